"""Matrix products with low-bit weights, and conversions to and from low-bit dtypes.

A weight is quantized in groups along the last axis: w = scale q. Here q[..., k] has a low-bit dtype
or i8 or u8, and scale is f32[..., groups], one for k / groups elements. Alternatively, w = scale q
+ offset; then the scale is f32[..., groups, 2], pairs of scale and offset.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from mlvm.core.errors import DTypeError, OperandValueError, ShapeError
from mlvm.core.op import internal, movement, op, pointwise
from mlvm.core.ops import few, windows
from mlvm.core.ops.block_memory import blocks
from mlvm.core.ops.windows import Padding, Pair
from mlvm.core.rules import broadcast_shapes, require
from mlvm.core.types import Array, DType, TensorType, f32, i8, i32, u8

# --- type rules ----------------------------------------------------------------------


def _pack(x: TensorType, dtype: str) -> TensorType:
    target = DType.named(dtype)
    require("real", x)
    if not target.is_storage or x.dtype.is_half:
        raise DTypeError(f"cannot pack {x.dtype.name} as {target.name}: use astype(x, ...)")
    return x.with_dtype(target)


def _unpack(x: TensorType) -> TensorType:
    if not x.dtype.is_storage:
        raise DTypeError(f"expected a packed dtype, got {x.dtype.name}")
    return x.with_dtype(few.unpacked_dtype(x.dtype))


def _dequantize(x: TensorType, scale: TensorType) -> TensorType:
    if not (x.dtype.is_storage or x.dtype in (i8, u8)):
        raise DTypeError(
            f"expected weights of i8, u8, {', '.join(DType.storage)}, got {x.dtype.name}"
        )
    if scale.dtype is not f32:
        raise DTypeError(
            f"expected a scale of f32, got {scale.dtype.name}: convert with astype(x, ...)"
        )
    groups = scale.shape[x.ndim - 1 : x.ndim]
    pairs = scale.shape[x.ndim :]
    same = x.ndim and scale.shape[: x.ndim - 1] == x.shape[:-1] and pairs in ((), (2,))
    if not same or not groups or not groups[0] or x.shape[-1] % groups[0]:
        raise ShapeError(
            "expected scale of shape [..., groups] or [..., groups, 2], with groups dividing the "
            f"last axis of the weight, got {scale} for {x}"
        )
    return x.with_dtype(f32)


def _dequantize_rows(indices: TensorType, x: TensorType, scale: TensorType) -> TensorType:
    require("integer", indices)
    if x.ndim != 2:
        raise ShapeError(f"expected a matrix, whose rows are selected, got {x}")
    _dequantize(x, scale)
    return TensorType(f32, (*indices.shape, x.shape[1]))


def _quantized_matmul(x: TensorType, y: TensorType, scale: TensorType) -> TensorType:
    if x.dtype is not f32:
        raise DTypeError(f"expected x of f32, got {x.dtype.name}: convert with astype(x, ...)")
    _dequantize(y, scale)
    return TensorType(f32, _rows_by_rows(x, y))


def _integer_matmul(x: TensorType, y: TensorType) -> TensorType:
    if not {x.dtype, y.dtype} <= {i8, u8}:
        raise DTypeError(
            f"expected x and y of i8 or u8, got {x.dtype.name} and {y.dtype.name}: convert with "
            f"astype(x, ...)"
        )
    return TensorType(i32, _rows_by_rows(x, y))


def _integer_conv2d(
    x: TensorType,
    kernel: TensorType,
    x_zero: TensorType,
    kernel_zero: TensorType,
    **how: Any,
) -> TensorType:
    if not {x.dtype, kernel.dtype} <= {i8, u8}:
        raise DTypeError(
            f"expected x and kernel of i8 or u8, got {x.dtype.name} and {kernel.dtype.name}: "
            f"convert with astype(x, ...)"
        )
    if (x_zero.dtype, kernel_zero.dtype) != (x.dtype, kernel.dtype):
        raise DTypeError(
            f"expected zero points of {x.dtype.name} and {kernel.dtype.name}, like x and kernel, "
            f"got {x_zero.dtype.name} and {kernel_zero.dtype.name}"
        )
    if x_zero.size != 1 or kernel_zero.size != 1:
        raise ShapeError(f"expected single numbers as zeros, got {x_zero} and {kernel_zero}")
    if kernel.ndim != 4:
        raise ShapeError(f"expected a kernel [out, height, width, channels], got {kernel}")
    outputs, *window, inputs = kernel.shape
    laid = TensorType(f32, (*window, inputs, outputs))
    return windows.convolution(x.with_dtype(f32), laid, **how).with_dtype(i32)


def _integer_conv2d_flops(*operands: TensorType, **how: Any) -> int:
    result: TensorType = cast("Any", _integer_conv2d)(*operands, **how)
    return 2 * result.size * math.prod(operands[1].shape[1:])


def _quantize_linear(x: TensorType, scale: TensorType, zero: TensorType) -> TensorType:
    if not x.dtype is scale.dtype is f32:
        raise DTypeError(f"expected x and scale of f32, got {x.dtype.name} and {scale.dtype.name}")
    if zero.dtype not in (i8, u8):
        raise DTypeError(f"expected a zero of i8 or u8, got {zero.dtype.name}")
    return TensorType(zero.dtype, broadcast_shapes(x.shape, scale.shape, zero.shape))


def _dequantize_linear(x: TensorType, scale: TensorType, zero: TensorType) -> TensorType:
    if x.dtype not in (i8, u8, i32) or zero.dtype is not x.dtype:
        raise DTypeError(
            f"expected x and zero of i8, u8 or i32, got {x.dtype.name} and {zero.dtype.name}"
        )
    if scale.dtype is not f32:
        raise DTypeError(
            f"expected a scale of f32, got {scale.dtype.name}: convert with astype(x, ...)"
        )
    return TensorType(f32, broadcast_shapes(x.shape, scale.shape, zero.shape))


def _rows_by_rows(x: TensorType, y: TensorType) -> tuple[int, ...]:
    if not x.ndim or y.ndim != 2 or x.shape[-1] != y.shape[1]:
        raise ShapeError(f"expected [..., k] and [n, k], got {x} and {y}")
    return (*x.shape[:-1], y.shape[0])


def _flops(x: TensorType, y: TensorType, scale: TensorType | None = None) -> int:
    return 2 * x.size * y.shape[0]


# --- ops -----------------------------------------------------------------------------


@internal(infer=_pack, takes_storage=True)
def pack(out: Array, x: Array, *, dtype: str) -> None:
    """The numbers of x in a low-bit dtype.

    A float is rounded to the nearest value of a float dtype, and truncated for an integer dtype. A
    value out of range becomes the nearest limit, except for infinity in f8e5m2 and nan in f8e4m3.
    An integer out of range wraps around.
    """
    few.pack(out, x)


@internal(infer=_unpack, takes_storage=True)
def unpack(out: Array, x: Array) -> None:
    """The low-bit elements as i8, u8 or f32. The conversion is exact."""
    np.copyto(out, few.unpacked(x))


@movement(infer=_dequantize, takes_storage=True)
def dequantize(out: Array, x: Array, scale: Array) -> None:
    """scale x, or scale x + offset, for low-bit or 8-bit x with a scale per group.

    The groups are equally long and along the last axis.

    x: [..., k], i8, u8 or a low-bit dtype; scale: f32[..., groups], or f32[..., groups, 2] with the
    offset after each scale -> f32[..., k]. Raises `ShapeError` and `DTypeError` for others.

        >>> ml.dequantize(ml.asarray([1, -2, 3, 4], dtype="i4"), ml.asarray([0.5, 2.0]))
        Tensor([ 0.5, -1. ,  6. ,  8. ], f32[4])
    """
    _write_dequantized(out, x, scale)


@movement(infer=_dequantize_rows, takes_storage=True, may_raise=True)
def dequantize_rows(out: Array, indices: Array, x: Array, scale: Array) -> None:
    """`take(dequantize(x, scale), indices, axis=0)`, computing only these rows.

    It looks up a quantized embedding. Negative indices count from the end.

    indices: i[...]; x: [n, k] with a scale as in `dequantize` -> f32[..., k]. Raises `ShapeError`
    and `DTypeError` for others, `OperandValueError` for an index out of range.

        >>> table = ml.asarray([[1, 2], [3, 4]], dtype="u4")
        >>> ml.dequantize_rows(ml.asarray([1, 1, 0]), table, ml.ones((2, 1)))
        Tensor([[3., 4.],
                [3., 4.],
                [1., 2.]], f32[3,2])

    Invalid calls:
        ml.dequantize_rows(ml.asarray([9]), *quantized)  # OperandValueError
        ml.dequantize_rows(ml.asarray([0]), ml.ones(4, dtype=ml.int8), ml.ones(1))  # ShapeError
        ml.dequantize_rows(ml.asarray([0.0]), *quantized)  # DTypeError
    """
    outside = (indices < -x.shape[0]) | (indices >= x.shape[0])
    if outside.any():
        worst = indices[outside].reshape(-1)[0]
        raise OperandValueError(
            f"expected indices from {-len(x)} to {len(x) - 1} for {len(x)} rows, got {worst}"
        )
    _write_dequantized(out, x[indices], scale[indices])


@op(infer=_quantized_matmul, flops=_flops, takes_storage=True, precision="f32")
def quantized_matmul(out: Array, x: Array, y: Array, scale: Array) -> None:
    """x @ dequantize(y, scale).T: floats times weights that stay in a low-bit dtype.

    Sums are computed in f32, and x is not quantized.

    x: f32[..., k]; y: [n, k] with a scale as in `dequantize` -> f32[..., n]. Raises `ShapeError`
    and `DTypeError` for others.

        >>> y = ml.asarray([[1, 2, 3, 4], [0, -1, 0, 1]], dtype="i4")
        >>> ml.quantized_matmul(ml.ones((1, 4)), y, ml.asarray([[0.5], [1.0]]))
        Tensor([[5., 0.]], f32[1,2])
    """
    for block in blocks(y.shape[0], x.shape[-1]):
        weights = np.empty((len(y[block]), x.shape[-1]), np.float32)
        _write_dequantized(weights, y[block], scale[block])
        out[..., block] = np.matmul(x, weights.T)


@op(infer=_integer_matmul, flops=_flops, heads=True)
def integer_matmul(out: Array, x: Array, y: Array) -> None:
    """x @ y.T of 8-bit integers, in i32; exact for sums of up to 32,768 products.

    Longer sums are computed modulo 2^32.

    x: [..., k], y: [n, k], i8 or u8 each -> i32[..., n]. Raises `ShapeError` and `DTypeError` for
    others.

        >>> x = ml.asarray([[1, 2, 100]], dtype="u8")
        >>> ml.integer_matmul(x, ml.asarray([[1, 1, 1], [0, -5, 100]], dtype=ml.int8))
        Tensor([[ 103, 9990]], i32[1,2])
    """
    np.matmul(x.astype(np.int32), y.astype(np.int32).T, out=out)


@op(infer=_integer_conv2d, flops=_integer_conv2d_flops, public=False, heads=True)
def integer_conv2d(
    out: Array,
    x: Array,
    kernel: Array,
    x_zero: Array,
    kernel_zero: Array,
    *,
    stride: Pair = (1, 1),
    padding: Padding,
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> None:
    """The cross-correlation of 8-bit images with an 8-bit kernel, each minus a zero point.

    [N,H,W,I] with [O,KH,KW,I/groups] -> i32[N,OH,OW,O]. The images are padded with the zero point
    of x.
    """
    images, weights = (
        each.astype(np.int32) - zero.reshape(()).astype(np.int32)
        for each, zero in ((x, x_zero), (kernel, kernel_zero))
    )
    weights = np.moveaxis(weights, 0, -1)
    windows.conv2d.kernel(out, images, weights, stride=stride, padding=padding, dilation=dilation,
                          groups=groups)  # fmt: skip


@pointwise(infer=_quantize_linear, public=False)
def quantize_linear(out: Array, x: Array, scale: Array, zero: Array) -> None:
    """clip(round(x / scale) + zero) in the dtype of the zero point; nan becomes 0."""
    limits = np.iinfo(out.dtype)
    values = np.rint(x / scale) + zero.astype(np.float32)
    values = np.clip(values, np.float32(limits.min), np.float32(limits.max))
    out[...] = np.where(np.isnan(values), np.float32(0), values)


@pointwise(infer=_dequantize_linear, public=False)
def dequantize_linear(out: Array, x: Array, scale: Array, zero: Array) -> None:
    """(x - zero) scale, in f32."""
    out[...] = (x.astype(np.int32) - zero.astype(np.int32)).astype(np.float32) * scale


def _write_dequantized(out: Array, x: Array, scale: Array) -> None:
    np.copyto(out, few.unpacked(x) if few.is_few(x) else x, casting="unsafe")
    pairs = scale.reshape(*scale.shape, 1) if scale.ndim == out.ndim else scale
    grouped = out.reshape(*pairs.shape[:-1], out.shape[-1] // pairs.shape[-2])
    np.multiply(grouped, pairs[..., :1], grouped)
    if pairs.shape[-1] == 2:
        np.add(grouped, pairs[..., 1:], grouped)
