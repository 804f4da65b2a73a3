"""Bessel functions of real numbers, elementwise; integers and bools give f32.

All results are computed in f64 and rounded once. For |x| up to 5, j0, j1, y0 and y1 are polynomials
of x^2 times the distances to the first zeros, plus logarithms for y0 and y1. For larger |x| they
use Hankel's form (Abramowitz and Stegun, 9.2.5 and 9.2.6) with polynomials of 25 / x^2 for P and Q,
as in Cephes. The polynomials interpolate at Chebyshev points, with an error of 1e-17.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mlvm.core.op import pointwise
from mlvm.core.ops.elementwise import float_
from mlvm.core.ops.special import polynomial, put, wide
from mlvm.core.types import Array

_J0_ZEROS: Final = (
    (2.404825557695773, -1.176691651530894e-16),
    (5.520078110286311, 8.088597146146722e-17),
)
_J1_ZEROS: Final = ((3.8317059702075125, -1.5269184090088067e-16),)
_J0_NEAR: Final = (
    9.959735198897267e-22, -8.055083315921048e-20, 5.711726613962134e-18,
    -3.5218732280095956e-16, 1.8671531900537605e-14, -8.404187991772375e-13,
    3.1637259177536936e-11, -9.781438944762927e-10, 2.4286220370253752e-08,
    -4.706291664571183e-07, 6.8549548472017165e-06, -7.121705240575852e-05,
    0.0004876827177655839, -0.0019210870437164043, 0.0031873556303932387,
)  # fmt: skip
_J1_NEAR: Final = (
    3.7291473558566954e-22, -3.211982366290382e-20, 2.4363342662125246e-18,
    -1.6151117465200678e-16, 9.260769104299385e-15, -4.5400458183119475e-13,
    1.87738203717471e-11, -6.443130987407797e-10, 1.79951599194786e-08, -3.991381169521697e-07,
    6.814683895178348e-06, -8.592956232073762e-05, 0.0007552540432951285, -0.004240225993395717,
    0.013090777521810029, -0.01587595431164548,
)  # fmt: skip
_Y0_NEAR: Final = (
    -3.832608759292262e-23, 3.875521095763056e-21, -3.485638769996517e-19,
    2.7705172875601105e-17, -1.929138312065524e-15, 1.1655646796725608e-13,
    -6.043182348429686e-12, 2.653999083937395e-10, -9.720964496817289e-09,
    2.914220687772686e-07, -6.985504367743399e-06, 0.00012994629092087043,
    -0.001802809666552602, 0.01763534538933875, -0.11151682184328618, 0.38851639956570944,
    -0.4705763655297288, -0.4326558222855125, 0.4837248578102995,
)  # fmt: skip
_Y1_NEAR: Final = (
    -1.0245889223155881e-24, 1.095246178812364e-22, -1.0448767652058982e-20,
    8.842353427046304e-19, -6.583659015095698e-17, 4.2745907877532505e-15,
    -2.3954772772256903e-13, 1.1448948813735703e-11, -4.60130424437038e-10,
    1.5288901821936093e-08, -4.113778077369878e-07, 8.73309830485033e-06,
    -0.00014141835794491777, 0.0016688031328635938, -0.013433433740818153, 0.06634695354779108,
    -0.16312020358118715, 0.09108650838448444, 0.13974939033568806,
)  # fmt: skip
_P0: Final = (
    -1.9975016566739445e-12, 3.5736949521760605e-12, 2.411441866647587e-12,
    -3.5821210474962445e-12, -1.189461787537485e-11, 2.4563632799612557e-11,
    -3.6990044251542916e-11, 9.74682627637317e-11, -2.843404232046865e-10,
    8.561284476621563e-10, -2.870792244429867e-09, 1.105832711236427e-08,
    -5.086428409883204e-08, 2.975900989096833e-07, -2.4599633242216923e-06,
    3.4917305810915766e-05, -0.0013274931272003446, 0.9986347659091991,
)  # fmt: skip
_Q0: Final = (
    1.6719461004875148e-11, -2.905571116138049e-11, -2.3423452782786964e-11,
    3.562574448327513e-11, 8.841508406804566e-11, -1.7287341578740399e-10,
    2.1507204173134496e-10, -5.434254325300238e-10, 1.535998416144636e-09,
    -4.310189328360642e-09, 1.329493357763446e-08, -4.639477537084234e-08,
    1.8870314526857428e-07, -9.409878402678547e-07, 6.239113163349642e-06,
    -6.338715441326986e-05, 0.0013142139729102815, -0.12361496352611873,
)  # fmt: skip
_P1: Final = (
    2.1173575182340737e-12, -3.7946206140880125e-12, -2.530760445033384e-12,
    3.749133511692303e-12, 1.2711568738317182e-11, -2.6348219236772803e-11,
    4.0144908940086184e-11, -1.0618042040803036e-10, 3.1088775918767203e-10,
    -9.42108465131188e-10, 3.1852202992251782e-09, -1.2402728629933329e-08,
    5.791663725419715e-08, -3.4667191185744856e-07, 2.97862110803436e-06,
    -4.5782806529543783e-05, 0.0022414632139171322, 1.0022906462560661,
)  # fmt: skip
_Q1: Final = (
    -1.7690669878518095e-11, 3.0791915245986736e-11, 2.460125735887713e-11,
    -3.737741879522466e-11, -9.417699532204387e-11, 1.8475235278580263e-10,
    -2.3286465079165067e-10, 5.902303830552147e-10, -1.6723239329374757e-09,
    4.719492381070445e-09, -1.4662497249958106e-08, 5.163822319588151e-08,
    -2.1266758568304428e-07, 1.07988571934412e-06, -7.3699279411451645e-06,
    7.89809417669389e-05, -0.0018648496218413482, 0.3730474331740803,
)  # fmt: skip
_I1_FAR: Final = (
    -1.13288885034257e-10, -3.2677656089803323e-11, 7.79067217908059e-10, 2.582169443152386e-10,
    -2.5062162405593894e-09, -1.0476127785270019e-09, 5.094016301574338e-09,
    3.0717395650769477e-09, -7.222524178953976e-09, -7.432535335623792e-09,
    5.722677527454156e-09, 1.3952625102162603e-08, 6.795073490187386e-09,
    -8.407326839577817e-09, -2.3382691353601083e-08, -4.31323156237458e-08,
    -1.0001220638799958e-07, -3.483853071371078e-07, -1.8349101539664522e-06,
    -1.503854721127423e-05, -0.000219235763833829, -0.009749577193235609, 0.38939845902587233,
)  # fmt: skip

_I1_NEAR: Final = tuple(
    [0.5 / (math.factorial(k) * math.factorial(k + 1)) for k in range(27, -1, -1)]
)


def _near(x: Array, zeros: tuple[tuple[float, float], ...], terms: tuple[float, ...]) -> Array:
    """Return the polynomial of x^2 in 0 .. 25 times x^2 - r^2 for each zero r.

    Each zero is given as a sum of two numbers.
    """
    result: Array = polynomial(terms, x * x * (2 / 25) - 1.0)
    for high, low in zeros:
        result = result * ((x - high - low) * (x + high))
    return result


def _far(x: Array, p: tuple[float, ...], q: tuple[float, ...]) -> tuple[Array, Array]:
    """Return P and Q of Hankel's form, times sqrt(1 / (pi x))."""
    t = 50.0 / (x * x) - 1.0
    root = np.sqrt(1.0 / (math.pi * x))
    return root * polynomial(p, t), root * polynomial(q, t) / x


def _halves(x: Array) -> tuple[Array, Array, Array, Array]:
    """Return |x| if below 5 (else 1), |x| if larger (else 5), and cos and sin of the latter."""
    size = np.abs(x)
    inner = np.where(size < 5.0, size, 1.0)
    outer = np.where((size >= 5.0) & np.isfinite(size), size, 5.0)
    return inner, outer, np.cos(outer), np.sin(outer)


def _joined(x: Array, near: Array, far: Array) -> Array:
    """Combine the values of both ranges: 0 at infinity, nan at nan."""
    size = np.abs(x)
    far = np.where(np.isfinite(size), far, np.where(np.isnan(size), np.nan, 0.0))
    return np.where(size < 5.0, near, far)


@pointwise(infer=float_)
def j0(out: Array, x: Array) -> None:
    """The Bessel function of the first kind and order 0. The error is below 5e-16 in f64.

    >>> ml.j0([0.0, 1.0])
    Tensor([1.       , 0.7651977], f32[2])
    """
    x = wide(x)
    inner, outer, cos, sin = _halves(x)
    p, q = _far(outer, _P0, _Q0)
    far = p * (cos + sin) - q * (sin - cos)
    put(out, _joined(x, _near(inner, _J0_ZEROS, _J0_NEAR), far))


@pointwise(infer=float_)
def j1(out: Array, x: Array) -> None:
    """The Bessel function of the first kind and order 1. The error is below 5e-16 in f64.

    >>> ml.j1([0.0, 1.0])
    Tensor([0.        , 0.44005057], f32[2])
    """
    x = wide(x)
    inner, outer, cos, sin = _halves(x)
    p, q = _far(outer, _P1, _Q1)
    far = p * (sin - cos) + q * (sin + cos)
    put(out, np.copysign(1.0, x) * _joined(x, inner * _near(inner, _J1_ZEROS, _J1_NEAR), far))


@pointwise(infer=float_)
def y0(out: Array, x: Array) -> None:
    """The Bessel function of the second kind and order 0: -inf at 0, nan for x < 0.

    The error is below 1e-15 in f64.

        >>> ml.y0([0.0, 1.0])
        Tensor([      -inf, 0.08825696], f32[2])
    """
    x = wide(x)
    inner, outer, cos, sin = _halves(x)
    p, q = _far(outer, _P0, _Q0)
    j = _near(inner, _J0_ZEROS, _J0_NEAR)
    near = polynomial(_Y0_NEAR, inner * inner * (2 / 25) - 1.0) + 2 / math.pi * _log(inner) * j
    _put_second(out, x, near, p * (sin - cos) + q * (cos + sin))


@pointwise(infer=float_)
def y1(out: Array, x: Array) -> None:
    """The Bessel function of the second kind and order 1: -inf at 0, nan for x < 0.

    The error is below 1e-15 in f64; near 0 it is relative to the result.

        >>> ml.y1([0.0, 1.0])
        Tensor([      -inf, -0.7812128], f32[2])
    """
    x = wide(x)
    inner, outer, cos, sin = _halves(x)
    p, q = _far(outer, _P1, _Q1)
    j = inner * _near(inner, _J1_ZEROS, _J1_NEAR)
    pole = 1.0 / np.where(inner > 0.0, inner, 1.0)
    near = inner * polynomial(_Y1_NEAR, inner * inner * (2 / 25) - 1.0)
    near = near + 2 / math.pi * (j * _log(inner) - pole)
    _put_second(out, x, near, -p * (sin + cos) + q * (sin - cos))


def _log(x: Array) -> Array:
    return np.log(np.where(x > 0.0, x, 1.0))


def _put_second(out: Array, x: Array, near: Array, far: Array) -> None:
    """Write a function of the second kind, including the pole."""
    y = _joined(x, near, far)
    put(out, np.where(x > 0.0, y, np.where(x == 0.0, -np.inf, np.nan)))


@pointwise(infer=float_)
def i1(out: Array, x: Array) -> None:
    """The modified Bessel function of the first kind and order 1.

    For |x| < 8 it is the sum of x / 2 (x^2 / 4)^k / (k! (k + 1)!), then e^|x| / sqrt(|x|) times a
    polynomial of 1 / |x|. The relative error is below 1e-15 in f64.

        >>> ml.i1([0.0, 1.0])
        Tensor([0.       , 0.5651591], f32[2])
    """
    x = wide(x)
    size = np.abs(x)
    inner, outer = np.where(size < 8.0, size, 0.0), np.where(size < 8.0, 8.0, size)
    root = np.exp(outer * 0.5)  # the square overflows only if the result does
    far = root * (polynomial(_I1_FAR, 16.0 / outer - 1.0) / np.sqrt(outer)) * root
    far = np.where(np.isinf(size), np.inf, far)
    near = inner * polynomial(_I1_NEAR, inner * inner * 0.25)
    put(out, np.copysign(1.0, x) * np.where(size < 8.0, near, far))
