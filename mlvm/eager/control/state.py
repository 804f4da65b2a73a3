"""What goes round in a loop: trees of tensors that keep their structure and their types."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.types import bool_, f32, i64
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, children, leaves, replace, with_leaves

_NUMBERS: Final = {bool: bool_, int: i64, float: f32}


def as_tree(tree: Any) -> Tree:
    """The tree with tensors for numbers and arrays."""
    return replace(_as_tensor, tree, (*_NUMBERS, np.ndarray, np.generic))


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        return asarray(value)
    dtype = next(dtype for kind, dtype in _NUMBERS.items() if isinstance(value, kind))
    return full((), value, dtype=dtype)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order, those in buffers too."""
    return [x for _, x in leaves(tree, buffers=True)]


def as_like(before: Tree, after: Tree, what: str) -> Tree:
    """The second tree, in the order of the first. Raise `DTypeError` or `ShapeError` if it has
    another structure, or other types. `what` says what has made it, out of what: "a body makes
    another state than it is given"."""
    found: list[Tensor] = []
    _collect(found, "", before, after, what)
    return with_leaves(before, iter(found))


def _collect(found: list[Tensor], path: str, before: Tree, after: Tree, what: str) -> None:
    """Add the tensors of the second tree, in the order of the first."""
    where = f" at {path}" if path else ""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if after.type is not before.type:
            refused = DTypeError if after.dtype is not before.dtype else ShapeError
            raise refused(f"{what}: {after.type}{where}, not {before.type}")
        found.append(after)
        return
    if isinstance(before, Tensor) or type(before) is not type(after):
        raise DTypeError(f"{what}: {_listed(path, after)}, not {_listed(path, before)}")
    if before is None:
        return
    was, now = children(before, path, buffers=True), children(after, path, buffers=True)
    if was.keys() != now.keys():
        raise DTypeError(f"{what}: {_listed(path, after)}, not {_listed(path, before)}")
    for name, child in was.items():
        _collect(found, f"{path}/{name}" if path else name, child, now[name], what)


def _listed(path: str, tree: Tree) -> str:
    """The tree in words: what it is, and what is in it."""
    if isinstance(tree, Tensor):
        return str(tree.type)
    named = [f"{name} {x.type}" for name, x in leaves(tree, path, buffers=True)]
    kind = "None" if tree is None else f"a {type(tree).__name__}"
    return f"{kind} of {', '.join(named)}" if named else kind
