"""Argument checks for tensors, ints, axes and counts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError, brief
from mlvm.core.ops.windows import Pair
from mlvm.core.rules import normalize_axes
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import OneOp
from mlvm.eager.tensor.number import has_open_lengths, index_of, is_open
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import kind_of, members_of

Ints: TypeAlias = int | Sequence[int]
"""One int, or several ints: a length or a shape, an axis or several axes."""


class Span(NamedTuple):
    """Positions along an axis, like a range with bounds that may be dynamic sizes."""

    start: int
    length: int
    step: int = 1


def span(start: int, stop: int | None = None, step: int = 1) -> Span:
    """Return the positions of `range(start, stop, step)`."""
    if stop is None:
        start, stop = 0, start
    distance = stop - start if step > 0 else start - stop
    return Span(start, max(0, (distance + abs(step) - 1) // abs(step)), step)


def sliced(item: slice, length: int) -> Span:
    """Return the positions of an axis that a slice selects.

    Raises `TypeError` and `ValueError` like Python."""
    if not (has_open_lengths() and any(map(is_open, (length, item.start, item.stop)))):
        places = range(length)[item]
        return Span(places.start, len(places), places.step)
    step = 1 if item.step is None else operator.index(item.step)
    if step == 0:
        raise ValueError("expected a slice step other than 0, got 0")
    lower, upper = (0, length) if step > 0 else (-1, length - 1)

    def bound(value: Any, default: int) -> int:
        if value is None:
            return default
        value = index_of(value)
        if value < 0:
            value = value + length
        return lower if value < lower else upper if value > upper else value

    first, last = (lower, upper) if step > 0 else (upper, lower)
    return span(bound(item.start, first), bound(item.stop, last), step)


def type_of(x: Tensor) -> TensorType:
    """Return the type of a tensor.

    Raises `DTypeError` for any other object."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"expected a tensor, got {kind_of(x)}; make one with asarray")
    return x.type


def inferred(call: OneOp, x: Tensor) -> TensorType:
    """Return the result type of `call` on x.

    Raises an `OpError` if the call is invalid."""
    types = (type_of(x),)
    return cast(TensorType, call.types.get(types) or call.infer(types))


MOST_PARTS: Final = 2**20
"""Maximum number of parts of an array that one call computes, each with ops of its own."""


def integer(value: int, name: str) -> int:
    """Return the value as an int.

    Raises `ArgumentError` if it is not an int, or has more than 64 bits."""
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            if is_open(value) or -(2**63) <= (value := operator.index(value)) < 2**63:
                return value
    raise ArgumentError(f"expected {name} as an int{_limit(value)}, got {brief(value)}")


def _limit(value: Any) -> str:
    """Return the limit for an invalid argument that contains ints of more than 64 bits."""
    several = [*members_of(value)] if issubclass(type(value), (tuple, list)) else [value]
    is_large = any(type(n) is int and not -(2**63) <= n < 2**63 for n in several)
    return " of at most 64 bits" if is_large else ""


def integers(value: Ints, name: str) -> tuple[int, ...]:
    """Return an int, or a sequence of ints, as a tuple.

    Raises `ArgumentError` with the value if it is neither, or if an int has more than 64 bits."""
    try:
        several = value if isinstance(value, (tuple, list)) else (value,)
        has_lengths = has_open_lengths()
        ints = tuple(map(index_of if has_lengths else operator.index, several))
        closed = [n for n in ints if not is_open(n)] if has_lengths else ints
        if -(2**63) <= min(closed, default=0) <= max(closed, default=0) < 2**63:
            return ints
    except TypeError:
        pass
    raise ArgumentError(
        f"expected {name} as an int or a tuple of ints{_limit(value)}, got {brief(value)}"
    )


def axes_of(axis: Ints | None, x: Tensor, *, name: str = "axis") -> tuple[int, ...]:
    """Normalise axes of a tensor, counted from the front."""
    axes = axis if axis is None else integers(axis, name)
    return normalize_axes(axes, type_of(x).ndim)


def counts_of(value: Ints, name: str) -> tuple[int, ...]:
    """Return one or several ints >= 0 as a tuple. Raises `ArgumentError` if one is negative."""
    counts = integers(value, name)
    if min(counts, default=0) < 0:
        raise ArgumentError(f"expected {name} >= 0, got {min(counts)}")
    return counts


def count_of(value: int, name: str, least: int = 0) -> int:
    """Return an int >= `least`. Raises `ArgumentError` for any other value."""
    count = integer(value, name)
    if count < least:
        raise ArgumentError(f"expected {name} >= {least}, got {count}")
    return count


def pair(value: Ints, name: str, *, least: int = 1) -> Pair:
    """Return a pair of ints >= `least`, such as (vertical, horizontal); a single int is repeated.

    Raises `ArgumentError` with the value if it is not such a pair.
    """
    first, second = each_of(value, 2, name, least=least)
    return first, second


def each_of(value: Ints, count: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """Return `count` ints >= `least`, one per axis; a single int is repeated.

    Raises `ArgumentError` with the value if it does not consist of such ints.
    """
    ints = integers(value, name)
    if len(ints) not in (1, count) or min(ints) < least:
        expected = {1: "an integer", 2: "one or two integers"}.get(
            count, f"one or {count} integers"
        )
        raise ArgumentError(f"expected {name} as {expected} >= {least}, got {value}")
    return ints * count if len(ints) == 1 else ints
