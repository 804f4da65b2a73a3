"""Checkpoints: `save` writes tensors by name, `load` reads them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, overload

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError, PathError, ShapeError, WeightsError, brief
from mlvm.core.types import Array
from mlvm.eager.files.gguf import MAGIC, GgufFile
from mlvm.eager.files.safetensors import WeightsFile, damaged, type_of, write
from mlvm.eager.files.structure import SavedStructure, Values, loader_of
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor, from_array
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import (
    Node,
    Where,
    fields,
    fits,
    flatten,
    named_nodes,
    no_match,
    require_live,
    warn_of_hidden,
    within_containers,
)
from mlvm.machines.terminal import escaped

T = TypeVar("T")
File: TypeAlias = str | os.PathLike[str]
Rename: TypeAlias = Callable[[str], str | None]


_OTHERS: Final = {
    ".gguf": "",
    ".onnx": ", and ml.onnx.save a function as ONNX",
    ".mlvm": ", and Captured.save a planned step",
    **dict.fromkeys((".pt", ".pth", ".npy", ".npz", ".h5", ".keras", ".pkl"), ""),
}
"""File extensions of other formats, and the functions that write them."""

_PLAIN: Final = "mlvm.plain"
"""Metadata key under which a file stores plain values by path, as JSON."""


class Loaded(dict[str, Tensor]):
    """Loaded tensors by name, with the `plain` values and the `metadata` of the file."""

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], plain: Mapping[str, Any]
    ) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata)
        self.plain = dict(plain)


@hinted
def save(
    file: File,
    tensors: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    where: Where | None = None,
) -> None:
    """Write tensors by name to a file in the safetensors format, which PyTorch and JAX also read.

    For a Module, `state()` is written: parameters and buffers by path. Arrays are also saved.

    model = nn.Linear(2, 3)
    save("model.safetensors", model, {"trained on": "digits"})
    load("model.safetensors").keys()         # kernel, bias
    load("model.safetensors", into=model)    # the values are the model's again

    A dict may contain all state of a training run, which can then be resumed exactly: Modules,
    optimizers, loss scales, pipelines, and other objects with `state()` and `load_state`; tensors
    and arrays; numbers, strings and None, and lists and dicts of these. `ml.random` represents the
    global keys of the current VM and all VMs of the dict's tensors. Hyperparameters of
    optimizers are also saved, except schedules.

    training = {"model": model, "optimizer": optimizer, "batches": pipeline, "epoch": 7}
    save("training.safetensors", training)
    load("training.safetensors", into=training)["epoch"]

    Arguments:

    - `file`: the path. The new file replaces an existing file only when it is complete. The file
      mode is preserved, and links are followed.

    - `tensors`: a Module, or a dict of the objects above.

    - `metadata`: a dict from str to str. Default: none.

    - `where`: selects the part to save: a pattern for the paths, in which `*` also matches "/", or
      a function of path and tensor, as in `Module.freeze`. Default: everything.

    Tensors are copied from the VM one at a time. A numpy array in a field of a Module is not a part
    of the state; a UserWarning names it: make it a `nn.buffer(asarray(x))`. A Module in an object
    that is not a tree, such as a dataclass or a deque, is also not saved; a `NoEffectWarning` names
    it.

    Raises `OSError` if the file cannot be written, or is a folder, a pipe or a device;
    `WeightsError` if a tensor is c128, which the format does not support, or a name is not a str;
    `DTypeError` if a part is none of the above, such as a masked array; `PathError` if two parts
    have the same name; `ArgumentError` if the file name has the extension of a different format,
    such as "x.onnx", or `where` selects nothing; `StaleTensorError` if a tensor was freed. In these
    cases no file is left. https://github.com/huggingface/safetensors

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3))
        >>> sorted(ml.load("layer.safetensors"))
        ['bias', 'kernel']

    Invalid calls:
        ml.save("x", {"x": len})  # DTypeError
        ml.save("x", {"x": ml.ones(1)}, where="y")  # ArgumentError
        ml.save("x", {"x/y": 1, "x": {"y": ml.ones(1), "z": 1}})  # PathError
        ml.save("x", {"x": stale})  # StaleTensorError
        ml.save("x", {"x": ml.ones(2, dtype="c128")})  # WeightsError
    """
    path = _path(file, "save")
    if path.suffix in _OTHERS:
        problem = (
            f'got "{path}", but ml.save writes safetensors{_OTHERS[path.suffix]}: write '
            f'"{path.stem}.safetensors"'
        )
        raise ArgumentError(f"expected a file name that ends in .safetensors, {problem}").at(
            "save", ()
        )
    if not isinstance(tensors, Mapping) and loader_of(tensors) is None:
        raise DTypeError(
            f"save: expected a Module or a dict of tensors such as {{'x': x}}, got {brief(tensors)}"
        )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ArgumentError(
            f"expected metadata as a mapping from str to str, got {brief(metadata)}"
        ).at("save", ())
    if metadata is not None and _PLAIN in metadata:
        raise ArgumentError(
            f"the metadata key {_PLAIN!r} is reserved for plain values; choose a different key"
        ).at("save", ())
    if isinstance(tensors, Mapping):
        for name in tensors:
            if not isinstance(name, str):
                raise WeightsError(
                    f"cannot write {path}: {name!r} is not a valid name; use text in valid Unicode"
                )
        tensors = dict(tensors)
    try:
        parts = SavedStructure(tensors)
    except DTypeError as error:
        raise error.at("save", ()) from None
    for x, _ in parts.objects.values():
        if isinstance(x, Node):
            warn_of_hidden(x)
    for place in _arrays_in({path: x for path, (x, _) in parts.objects.items()}):
        text = f"{place} is a numpy array, which is not saved; to save it with the model, write"
        warnings.warn(f"{text} ml.nn.buffer(ml.asarray(x))", stacklevel=3)
    chosen, plain = parts.selected(where)
    texts = dict(metadata or {})
    if plain:
        texts[_PLAIN] = json.dumps(plain)
    types = {name: x.type if isinstance(x, Tensor) else type_of(x) for name, x in chosen.items()}
    require_live(x for x in chosen.values() if isinstance(x, Tensor))

    def read(name: str) -> Array:
        x = chosen[name]
        return values_of(x) if isinstance(x, Tensor) else x

    try:
        write(path, types, read, texts)
    except WeightsError as error:
        raise WeightsError(escaped(f"{path} is not written: {error}")) from None


@overload
def load(
    file: File,
    *,
    rename: Rename | None = None,
    keep_halves: bool = False,
    where: Where | None = None,
) -> Loaded: ...
@overload
def load(file: File, into: T, *, rename: Rename | None = None, where: Where | None = None) -> T: ...
@hinted
def load(
    file: File,
    into: Any = None,
    *,
    rename: Rename | None = None,
    keep_halves: bool = False,
    where: Where | None = None,
) -> Any:
    """Load the tensors of a safetensors or GGUF file by name into the current arena.

    `metadata` of the result contains the metadata of the file. For a GGUF file, `plain` contains
    the metadata of the file, and low-bit blocks stay quantized: `x` contains the elements, and
    `x.scale` the scales for `quantized_matmul`.

    tensors = load("model.safetensors")
    tensors["kernel"], tensors.metadata
    model = load("model.safetensors", into=nn.Linear(2, 3))

    Arguments:

    - `file`: the path.

    - `into`: a Module. The tensors are written to the parameters and buffers by the paths of
      `state()`, and the Module is returned. A dict in the form that `save` accepts is restored
      likewise; numbers, strings and arrays in it are replaced. Default: None, which returns new
      tensors.

    - `rename`: maps each name in the file to the name of the tensor, or to None to skip it:
      `rename=lambda name: name.removeprefix("encoder.")`.

    - `keep_halves`: keep F16 and BF16, which are otherwise converted to f32 without loss. A
      parameter of the same dtype always receives them unchanged. Default: False.

    - `where`: selects tensors, as in `save`; the file may contain additional tensors.

    The file is mapped into memory, so that loading needs no additional memory. Truncating it
    meanwhile terminates this process (SIGBUS). In an arena of a `DryVM`, tensors have only types.

    Raises `OSError` if the file cannot be read; `WeightsError` if it has a different format or is
    damaged, or a tensor's dtype is unknown and `rename` does not skip it; `PathError` if two
    tensors have the same name. With `into` nothing is written unless everything fits: `PathError`
    if names are missing or unknown; `DTypeError` or `ShapeError` if a type differs. Each error
    contains the name of the file.

        >>> ml.save("layer.safetensors", ml.nn.Linear(2, 3))
        >>> ml.load("layer.safetensors", into=ml.nn.Linear(2, 3)).bias
        Tensor([0., 0., 0.], f32[3])

    Invalid calls:
        ml.load("layer", into=ml.nn.Linear(2, 3, dtype="f64"))  # DTypeError
        ml.load("layer", into=ml.nn.Dropout(0.5))  # PathError
        ml.load("layer", into=ml.nn.Linear(2, 4))  # ShapeError
        ml.load("damaged")  # WeightsError
    """
    refuse_captured("load a file", ". Load it outside")
    path = _path(file, "load")
    if into is not None and not isinstance(into, dict) and loader_of(into) is None:
        raise DTypeError(f"load: expected a Module or a dict as into=, got {brief(into)}")
    if rename is not None and not callable(rename):
        text = f"expected rename as a function of a name, got {brief(rename)}"
        raise ArgumentError(text).at("load", ())
    try:
        opened = _opened(path)
        metadata = dict(opened.metadata)
        if isinstance(opened, GgufFile):
            values = opened.plain
        else:
            values = _parsed(metadata.pop(_PLAIN, "{}"))
        names = _renamed(opened.entries, rename)
        plain = {name: values[own] for name, own in _renamed(values, rename).items()}
        if into is not None:
            arrays = {name: opened.read(own, True) for name, own in names.items()}
            return SavedStructure(into).take(arrays, plain, where)
        loaded: dict[str, Tensor] = {}
        for name, own in names.items():
            if not isinstance(where, str) or fits(where, name, None):
                x = from_array(opened.read(own, keep_halves))
                if where is None or fits(where, name, x):
                    loaded[name] = x
        if where is not None:
            named = [*names, *plain]
            plain = {name: x for name, x in plain.items() if fits(where, name, x)}
            if not loaded and not plain:
                raise no_match(where, map(escaped, named))
        return Loaded(loaded, metadata, plain)
    except (WeightsError, PathError, DTypeError, ShapeError) as error:
        raise type(error)(escaped(f"{path}: {error}")) from None


def _opened(path: Path) -> WeightsFile | GgufFile:
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(4) == MAGIC:
                return GgufFile(path)
    return WeightsFile(path)


def _parsed(text: str) -> Values:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise damaged(f"expected the plain values as a JSON object by path, got {brief(text)}")
    return values


def _renamed(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Map the requested names to the names in the file."""
    renamed: dict[str, str] = {}
    for own in names:
        name = own if rename is None else rename(own)
        if name is None:
            continue
        if not isinstance(name, str):
            raise PathError(f"rename: expected a name or None for {own!r}, got {brief(name)}")
        if name in renamed:
            raise PathError(
                f"rename: {own!r} and {renamed[name]!r} would both become {name!r}; rename "
                "one of them"
            )
        renamed[name] = own
    return renamed


def _arrays_in(objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of numpy arrays in Modules, which are not part of the state."""
    for root, model in objects.items():
        for path, node in named_nodes(model) if isinstance(model, Node) else ():
            values = dict(fields(node, buffers=True))
            within = "/".join(filter(None, (root, path)))
            yield from (
                place for place, _ in flatten(values, within, ends=within_containers(np.ndarray))[0]
            )


def _path(file: File, function: str) -> Path:
    try:
        return Path(file)
    except TypeError:
        text = f"expected a file name as a str or a path, got {brief(file)}"
        if function == "save":
            text = f"{text}; write save(file, tensors)"
        raise ArgumentError(text).at(function, ()) from None
