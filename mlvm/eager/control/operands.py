"""What control flow takes and gives back: trees whose tensors nobody else updates, and integers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mlvm.core.errors import DTypeError, brief
from mlvm.core.types import i64
from mlvm.eager.control.state import tensors
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, replace, with_leaves

Body: TypeAlias = Callable[..., Any]


def aliased(tree: Tree) -> Tree:
    """The tree with other tensors over the same bytes: an update of one is none of the caller's."""
    return replace(alias_of, tree)


def copied(tree: Tree) -> Tree:
    """The tree with copies of its tensors."""
    return with_leaves(tree, iter([op.copy(x) for x in tensors(tree)]))


def require_integer(name: str, value: Any) -> None:
    """Raise `DTypeError` unless it is an int, or a tensor of one."""
    if isinstance(value, Tensor):
        if not value.dtype.is_integer or value.size != 1:
            raise DTypeError(f"{name} is one integer, not {value.type}")
    elif not isinstance(value, (int, np.integer)):
        raise DTypeError(f"{name} is an integer, not {brief(value)}")


def integer(name: str, value: Any) -> int:
    """The int, which a tensor is read for. Raises `DTypeError` for anything else."""
    require_integer(name, value)
    return operator.index(value)


def as_index(value: Tensor | int) -> Tensor:
    """The integer as an i64[]."""
    if isinstance(value, Tensor):
        return reshape(value if value.dtype is i64 else op.astype(value, dtype=i64), ())
    return full((), value, dtype=i64)
