"""Strides of packed tensors, in elements, and shapes with fewer axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mlvm.core.types import Shape


def packed(shape: Sequence[int]) -> list[int]:
    """Return the strides of a packed tensor."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def broadcast_steps(shape: Shape, ndim: int) -> list[int]:
    """Return the strides of a packed tensor along the axes to which it is broadcast.

    They are 0 along new axes and axes of length 1.

    >>> broadcast_steps((3, 1, 5), 4)
    [0, 5, 0, 1]
    """
    steps = [0 if n == 1 else step for n, step in zip(shape, packed(shape), strict=True)]
    return [0] * (ndim - len(shape)) + steps


def group_steps(shape: Shape, groups: Sequence[Shape]) -> list[int] | None:
    """Return the stride along each group of axes of a packed tensor that is broadcast to these.

    None: the tensor has some axes of a group, but not all.
    """
    shape = (1,) * (sum(map(len, groups)) - len(shape)) + shape
    steps, step = [0] * len(groups), 1
    for i, group in reversed([*enumerate(groups)]):
        at = len(shape) - len(group)
        shape, part = shape[:at], shape[at:]
        if part == group:
            steps[i] = step
            step *= math.prod(group)
        elif any(n != 1 for n in part):
            return None
    return steps


def around(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return the number of elements before an axis, along it, and after it; () has one of each."""
    if not shape:
        return 1, 1, 1
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def merged(axes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge adjacent axes if the end of the inner axis is the next step of the outer axis.

    An axis is a length and a stride for each tensor.

    >>> merged([(2, 12, 12), (3, 4, 4), (4, 1, 0)])
    [(6, 4, 4), (4, 1, 0)]
    """
    remaining: list[tuple[int, ...]] = []
    for length, *steps in axes:
        if remaining and remaining[-1][1:] == tuple([length * step for step in steps]):
            length *= remaining.pop()[0]
        remaining.append((length, *steps))
    return remaining
