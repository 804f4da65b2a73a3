"""Tensors in files: `save` writes them by name, `load` reads them, as safetensors has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    PathError,
    ShapeError,
    WeightsError,
    brief,
)
from mlvm.core.types import Array, TensorType
from mlvm.eager.creation import array_of
from mlvm.eager.nn.module import Module
from mlvm.eager.tensor import Tensor, from_array, values_of
from mlvm.eager.tree import require_live
from mlvm.eager.weights_file import WeightsFile, type_of, write

M = TypeVar("M", bound=Module)
File: TypeAlias = str | os.PathLike[str]
Rename: TypeAlias = Callable[[str], str | None]


class Loaded(dict[str, Tensor]):
    """Tensors by name, and the texts of their file by name, `metadata`."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata)


def save(
    file: File,
    tensors: Module | Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors by name to a file in the safetensors format, which PyTorch, JAX and others read
    too; of a Module its `state()`, parameters and buffers by path. Arrays are taken as well.

    model = nn.Linear(2, 3)
    save("model.safetensors", model, {"trained on": "digits"})
    load("model.safetensors").keys()         # kernel, bias
    load("model.safetensors", into=model)    # the values are the model's again

    `metadata` is texts by name. The file is written beside the one of that name, if there is one,
    and takes its place when it is whole; one tensor at a time is copied out of its VM.

    Raises `OSError` for a file that cannot be written; `WeightsError` for c128, which the format
    does not have, and for names that are no texts; `DTypeError` for what is no tensor or array;
    `StaleTensor`. Nothing is left behind then. https://github.com/huggingface/safetensors

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3))
        >>> sorted(ml.load("layer.safetensors"))
        ['bias', 'kernel']
    """
    path = _path(file, "save")
    named = tensors.state() if isinstance(tensors, Module) else tensors
    if not isinstance(named, Mapping):
        raise DTypeError(f"save takes a Module, or tensors by name, not {brief(tensors)}")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise AttributeRefused(f"metadata is texts by name, not {brief(metadata)}").at("save", ())
    types = {name: _type(name, x) for name, x in named.items()}
    require_live(x for x in named.values() if isinstance(x, Tensor))

    def read(name: str) -> Array:
        x = named[name]
        return values_of(x) if isinstance(x, Tensor) else array_of(x)

    try:
        write(path, types, read, metadata or {})
    except WeightsError as error:
        raise WeightsError(f"{path} is not written: {error}") from None


@overload
def load(file: File, *, rename: Rename | None = None, keep_halves: bool = False) -> Loaded: ...
@overload
def load(file: File, *, into: M, rename: Rename | None = None) -> M: ...
def load(
    file: File,
    *,
    into: M | None = None,
    rename: Rename | None = None,
    keep_halves: bool = False,
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
    own; in an arena of a `DryVM` they are types alone.

    Raises `OSError` for a file that cannot be read; `WeightsError` for one that is no such file or
    is damaged, and for a tensor that is left in and of a dtype that there is not; `PathError` for
    two tensors of one name. For a Module nothing is written unless all fits: `PathError` for names
    that are missing or unknown, `DTypeError` and `ShapeError` for another dtype or shape. Each
    names the file.

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3, zeros=True))
        >>> ml.load("layer.safetensors", into=ml.nn.Linear(2, 3)).bias
        Tensor([0., 0., 0.], f32[3])
    """
    path = _path(file, "load")
    if into is not None and not isinstance(into, Module):
        raise DTypeError(f"load writes into a Module, not into {brief(into)}")
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
        raise type(error)(f"{path}: {error}") from None
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


def _type(name: str, x: Any) -> TensorType:
    if isinstance(x, Tensor):
        return x.type
    if not hasattr(x, "__array__"):
        raise DTypeError(f"{name} must be a tensor or an array, not {brief(x)}").at("save", ())
    return type_of(array_of(x))


def _path(file: File, function: str) -> Path:
    try:
        return Path(file)
    except TypeError:
        text = f"a file is named by a text or a path, not {brief(file)}"
        raise AttributeRefused(text).at(function, ()) from None
