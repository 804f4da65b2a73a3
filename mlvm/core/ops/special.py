"""Special functions of real numbers, elementwise; integers and bools give f32.

All results are computed in f64 and rounded once, by functions of whole arrays, which also run on
arrays of a GPU. If a formula is valid for only some of the numbers, the other numbers are replaced
by a valid one before it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ArgumentError
from mlvm.core.op import internal, pointwise
from mlvm.core.ops.elementwise import float_
from mlvm.core.ops.erf import FAR_P, FAR_Q, NEAR_P, NEAR_Q, Coefficients
from mlvm.core.types import Array, TensorType


def polynomial(coefficients: Coefficients, x: Any) -> Any:
    """Evaluate a polynomial of an array or tensor by Horner's rule, highest power first."""
    result = x * coefficients[0] + coefficients[1]
    for each in coefficients[2:]:
        result = result * x + each
    return result


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def put(out: Array, y: Array) -> None:
    """Write the result. Replace numpy's nans, because the sign of a nan depends on the position."""
    np.copyto(out, np.where(np.isnan(y), np.nan, y))


# --- the error function's relatives --------------------------------------------------

_TAIL_P: Final = (
    1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
    1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4,
)  # fmt: skip
_TAIL_Q: Final = (
    1.0, 2.56852019228982242e0, 1.87295284992346047e0,
    5.27905102951428412e-1, 6.05183413124413191e-2, 2.33520497626869185e-3,
)  # fmt: skip


@pointwise(infer=float_)
def erfc(out: Array, x: Array) -> None:
    """1 - erf(x), with a relative error below 3e-15 in f64 even if it is small.

    The method is from W. J. Cody, Math. Comp. 23, 1969, 631-637.

        >>> ml.erfc([0.0, 5.0])
        Tensor([1.0000000e+00, 1.5374597e-12], f32[2])
    """
    x = wide(x)
    a = np.minimum(np.abs(x), 30.0)  # for larger |x|, the result is 0 or 2
    square = a * a
    near = 1.0 - x * (polynomial(NEAR_P, square) / polynomial(NEAR_Q, square))
    z = 1.0 / np.where(a > 4.0, square, 16.0)
    far = z * (polynomial(_TAIL_P, z) / polynomial(_TAIL_Q, z))
    far = (1 / math.sqrt(math.pi) - far) / np.where(a > 4.0, a, 4.0)
    scaled = np.where(a > 4.0, far, polynomial(FAR_P, a) / polynomial(FAR_Q, a))
    upper = np.floor(16.0 * a) / 16.0  # the square is exact
    tail = np.exp(-upper * upper) * np.exp((upper - a) * (upper + a)) * scaled
    put(out, np.where(a < 0.46875, near, np.where(x < 0, 2.0 - tail, tail)))


_CENTRE: Final = (
    (
        2.509080928730122e3, 3.343057558358813e4, 6.726577092700870e4, 4.592195393154987e4,
        1.373169376550946e4, 1.971590950306551e3, 1.331416678917844e2, 3.387132872796366e0,
    ),
    (
        5.226495278852854e3, 2.872908573572194e4, 3.930789580009271e4, 2.121379430158660e4,
        5.394196021424751e3, 6.871870074920579e2, 4.231333070160091e1, 1.0,
    ),
)  # fmt: skip
_MIDDLE: Final = (
    (
        7.745450142783414e-4, 2.272384498926918e-2, 2.417807251774506e-1, 1.270458252452368e0,
        3.647848324763205e0, 5.769497221460691e0, 4.630337846156546e0, 1.423437110749684e0,
    ),
    (
        1.050750071644417e-9, 5.475938084995345e-4, 1.519866656361646e-2, 1.481039764274801e-1,
        6.897673349851000e-1, 1.676384830183804e0, 2.053191626637759e0, 1.0,
    ),
)  # fmt: skip
_END: Final = (
    (
        2.010334399292288e-7, 2.711555568743488e-5, 1.242660947388078e-3, 2.653218952657612e-2,
        2.965605718285049e-1, 1.784826539917291e0, 5.463784911164114e0, 6.657904643501104e0,
    ),
    (
        2.044263103389940e-15, 1.421511758316446e-7, 1.846318317510055e-5, 7.868691311456133e-4,
        1.487536129085061e-2, 1.369298809227358e-1, 5.998322065558879e-1, 1.0,
    ),
)  # fmt: skip


@pointwise(infer=float_, precision="f32")
def erfinv(out: Array, x: Array) -> None:
    """The inverse of erf; -inf at -1, inf at 1, nan outside.

    The relative error is below 3e-15 in f64 (Wichura, Algorithm AS 241, Appl. Statist. 37, 1988,
    477-484).

        >>> ml.erfinv([0.0, 0.5])
        Tensor([0.       , 0.4769363], f32[2])
    """
    x = wide(x)
    size = np.abs(x)
    _put_quantile(out, x, size, (1.0 - size) * 0.5)


@pointwise(infer=float_, precision="f32")
def erfcinv(out: Array, x: Array) -> None:
    """The inverse of erfc; inf at 0, -inf at 2, nan outside.

    The relative error is below 3e-15 in f64, also near 0. It uses the algorithm of `erfinv`,
    applied to the tail directly.

        >>> ml.erfcinv([1.0, 0.5])
        Tensor([0.       , 0.4769363], f32[2])
    """
    x = wide(x)
    centre = 1.0 - x
    _put_quantile(out, centre, np.abs(centre), np.minimum(x, 2.0 - x) * 0.5)


def _put_quantile(out: Array, x: Array, size: Array, tail: Array) -> None:
    """Write erfinv(x), for |x| as `size` and (1 - |x|) / 2 as `tail`."""
    q = np.minimum(size, 0.85) * 0.5
    r = 0.180625 - q * q
    centre = q * (polynomial(_CENTRE[0], r) / polynomial(_CENTRE[1], r))
    inside = (tail > 0.0) & (size > 0.85)
    r = np.sqrt(-np.log(np.where(inside, tail, 0.25)))
    middle = polynomial(_MIDDLE[0], r - 1.6) / polynomial(_MIDDLE[1], r - 1.6)
    end = polynomial(_END[0], r - 5.0) / polynomial(_END[1], r - 5.0)
    y = np.where(size <= 0.85, centre, np.where(r <= 5.0, middle, end)) * math.sqrt(0.5)
    y = np.where(tail > 0.0, y, np.where(tail == 0.0, np.inf, np.nan))
    put(out, np.copysign(y, x))


# --- the gamma function's ------------------------------------------------------------

LGAMMA: Final = (
    2.7475390051909663e-07, -5.811277768921246e-07, 9.242852225162277e-07, -1.9743106888421067e-06,
    4.3828545383846665e-06, -9.45628851510172e-06, 2.050601970174762e-05, -4.4923727564247656e-05,
    9.945761692157133e-05, -0.00022315497746292723, 0.0005096695196526673, -0.0011927539009983087,
    0.002890510330865901, -0.007385551028935545, 0.02058080842778338, -0.06735230105319563,
    0.3224670334241132, 0.42278433509846713,
)  # fmt: skip
"""Coefficients of lgamma(2 + u) / u on |u| <= 1/2, highest power first, from Chebyshev points."""

_BERNOULLI: Final = (
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510,
    43867 / 798, -174611 / 330,
)  # fmt: skip
"""Bernoulli numbers B(2), B(4), ... for asymptotic series."""

STIRLING: Final = tuple([b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI[:8], 1)][::-1])
_DIGAMMA_SERIES: Final = tuple([b / (2 * k) for k, b in enumerate(_BERNOULLI[:8], 1)][::-1])


@pointwise(infer=float_)
def lgamma(out: Array, x: Array) -> None:
    """The logarithm of |Gamma(x)|; inf at 0, -1, -2, ...

    For x > 0 the error is a few units in the last place. For x < 0, where the function has zeros
    between the poles, the absolute error is a few times 1e-16.

        >>> ml.lgamma([0.5, 5.0])
        Tensor([0.5723649, 3.1780539], f32[2])
    """
    x = wide(x)
    size = np.abs(x)
    y, product = size, np.ones_like(x)
    for _ in range(6):  # reduces x to less than 2.5
        above = (y >= 2.5) & (size < 8.0)
        y = np.where(above, y - 1.0, y)
        product = np.where(above, product * y, product)
    u = np.where(y < 0.5, y, np.where(y < 1.5, y - 1.0, y - 2.0))
    u = np.where(size < 8.0, u, 0.0)
    small = u * polynomial(LGAMMA, u) + np.log(product)
    small = np.where(size < 1.5, small - np.log1p(u), small)
    small = np.where(size < 0.5, small - np.log(np.where(size < 0.5, size, 1.0)), small)
    large = np.where(size < 8.0, 8.0, size)
    series = polynomial(STIRLING, 1.0 / (large * large)) / large
    far = (large - 0.5) * (np.log(large) - 1.0) + (0.5 * math.log(2 * math.pi) - 0.5) + series
    result = np.where(size < 8.0, small, far)
    fraction = np.abs(np.sin(math.pi * (x - np.round(x))))
    pole = (x <= 0.0) & (x == np.round(x))
    between = (x < 0.0) & ~pole
    mirrored = np.log(math.pi / np.where(between, size * fraction, 1.0)) - result
    result = np.where(between, mirrored, result)
    put(out, np.where(pole | np.isinf(x), np.inf, result))


_ROOT: Final = 1.4616321449683622
_ROOT_REST: Final = 9.549995429965697e-17
_DIGAMMA_P: Final = (
    6.593896811048937e-09, 7.073827837070246e-06, 0.000518592803976098, 0.01247752166269495,
    0.12843461199925355, 0.5831851283607484, 0.9510558760318328,
)  # fmt: skip
_DIGAMMA_Q: Final = (
    7.288998560446944e-07, 7.822450737745899e-05, 0.002586144655051697, 0.03722648795697639,
    0.2579833419088156, 0.8359118102697777, 1.0,
)  # fmt: skip
"""Coefficients in 2 x - 3 of digamma(x) / (x - root) on 1 <= x <= 2, from Chebyshev points.
"""


@pointwise(infer=float_)
def digamma(out: Array, x: Array) -> None:
    """The derivative of `lgamma`: -inf at 0, inf at -0, nan at -1, -2, ...

    For x > 0 the error is a few units in the last place. For x < 0, where it has zeros between the
    poles, it is a few times 1e-16 relative to the terms of the reflection formula.

        >>> ml.digamma([1.0, 10.0])
        Tensor([-0.5772157,  2.2517526], f32[2])
    """
    x = wide(x)
    positive = np.where(x <= 0.0, 1.0 - x, x)
    y = np.where(positive < 1.0, positive + 1.0, positive)
    added = np.where(positive < 1.0, -1.0 / np.where(positive < 1.0, positive, 1.0), 0.0)
    for _ in range(9):  # reduces x to 1 .. 2
        above = (y >= 2.0) & (positive < 10.0)
        y = np.where(above, y - 1.0, y)
        added = np.where(above, added + 1.0 / y, added)
    centre = np.where(positive < 10.0, y, 1.5)
    t = 2.0 * centre - 3.0
    small = (centre - _ROOT - _ROOT_REST) * (polynomial(_DIGAMMA_P, t) / polynomial(_DIGAMMA_Q, t))
    large = np.where(positive < 10.0, 10.0, positive)
    z = 1.0 / (large * large)
    far = np.log(large) - 0.5 / large - z * polynomial(_DIGAMMA_SERIES, z)
    result = np.where(positive < 10.0, small + added, far)
    whole = x == np.round(x)
    away = np.tan(math.pi * np.where(whole, 0.25, x - np.round(x)))
    result = np.where(x < 0.0, np.where(whole, np.nan, result - math.pi / away), result)
    put(out, np.where(x == 0.0, np.copysign(np.inf, -x), result))


def _order(x: TensorType, n: int) -> TensorType:
    if not 0 <= n <= 100:
        raise ArgumentError(f"expected n from 0 to 100, got {n}")
    return float_(x)


@internal(infer=_order)
def polygamma(out: Array, x: Array, *, n: int) -> None:
    """The n-th derivative of `digamma`: (-1)^(n+1) n! times the sum of 1 / (x + k)^(n+1).

    The first terms are added; the rest is an asymptotic series (Abramowitz and Stegun, 6.4.11 and
    6.4.6). For x < 0 the reflection formula applies. At 0.0, -1, -2, ... the result is inf for an
    odd n. For an even n it is -inf at 0.0, inf at -0.0, and nan at -1, -2, ...
    """
    if n == 0:
        digamma.kernel(out, x)
        return
    x = wide(x)
    positive = np.where(x <= 0.0, 1.0 - x, x)
    y, total, first = positive, np.zeros_like(x), 12.0 + n
    for _ in range(12 + n):
        below = y < first
        total = np.where(below, total + y ** -(n + 1.0), total)
        y = np.where(below, y + 1.0, y)
    factorial = float(math.factorial(n))
    terms = [
        b * (math.factorial(2 * k + n - 1) / (math.factorial(2 * k) * math.factorial(n)))
        for k, b in enumerate(_BERNOULLI, 1)
    ]
    series = (1.0 / n + 0.5 / y + polynomial(tuple(terms[::-1]), 1.0 / (y * y)) / (y * y)) * y**-n
    value = (total + series) * factorial
    whole = x == np.round(x)
    cotangent = 1.0 / np.tan(math.pi * np.where(whole, 0.25, x - np.round(x)))
    turned = math.pi ** (n + 1) * polynomial(_cotangent_slope(n), cotangent)
    value = np.where(x < 0.0, -value - turned, value if n % 2 else -value)
    pole = np.inf if n % 2 else np.where(x < 0.0, np.nan, np.copysign(np.inf, -x))
    put(out, np.where(whole & (x <= 0.0), pole, value))


def _cotangent_slope(n: int) -> Coefficients:
    """Return the n-th derivative of cot(t) as a polynomial in c = cot(t), highest power first.

    The derivative of p(c) is -(1 + c^2) p'(c).
    """
    p = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(n):
        p = p.deriv() * np.polynomial.Polynomial([-1.0, 0.0, -1.0])
    return tuple(p.coef[::-1].tolist())
