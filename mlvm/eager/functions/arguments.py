"""What arguments of functions are checked for: tensors, ints, axes, counts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias, cast

from mlvm.core.errors import AttributeRefused, DTypeError, brief
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import normalize_axes
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import OneOp
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of

Ints: TypeAlias = int | Sequence[int]
"""One int, or several: a length or a shape, an axis or axes."""


def type_of(x: Tensor) -> TensorType:
    """The tensor's type. Raises `DTypeError` for anything else."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"takes a tensor, not {kind_of(x)}; make one with asarray")
    return x.type


def inferred(call: OneOp, x: Tensor) -> TensorType:
    """The type of `call` on x. Raises an `OpError` where it is refused."""
    types = (type_of(x),)
    return cast(TensorType, call.types.get(types) or call.infer(types))


def integer(value: int, name: str) -> int:
    """An int. Raises `AttributeRefused`, which names the value, for anything else, and for one of
    more than 64 bits."""
    try:
        if -(2**63) <= (n := operator.index(value)) < 2**63:
            return n
    except TypeError:
        pass
    raise AttributeRefused(f"{name} is an int, not {brief(value)}")


def integers(value: Ints, name: str) -> tuple[int, ...]:
    """An int, or a sequence of ints, as a tuple. Raises `AttributeRefused` for anything else, and
    for an int of more than 64 bits. The error names the value."""
    try:
        several = value if isinstance(value, (tuple, list)) else (value,)
        ints = tuple(map(operator.index, several))
        if all(-(2**63) <= n < 2**63 for n in ints):
            return ints
    except TypeError:
        pass
    raise AttributeRefused(f"{name} is an int or a tuple of ints, not {brief(value)}")


def axes_of(axis: Ints | None, x: Tensor, new: int = 0, *, name: str = "axis") -> tuple[int, ...]:
    """The axes, counted from the front, of a tensor like x with `new` more dimensions."""
    given = axis if axis is None else integers(axis, name)
    return normalize_axes(given, type_of(x).ndim + new)


def counts_of(value: Ints, name: str) -> tuple[int, ...]:
    """One or several ints >= 0. Raises `AttributeRefused` for others."""
    counts = integers(value, name)
    if min(counts, default=0) < 0:
        raise AttributeRefused(f"{name} must be >= 0, not {min(counts)}")
    return counts


def pair(value: Ints, name: str, *, least: int = 1) -> Pair:
    """A pair of ints >= `least`, such as (vertical, horizontal); one int stands for both.

    Raises `AttributeRefused`, which names the value.
    """
    first, second = each_of(value, 2, name, least=least)
    return first, second


def each_of(value: Ints, count: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """So many ints >= `least`, one for each axis; one int stands for all of them.

    Raises `AttributeRefused`, which names the value.
    """
    ints = integers(value, name)
    if len(ints) not in (1, count) or min(ints) < least:
        wanted = {1: "an integer", 2: "one or two integers"}.get(count, f"one or {count} integers")
        raise AttributeRefused(f"{name} must be {wanted} >= {least}, given {value}")
    return ints * count if len(ints) == 1 else ints
