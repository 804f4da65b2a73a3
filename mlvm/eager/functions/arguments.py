"""What arguments of functions are checked for: tensors, ints, axes, counts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

from mlvm.core.errors import AttributeRefused, DTypeError, OpError, brief
from mlvm.core.ops.neural import Pair
from mlvm.core.rules import Axis, normalize_axes
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import OneOp
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of


def type_of(x: Tensor, function: str | None = None) -> TensorType:
    """The tensor's type. Raises `DTypeError`, which names the function, for anything else."""
    if not isinstance(x, Tensor):
        error = DTypeError(f"takes a tensor, not {kind_of(x)}; make one with asarray")
        raise error.at(function, ()) if function else error
    return x.type


def inferred(call: OneOp, x: Tensor) -> TensorType:
    """The type of `call` on x. Raises an `OpError` where it is refused."""
    types = (type_of(x),)
    return cast(TensorType, call.types.get(types) or call.infer(types))


def integer(value: int, name: str, function: str) -> int:
    """An int. Raises `AttributeRefused`, which names the value and the function, for anything else
    and for one of more than 64 bits."""
    try:
        if -(2**63) <= (n := operator.index(value)) < 2**63:
            return n
    except TypeError:
        pass
    raise AttributeRefused(f"{name} is an int, not {brief(value)}").at(function, ())


def integers(value: int | Sequence[int], name: str, function: str | None = None) -> tuple[int, ...]:
    """An int, or a sequence of ints, as a tuple. Raises `AttributeRefused` for anything else, and
    for an int of more than 64 bits. The error names the value and the function."""
    try:
        several = value if isinstance(value, (tuple, list)) else (value,)
        ints = tuple(map(operator.index, several))
        if all(-(2**63) <= n < 2**63 for n in ints):
            return ints
    except TypeError:
        pass
    error = AttributeRefused(f"{name} is an int or a tuple of ints, not {brief(value)}")
    raise error.at(function, ()) if function else error


def axes_of(name: str, axis: Axis, x: Tensor, new: int = 0) -> tuple[int, ...]:
    """The axes, counted from the front, of a tensor like x with `new` more dimensions."""
    type = type_of(x)
    try:
        given = axis if axis is None else integers(axis, "axis", name)
        return normalize_axes(given, type.ndim + new)
    except OpError as error:
        raise error.at(name, (type,)) from None


def counts_of(function: str, value: int | Sequence[int], name: str, x: Tensor) -> tuple[int, ...]:
    """One or several ints >= 0. Raises `AttributeRefused` for others."""
    type, counts = type_of(x), integers(value, name, function)
    if min(counts, default=0) < 0:
        raise AttributeRefused(f"{name} must be >= 0, not {min(counts)}").at(function, (type,))
    return counts


def pair(value: int | Sequence[int], name: str, function: str, *, least: int = 1) -> Pair:
    """A pair of ints >= `least`, such as (vertical, horizontal); one int stands for both.

    Raises `AttributeRefused`, which names the value and the function.
    """
    ints = integers(value, name, function)
    if len(ints) not in (1, 2) or min(ints) < least:
        raise AttributeRefused(f"{name} must be one or two integers >= {least}, given {value}").at(
            function, ()
        )
    return ints[0], ints[-1]
