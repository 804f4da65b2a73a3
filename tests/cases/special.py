"""Cases of the special functions: through `math`, and through their sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.cases.elementwise import _away, _each, _f32, _unary

_TERMS = 10_000


def inverse_of_erf(y: float) -> float:
    """By the normal distribution's, for 0 < |y| < 1."""
    return math.copysign(-NormalDist().inv_cdf((1 - abs(y)) / 2) / math.sqrt(2), y)


def _from_the_end(y: float) -> float:
    """The inverse of erfc, by the normal distribution's."""
    return -NormalDist().inv_cdf(y / 2) / math.sqrt(2)


def digamma(x: float) -> float:
    """log(x + n) less the sum of 1 / (x + k) for k < n, and the first terms of what is left."""
    end = x + _TERMS
    total = math.fsum(1 / (x + k) for k in range(_TERMS))
    return math.log(end) - total - 1 / (2 * end) - 1 / (12 * end**2)


def polygamma(n: int, x: float) -> float:
    """The sum of (x + k)^-(n+1), of which the rest is an integral and a correction."""
    end = x + _TERMS
    total = math.fsum((x + k) ** -(n + 1) for k in range(_TERMS))
    rest = end**-n / n + end ** -(n + 1) / 2 + (n + 1) * end ** -(n + 2) / 12
    value = math.factorial(n) * (total + rest)
    return value if n % 2 else -value


_PLACES = np.array([0.6, 0.9, 1.2, 1.7, 3.3, 9.8, 25.0, -0.4])
_MORE = np.array([0.04, 0.3, 100.0, -0.98, -2.7, -7.3])
_INSIDE = np.array([-0.8, -0.5, 0.01, 0.3, 0.76])
_ENDS = np.array([-0.9999, -0.9, 0.84, 0.9375])


def _orders(x: Array) -> list[Case]:
    def expected(n: int) -> Callable[..., Array]:
        return lambda x, n: _each(lambda v: polygamma(n, v))(x)

    return [Case((x,), expected(n), {"n": n}) for n in (1, 2, 3, 6)]


CASES: dict[str, list[Case]] = {
    "erfc": [*_unary(math.erfc, _away(3, 4)), *_unary(math.erfc, np.array([-7.0, 3.5, 8.0]))],
    "erfinv": [*_unary(inverse_of_erf, _INSIDE), Case((_f32(_ENDS),), _each(inverse_of_erf))],
    "erfcinv": [
        *_unary(lambda y: inverse_of_erf(1 - y), 1 - _INSIDE),
        Case((_f32(np.array([1e-9, 1e-3, 1.9])),), _each(_from_the_end)),
    ],
    "lgamma": [*_unary(math.lgamma, _PLACES), *_unary(math.lgamma, _MORE)],
    "digamma": [*_unary(digamma, _PLACES), *_unary(digamma, _MORE)],
    "polygamma": [*_orders(_PLACES), *_orders(_f32(_MORE[1:])), *_orders(_f32(_PLACES[:6]))],
}
