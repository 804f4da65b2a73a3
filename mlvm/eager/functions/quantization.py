"""Quantization to low-bit dtypes with a scale, and dequantization.

Matrix products of quantized tensors are `quantized_matmul` and `integer_matmul`."""

from __future__ import annotations

from mlvm.core.errors import DTypeError, ShapeError
from mlvm.core.ops import few
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, f32, i8, i32, u8
from mlvm.eager.functions.arguments import integer, type_of
from mlvm.eager.functions.elements import astype, clip, where
from mlvm.eager.functions.elements import round as rounded
from mlvm.eager.functions.shapes import repeat, reshape, stack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.constants import constant
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


def require_quantized(dtype: object) -> DType:
    """Return a dtype for quantized numbers.

    Raises `DTypeError` for any other dtype."""
    target = DType.of(dtype, in_bits=True)
    if target not in (i8, u8) and not target.is_storage:
        raise DTypeError(
            f"expected a quantized dtype, i8, u8, {', '.join(DType.storage)}, got {target.name}"
        )
    return target


@public
def quantize_groups(
    x: Tensor, dtype: object = i8, *, group: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize x by groups along the last axis; return the quantized numbers and the scale.

    `dequantize`, `quantized_matmul` and `dequantize_rows` accept both. A group has `group`
    elements, by default a whole row.

    For signed and float dtypes scale = max |x| / (the largest number). For u8, u4 and u2, the
    offset is the least x, and scale = (max x - min x) / (the largest number).

    x: f32[..., k] -> dtype[..., k], and f32[..., k / group], or for unsigned integers f32[..., k /
    group, 2]. Raises `DTypeError` if x is not f32 or the dtype is invalid; `ShapeError` if x has no
    axes, or k is not a multiple of `group`.

        >>> q, scale = ml.quantize_groups(ml.asarray([1.1, -2.0, 30.0, 70.0]), "i4", group=2)
        >>> q, ml.dequantize(q, scale).type
        (Tensor([ 4, -7,  3,  7], i4[4]), f32[4])

    Invalid calls:
        ml.quantize_groups(v, "f32")  # DTypeError
        ml.quantize_groups(ml.ones(6), group=4)  # ShapeError
    """
    target, type = require_quantized(dtype), type_of(x)
    if type.dtype is not f32:
        raise DTypeError(f"expected f32, got {type.dtype.name}; convert with astype")
    if not type.ndim or not type.shape[-1]:
        raise ShapeError(f"expected rows, got {type}")
    length = type.shape[-1] if group is None else integer(group, "group")
    if length < 1 or type.shape[-1] % length:
        raise ShapeError(f"expected rows as a multiple of the group {length}, got {type.shape[-1]}")
    grouped = reshape(x, (*type.shape[:-1], type.shape[-1] // length, length))
    low, high = few.limits(target)
    if low == 0:
        offset = op.min(grouped, axis=-1, keepdims=True)
        scale = (op.max(grouped, axis=-1, keepdims=True) - offset) / high
        both = stack([reshape(each, each.shape[:-1]) for each in (scale, offset)], axis=-1)
        values = (grouped - offset) / _not_zero(scale)
    else:
        scale = op.max(op.abs(grouped), axis=-1, keepdims=True) / high
        both = reshape(scale, scale.shape[:-1])
        values = grouped / _not_zero(scale)
    return _in(reshape(values, type.shape), target), both


def _not_zero(scale: Tensor) -> Tensor:
    return where(op.equal(scale, 0.0), constant(1.0, f32), scale)


def _in(values: Tensor, dtype: DType) -> Tensor:
    """Convert to the nearest finite numbers of that dtype."""
    values = values if dtype in few.FLOATS else rounded(values)
    low, high = few.limits(dtype)
    return astype(clip(values, low, high), dtype)


@public
def quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1, dtype: object = u8
) -> Tensor:
    """Compute clip(round(x / scale) + zero_point): ONNX's QuantizeLinear.

    The result has the dtype of `zero_point`, or `dtype` without one. Halves are rounded to even,
    and nan becomes 0.

    x: f32[...]; scale and zero_point: scalars, [n] along an `axis` of n elements, or tensors with
    the rank of x, with one number per block of equal length along `axis`. Raises `DTypeError` or
    `ShapeError` for other operands, `AxisError` for an axis that x does not have.

        >>> zero = ml.asarray(2, dtype="u8")
        >>> ml.quantize_linear(ml.asarray([0.0, 1.3, -3.0]), ml.asarray(0.5), zero)
        Tensor([2, 5, 0], u8[3])

    Invalid calls:
        ml.quantize_linear(v, v, axis=3)  # AxisError
        ml.quantize_linear(v, ml.ones(()), dtype="f32")  # DTypeError
        ml.quantize_linear(v, ml.ones(7), axis=0)  # ShapeError
    """
    target = require_quantized(dtype if zero_point is None else zero_point.dtype)
    scale = _along(x, scale, axis)
    if target in (i8, u8) and x.dtype is f32 and scale.dtype is f32:
        zero = constant(0, target) if zero_point is None else _along(x, zero_point, axis)
        return op.quantize_linear(x, scale, zero)
    values = x / scale
    if target not in few.FLOATS:
        values = rounded(values)
    if zero_point is not None:
        values = values + _along(x, astype(zero_point, f32), axis)
    return _in(values, target)


@public
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1
) -> Tensor:
    """Compute (x - zero_point) scale in f32: ONNX's DequantizeLinear.

    x: i8, u8, i32 or a low-bit dtype [...]; scale: f32, and zero_point of x's dtype, with the
    shapes of `quantize_linear`. Raises `DTypeError` and `ShapeError` for other operands,
    `AxisError` for an axis that x does not have.

        >>> zero = ml.asarray(2, dtype="u8")
        >>> ml.dequantize_linear(ml.asarray([2, 5], dtype="u8"), ml.asarray(0.5), zero)
        Tensor([0. , 1.5], f32[2])

    Invalid calls:
        ml.dequantize_linear(v, v, axis=3)  # AxisError
        ml.dequantize_linear(ml.ones(3, dtype="c64"), ml.ones(()))  # DTypeError
        ml.dequantize_linear(v, ml.ones(7), axis=0)  # ShapeError
    """
    if x.dtype in (i8, u8, i32) and scale.dtype is f32:
        own = constant(0, x.dtype) if zero_point is None else _along(x, zero_point, axis)
        if own.dtype is x.dtype:
            return op.dequantize_linear(x, _along(x, scale, axis), own)
    values = astype(x, f32)
    if zero_point is not None:
        values = values - _along(x, astype(zero_point, f32), axis)
    return values * _along(x, scale, axis)


@public
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x to u8, with scale and zero point from the range of x: ONNX DynamicQuantizeLinear.

    Return the numbers, the scale f32[] and the zero point u8[]. The range includes 0; the scale of
    zeros is 1.

    x: f32[...] -> u8[...]. Raises `DTypeError` if x is not f32; `ShapeError` if x is empty.

        >>> ml.dynamic_quantize_linear(ml.asarray([0.0, 255.0]))[0]
        Tensor([  0, 255], u8[2])

    Invalid calls:
        ml.dynamic_quantize_linear(ml.ones(2, dtype="c64"))  # DTypeError
        ml.dynamic_quantize_linear(ml.ones(0))  # ShapeError
    """
    zero = constant(0.0, f32)
    low, high = op.minimum(op.min(x), zero), op.maximum(op.max(x), zero)
    scale = _not_zero((high - low) / 255.0)
    zero_point = astype(clip(rounded(-low / scale), 0.0, 255.0), u8)
    return quantize_linear(x, scale, zero_point), scale, zero_point


def _along(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Reshape a scale to broadcast with x.

    It contains one number in total, one per index along an axis, or one per block."""
    if scale.ndim == 0 or scale.size == 1:
        return reshape(scale, ())
    axis = normalize_axis(axis, x.ndim)
    if scale.ndim == 1 and scale.shape[0] == x.shape[axis]:
        return reshape(scale, [n if i == axis else 1 for i, n in enumerate(x.shape)])
    same = scale.ndim == x.ndim and all(
        m == n or i == axis for i, (m, n) in enumerate(zip(scale.shape, x.shape, strict=True))
    )
    if not same or not scale.shape[axis] or x.shape[axis] % scale.shape[axis]:
        raise ShapeError(
            f"expected a scale that divides {x.type} into groups along axis {axis}, got "
            f"{scale.type}"
        )
    return repeat(scale, x.shape[axis] // scale.shape[axis], axis=axis)
