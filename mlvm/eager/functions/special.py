"""Composite elementwise functions: near equality, replacement of nan, and special functions."""

from __future__ import annotations

import math
from typing import Final

from mlvm.core.errors import ArgumentError, brief
from mlvm.core.ops.special import polynomial
from mlvm.core.rules import is_real, require
from mlvm.core.types import bool_, f64
from mlvm.eager.functions.arguments import integer, type_of
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.elements import astype, between, from_parts, stop_gradient
from mlvm.eager.functions.halves import in_f32, through_f32
from mlvm.eager.functions.matrices import floating
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.dtypes import finfo, result_type
from mlvm.eager.tensor.operands import Operand, as_operand
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

# --- near equality -------------------------------------------------------------------


@public
def isclose(
    x: Tensor, y: Operand, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Test |x - y| <= atol + rtol |y|, elementwise, with broadcasting.

    Equal infinities are close; so are nans with `equal_nan`.

    x and y: shapes that broadcast to [...], any dtype -> bool[...]. Raises `ShapeError` if the
    shapes do not fit; `DTypeError` if the dtypes do not promote.

        >>> ml.isclose(ml.asarray([1.0, 2.0]), ml.asarray([1.000001, 2.1]))
        Tensor([ True, False], bool[2])
    """
    type_of(x)
    y = as_operand(y, x)
    same = op.equal(x, y)
    if not (x.dtype.is_inexact or y.dtype.is_inexact):
        if x.dtype is bool_ and y.dtype is bool_:
            return same
        x, y = astype(x, "f64"), astype(y, "f64")
    bound = op.abs(y) * float(rtol) + float(atol)
    near = op.logical_and(op.less_equal(op.abs(x - y), bound), op.isfinite(y))
    close = op.logical_or(same, near)
    if not equal_nan:
        return close
    return op.logical_or(close, op.logical_and(op.isnan(x), op.isnan(y)))


@public
def allclose(
    x: Tensor, y: Operand, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Test whether all elements are close, as in `isclose`.

    x and y: shapes [...] that broadcast, any dtype -> bool[]. Raises the errors of `isclose`.

        >>> ml.allclose(ml.asarray([1.0, 2.0]), ml.asarray([1.000001, 2.0]))
        Tensor(True, bool[])
    """
    return op.all(isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan))


@public
def array_equal(x: Tensor, y: Tensor, /, equal_nan: bool = False) -> Tensor:
    """Test whether two tensors have the same shape and equal elements.

    With `equal_nan`, nans are equal.

    x and y: [...], any dtype -> bool[]. Raises `DTypeError` if the dtypes do not promote.

        >>> ml.array_equal(ml.asarray([1, 2]), ml.asarray([1, 2, 3]))
        Tensor(False, bool[])

    Invalid calls:
        ml.array_equal(ml.ones(2, dtype="u64"), ml.ones(2, dtype="i64"))  # DTypeError
    """
    if type_of(x).shape != type_of(y).shape:
        return full((), False)
    same = op.equal(x, y)
    if equal_nan and x.dtype.is_inexact and y.dtype.is_inexact:
        same = op.logical_or(same, op.logical_and(op.isnan(x), op.isnan(y)))
    return op.all(same)


# --- other values --------------------------------------------------------------------


@public
def nan_to_num(
    x: Tensor, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Replace nan, inf and -inf by numbers.

    None means the largest or smallest finite number of the dtype. The two parts of complex numbers
    are replaced separately.

    x: [...], any dtype, and so is the result. Raises `ArgumentError` if a replacement is not a
    number; `DTypeError` if x is not a tensor, array or list.

        >>> ml.nan_to_num(ml.asarray([1.0, ml.nan, ml.inf]), posinf=9.0)
        Tensor([1., 0., 9.], f32[3])

    Invalid calls:
        ml.nan_to_num(v, nan=[1.0, 2.0])  # ArgumentError
    """
    if not type_of(x).dtype.is_inexact:
        return alias_of(x)
    if x.dtype.kind == "complex":
        parts = [nan_to_num(each, nan, posinf, neginf) for each in (op.real(x), op.imag(x))]
        return from_parts(*parts)
    for name, number in (("nan", nan), ("posinf", posinf), ("neginf", neginf)):
        if not (is_real(number) or number is None):
            raise ArgumentError(f"expected {name} as a number, got {brief(number)}")
    limits = finfo(x.dtype)
    for mask, value in (
        (op.isnan(x), nan),
        (op.equal(x, math.inf), limits.max if posinf is None else posinf),
        (op.equal(x, -math.inf), limits.min if neginf is None else neginf),
    ):
        x = op.where(mask, constant(float(value), x.dtype), x)
    return x


@public
@through_f32
def lerp(x: Tensor, y: Operand, weight: Operand, /) -> Tensor:
    """Compute x + weight (y - x), elementwise, with broadcasting: exactly x at 0 and y at 1.

    x, y and weight: shapes that broadcast to [...], floats or complex numbers -> [...]. Raises
    `ShapeError` if the shapes do not fit; `DTypeError` if an operand is an integer or bool.

        >>> ml.lerp(ml.asarray([0.0, 10.0]), 20.0, 0.25)
        Tensor([ 5. , 12.5], f32[2])

    Invalid calls:
        ml.lerp(ml.ones(0), v, v)  # ShapeError
    """
    require("inexact", type_of(x))
    return between(x, as_operand(y, x), as_operand(weight, x))


@public
def fmod(x: Tensor, y: Operand, /) -> Tensor:
    """Compute the remainder of x / y with a truncated quotient; it has the sign of x, as in C.

    An integer modulo zero is 0.

    x and y: shapes that broadcast to [...], integers or floats -> [...], the dtype that they
    promote to. Raises `ShapeError` if the shapes do not fit; `DTypeError` if an operand is bool or
    complex.

        >>> ml.fmod(ml.asarray([7, -7]), 3)
        Tensor([ 1, -1], i64[2])

    Invalid calls:
        ml.fmod(ml.ones(0), x)  # ShapeError
    """
    require("real", type_of(x))
    y = as_operand(y, x)
    dtype = result_type(x, y)
    if dtype.is_float:
        side = op.copysign(constant(1.0, dtype), stop_gradient(astype(x, dtype)))
        return op.remainder(x * side, op.abs(y)) * side
    rest = op.remainder(x, y)  # the remainder has the sign of y
    differ = op.not_equal(op.less(x, 0), op.less(y, 0))
    return op.where(op.logical_and(differ, op.not_equal(rest, 0)), rest - y, rest)


# --- special functions ----------------------------------------------------------------------


@public
@in_f32
def xlogy(x: Tensor, y: Operand, /) -> Tensor:
    """Compute x log(y), elementwise, with broadcasting; 0 where x is 0 and log(y) is not finite.

    There the gradient is 0. This is the convention of an entropy.

    x and y: shapes that broadcast to [...], floats, or integers as f32 -> f[...]. Raises
    `ShapeError` if the shapes do not fit; `DTypeError` if an operand is bool or complex.

        >>> ml.xlogy(ml.asarray([0.0, 2.0]), ml.asarray([0.0, 1.0]))
        Tensor([0., 0.], f32[2])
    """
    require("real", type_of(x))
    x = floating(x)
    y = as_operand(y, x)
    require("real", y.type)
    y = floating(y)
    logarithm = op.logical_or(op.logical_and(op.greater(y, 0.0), op.isfinite(y)), op.isnan(y))
    none = op.logical_and(op.equal(x, 0.0), op.logical_not(logarithm))
    return x * op.log(op.where(none, constant(1.0, y.dtype), y))


@public
def polygamma(n: int, x: Tensor, /) -> Tensor:
    """Return the n-th derivative of `digamma`; for n = 0 `digamma`, the derivative of `lgamma`.

    At 0, -1, -2, ... it is inf for an odd n, else nan.

    x: [...], any dtype but complex; integers and bools as f32 -> f[...]. Raises `ArgumentError`
    if n is not in 0 .. 100; `DTypeError` if an operand is complex.

        >>> ml.polygamma(1, ml.asarray([1.0]))
        Tensor([1.644934], f32[1])

    Invalid calls:
        ml.polygamma(-1, v)  # ArgumentError
    """
    type_of(x)
    return op.polygamma(x, n=integer(n, "n"))


@public
@in_f32
def gamma(x: Tensor, /) -> Tensor:
    """Compute the gamma function, a sign times e^`lgamma`: nan at -1, -2, ..., and inf at 0.

    Random numbers of the gamma distribution are drawn by `random.gamma`.

    x: [...], any dtype but complex; integers and bools as f32 -> f[...]. Raises `DTypeError` if x
    is complex.

        >>> ml.gamma(ml.asarray([5.0, -0.5]))
        Tensor([24.       , -3.5449076], f32[2])
    """
    x = floating(x)
    require("real", x.type)
    return op.exp(op.lgamma(x)) * _gamma_sign(x)


def _gamma_sign(x: Tensor) -> Tensor:
    """Return the sign of the gamma function; nan at the poles, but at 0 the sign of x."""
    x = stop_gradient(x)
    floor = op.floor(x)
    is_pole = op.logical_and(op.less(x, 0.0), op.equal(x, floor))
    parity = 1.0 - 2.0 * op.remainder(floor, 2.0)
    sign = op.where(op.less(x, 0.0), parity, op.copysign(constant(1.0, x.dtype), x))
    return op.where(is_pole, constant(math.nan, x.dtype), sign)


@public
@in_f32
def multigammaln(x: Tensor, d: int, /) -> Tensor:
    """Compute the logarithm of the multivariate gamma function; nan unless x > (d - 1) / 2.

    It is d (d - 1) / 4 log(pi) plus the sum of lgamma(x - j / 2) for j = 0 .. d - 1.

    x: [...], any dtype but complex; integers and bools as f32 -> f[...]. Raises `ArgumentError` if
    d is not in 1 .. 1000; `DTypeError` if x is complex.

        >>> ml.multigammaln(ml.asarray([2.5]), 2)
        Tensor([0.8570478], f32[1])

    Invalid calls:
        ml.multigammaln(v, 0)  # ArgumentError
    """
    x = floating(x)
    require("real", x.type)
    if not 1 <= integer(d, "d") <= 1000:
        raise ArgumentError(f"expected d in 1 .. 1000, got {d}")
    total = op.lgamma(x)
    for j in range(1, d):
        total = total + op.lgamma(x - j / 2)
    inside = op.greater(x, (d - 1) / 2)
    total = total + d * (d - 1) / 4 * math.log(math.pi)
    return op.where(inside, total, constant(math.nan, x.dtype))


@public
@in_f32
def logit(x: Tensor, /) -> Tensor:
    """Compute log(x / (1 - x)), the inverse of `sigmoid`.

    It is accurate also near 1/2, where it is 0. It is -inf at 0, inf at 1, and nan outside.

    x: [...], floats -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.logit(ml.asarray([0.5, 0.75]))
        Tensor([0.       , 1.0986123], f32[2])
    """
    require("float", type_of(x))
    centre = op.less(op.abs(x - 0.5), 0.25)
    half = constant(0.5, x.dtype)
    near = 2.0 * op.atanh(2.0 * op.where(centre, x, half) - 1.0)
    far = op.where(centre, half, x)
    return op.where(centre, near, op.log(far) - op.log1p(-far))


_I0_NEAR: Final = tuple([1 / math.factorial(k) ** 2 for k in range(27, -1, -1)])
_I0_SCALE: Final = 0.4
_I0_FAR: Final = (
    2.720498696367233e-10, 8.813302549251989e-11, -1.8684611554718977e-09,
    -6.870279093190082e-10, 5.995481807237309e-09, 2.7311318116171657e-09,
    -1.212062730529424e-08, -7.796286403030599e-09, 1.697447600973934e-08,
    1.8308276837807233e-08, -1.2906294702347531e-08, -3.3299496480049847e-08,
    -1.7014950187824194e-08, 1.883096604388781e-08, 5.3892027774746854e-08,
    9.832316427728129e-08, 2.2180386547361562e-07, 7.433989145382039e-07,
    3.7096189657742437e-06, 2.7857584506459206e-05, 0.0003405401859796798, 0.008401379959169309,
    1.0054412736125202,
)  # fmt: skip
"""Coefficients of a polynomial in 16 / x - 1, the highest power first.

It interpolates e^-x sqrt(x) I0(x) / 0.4, which is about 1, on x >= 8 at Chebyshev points, to a
relative error of 4e-17."""


@public
@in_f32
def i0(x: Tensor, /) -> Tensor:
    """Compute the modified Bessel function of the first kind and order 0, as in `numpy.i0`.

    It is the sum of (x^2 / 4)^k / (k!)^2 below |x| = 8, and then e^|x| / sqrt(|x|) times a
    polynomial of 1 / |x|. The relative error is below 1e-15 in f64.

    x: [...], floats -> f[...]. Raises `DTypeError` if x is not of floats.

        >>> ml.i0(ml.asarray([0.0, 1.0]))
        Tensor([1.       , 1.2660658], f32[2])
    """
    require("float", type_of(x))
    size = op.abs(x)
    largest = 713.98 if x.dtype is f64 else 91.9  # the largest x at which the function is finite
    near, beyond = op.less(size, 8.0), op.greater(size, largest)
    zero = constant(0.0, x.dtype)
    inner = op.where(near, x, zero)
    outer = op.where(op.logical_or(near, beyond), constant(8.0, x.dtype), size)
    series = polynomial(_I0_FAR, 16.0 / outer - 1.0)
    root = op.exp(outer * 0.5)  # the square overflows exactly where the result does
    far = stop_gradient(root * (series * (op.rsqrt(outer) * _I0_SCALE)) * root)
    logarithm = outer + op.log(series) - 0.5 * op.log(outer)
    # a factor of 1 with slopes that do not overflow
    far = far * op.exp(logarithm - stop_gradient(logarithm))
    far = op.where(beyond, op.exp(op.where(beyond, size, zero)), far)
    return op.where(near, polynomial(_I0_NEAR, op.square(inner) * 0.25), far)
