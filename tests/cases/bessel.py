"""Cases of the Bessel functions: through their integrals."""

from __future__ import annotations

import math

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.cases.elementwise import _unary

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


def _over(f: Array, end: float) -> float:
    """The integral from 0 to `end` of a function with these values at the nodes."""
    return float(np.sum(f * _WEIGHTS)) * end / 2


def _places(end: float) -> Array:
    return (_NODES + 1) * end / 2


def first(n: int, x: float) -> float:
    """J(n, x), by Bessel's integral."""
    t = _places(math.pi)
    return _over(np.cos(n * t - x * np.sin(t)), math.pi) / math.pi


def second(n: int, x: float) -> float:
    """Y(n, x), by the integrals of DLMF 10.9.7."""
    t, end = _places(math.pi), math.asinh(60.0 / x)
    u = _places(end)
    tail = (np.exp(n * u) + (-1) ** n * np.exp(-n * u)) * np.exp(-x * np.sinh(u))
    return (_over(np.sin(x * np.sin(t) - n * t), math.pi) - _over(tail, end)) / math.pi


def modified(x: float) -> float:
    """I(1, x), by the integral of DLMF 10.32.3."""
    t = _places(math.pi)
    return _over(np.exp(x * np.cos(t)) * np.cos(t), math.pi) / math.pi


_PLACES = np.array([0.3, 1.0, 2.2, 3.9, 4.9, 5.2, 7.0, 9.5, 20.0])
_BOTH = np.array([-6.5, -1.1, 0.2, 0.9, 2.5, 4.4, 5.3, 8.2, 13.0])

CASES: dict[str, list[Case]] = {
    "j0": [*_unary(lambda x: first(0, x), _BOTH)],
    "j1": [*_unary(lambda x: first(1, x), _BOTH)],
    "y0": [*_unary(lambda x: second(0, x), _PLACES)],
    "y1": [*_unary(lambda x: second(1, x), _PLACES)],
    "i1": [*_unary(modified, _BOTH)],
}
