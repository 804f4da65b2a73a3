"""Arithmetic, comparison, logic and the elementary functions, element by element.

Floats follow IEEE 754: overflow, division by zero and invalid operations give inf and nan,
and no warning (the VM runs kernels with numpy's floating-point warnings off). `out` may be one
of the operands: these ops also work in place.
"""

from __future__ import annotations

import numpy as np

from mlvm.core.errors import OperandValueError
from mlvm.core.op import op
from mlvm.core.ops.blocks import BLOCK_SIZE, blocks
from mlvm.core.ops.erf import write_erf
from mlvm.core.rules import broadcast, broadcast_shapes, elementwise, require
from mlvm.core.types import Array, DType, TensorType, bool_, f32, promote

_real = elementwise("real")
_integer = elementwise("integer")
_bitwise = elementwise("integer or bool")
_logical = elementwise("bool")
_equality = elementwise("any", bool_)
_compare = elementwise("real", bool_)
_is = elementwise("numeric", bool_)


_any = elementwise("any")


def _inexact(*operands: TensorType) -> TensorType:
    type = _any(*operands)
    return type if type.dtype.is_inexact else type.with_dtype(f32)


def _float(*operands: TensorType) -> TensorType:
    type = _inexact(*operands)
    require("float", type)
    return type


def _part(x: TensorType) -> TensorType:
    require("numeric", x)
    return x.with_dtype(x.dtype.real)


def _promoted(x: Array, y: Array) -> tuple[Array, Array]:
    """Both in the dtype that they promote to, where numpy would compare in another one."""
    if x.dtype == y.dtype:
        return x, y
    dtype = promote(DType.of(x.dtype), DType.of(y.dtype)).numpy
    return x.astype(dtype, copy=False), y.astype(dtype, copy=False)


# --- arithmetic ----------------------------------------------------------------------


@op(infer=broadcast)
def add(out: Array, x: Array, y: Array) -> None:
    """x + y, elementwise, with broadcasting."""
    np.add(x, y, out, dtype=out.dtype)


@op(infer=broadcast)
def subtract(out: Array, x: Array, y: Array) -> None:
    """x - y, elementwise, with broadcasting."""
    np.subtract(x, y, out, dtype=out.dtype)


@op(infer=broadcast)
def multiply(out: Array, x: Array, y: Array) -> None:
    """x * y, elementwise, with broadcasting."""
    np.multiply(x, y, out, dtype=out.dtype)


@op(infer=elementwise("inexact"))
def multiply_add(out: Array, x: Array, y: Array, z: Array) -> None:
    """x * y + z, elementwise, with broadcasting; rounded to the result's dtype after the
    product and after the sum."""
    operands = (x, y, z)
    if out.size <= BLOCK_SIZE or any(
        each.size != 1 and each.shape != out.shape for each in operands
    ):
        np.add(np.multiply(x, y, dtype=out.dtype), z, out, dtype=out.dtype)
        return
    flat_out, *flat = [each.reshape(-1) for each in (out, *operands)]
    product = np.empty(BLOCK_SIZE, out.dtype)
    for block in blocks(out.size):
        x, y, z = [each if each.size == 1 else each[block] for each in flat]
        part = product[: block.stop - block.start]
        np.multiply(x, y, part, dtype=out.dtype)
        np.add(part, z, flat_out[block], dtype=out.dtype)


@op(infer=_inexact)
def divide(out: Array, x: Array, y: Array) -> None:
    """x / y, elementwise, with broadcasting. Of integers and bools it is f32."""
    np.divide(x, y, out, dtype=out.dtype)


@op(infer=_real)
def floor_divide(out: Array, x: Array, y: Array) -> None:
    """The floor of x / y, elementwise. An integer divided by zero gives 0.

    Infinities are those of x / y, as in the Python Array API standard: inf // 1.0 is inf, and
    -1.0 // inf is -0.0.
    """
    if out.dtype.kind == "f":
        infinite = np.isinf(x) | np.isinf(y)
        if infinite.any():
            quotient = np.divide(x, y, dtype=out.dtype)
            np.floor_divide(x, y, out, dtype=out.dtype)
            np.copyto(out, quotient, where=infinite)
            return
    np.floor_divide(x, y, out, dtype=out.dtype)


@op(infer=_real)
def remainder(out: Array, x: Array, y: Array) -> None:
    """x - floor(x / y) * y, elementwise, with the sign of y. An integer and zero give 0."""
    np.remainder(x, y, out, dtype=out.dtype)


@op(infer=_inexact)
def reciprocal(out: Array, x: Array) -> None:
    """1 / x."""
    np.divide(1, x, out, dtype=out.dtype)


@op(infer=broadcast)
def pow(out: Array, x: Array, y: Array) -> None:
    """x to the power y, elementwise. An integer to a negative integer power raises."""
    if y.dtype.kind == "i" and out.dtype.kind == "i" and np.any(y < 0):
        raise OperandValueError("an integer has no negative integer power; use a float")
    np.power(x, y, out, dtype=out.dtype)


@op(infer=_real)
def maximum(out: Array, x: Array, y: Array) -> None:
    """The larger of x and y, elementwise; nan if either is nan."""
    np.maximum(x, y, out=out, dtype=out.dtype)


@op(infer=_real)
def minimum(out: Array, x: Array, y: Array) -> None:
    """The smaller of x and y, elementwise; nan if either is nan."""
    np.minimum(x, y, out=out, dtype=out.dtype)


@op(infer=_real)
def clip(out: Array, x: Array, lower: Array, upper: Array) -> None:
    """x limited to lower <= x <= upper, elementwise; upper where lower > upper."""
    least = np.maximum(x, lower, dtype=out.dtype)
    np.minimum(least, upper, out=out, dtype=out.dtype)


@op(infer=broadcast)
def negative(out: Array, x: Array) -> None:
    """-x; of an unsigned integer, 2^bits - x."""
    np.negative(x, out)


@op(infer=_part)
def abs(out: Array, x: Array) -> None:
    """|x|; of a complex number the length, which is real."""
    np.absolute(x, out)


@op(infer=broadcast)
def sign(out: Array, x: Array) -> None:
    """-1, 0 or 1 as x is negative, zero or positive; nan for nan. Of complex numbers x / |x|, and 0
    of 0."""
    np.sign(x, out)


@op(infer=broadcast)
def square(out: Array, x: Array) -> None:
    """x * x."""
    np.square(x, out)


@op(infer=_real)
def floor(out: Array, x: Array) -> None:
    """The largest integer value <= x."""
    np.floor(x, out)


@op(infer=_real)
def ceil(out: Array, x: Array) -> None:
    """The smallest integer value >= x."""
    np.ceil(x, out)


@op(infer=broadcast)
def round(out: Array, x: Array) -> None:
    """The nearest integer value, of both parts of a complex number; halves go to the even one."""
    np.round(x, 0, out)


@op(infer=_real)
def trunc(out: Array, x: Array) -> None:
    """x without its fraction."""
    np.trunc(x, out)


# --- parts ---------------------------------------------------------------------------


@op(infer=_part)
def real(out: Array, x: Array) -> None:
    """The real part."""
    np.copyto(out, x.real)


@op(infer=_part)
def imag(out: Array, x: Array) -> None:
    """The imaginary part; 0 of a real x."""
    np.copyto(out, x.imag)


@op(infer=broadcast)
def conj(out: Array, x: Array) -> None:
    """The complex conjugate; x itself where it is real."""
    np.conjugate(x, out)


@op(infer=_float)
def copysign(out: Array, x: Array, y: Array) -> None:
    """|x| with the sign of y, also that of zeros and nans."""
    np.copysign(x, y, out, dtype=out.dtype)


@op(infer=elementwise("float", bool_))
def signbit(out: Array, x: Array) -> None:
    """Whether the sign is negative, also that of zeros and nans."""
    np.signbit(x, out)


@op(infer=elementwise("float"))
def nextafter(out: Array, x: Array, y: Array) -> None:
    """The next float after x in the direction of y; y where they are equal."""
    np.nextafter(x, y, out, dtype=out.dtype)


# --- elementary functions: of integers and bools they are f32 ------------------------


@op(infer=_inexact)
def exp(out: Array, x: Array) -> None:
    """e to the power x."""
    np.exp(x, out, dtype=out.dtype)


@op(infer=_inexact)
def expm1(out: Array, x: Array) -> None:
    """e^x - 1, accurate near 0."""
    if out.dtype.kind != "c":
        np.expm1(x, out, dtype=out.dtype)
    else:  # where the standard has other values than numpy
        real, imag = x.real.copy(), x.imag.copy()  # `out` may be x
        np.expm1(x, out)
        np.copyto(out.imag, imag, where=imag == 0)
        np.add(out.real, 0, out.real)  # no -0
        infinite = np.isinf(real) & ~np.isfinite(imag)
        np.copyto(out.real, np.where(real > 0, real, -1), where=infinite)
        np.copyto(out.imag, np.where(real > 0, np.nan, 0), where=infinite)


@op(infer=_inexact)
def log(out: Array, x: Array) -> None:
    """The natural logarithm; -inf at 0, nan below. Of complex numbers that with an imaginary part
    from -pi to pi."""
    np.log(x, out, dtype=out.dtype)


@op(infer=_inexact)
def log1p(out: Array, x: Array) -> None:
    """log(1 + x), accurate near 0."""
    np.log1p(x, out, dtype=out.dtype)


@op(infer=_inexact)
def log2(out: Array, x: Array) -> None:
    """The logarithm of base 2."""
    np.log2(x, out, dtype=out.dtype)


@op(infer=_inexact)
def log10(out: Array, x: Array) -> None:
    """The logarithm of base 10."""
    np.log10(x, out, dtype=out.dtype)


@op(infer=_float)
def logaddexp(out: Array, x: Array, y: Array) -> None:
    """log(e^x + e^y), elementwise, with broadcasting, as max(x, y) + log(1 + e^-|x - y|): it
    overflows only where the result does."""
    np.logaddexp(x, y, out, dtype=out.dtype)


@op(infer=_inexact)
def sqrt(out: Array, x: Array) -> None:
    """The square root; nan for a real x < 0. Of complex numbers that with a real part >= 0."""
    np.sqrt(x, out, dtype=out.dtype)


@op(infer=_inexact)
def rsqrt(out: Array, x: Array) -> None:
    """1 / sqrt(x)."""
    np.sqrt(x, out, dtype=out.dtype)
    np.reciprocal(out, out)


@op(infer=_inexact)
def sin(out: Array, x: Array) -> None:
    """The sine of x radians."""
    np.sin(x, out, dtype=out.dtype)


@op(infer=_inexact)
def cos(out: Array, x: Array) -> None:
    """The cosine of x radians."""
    np.cos(x, out, dtype=out.dtype)


@op(infer=_inexact)
def tan(out: Array, x: Array) -> None:
    """The tangent of x radians."""
    np.tan(x, out, dtype=out.dtype)


@op(infer=_inexact)
def asin(out: Array, x: Array) -> None:
    """The arcsine; nan for a real x outside of [-1, 1]."""
    np.arcsin(x, out, dtype=out.dtype)


@op(infer=_inexact)
def acos(out: Array, x: Array) -> None:
    """The arccosine; nan for a real x outside of [-1, 1]."""
    np.arccos(x, out, dtype=out.dtype)


@op(infer=_inexact)
def atan(out: Array, x: Array) -> None:
    """The arctangent."""
    np.arctan(x, out, dtype=out.dtype)


@op(infer=_float)
def atan2(out: Array, x: Array, y: Array) -> None:
    """atan(x / y) in the quadrant of the point (y, x), from -pi to pi, also where an operand is 0
    or infinite."""
    np.arctan2(x, y, out, dtype=out.dtype)


@op(infer=_float)
def hypot(out: Array, x: Array, y: Array) -> None:
    """sqrt(x^2 + y^2), elementwise, with broadcasting; it overflows only where the result does."""
    np.hypot(x, y, out, dtype=out.dtype)


@op(infer=_inexact)
def sinh(out: Array, x: Array) -> None:
    """The hyperbolic sine."""
    np.sinh(x, out, dtype=out.dtype)


@op(infer=_inexact)
def cosh(out: Array, x: Array) -> None:
    """The hyperbolic cosine."""
    np.cosh(x, out, dtype=out.dtype)


@op(infer=_inexact)
def tanh(out: Array, x: Array) -> None:
    """The hyperbolic tangent."""
    if out.dtype.kind != "c":
        np.tanh(x, out, dtype=out.dtype)
    else:  # numpy's zero has another sign
        real, imag = x.real.copy(), x.imag.copy()  # `out` may be x
        np.tanh(x, out)
        limit = np.isinf(real) & np.isfinite(imag)
        np.copyto(out.imag, np.copysign(0, imag), where=limit)


@op(infer=_inexact)
def asinh(out: Array, x: Array) -> None:
    """The inverse hyperbolic sine."""
    np.arcsinh(x, out, dtype=out.dtype)


@op(infer=_inexact)
def acosh(out: Array, x: Array) -> None:
    """The inverse hyperbolic cosine; nan for a real x < 1."""
    np.arccosh(x, out, dtype=out.dtype)


@op(infer=_inexact)
def atanh(out: Array, x: Array) -> None:
    """The inverse hyperbolic tangent; nan for a real x outside of [-1, 1]."""
    np.arctanh(x, out, dtype=out.dtype)


@op(infer=_float)
def sigmoid(out: Array, x: Array) -> None:
    """1 / (1 + e^-x), accurate at both ends. Where e^-x overflows the result is 0, or subnormal."""
    np.negative(x, out, dtype=out.dtype)
    np.exp(out, out)
    np.add(out, 1, out)
    np.reciprocal(out, out)


@op(infer=_float)
def erf(out: Array, x: Array) -> None:
    """The error function, 2 / sqrt(pi) * integral of exp(-t^2) from 0 to x; its relative error
    is below 1e-15 in f64 and 1e-6 in f32."""
    write_erf(out, x.astype(out.dtype, copy=False))


# --- comparison ----------------------------------------------------------------------


@op(infer=_equality)
def equal(out: Array, x: Array, y: Array) -> None:
    """x == y, elementwise, with broadcasting."""
    np.equal(*_promoted(x, y), out)


@op(infer=_equality)
def not_equal(out: Array, x: Array, y: Array) -> None:
    """x != y, elementwise, with broadcasting."""
    np.not_equal(*_promoted(x, y), out)


@op(infer=_compare)
def less(out: Array, x: Array, y: Array) -> None:
    """x < y, elementwise, with broadcasting."""
    np.less(*_promoted(x, y), out)


@op(infer=_compare)
def less_equal(out: Array, x: Array, y: Array) -> None:
    """x <= y, elementwise, with broadcasting."""
    np.less_equal(*_promoted(x, y), out)


@op(infer=_compare)
def greater(out: Array, x: Array, y: Array) -> None:
    """x > y, elementwise, with broadcasting."""
    np.greater(*_promoted(x, y), out)


@op(infer=_compare)
def greater_equal(out: Array, x: Array, y: Array) -> None:
    """x >= y, elementwise, with broadcasting."""
    np.greater_equal(*_promoted(x, y), out)


@op(infer=_is)
def isnan(out: Array, x: Array) -> None:
    """True where x is nan."""
    np.isnan(x, out)


@op(infer=_is)
def isinf(out: Array, x: Array) -> None:
    """True where x is inf or -inf."""
    np.isinf(x, out)


@op(infer=_is)
def isfinite(out: Array, x: Array) -> None:
    """True where x is neither inf nor nan."""
    np.isfinite(x, out)


# --- logic ---------------------------------------------------------------------------


@op(infer=_logical)
def logical_and(out: Array, x: Array, y: Array) -> None:
    """x and y, of booleans."""
    np.logical_and(x, y, out)


@op(infer=_logical)
def logical_or(out: Array, x: Array, y: Array) -> None:
    """x or y, of booleans."""
    np.logical_or(x, y, out)


@op(infer=_logical)
def logical_xor(out: Array, x: Array, y: Array) -> None:
    """Either x or y, of booleans."""
    np.logical_xor(x, y, out)


@op(infer=_logical)
def logical_not(out: Array, x: Array) -> None:
    """not x, of booleans."""
    np.logical_not(x, out)


@op(infer=_bitwise)
def bitwise_and(out: Array, x: Array, y: Array) -> None:
    """x & y, of integers or booleans."""
    np.bitwise_and(x, y, out)


@op(infer=_bitwise)
def bitwise_or(out: Array, x: Array, y: Array) -> None:
    """x | y, of integers or booleans."""
    np.bitwise_or(x, y, out)


@op(infer=_bitwise)
def bitwise_xor(out: Array, x: Array, y: Array) -> None:
    """x ^ y, of integers or booleans."""
    np.bitwise_xor(x, y, out)


@op(infer=_bitwise)
def bitwise_invert(out: Array, x: Array) -> None:
    """~x, of integers or booleans."""
    np.invert(x, out)


@op(infer=_integer)
def bitwise_left_shift(out: Array, x: Array, y: Array) -> None:
    """x << y, of integers."""
    np.left_shift(x, y, out)


@op(infer=_integer)
def bitwise_right_shift(out: Array, x: Array, y: Array) -> None:
    """x >> y, of integers, keeping the sign."""
    np.right_shift(x, y, out)


# --- choice --------------------------------------------------------------------------


def _where(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    require("bool", condition)
    shape = broadcast_shapes(condition.shape, x.shape, y.shape)
    return TensorType(promote(x.dtype, y.dtype), shape)


@op(infer=_where)
def where(out: Array, condition: Array, x: Array, y: Array) -> None:
    """x where the condition holds, else y; all three broadcast."""
    np.copyto(out, np.where(condition, *_promoted(x, y)))
