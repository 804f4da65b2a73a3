"""Arguments and results of control flow: integers, and trees of tensors with fixed types."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import DTypeError, ShapeError, brief, with_article
from mlvm.core.types import TensorType, bool_, i64
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.autocast import autocast_dtype
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.default import default_of
from mlvm.eager.tensor.number import is_free
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tree import Tree, flatten, named_leaves, partners, replace, unflatten, with_leaves

Body: TypeAlias = Callable[..., Any]

_NUMBERS: Final = (bool, int, float)


def as_tree(tree: Any) -> Tree:
    """Convert the numbers and arrays of a tree to tensors."""
    return replace(_as_tensor, tree, (*_NUMBERS, np.ndarray, np.generic))


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        return asarray(value)
    kind = next(kind for kind in _NUMBERS if isinstance(value, kind))
    return full((), value, dtype=default_of(kind))


def tensors(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree in order, buffers included."""
    return [x for _, x in named_leaves(tree, buffers=True)]


def as_like(
    before: Tree,
    after: Tree,
    what: str,
    fits: Callable[[TensorType, TensorType], bool] = operator.is_,
    source: str = "",
) -> Tree:
    """Return the tree `after` in the order of `before`.

    Raises `DTypeError` or `ShapeError` if structure or types differ. `what` precedes the expected
    types in the message, and `source` follows the actual types.
    """

    def differ(path: str, was: Tree, now: Tree) -> NoReturn:
        raise DTypeError(
            f"{what} {_listed(path, was)}, got {_listed(path, now)}{source}; return the same "
            f"containers with the same names and lengths"
        )

    leaves_before, structure = flatten(before, buffers=True)
    leaves_after = partners(structure, after, lambda x, y: type(x) is type(y), differ, buffers=True)
    for (path, x), y in zip(leaves_before, leaves_after, strict=True):
        if not isinstance(y, Tensor):
            differ(path, x, y)
        if not fits(x.type, y.type):
            refused = DTypeError if y.dtype is not x.dtype else ShapeError
            where = f" at {path}" if path else ""
            hint = _of_autocast(x, y) or _remedy(x.type, refused is DTypeError)
            raise refused(f"{what} {x.type}{where}, got {y.type}{source}{hint}")
    return unflatten(structure, leaves_after)


def _remedy(type: TensorType, is_of_dtype: bool) -> str:
    if is_of_dtype:
        return f"; convert with ml.astype(y, ml.{type.dtype.long_name})"
    return f"; give both the shape {type.shape}, for example with ml.pad or ml.broadcast_to"


def _of_autocast(was: Tensor, now: Tensor) -> str:
    """Return a hint for an error in which `autocast` has changed a dtype."""
    half = autocast_dtype()
    if was.dtype is now.dtype or half not in (was.dtype, now.dtype):
        return ""
    return (
        f"; products are {half.name} under autocast: write ml.astype(x, ml.{was.dtype.long_name})"
    )


def _listed(path: str, tree: Tree) -> str:
    """Describe a tree by kind and tensors."""
    if isinstance(tree, Tensor):
        return str(tree.type)
    named = [
        f"{f'item {name}' if name.isdecimal() else name}: {x.type}"
        for name, x in named_leaves(tree, path, buffers=True)
    ]
    kind = "None" if tree is None else with_article(type(tree).__name__)
    return f"{kind} of {', '.join(named)}" if named else kind


def aliased(tree: Tree) -> Tree:
    """Replace tensors by aliases, so that an update does not change the caller's tensors."""
    return replace(alias_of, tree)


def copied(tree: Tree) -> Tree:
    """Copy the tensors of a tree."""
    return with_leaves(tree, iter([op.copy(x) for x in tensors(tree)]))


def require_functions(order: str, **functions: Any) -> None:
    """Raise `DTypeError` for a value that is not a function; the text states the parameters."""
    for name, value in functions.items():
        if not callable(value):
            raise DTypeError(
                f"{name}: expected a function, got {described(value)}; the order is ({order})"
            )


def require_integer(name: str, value: Any) -> None:
    """Raise `DTypeError` unless the value is an int or a tensor with one integer."""
    if isinstance(value, Tensor):
        if not value.dtype.is_integer or value.size != 1:
            raise DTypeError(f"{name}: expected one integer, got {value.type}")
    elif not isinstance(value, (int, np.integer)):
        raise DTypeError(f"{name}: expected an integer, got {brief(value)}")


def integer(name: str, value: Any) -> int:
    """Return the value as an int; a tensor is read.

    Raises `DTypeError` for other values."""
    require_integer(name, value)
    return operator.index(value)


def as_condition(value: Tensor) -> Tensor:
    """Convert to bool: nonzero elements of any dtype are true."""
    return value if value.dtype is bool_ else astype(value, bool_)


def as_index(value: Tensor | int) -> Tensor:
    """Return an integer as an i64[]."""
    if isinstance(value, Tensor):
        return reshape(value if value.dtype is i64 else op.astype(value, dtype=i64), ())
    return constant(value if is_free(value) else operator.index(value), i64)
