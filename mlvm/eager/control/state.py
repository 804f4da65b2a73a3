"""What goes round in a loop: trees of tensors that keep their structure and their types."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.types import bool_, f32, i64
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, flatten, named_leaves, partners, replace, unflatten

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
    return [x for _, x in named_leaves(tree, buffers=True)]


def as_like(before: Tree, after: Tree, what: str) -> Tree:
    """The second tree, in the order of the first. Raise `DTypeError` or `ShapeError` if it has
    another structure, or other types. `what` says what has made it, out of what: "a body makes
    another state than it is given"."""

    def differ(path: str, was: Tree, now: Tree) -> NoReturn:
        raise DTypeError(f"{what}: {_listed(path, now)}, not {_listed(path, was)}")

    found, structure = flatten(before, buffers=True)
    beside = partners(structure, after, _are_alike, differ, buffers=True)
    for (path, x), y in zip(found, beside, strict=True):
        if not isinstance(y, Tensor):
            differ(path, x, y)
        if y.type is not x.type:
            refused = DTypeError if y.dtype is not x.dtype else ShapeError
            where = f" at {path}" if path else ""
            raise refused(f"{what}: {y.type}{where}, not {x.type}")
    return unflatten(structure, beside)


def _are_alike(was: Tree, now: Tree) -> bool:
    return type(was) is type(now)


def _listed(path: str, tree: Tree) -> str:
    """The tree in words: what it is, and what is in it."""
    if isinstance(tree, Tensor):
        return str(tree.type)
    named = [f"{name} {x.type}" for name, x in named_leaves(tree, path, buffers=True)]
    kind = "None" if tree is None else f"a {type(tree).__name__}"
    return f"{kind} of {', '.join(named)}" if named else kind
