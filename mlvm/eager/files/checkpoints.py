"""What is learned outlives its process: `save` writes tensors by name, `load` reads them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np

from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    PathError,
    ShapeError,
    WeightsError,
    brief,
)
from mlvm.core.types import Array
from mlvm.eager.files.safetensors import WeightsFile, escaped, type_of, write
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.values import array_of
from mlvm.eager.tree import Node, fields, flatten, require_live

M = TypeVar("M", bound=Module)
File: TypeAlias = str | os.PathLike[str]
Rename: TypeAlias = Callable[[str], str | None]


class Loaded(dict[str, Tensor]):
    """Tensors by name, and the texts of their file by name, `metadata`."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata)


def save(
    file: File, tensors: Module | Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors by name to a file in the safetensors format, which PyTorch, JAX and others read
    too; of a Module its `state()`, parameters and buffers by path. Arrays are taken as well.

    model = nn.Linear(2, 3)
    save("model.safetensors", model, {"trained on": "digits"})
    load("model.safetensors").keys()         # kernel, bias
    load("model.safetensors", into=model)    # the values are the model's again

    `metadata` is texts by name. The file is written beside the one of that name, if there is one,
    and takes its place, and its mode, when it is whole: through a link, too. One tensor at a time
    is copied out of its VM. An array of numpy in a field of a Module is no part of its state, and
    a UserWarning names it: make it a `nn.buffer(asarray(x))`.

    Raises `OSError` for a file that cannot be written, and for a name that has a folder, a pipe or
    a device; `WeightsError` for c128, which the format does not have, and for names that are no
    texts; `DTypeError` for what is no tensor or array, masked arrays included; `StaleTensor`.
    Nothing is left behind then. https://github.com/huggingface/safetensors

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3))
        >>> sorted(ml.load("layer.safetensors"))
        ['bias', 'kernel']
    """
    path = _path(file, "save")
    named = tensors.state() if isinstance(tensors, Module) else tensors
    if not isinstance(named, Mapping):
        raise DTypeError(
            f"save takes a Module, or tensors by name such as {{'x': x}}, not {brief(tensors)}"
        )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise AttributeRefused(f"metadata is texts by name, not {brief(metadata)}").at("save", ())
    if isinstance(tensors, Module):
        for place in _arrays_in(tensors):
            text = f"{place} is an array of numpy, which is not saved: ml.nn.buffer(ml.asarray(x))"
            warnings.warn(f"{text} makes it part of the model's state", stacklevel=2)
    found = {name: _readable(name, x) for name, x in named.items()}
    types = {name: x.type if isinstance(x, Tensor) else type_of(x) for name, x in found.items()}
    require_live(x for x in found.values() if isinstance(x, Tensor))

    def read(name: str) -> Array:
        x = found[name]
        return values_of(x) if isinstance(x, Tensor) else x

    try:
        write(path, types, read, metadata or {})
    except WeightsError as error:
        raise WeightsError(escaped(f"{path} is not written: {error}")) from None


@overload
def load(file: File, *, rename: Rename | None = None, keep_halves: bool = False) -> Loaded: ...
@overload
def load(file: File, *, into: M, rename: Rename | None = None) -> M: ...
def load(
    file: File, *, into: M | None = None, rename: Rename | None = None, keep_halves: bool = False
) -> Loaded | M:
    """The tensors of a safetensors file by name, in the current arena; their `metadata` has the
    texts of the file. With `into`, a Module, they are written over its parameters and buffers, by
    the paths of its `state()`, and the Module is returned.

    tensors = load("model.safetensors")
    tensors["kernel"], tensors.metadata
    model = load("model.safetensors", into=nn.Linear(2, 3))

    `rename` is called with each name in the file, and says under which one the tensor comes, or
    None to leave it out: `rename=lambda name: name.removeprefix("encoder.")`. F16 and BF16 are read
    as f32, which has all of their values, unless `keep_halves`; a parameter of that dtype takes
    them as they are. The file is mapped into memory, so that its tensors need no room besides their
    own, and whoever cuts it short meanwhile ends this process (SIGBUS); in an arena of a `DryVM`
    they are types alone.

    Raises `OSError` for a file that cannot be read; `WeightsError` for one that is no such file or
    is damaged, and for a tensor of a dtype that mlvm lacks, unless `rename` leaves it out;
    `PathError` for two tensors of one name. For a Module nothing is written unless all fits:
    `PathError` for names that are missing or unknown, `DTypeError` and `ShapeError` for another
    dtype or shape. Each names the file.

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3, zeros=True))
        >>> ml.load("layer.safetensors", into=ml.nn.Linear(2, 3)).bias
        Tensor([0., 0., 0.], f32[3])
    """
    path = _path(file, "load")
    if into is not None and not isinstance(into, Module):
        raise DTypeError(f"load writes into a Module, not into {brief(into)}")
    if rename is not None and not callable(rename):
        text = f"rename is called with each name in the file, and {brief(rename)} is no function"
        raise AttributeRefused(text).at("load", ())
    try:
        opened = WeightsFile(path)
        found = _renamed(opened, rename)
        if into is None:
            loaded = {
                name: from_array(opened.read(own, keep_halves)) for name, own in found.items()
            }
            return Loaded(loaded, opened.metadata)
        into.load_state({name: opened.read(own, True) for name, own in found.items()})
    except (WeightsError, PathError, DTypeError, ShapeError) as error:
        raise type(error)(escaped(f"{path}: {error}")) from None
    return into


def _renamed(opened: WeightsFile, rename: Rename | None) -> dict[str, str]:
    """The names in the file by those that are wanted."""
    found: dict[str, str] = {}
    for own in opened.entries:
        name = own if rename is None else rename(own)
        if name is None:
            continue
        if not isinstance(name, str):
            raise PathError(f"rename makes {brief(name)} of {own!r}, not a name or None")
        if name in found:
            raise PathError(f"{own!r} and {found[name]!r} would both be {name!r}")
        found[name] = own
    return found


def _readable(name: str, x: Any) -> Tensor | Array:
    """A tensor as it is, and an array as one of numpy, which is read once."""
    if isinstance(x, Tensor):
        return x
    if not hasattr(x, "__array__"):
        raise DTypeError(f"{name} must be a tensor or an array, not {brief(x)}").at("save", ())
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{name} is a masked array, and a file has no masks").at("save", ())
    try:
        return array_of(x)
    except DTypeError as error:
        raise DTypeError(f"{name}: {error.reason}").at("save", ()) from None


def _arrays_in(node: Node) -> Iterator[str]:
    """The paths of numpy's arrays in a Module, which are no part of its state."""
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", node)]
    while left:
        path, part = left.pop()
        if isinstance(part, np.ndarray):
            yield path
        elif id(part) not in seen:
            seen.add(id(part))
            held = dict(fields(part, buffers=True))
            left += reversed(flatten(held, path, ends=_at_arrays_and_modules)[0])


def _at_arrays_and_modules(part: Any) -> bool | None:
    if isinstance(part, (np.ndarray, Node)):
        return True
    return None if isinstance(part, (dict, list, tuple)) else False


def _path(file: File, function: str) -> Path:
    try:
        return Path(file)
    except TypeError:
        text = f"a file is named by a text or a path, not {brief(file)}"
        if function == "save":
            text = f"{text}: it comes first, save(file, tensors)"
        raise AttributeRefused(text).at(function, ()) from None
