"""Derivatives up to the third order at zeros, ties and other kinks, against their limits.

    python -m tests.fuzz kinks
    python -m tests.fuzz kinks softplus linalg.vector_norm

Each elementwise function of the public table is taken at points where formulas branch (0,
integers, equal operands), each function of one vector at zeros and at equal elements, plain and
squared. Along a line through the point, the derivatives on both sides tend to limits. Where these
are equal up to some order, the function is as smooth there, and its derivatives must be the limits.
The first derivative at a kink of an elementwise function must lie between. A second or third
derivative that is nan shows, and counts as an answer.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import MlvmError
from tests.fuzz.command import parser_of, require_known
from tests.fuzz.counts import functions
from tests.fuzz.extremes import elementwise

Line = Callable[[Any], Any]

_H: Final = 1e-5
_POINTS: Final = (0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 8.0, -8.0)
_EQUAL: Final = (0.0, 1.0, -2.0)

EXCEPTIONS: Final = {
    **dict.fromkeys(("median", "nanmedian", "sort"), "of equal elements, the first has the slope"),
    **dict.fromkeys(("ptp", "linalg.vector_norm, inf"), "equal extremes share the slope"),
    "abs": "a slope of 0 at 0, as in JAX and PyTorch",
    "margin_ranking": "the product of a sign and a difference is not both 0",
    "normalize": "0 / 0",
}
"""Function -> reason."""


def lines(names: list[str]) -> Iterator[tuple[str, Line]]:
    """Return functions of a number t, which is 0 at the point, with their names."""
    for name, (fn, arity) in elementwise(*names).items():
        points: Any = [(x,) for x in _POINTS]
        if arity > 1:
            points = [(x,) * arity for x in _EQUAL] + [(0.0, 1.0, 0.5)[:arity]]
        for point in points:
            for slopes in itertools.product((1.0, 0.0, -0.5), repeat=arity):
                if any(slopes):
                    yield f"{name} at {point} along {slopes}", _line(fn, point, slopes)
    direction = np.array([0.3, -1.0, 0.7, 0.1])
    for name, fn in functions(*names).items():
        for start, power in itertools.product((0.0, 1.0), (1, 2)):
            place = f"{name}, to the power {power}, at elements {start:g}"
            yield place, _of_vector(fn, np.full(4, start), direction, power)


def _line(fn: Any, point: tuple[float, ...], slopes: tuple[float, ...]) -> Line:
    return lambda t: fn(*[t * b + a for a, b in zip(point, slopes, strict=True)])


def _of_vector(fn: Any, start: Any, direction: Any, power: int) -> Line:
    weights = np.array([1.0, -0.4, 0.6, 0.2])

    def line(t: Any) -> Any:
        y = fn(ml.asarray(start) + t * ml.asarray(direction))
        y = y**power if power > 1 else y
        return ml.sum(y * ml.asarray(weights[: y.size]).reshape(y.shape))  # of its elements

    return line


def derivatives(line: Line, t: float) -> list[float] | None:
    """Return the derivatives of the first three orders at t; None if there are none."""
    values = []
    with warnings.catch_warnings(action="ignore"):
        for order in range(4):
            line = ml.grad(line) if order else line
            try:
                values.append(float(line(ml.asarray(t, dtype="f64"))))
            except MlvmError:
                return None
    return None if np.isnan(values[0]) else values[1:]


def findings(names: list[str]) -> Iterator[str]:
    """Return derivatives that are not the limits from both sides, nor between."""
    for place, line in lines(names):
        if re.split(r" at |, to the", place)[0] in EXCEPTIONS:
            continue
        near = [derivatives(line, h) for h in (-_H, _H, -_H / 10, _H / 10)]
        at = derivatives(line, 0.0)
        if at is None or any(each is None for each in near):
            continue
        rows: list[tuple[Any, ...]] = [*zip((1, 2, 3), at, *near, strict=True)]
        for order, got, *sides in rows:
            low, high = sorted(sides[2:])
            slack = 1e-3 * max(1.0, abs(low), abs(high))
            is_smooth = high - low < slack
            if not np.isfinite(sides).all() or not _settled(sides) or (order > 1 and np.isnan(got)):
                break  # a pole, or another kink nearby
            is_between = low - slack <= got <= high + slack
            if not is_between and (is_smooth or (order == 1 and " along " in place)):
                yield f"{place}: derivative {order} is {got:.6g}, expected {low:.6g} .. {high:.6g}"
            if not is_between or not is_smooth:
                break


def _settled(sides: list[float]) -> bool:
    """Return whether the derivatives on each side tend to a limit."""
    size = 1e-2 * max(1.0, *map(abs, sides))
    return abs(sides[0] - sides[2]) < size and abs(sides[1] - sides[3]) < size


def main(argv: list[str]) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("names", nargs="*", help="functions; all if there are none")
    names = parser.parse_args(argv).names
    unknown = [name for name in names if not (elementwise(name) or functions(name))]
    require_known(parser, unknown, lambda: [*elementwise(), *functions()])
    found = [*findings(names)]
    print("\n".join(found) or "all derivatives are their limits")
    return int(bool(found))
