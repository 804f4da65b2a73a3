"""Line search for the strong Wolfe conditions, on Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

Phi: TypeAlias = Callable[[float], tuple[float, float]]
"""Function from a step t to the loss there and the derivative with respect to t."""

_DECREASE: Final = 1e-4  # c1 and c2 in Nocedal and Wright, and in PyTorch
_CURVATURE: Final = 0.9


class _Point(NamedTuple):
    t: float
    loss: float
    slope: float


def strong_wolfe(phi: Phi, loss: float, slope: float, most: int) -> float:
    """Return a step t > 0 that satisfies the strong Wolfe conditions.

    There the loss has decreased enough, and the slope is flat enough (Nocedal and Wright,
    "Numerical Optimization", algorithm 3.5). `loss` and `slope` are the values at 0. After `most`
    calls of `phi` it returns the best step so far, which may be 0."""
    best = previous = _Point(0.0, loss, slope)
    t = 1.0
    for number in range(most):
        here = _Point(t, *phi(t))
        is_worse = not here.loss <= loss + _DECREASE * t * slope  # also if the loss is nan
        if is_worse or (number and here.loss >= previous.loss):
            return _zoom(phi, loss, slope, previous, here, most - number - 1)
        if abs(here.slope) <= -_CURVATURE * slope:
            return t
        if here.slope >= 0:
            return _zoom(phi, loss, slope, here, previous, most - number - 1)
        best, previous, t = here, here, 2 * t
    return best.t


def _zoom(phi: Phi, loss: float, slope: float, low: _Point, high: _Point, most: int) -> float:
    """Return a step between two points; `low` is the point with the lower loss (algorithm 3.6)."""
    for _ in range(most):
        t = _between(low, high)
        here = _Point(t, *phi(t))
        if not here.loss <= loss + _DECREASE * t * slope or here.loss >= low.loss:
            high = here
            continue
        if abs(here.slope) <= -_CURVATURE * slope:
            return t
        if here.slope * (high.t - low.t) >= 0:
            high = low
        low = here
    return low.t


def _between(x: _Point, y: _Point) -> float:
    """Return the minimum of the cubic through two points with given slopes (equation 3.59).

    It is kept away from both points. Return the midpoint if the cubic has no minimum."""
    a = x.slope + y.slope - 3 * (x.loss - y.loss) / (x.t - y.t)
    square = a * a - x.slope * y.slope
    t = math.nan
    if square >= 0 and math.isfinite(square):
        root = math.copysign(math.sqrt(square), y.t - x.t)
        divisor = y.slope - x.slope + 2 * root
        t = y.t - (y.t - x.t) * (y.slope + root - a) / divisor if divisor else math.nan
    start, end = min(x.t, y.t), max(x.t, y.t)
    margin = 0.1 * (end - start)
    return min(max(t, start + margin), end - margin) if t == t else (start + end) / 2
