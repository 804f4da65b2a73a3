"""What goes round in a loop: trees of tensors that keep their structure and their types."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.types import TensorType, bool_, f32, i64
from mlvm.eager.creation import asarray, full
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import Tree, leaves, replace

_NUMBERS: Final = {bool: bool_, int: i64, float: f32}


def as_tree(tree: Any) -> Tree:
    """The tree with tensors for numbers and arrays."""
    return replace(_as_tensor, tree, (*_NUMBERS, np.ndarray, np.generic))


def _as_tensor(value: Any) -> Tensor:
    dtype = _NUMBERS.get(type(value))
    return asarray(value) if dtype is None else full((), value, dtype=dtype)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order, those in buffers too."""
    return [x for _, x in leaves(tree, buffers=True)]


def require_same(before: Tree, after: Tree, what: str) -> None:
    """Raise `DTypeError` or `ShapeError` if the second tree has another structure than the first,
    or other types. `what` says what has made it, out of what: "a body", "the state"."""
    was, now = (
        {path: x.type for path, x in leaves(tree, buffers=True)} for tree in (before, after)
    )
    if was.keys() != now.keys():
        raise DTypeError(f"{what}: {_listed(now)}, not {_listed(was)}")
    for path, type in was.items():
        if now[path] is not type:
            refused = DTypeError if now[path].dtype is not type.dtype else ShapeError
            where = f" at {path}" if path else ""
            raise refused(f"{what}: {now[path]}{where}, not {type}")


def _listed(types: dict[str, TensorType]) -> str:
    named = [f"{path} {type}" if path else str(type) for path, type in types.items()]
    return ", ".join(named) or "no tensors"
