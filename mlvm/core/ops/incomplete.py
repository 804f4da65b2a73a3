"""Beta function, and incomplete gamma and beta functions, elementwise.

Integers and bools give f32. All results are computed in f64 and rounded once. The densities use
Loader's deviances, which stay accurate for large parameters (Loader, "Fast and accurate computation
of binomial probabilities", 2000). Sums and continued fractions run until all elements converge.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import numpy as np

from mlvm.core.op import internal, pointwise
from mlvm.core.ops.elementwise import float_
from mlvm.core.ops.special import LGAMMA, STIRLING, digamma, lgamma, polynomial, put, wide
from mlvm.core.types import Array, TensorType

_TINY: Final = 1e-300
_LARGE: Final = 200.0  # parameter above which gamma functions are computed by integration
_MOST_TERMS: Final = 100_000
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def _of(kernel: Any, x: Array) -> Array:
    result = np.empty_like(x)
    kernel(result, x)
    return result


def _deviance(u: Array, ratio: Array) -> Array:
    """Return u - log(1 + u), without cancellation near 0; `ratio` is 1 + u."""
    v = u / (2.0 + u)
    terms = polynomial(tuple([1.0 / k for k in range(25, 2, -2)]), v * v)
    near = u * v - 2.0 * v * v * v * terms
    return np.where(np.abs(u) < 0.3, near, u - np.log(ratio))


def _stirling(a: Array) -> Array:
    """Return the logarithm of Gamma(a + 1) divided by Stirling's formula, for a >= 10."""
    series: Array = polynomial(STIRLING, 1.0 / (a * a))
    return series / a


# --- gamma ---------------------------------------------------------------------------


def _gamma_density(a: Array, x: Array) -> Array:
    """Return x^(a - 1) e^-x / Gamma(a), for a > 0 and 0 < x < inf."""
    large = np.where(a < 10.0, 10.0, a)
    far = np.exp(-_stirling(large) - large * _deviance((x - large) / large, x / large))
    far = far * np.sqrt(large / (2 * math.pi)) / x
    small = np.where(a < 10.0, a, 1.0)
    near = np.exp((small - 1.0) * np.log(x) - x - _of(lgamma.kernel, small))
    return np.where(a < 10.0, near, far)


def _integral(a: Array, x: Array, slope: bool) -> Array:
    """Integrate the density from x away from the peak, by Gauss-Legendre quadrature.

    With `slope`, integrate the derivative by a (Press et al., Numerical Recipes, 3rd edition, 6.2).
    """
    peak = np.maximum(a - 1.0, 0.0)
    wide_ = np.sqrt(np.maximum(a, 1.0))
    above = x > peak
    up = np.maximum(peak + 12.0 * wide_, x + 8.0 * wide_) + 40.0
    down = np.maximum(0.0, np.minimum(peak - 10.0 * wide_, x - 7.0 * wide_))
    end = np.where(above, up, down)
    half, total = (end - x) / 2.0, np.zeros_like(x)
    psi = _of(digamma.kernel, a) if slope else 0.0
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        t = np.maximum(x + half * (node + 1.0), _TINY)
        term = _gamma_density(a, t)
        total = total + weight * (term * (np.log(t) - psi) if slope else term)
    return total * half


def _gamma_parts(a: Array, x: Array) -> tuple[Array, Array]:
    """Return P and Q for a > 0 and 0 < x < inf, each with a small relative error."""
    lower = x < a + 1.0
    integrated = a >= _LARGE
    density = _gamma_density(a, x)
    # the sum of x^n / (a (a + 1) ... (a + n)) (Abramowitz and Stegun, 6.5.29)
    summed = lower & ~integrated
    step, z = np.where(summed, a, 1.0), np.where(summed, x, 0.0)
    term = 1.0 / step
    total = term
    for _ in range(_MOST_TERMS):
        step = step + 1.0
        term = term * z / step
        total = total + term
        if (term <= total * 1e-17).all():
            break
    p = np.where(a < _TINY, 1.0, density * x * total)
    # a continued fraction (6.5.31), by Lentz's algorithm
    fraction = ~lower & ~integrated
    b = np.where(fraction, x + 1.0 - a, 1.0)
    c, d = np.full_like(b, 1 / _TINY), 1.0 / b
    h, is_done = d, np.zeros(b.shape, bool)
    for i in range(1, _MOST_TERMS):
        an = np.where(fraction, -i * (i - a), 0.0)
        b = b + 2.0
        d = an * d + b
        d = 1.0 / np.where(np.abs(d) < _TINY, _TINY, d)
        c = b + an / c
        c = np.where(np.abs(c) < _TINY, _TINY, c)
        h = np.where(is_done, h, h * d * c)  # converged elements no longer change
        is_done |= np.abs(d * c - 1.0) <= 4e-16
        if is_done.all():
            break
    q = density * x * h
    if integrated.any():
        area = _integral(np.where(integrated, a, _LARGE), np.where(integrated, x, _LARGE), False)
        left = integrated & (x <= a - 1.0)  # True also for an area of 0
        right = integrated & ~left
        p, q = np.where(left, 0.0 - area, p), np.where(right, area, q)
        lower = np.where(integrated, left, lower)
    is_small = (a < 0.5) & (x < 1.5)
    small = _upper_of_small(np.where(is_small, a, 0.25), np.where(is_small, x, 1.0))
    q = np.where(is_small, small, np.where(lower, 1.0 - p, q))
    return np.where(lower, p, 1.0 - q), q


def _upper_of_small(a: Array, x: Array) -> Array:
    """Compute Q for a < 1/2 and x < 3/2 by the alternating series of P (DLMF 8.7.1)."""
    logarithm = a * np.log(x) - (a * polynomial(LGAMMA, a) - np.log1p(a))
    term, total = np.ones_like(x), np.zeros_like(x)
    for n in range(1, 30):
        term = term * -x / n
        total = total + term / (a + n)
    q: Array = -np.expm1(logarithm) - a * np.exp(logarithm) * total
    return q


def _put_gamma(out: Array, a: Array, x: Array, upper: bool) -> None:
    a, x = np.broadcast_arrays(wide(a), wide(x))
    inside = (a > 0.0) & (x > 0.0) & np.isfinite(a) & np.isfinite(x)
    p, q = _gamma_parts(np.where(inside, a, 1.0), np.where(inside, x, 1.0))
    zero = (a > 0.0) & ((x == 0.0) | (np.isinf(a) & (x > 0.0) & np.isfinite(x)))
    one = (x > 0.0) & (((a >= 0.0) & np.isinf(x) & np.isfinite(a)) | (a == 0.0))
    edge = np.where(zero, 1.0 if upper else 0.0, np.where(one, 0.0 if upper else 1.0, np.nan))
    put(out, np.where(inside, q if upper else p, edge))


@pointwise(infer=float_, precision="f32")
def gammainc(out: Array, a: Array, x: Array) -> None:
    """The regularized lower incomplete gamma function P(a, x), elementwise, with broadcasting.

    It is the integral of t^(a - 1) e^-t / Gamma(a) from 0 to x, for a > 0 and x >= 0; else nan. The
    relative error is below 1e-12 in f64, for a up to 1e6.

        >>> ml.gammainc([1.0, 2.0], 1.0)
        Tensor([0.63212055, 0.26424113], f32[2])
    """
    _put_gamma(out, a, x, upper=False)


@pointwise(infer=float_, precision="f32")
def gammaincc(out: Array, a: Array, x: Array) -> None:
    """The regularized upper incomplete gamma function Q(a, x) = 1 - P(a, x); see `gammainc`.

    It has a small relative error also if Q is small.

        >>> ml.gammaincc([1.0, 2.0], 1.0)
        Tensor([0.36787945, 0.7357589 ], f32[2])
    """
    _put_gamma(out, a, x, upper=True)


@internal(infer=float_, elementwise=True, in_place=3)
def gamma_density(out: Array, a: Array, x: Array) -> None:
    """The derivative x^(a - 1) e^-x / Gamma(a) of P(a, x) by x.

    It is 0 outside of 0 < x < inf and if a is 0, and nan where P is nan.
    """
    a, x = np.broadcast_arrays(wide(a), wide(x))
    inside, valid = _where_defined(a, x)
    y = _gamma_density(np.where(inside, a, 1.0), np.where(inside, x, 1.0))
    at_zero = np.where(a < 1.0, np.inf, np.where(a == 1.0, 1.0, 0.0))
    edge = np.where((x == 0.0) & (a > 0.0), at_zero, np.where(valid, 0.0, np.nan))
    put(out, np.where(inside, y, edge))


def _where_defined(a: Array, x: Array) -> tuple[Array, Array]:
    """Return where 0 < a, x < inf, and where P(a, x) is not nan."""
    inside = (a > 0.0) & (x > 0.0) & np.isfinite(a) & np.isfinite(x)
    valid = (a >= 0.0) & (x >= 0.0) & (np.maximum(a, x) > 0.0) & np.isfinite(np.minimum(a, x))
    return inside, valid


def _above_zero(a: Array, other: Array) -> Array:
    """Replace a parameter of 0 by a tiny number if the other parameter is positive."""
    return np.where((a == 0.0) & (other > 0.0), _TINY, a)


@internal(infer=float_, elementwise=True, in_place=3)
def gammainc_slope(out: Array, a: Array, x: Array) -> None:
    """The derivative of P(a, x) by a; nan where P is.

    For a < 10 and x < a + 10, it is the sum of the terms of P times log(x) - digamma(a + n + 1).
    Otherwise, it is an integral of the density times log(t) - digamma(a).
    """
    a, x = np.broadcast_arrays(wide(a), wide(x))
    a = _above_zero(a, x)
    inside, valid = _where_defined(a, x)
    slope = _gamma_slope(np.where(inside, a, 1.0), np.where(inside, x, 1.0))
    put(out, np.where(inside, slope, np.where(valid, 0.0, np.nan)))


def _gamma_slope(a: Array, x: Array) -> Array:
    """Return the derivative of P(a, x) by a, for a > 0 and 0 < x < inf."""
    summed = (a < 10.0) & (x < a + 10.0)
    first, z = np.where(summed, a, 1.0), np.where(summed, x, 0.5)
    factor = np.log(z) - _of(digamma.kernel, first + 1.0)
    step, term = first, 1.0 / first
    total = term * factor
    for _ in range(200):
        step = step + 1.0
        term = term * z / step
        factor = factor - 1.0 / step
        total = total + term * factor
    near = _gamma_density(first, z) * z * total
    area = _integral(np.where(summed, 20.0, a), np.where(summed, 20.0, x), True)
    slope: Array = np.where(summed, near, -area)
    return slope


# --- beta ----------------------------------------------------------------------------


def _without_overflow(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Return parameters with a finite sum and the factor: the distribution is a point there."""
    scale = np.where(np.minimum(a, b) > 1e290, 1e-8, 1.0)
    return a * scale, b * scale, scale


def _from_mean(a: Array, b: Array, x: Array) -> Array:
    """Return x - a / (a + b); 1 - x has no error if x is near 1."""
    n = a + b
    away: Array = np.where(x < 0.5, x * n - a, b - (1.0 - x) * n) / n
    return away


def _beta_density(a: Array, b: Array, x: Array) -> Array:
    """Return x^(a - 1) (1 - x)^(b - 1) / B(a, b), for a, b > 0 and 0 < x < 1."""
    a, b, _ = _without_overflow(a, b)
    both = (a >= 10.0) & (b >= 10.0)
    p, q = np.where(both, a, 10.0), np.where(both, b, 10.0)
    n = p + q
    away = _from_mean(p, q, x)
    u, v = away * n / p, -away * n / q
    deviance = p * _deviance(u, x * n / p) + q * _deviance(v, (1.0 - x) * n / q)
    far = np.exp(_stirling(n) - _stirling(p) - _stirling(q) - deviance)
    far = far * (np.sqrt(p / n) * np.sqrt(q / (2 * math.pi))) / (x * (1.0 - x))
    p, q = np.where(both, 1.0, a), np.where(both, 1.0, b)
    scale = _log_beta(p, q)
    near = np.exp((p - 1.0) * np.log(x) + (q - 1.0) * np.log1p(-x) - scale)
    return np.where(both, far, near)


def _log_beta(a: Array, b: Array) -> Array:
    """Return log |B(a, b)|.

    For a large parameter, Stirling's formula computes lgamma(b) - lgamma(a + b) without
    cancellation.
    """
    low, high = np.minimum(a, b), np.maximum(a, b)
    is_large = np.minimum(high, low + high) >= 10.0
    high = np.where(np.isinf(high), 1e308, high)
    least = np.where(is_large, low, 0.0)
    large = np.where(is_large, high, 10.0)
    n = least + large
    change = _stirling(large) - _stirling(n) + least - least * np.log(n)
    change = change - (large - 0.5) * np.log1p(least / large)
    small = np.where(is_large, 1.0, high)
    direct = _of(lgamma.kernel, small) - _of(lgamma.kernel, np.where(is_large, 2.0, low + high))
    return _of(lgamma.kernel, low) + np.where(is_large, change, direct)


def _beta_fraction(a: Array, b: Array, x: Array) -> tuple[Array, Array, Array]:
    """Return the continued fraction of I, and the derivatives by a and b.

    The fraction (Abramowitz and Stegun, 26.5.8) is computed by Lentz's algorithm with dual numbers.
    """
    zero = np.zeros_like(x)

    def inverse(v: list[Array]) -> list[Array]:
        y = 1.0 / np.where(np.abs(v[0]) < _TINY, _TINY, v[0])
        return [y, -v[1] * y * y, -v[2] * y * y]

    def times(v: list[Array], w: list[Array]) -> list[Array]:
        return [v[0] * w[0], v[1] * w[0] + v[0] * w[1], v[2] * w[0] + v[0] * w[2]]

    first = -(a + b) * x / (a + 1.0)
    by_a = -x / (a + 1.0) + (a + b) * x / ((a + 1.0) * (a + 1.0))
    c: list[Array] = [np.ones_like(x), zero, zero]
    d = inverse([1.0 + first, by_a, -x / (a + 1.0)])
    h, is_done = d, np.zeros(x.shape, bool)
    for m in range(1, _MOST_TERMS):
        even = a + 2.0 * m
        scale = m * x / ((even - 1.0) * even)
        value = scale * (b - m)
        up = [value, -value * (1.0 / (even - 1.0) + 1.0 / even), scale]
        value = -(a + m) * (a + b + m) * x / (even * (even + 1.0))
        by_a = value * (1.0 / (a + m) + 1.0 / (a + b + m) - 1.0 / even - 1.0 / (even + 1.0))
        for each in (up, [value, by_a, value / (a + b + m)]):
            product, quotient = times(each, d), times(each, inverse(c))
            d = inverse([1.0 + product[0], product[1], product[2]])
            c = [1.0 + quotient[0], quotient[1], quotient[2]]
            change = times(d, c)
            h = [np.where(is_done, old, new) for old, new in zip(h, times(h, change), strict=True)]
        rest = np.abs(change[0] - 1.0) + np.abs(change[1]) + np.abs(change[2])
        is_done |= ~(rest > 4e-16 * (1.0 + np.abs(h[1]) + np.abs(h[2])))
        if is_done.all():
            break
    return h[0], h[1], h[2]


def _beta_parts(a: Array, b: Array, x: Array) -> tuple[Array, Array, Array]:
    """Return I(a, b, x) and the derivatives by a and b, for a, b > 0 and 0 < x < 1."""
    a, b, scale = _without_overflow(a, b)
    integrated = np.minimum(a, b) >= _LARGE
    limit = ~integrated & (np.maximum(a, b) >= 1e8)  # the fraction loses digits of a small x
    others = integrated | limit
    p, q, z = [np.where(others, 0.5, each) for each in (a, b, x)]
    parts = _by_fraction(p, q, z)
    if others.any():
        p, q = [np.where(integrated, each, _LARGE) for each in (a, b)]
        large = _by_integral(p, q, np.where(integrated, x, 0.5))
        p, q = np.where(limit, a, 1.0), np.where(limit, b, 1e8)
        end = _by_gamma(p, q, np.where(limit, x, 0.5))
        several = zip(parts, large, end, strict=True)
        parts = [np.where(integrated, y, np.where(limit, z, x)) for x, y, z in several]
    return np.clip(parts[0], 0.0, 1.0), parts[1] * scale, parts[2] * scale


def _by_integral(a: Array, b: Array, x: Array) -> list[Array]:
    """Integrate the density and its derivatives from x away from the mean, for large a and b."""
    n = a + b
    away, sigma = _from_mean(a, b, x), np.sqrt(a / n) * np.sqrt(b / n) / np.sqrt(n)
    above = away > 0.0
    span = np.maximum(12.0 * sigma - np.abs(away), 8.0 * sigma)
    half = np.where(above, np.minimum(span, 1.0 - x), -np.minimum(span, x)) / 2.0
    factor = np.exp(_stirling(n) - _stirling(a) - _stirling(b)) / (math.sqrt(2.0 * math.pi) * sigma)
    rest, rest_a, rest_b = [(0.1 / y**2 - 1.0) / (12.0 * y**2) - 0.5 / y for y in (n, a, b)]
    sums = [np.zeros_like(x) for _ in range(3)]
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        away_there = away + half * (node + 1.0)
        u, v = away_there * (n / a), -away_there * (n / b)
        p, q = np.maximum(1.0 + u, _TINY), np.maximum(1.0 + v, _TINY)
        term = weight * np.exp(-a * _deviance(u, p) - b * _deviance(v, q)) / (p * q)
        slopes = np.log1p(u) + rest - rest_a, np.log1p(v) + rest - rest_b
        for i, each in enumerate((1.0, *slopes)):
            sums[i] = sums[i] + np.where(term > 0.0, term * each, 0.0)
    area, by_a, by_b = [each * factor * half for each in sums]
    return [np.where(above, 1.0 - area, -area), -by_a, -by_b]


def _by_gamma(a: Array, b: Array, x: Array) -> list[Array]:
    """Return the limit P(a, -(b + (a - 1) / 2) log(1 - x)) for a large b; 1 - P for a large a.

    (Didonato and Morris, "Algorithm 708", 1992.)"""
    swapped = a > b
    low, high = np.minimum(a, b), np.maximum(a, b)
    y = -np.where(swapped, np.log(x), np.log1p(-x))
    z = np.clip((high + (low - 1.0) / 2.0) * y, _TINY, 1e5)
    p, q = _gamma_parts(low, z)
    by_high = _gamma_density(low, z) * y
    by_low = _gamma_slope(low, z) + by_high / 2.0
    return [
        np.where(swapped, q, p),
        np.where(swapped, -by_high, by_low),
        np.where(swapped, -by_low, by_high),
    ]


def _by_fraction(a: Array, b: Array, x: Array) -> list[Array]:
    swapped = x * (a + b + 2.0) > a + 1.0
    p, q, z = np.where(swapped, b, a), np.where(swapped, a, b), np.where(swapped, 1.0 - x, x)
    h, by_p, by_q = _beta_fraction(p, q, z)
    front = _beta_density(a, b, x) * x * (1.0 - x) / p
    psi = _of(digamma.kernel, p + q)
    value = front * h
    log_z, log_rest = np.log(z), np.log1p(-z)
    slope_p = front * by_p + value * (log_z - _of(digamma.kernel, p + 1.0) + psi)
    slope_q = front * by_q + value * (log_rest - _of(digamma.kernel, q) + psi)
    return [
        np.where(swapped, 1.0 - value, value),
        np.where(swapped, -slope_q, slope_p),
        np.where(swapped, -slope_p, slope_q),
    ]


def _gamma_sign(x: Array) -> Array:
    """Return the sign of the gamma function: nan at the poles, except at a zero with a sign."""
    floor = np.floor(x)
    sign = np.where(x < 0.0, 1.0 - 2.0 * np.remainder(floor, 2.0), np.copysign(1.0, x))
    return np.where((x < 0.0) & (x == floor), np.nan, sign)


@pointwise(infer=float_, precision="f32")
def beta(out: Array, x: Array, y: Array) -> None:
    """The beta function gamma(x) gamma(y) / gamma(x + y), elementwise, with broadcasting.

    It is nan where one of these arguments is -1, -2, ... See `random.beta` for draws.

    x and y: shapes that broadcast to [...], any dtype but complex -> [...], in that dtype; integers
    and bools give f32. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand is
    complex.

        >>> ml.beta(ml.asarray([2.0]), 3.0)
        Tensor([0.08333334], f32[1])

    Invalid calls:
        ml.beta(v, ml.ones(3))  # ShapeError
        ml.beta(v, 1j)  # DTypeError
    """
    a, b = np.broadcast_arrays(wide(x), wide(y))
    low, high = np.minimum(a, b), np.maximum(a, b)
    size = np.where(low > 1e3, 0.0, np.exp(_log_beta(a, b)))
    size = np.where(np.isinf(high), np.where(low > 0.0, 0.0, np.inf), size)
    put(out, _gamma_sign(a) * _gamma_sign(b) * _gamma_sign(a + b) * size)


def _inside(a: Array, b: Array, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return where 0 < x < 1 and 0 < a, b < inf, and operands that are replaced elsewhere."""
    a, b, x = np.broadcast_arrays(wide(a), wide(b), wide(x))
    inside = (a > 0.0) & (b > 0.0) & (x > 0.0) & (x < 1.0) & np.isfinite(a) & np.isfinite(b)
    return inside, *[np.where(inside, each, 0.5) for each in (a, b, x)]  # type: ignore[return-value]


def _beta_edge(a: Array, b: Array, x: Array) -> Array:
    """Return I(a, b, x) at the ends of x, and the limits for a parameter of 0 or infinity.

    In a limit, the whole distribution is at one end. The result is nan where there is no limit."""
    low, high = (a == 0.0) | np.isinf(b), (b == 0.0) | np.isinf(a)  # whether all mass is at 0, at 1
    valid = (a >= 0.0) & (b >= 0.0) & (x >= 0.0) & (x <= 1.0) & ~(low & high)
    value = np.where(low, x > 0.0, np.where(high, x == 1.0, x > 0.0))
    return np.where(valid, value, np.nan)


@pointwise(infer=float_, precision="f32")
def betainc(out: Array, a: Array, b: Array, x: Array) -> None:
    """The regularized incomplete beta function I(a, b, x), elementwise, with broadcasting.

    It is the integral of t^(a - 1) (1 - t)^(b - 1) / B(a, b) from 0 to x, for a, b > 0 and 0 <= x
    <= 1. If one of a and b is 0 or infinite, it is the limit; else nan. The relative error is below
    1e-11 in f64, for a and b from 0.01 to 1e8.

    a, b and x: shapes that broadcast to [...], any dtype but complex -> [...], in that dtype;
    integers and bools give f32. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an
    operand is complex.

        >>> ml.betainc([1.0, 2.0], 2.0, 0.5)
        Tensor([0.75, 0.5 ], f32[2])

    Invalid calls:
        ml.betainc(v, v, ml.ones(3))  # ShapeError
        ml.betainc(v, v, 1j)  # DTypeError
    """
    inside, *operands = _inside(a, b, x)
    value, _, _ = _beta_parts(*operands)
    put(out, np.where(inside, value, _beta_edge(wide(a), wide(b), wide(x))))


@internal(infer=float_, elementwise=True, in_place=3)
def beta_density(out: Array, a: Array, b: Array, x: Array) -> None:
    """x^(a - 1) (1 - x)^(b - 1) / B(a, b), the derivative of I(a, b, x) by x; nan where I is."""
    inside, *operands = _inside(a, b, x)
    a, b, x = np.broadcast_arrays(wide(a), wide(b), wide(x))
    valid = np.isfinite(_beta_edge(a, b, x))
    edge = np.where(valid, 0.0, np.nan)
    for end, near, far in ((0.0, a, b), (1.0, b, a)):
        at_end = np.where(near < 1.0, np.inf, np.where(near == 1.0, far, 0.0))
        edge = np.where(valid & (x == end), at_end, edge)
    put(out, np.where(inside, _beta_density(*operands), edge))


def _of_parameter(*operands: TensorType, by: Literal["a", "b"]) -> TensorType:
    return float_(*operands)


@internal(infer=_of_parameter, elementwise=True, in_place=3)
def betainc_slope(out: Array, a: Array, b: Array, x: Array, *, by: Literal["a", "b"]) -> None:
    """The derivative of I(a, b, x) by a or b, from the continued fraction; nan where I is nan."""
    a, b, x = wide(a), wide(b), wide(x)
    a, b = (_above_zero(a, b), b) if by == "a" else (a, _above_zero(b, a))
    inside, *operands = _inside(a, b, x)
    _, by_a, by_b = _beta_parts(*operands)
    edge = 0.0 * _beta_edge(a, b, x)
    put(out, np.where(inside, by_a if by == "a" else by_b, edge))
