"""Cases of the incomplete gamma and beta functions: through their series."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.cases.special import digamma

Function = Callable[..., float]


def lower(a: float, x: float) -> float:
    """P(a, x), the sum of x^(a + n) e^-x / Gamma(a + n + 1)."""
    terms = (math.exp((a + n) * math.log(x) - x - math.lgamma(a + n + 1)) for n in range(1500))
    return math.fsum(terms)


def density(a: float, x: float) -> float:
    return math.exp((a - 1) * math.log(x) - x - math.lgamma(a))


def lower_slope(a: float, x: float) -> float:
    """The derivative of `lower` by a, term by term."""
    psi, terms = digamma(a + 1), []
    for n in range(1500):
        term = math.exp((a + n) * math.log(x) - x - math.lgamma(a + n + 1))
        terms.append(term * (math.log(x) - psi))
        psi += 1 / (a + n + 1)
    return math.fsum(terms)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def whole_beta(a: float, b: float) -> float:
    """B(a, b); far beyond b it is gamma(b) / a^b."""
    if a > 1e5:
        return float(math.gamma(b) / a**b * (1 + b * (1 - b) / (2 * a)))
    return math.gamma(a) * math.gamma(b) / math.gamma(a + b)


def beta_density(a: float, b: float, x: float) -> float:
    return math.exp((a - 1) * math.log(x) + (b - 1) * math.log1p(-x) - _log_beta(a, b))


def below(a: float, b: float, x: float) -> float:
    """I(a, b, x), by the series of DLMF 8.17.8."""
    term, terms = 1.0, [1.0]
    for n in range(3000):
        term *= (a + b + n) / (a + 1 + n) * x
        terms.append(term)
    return beta_density(a, b, x) * x * (1 - x) / a * math.fsum(terms)


def below_slope(a: float, b: float, x: float, by: str) -> float:
    """The derivative of `below` by a or b, term by term."""
    by_a = by == "a"
    slope = digamma(a + b) + (
        math.log(x) - 1 / a - digamma(a) if by_a else math.log1p(-x) - digamma(b)
    )
    term, terms = 1.0, [slope]
    for n in range(3000):
        term *= (a + b + n) / (a + 1 + n) * x
        slope += 1 / (a + b + n) - by_a / (a + 1 + n)
        terms.append(term * slope)
    return beta_density(a, b, x) * x * (1 - x) / a * math.fsum(terms)


def _each(fn: Function, **attributes: str) -> Callable[..., Array]:
    def expected(*operands: Array, **_: str) -> Array:
        wide = [x.astype(np.float64) for x in operands]
        return np.asarray(np.vectorize(lambda *xs: fn(*xs, **attributes), otypes=[float])(*wide))

    return expected


def _cases(fn: Function, *operands: Array, **attributes: str) -> list[Case]:
    narrow = tuple([x.astype(np.float32) for x in operands])
    expected = _each(fn, **attributes)
    return [Case(each, expected, attributes) for each in (operands, narrow)]


_A = np.array([0.3, 1.0, 2.5, 4.0, 9.0, 30.0, 15.0])
_X = np.array([0.2, 1.5, 2.0, 9.0, 7.0, 26.0, 31.0])
_LARGE_A = np.array([700.0, 250.0, 300.0, 5000.0, 220.0])  # integrated; the first P is 0
_LARGE_X = np.array([1.0, 240.0, 330.0, 900.0, 600.0])
_FAR = np.array([1e6, 3e17, -0.5, -1.5, 0.1])
_P = np.array([0.5, 1.0, 2.5, 12.0, 30.0])
_Q = np.array([2.0, 0.7, 1.5, 14.0, 11.0])
_T = np.array([0.1, 0.6, 0.8, 0.45, 0.7])
_LARGE_P = np.array([250.0, 300.0, 210.0])  # integrated
_LARGE_Q = np.array([300.0, 220.0, 400.0])
_LARGE_T = np.array([0.45, 0.59, 0.35])

CASES: dict[str, list[Case]] = {
    "beta": [*_cases(whole_beta, _P, _Q), *_cases(whole_beta, _FAR, 0.75 + 0.0 * _FAR)],
    "gammainc": [*_cases(lower, _A, _X), *_cases(lower, _LARGE_A, _LARGE_X)],
    "gammaincc": [
        *_cases(lambda a, x: 1 - lower(a, x), _A, _X),
        *_cases(lambda a, x: 1 - lower(a, x), _LARGE_A, _LARGE_X),
    ],
    "gamma_density": _cases(density, _A, _X),
    "gammainc_slope": [*_cases(lower_slope, _A, _X), *_cases(lower_slope, _LARGE_A, _LARGE_X)],
    "betainc": [*_cases(below, _P, _Q, _T), *_cases(below, _LARGE_P, _LARGE_Q, _LARGE_T)],
    "beta_density": _cases(beta_density, _P, _Q, _T),
    "betainc_slope": [
        case
        for by in "ab"
        for xs in ((_P, _Q, _T), (_LARGE_P, _LARGE_Q, _LARGE_T))
        for case in _cases(below_slope, *xs, by=by)
    ],
}
