"""Numbers of few bits and their scales: quantised, and computed with as they are."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.types import Array, DType
from mlvm.onnx.arrays import FLOATS, INTEGERS, NAMES, dtype_of
from mlvm.onnx.few import rounded
from mlvm.onnx.graph import is_array
from mlvm.onnx.ops.neural import channels_last, channels_second, convolved, sides
from mlvm.onnx.table import Call, op
from mlvm.onnx.values import Lying, Value, Weight, tensor


def _spread(xp: Any, v: Any, shape: Any, axis: int, block: int) -> Any:
    """A scale or zero for each element: of a tensor, of an axis, or of blocks of one."""
    if v is None or v.ndim == 0 or (v.ndim == 1 and v.shape[0] == 1 and not block):
        return v if v is None else xp.reshape(v, ())
    if block:
        y = xp.repeat(v, block, axis=axis)
        return y[tuple(slice(0, n) for n in shape)]
    return xp.reshape(v, tuple(-1 if i == axis else 1 for i in range(len(shape))))


def _range(number: int) -> tuple[int, int]:
    if number in INTEGERS:
        bits, kind = INTEGERS[number]
        return (0, (1 << bits) - 1) if kind is np.uint8 else (-(1 << bits - 1), (1 << bits - 1) - 1)
    info = np.iinfo(str(dtype_of(number, "it").numpy))
    return int(info.min), int(info.max)


def _float(xp: Any, v: Any) -> Any:
    return xp.astype(v, np.float32 if xp is np else ml.float32)


@op("QuantizeLinear com.microsoft.QuantizeLinear")
def quantize_linear(at: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    xp, number = at.xp, at.get("output_dtype", 0)
    if not number and zero is not None:
        number = at.node.numbers[2] or NAMES[DType.of(zero.dtype)]
    number = number or 2
    axis, block = at.get("axis", 1), at.get("block_size", 0)
    axis %= max(x.ndim, 1)
    by = _float(xp, _spread(xp, scale, x.shape, axis, block))
    add = _spread(xp, zero, x.shape, axis, block)
    y = _float(xp, x) / by
    if number in FLOATS:
        y = y if add is None else y + _float(xp, add)
        return rounded(xp, y, number, bool(at.get("saturate", 1)))
    y = xp.round(y)
    y = y if add is None else y + _float(xp, add)
    low, high = _range(number)
    dtype = dtype_of(number, "it")
    return xp.astype(xp.clip(y, float(low), float(high)), dtype.numpy if xp is np else dtype)


@op("DequantizeLinear com.microsoft.DequantizeLinear")
def dequantize_linear(at: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    xp, axis, block = at.xp, at.get("axis", 1), at.get("block_size", 0)
    axis %= max(x.ndim, 1)
    by = _spread(xp, scale, x.shape, axis, block)
    add = _spread(xp, zero, x.shape, axis, block)
    if DType.of(x.dtype).is_float:
        y = _float(xp, x) if add is None else _float(xp, x) - _float(xp, add)
    else:
        wide = np.int32 if xp is np else ml.int32
        y = xp.astype(x, wide)
        y = _float(xp, y if add is None else y - xp.astype(add, wide))
    number = at.get("output_dtype", 0)
    wanted = dtype_of(number, "it") if number else DType.of(scale.dtype)
    return xp.astype(y * _float(xp, by), wanted.numpy if xp is np else wanted)


@op("DynamicQuantizeLinear", "raw")
def dynamic_quantize_linear(at: Call, x: Value) -> Value:
    if type(x) is not Lying:
        return ml.dynamic_quantize_linear(tensor(x))
    q, scale, zero = ml.dynamic_quantize_linear(x.x)
    return Lying(q, x.axes), scale, zero


def centered(x: Any, zero: Any) -> Any:
    """Integers less their zero, as floats, which hold all of them."""
    y = ml.astype(x, ml.float32)
    return y if zero is None else y - ml.astype(zero, ml.float32)


class Rows(NamedTuple):
    """The second operand of a product of integers, [n, k], and what goes with it."""

    q: Any
    zero: Any
    """Its zeros, i32; None where they are 0."""
    sums: Any
    """The sum of each row less its zeros, i32[n]."""


def rows_of(q: Any, zero: Value) -> Rows:
    """[..., n, k] with a zero for all, or for each row."""
    sums = ml.sum(q, axis=-1, dtype=ml.int32)
    sums = ml.expand_dims(sums, axis=-2) if q.ndim > 2 else sums
    wide = _zero(zero)
    return Rows(q, wide, sums if wide is None else sums - wide * q.shape[-1])


def _zero(zero: Value) -> Any:
    """A zero in i32; None where it is 0."""
    if zero is None or (isinstance(zero, np.ndarray) and not zero.any()):
        return None
    wide = ml.astype(tensor(zero), ml.int32)
    return ml.reshape(wide, ()) if wide.size == 1 else wide


def product(x: Any, zero: Value, rows: Rows) -> Any:
    """(x - zero) @ (rows - zeros).T, i32. x: [..., k], with a zero for all, or for each row."""
    if rows.q.ndim == 2 and x.dtype.itemsize == rows.q.dtype.itemsize == 1:
        y = ml.integer_matmul(x, rows.q)
    else:
        wide = ml.astype(x, ml.float64), ml.astype(rows.q, ml.float64)
        y = ml.astype(ml.matmul(*wide, transpose_y=True), ml.int32)
    if rows.zero is not None:
        y = y - ml.sum(x, axis=-1, keepdims=True, dtype=ml.int32) * rows.zero
    by = _zero(zero)
    if by is None:
        return y
    return y - (ml.expand_dims(by, axis=-1) if by.ndim == 1 else by) * rows.sums


def _turned(node: Any, w: Array) -> Array:
    """[..., k, n] as rows, [..., n, k]."""
    return np.ascontiguousarray(np.swapaxes(w, -1, -2))


def _rows(at: Call, place: int, w: Value, zero: Value) -> Rows:
    """The operand at that place, [..., k, n], as the Module has it, or turned now."""
    is_turned = type(at.node.inputs[place]) is Weight
    return rows_of(w if is_turned else ml.matrix_transpose(tensor(w)), zero)


@op("MatMulInteger com.microsoft.MatMulInteger16", "raw", packed={1: _turned})
def matmul_integer(at: Call, a: Value, b: Value, az: Value = None, bz: Value = None) -> Value:
    return product(tensor(a), az, _rows(at, 1, b, bz))


def dynamic_matmul(x: Any, rows: Rows, scale: Any) -> Any:
    """x, quantised by itself, by rows."""
    q, by, zero = ml.dynamic_quantize_linear(x)
    return ml.astype(product(q, zero, rows), ml.float32) * by * scale


@op("com.microsoft.DynamicQuantizeMatMul", "raw", packed={1: _turned})
def dynamic_quantize_matmul(
    at: Call, x: Value, w: Value, scale: Value, zero: Value = None, bias: Value = None
) -> Value:
    y = dynamic_matmul(tensor(x), _rows(at, 1, w, zero), tensor(scale))
    return y if bias is None else y + tensor(bias)


@op("com.microsoft.MatMulIntegerToFloat", "raw", packed={1: _turned})
def matmul_integer_to_float(at: Call, a: Value, b: Value, sa: Value, sb: Value, za: Value = None,
                            zb: Value = None, bias: Value = None) -> Value:  # fmt: skip
    y = ml.astype(product(tensor(a), za, _rows(at, 1, b, zb)), ml.float32) * tensor(sa) * tensor(sb)
    return y if bias is None else y + tensor(bias)


def _requantized(y: Any, scale: Any, zero: Any) -> Any:
    dtype = zero.dtype
    info = np.iinfo(dtype.numpy)
    made = ml.round(y / scale) + ml.astype(zero, ml.float32)
    return ml.astype(ml.clip(made, float(info.min), float(info.max)), dtype)


@op("QLinearMatMul", "raw", packed={3: _turned})
def qlinear_matmul(at: Call, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value,
                   sy: Value, zy: Value) -> Value:  # fmt: skip
    total = product(tensor(a), za, _rows(at, 3, b, zb))
    sa, sb, sy = (ml.astype(tensor(s), ml.float32) for s in (sa, sb, sy))
    sa = ml.expand_dims(sa, axis=-1) if sa.ndim == 1 and sa.shape[0] > 1 else sa
    return _requantized(ml.astype(total, ml.float32) * (sa * sb), sy, tensor(zy))


def _filters(node: Any, w: Array) -> Array:
    """[O, I, ...] as [O, ..., I]."""
    return np.ascontiguousarray(np.moveaxis(w, 1, -1))


_EXACT: Final = (1 << 24) // 255**2
"""So many products of bytes have sums that f32 holds."""


def _integer_conv(at: Call, x: Value, xz: Value, w: Value, wz: Value, place: int) -> Any:
    """The convolution of integers, i32, channels last: a product of windows, or one of floats that
    hold its sums."""
    q = w if type(at.node.inputs[place]) is Weight else ml.moveaxis(tensor(w), 1, -1)
    image, (outputs, *window, _) = channels_last(x), q.shape
    inner, axes = q.size // max(outputs, 1), len(window)
    if at.get("group", 1) > 1 or (math.prod(window) > 1 and inner <= _EXACT):
        dtype = ml.float32 if inner <= _EXACT else ml.float64
        zero = None if wz is None else ml.reshape(tensor(wz), (-1, *[1] * (axes + 1)))
        kernel = ml.permute_dims(centered(q, zero), (*range(1, axes + 2), 0))
        flat = centered(image, None if xz is None else tensor(xz))
        y = convolved(at, ml.astype(flat, dtype), ml.astype(kernel, dtype), axes)
        return ml.astype(y, ml.int32)
    strides, apart = at.get("strides") or [1] * axes, at.get("dilations") or [1] * axes
    span = [(k - 1) * d + 1 for k, d in zip(window, apart, strict=True)]
    padding = sides(at, image.shape[1:-1], span, strides)
    if any(map(any, padding)):
        frame = [(0, 0), *padding, (0, 0)]
        around = np.pad(np.zeros((1, *image.shape[1:-1], 1), bool), frame, constant_values=True)
        image = ml.pad(image, frame)
        if xz is not None:
            image = ml.where(ml.asarray(around), tensor(xz), image)
    counts = [
        (n - k) // step + 1 for n, k, step in zip(image.shape[1:-1], span, strides, strict=True)
    ]
    parts = [
        image[(slice(None), *(
            slice(i * d, i * d + (n - 1) * step + 1, step)
            for i, d, n, step in zip(index, apart, counts, strides, strict=True)
        ))]
        for index in np.ndindex(*window)
    ]  # fmt: skip
    columns = ml.concat(parts, axis=-1) if len(parts) > 1 else parts[0]
    return product(columns, xz, rows_of(ml.reshape(q, (outputs, inner)), wz))


@op("ConvInteger", "raw", packed={1: _filters})
def conv_integer(at: Call, x: Value, w: Value, xz: Value = None, wz: Value = None) -> Value:
    return channels_second(_integer_conv(at, x, xz, w, wz, 1))


@op("QLinearConv", "raw", packed={3: _filters})
def qlinear_conv(at: Call, x: Value, sx: Value, zx: Value, w: Value, sw: Value, zw: Value,
                 sy: Value, zy: Value, b: Value = None) -> Value:  # fmt: skip
    y = _integer_conv(at, x, zx, w, zw, 3)
    if b is not None:
        y = y + tensor(b)
    y = ml.astype(y, ml.float32) * (tensor(sx) * tensor(sw))
    return channels_second(_requantized(y, tensor(sy), tensor(zy)))


@op("com.microsoft.QLinearAdd com.microsoft.QLinearMul", "tensors")
def qlinear_binary(at: Call, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any,
                   zy: Any = None) -> Any:  # fmt: skip
    left, right = centered(a, za) * sa, centered(b, zb) * sb
    y = left + right if at.node.type.endswith("Add") else left * right
    return _requantized(y, sy, ml.zeros((), dtype=a.dtype) if zy is None else zy)


@op("com.microsoft.QLinearSigmoid com.microsoft.QLinearLeakyRelu", "tensors")
def qlinear_unary(at: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    wide = centered(x, zx) * sx
    is_sigmoid = at.node.type.endswith("Sigmoid")
    y = ml.sigmoid(wide) if is_sigmoid else ml.leaky_relu(wide, at.get("alpha", 0.01))
    return _requantized(y, sy, ml.zeros((), dtype=x.dtype) if zy is None else zy)


@op("com.microsoft.QLinearGlobalAveragePool com.microsoft.QLinearAveragePool", "raw")
def qlinear_pool(at: Call, x: Value, sx: Value, zx: Value, sy: Value, zy: Value = None) -> Value:
    if not at.node.type.endswith("GlobalAveragePool"):
        raise ModelError("averages of windows of integers are not run")
    image = centered(channels_last(x), tensor(zx)) * tensor(sx)
    y = ml.mean(image, axis=tuple(range(1, image.ndim - 1)), keepdims=True)
    return channels_second(_requantized(y, tensor(sy), tensor(zy if zy is not None else zx)))


@op("com.microsoft.QLinearConcat", "raw")
def qlinear_concat(at: Call, sy: Value, zy: Value, *rest: Value) -> Value:
    parts = [
        centered(tensor(rest[i]), tensor(rest[i + 2])) * tensor(rest[i + 1])
        for i in range(0, len(rest), 3)
    ]
    return _requantized(ml.concat(parts, axis=at["axis"]), tensor(sy), tensor(zy))


def _few(node: Any, w: Array) -> Array:
    """Weights of MatMulNBits as rows in its bits: of signed integers where their zero is in the
    middle, of unsigned ones where it is given."""
    bits = node.attributes.get("bits", 4)
    has_zeros = len(node.inputs) > 3 and (is_array(node.inputs[3]) or bool(node.inputs[3]))
    if bits not in (2, 4, 8):
        raise ModelError(f"{node} has weights of {bits} bits")
    signs = sum(1 << i for i in range(bits - 1, 8, bits))
    rows = w.reshape(len(w), -1) ^ np.uint8(0 if has_zeros else signs)
    return rows.view(DType.named(f"{'u' if has_zeros else 'i'}{bits}").numpy)


@op("com.microsoft.MatMulNBits", "raw", packed={1: _few})
def matmul_nbits(at: Call, x: Value, w: Value, scales: Value, zeros: Value = None,
                 groups: Value = None, bias: Value = None) -> Value:  # fmt: skip
    k, n, block, bits = at["K"], at["N"], at["block_size"], at.get("bits", 4)
    if groups is not None:
        raise ModelError("its weights are in groups of their own (g_idx)")
    if type(at.node.inputs[1]) is not Weight:
        raise ModelError("its weights are none of the file")
    x, count = tensor(x), -(-k // block)
    wide = ml.astype(x, ml.float32)
    if count * block > k:
        wide = ml.pad(wide, [*[(0, 0)] * (x.ndim - 1), (0, count * block - k)])
    by = ml.reshape(ml.astype(tensor(scales), ml.float32), (n, count))
    if zeros is not None:
        flat = tensor(zeros)
        if DType.of(flat.dtype).is_float:
            middle = ml.astype(ml.reshape(flat, (n, count)), ml.float32)
        else:  # as many to a byte
            shifts = ml.asarray(1 << np.arange(0, 8, bits))
            codes = ml.expand_dims(ml.astype(ml.reshape(flat, (n, -1)), ml.int64), axis=-1)
            codes = ml.reshape(codes // shifts % (1 << bits), (n, -1))[:, :count]
            middle = ml.astype(codes, ml.float32)
        by = ml.stack([by, -by * middle], axis=-1)
    y = ml.astype(ml.quantized_matmul(wide, w, by), x.dtype)
    return y if bias is None else y + tensor(bias)
