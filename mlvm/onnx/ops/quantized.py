"""Numbers of few bits and their scales: quantised, and computed with as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.types import DType
from mlvm.onnx.arrays import FLOATS, INTEGERS, NAMES, dtype_of
from mlvm.onnx.few import rounded
from mlvm.onnx.ops.neural import _kernel, channels_last, channels_second, convolved
from mlvm.onnx.table import Call, op
from mlvm.onnx.values import Value, Weight, tensor


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


def dynamic(x: Any) -> tuple[Any, Any, Any]:
    """x as u8, with its scale and zero (https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear)."""
    low, high = ml.minimum(ml.min(x), 0.0), ml.maximum(ml.max(x), 0.0)
    scale = (high - low) / 255.0
    safe = ml.where(ml.equal(scale, 0.0), ml.ones_like(scale), scale)
    zero = ml.round(ml.clip(-low / safe, 0.0, 255.0))
    y = ml.clip(ml.round(x / safe) + zero, 0.0, 255.0)
    return ml.astype(y, ml.uint8), safe, ml.astype(zero, ml.uint8)


@op("DynamicQuantizeLinear", "tensors")
def dynamic_quantize_linear(at: Call, x: Any) -> Any:
    return dynamic(x)


def centered(x: Any, zero: Any, *, by_row: bool = False) -> Any:
    """Integers less their zero, as floats, which hold all of them."""
    y = ml.astype(x, ml.float32)
    if zero is None:
        return y
    zero = ml.astype(zero, ml.float32)
    if by_row and zero.ndim == 1 and zero.shape[0] > 1:
        zero = ml.expand_dims(zero, axis=-1)
    return y - zero


def exact(product: Callable[[Any, Any], Any], a: Any, b: Any, inner: int) -> Any:
    """Sums of so many products of centered bytes, i32: f32 holds them, where a is cut into its
    upper and lower four bits if they are many."""
    if inner * 255 * 255 < 1 << 24:
        return ml.astype(product(a, b), ml.int32)
    if inner * 16 * 255 < 1 << 24:
        upper = ml.floor(a * (1 / 16))
        low = ml.astype(product(a - upper * 16.0, b), ml.int32)
        return ml.astype(product(upper, b), ml.int32) * 16 + low
    wide = product(ml.astype(a, ml.float64), ml.astype(b, ml.float64))
    return ml.astype(wide, ml.int32)


@op("MatMulInteger com.microsoft.MatMulInteger16", "tensors")
def matmul_integer(at: Call, a: Any, b: Any, az: Any = None, bz: Any = None) -> Any:
    return exact(ml.matmul, centered(a, az, by_row=True), centered(b, bz), a.shape[-1])


def dynamic_matmul(x: Any, w: Any, scale: Any) -> Any:
    """x, quantised by itself, by centered weights."""
    q, by, middle = dynamic(x)
    total = exact(ml.matmul, centered(q, middle), w, x.shape[-1])
    return ml.astype(total, ml.float32) * by * scale


@op("com.microsoft.DynamicQuantizeMatMul", "tensors")
def dynamic_quantize_matmul(
    at: Call, x: Any, w: Any, scale: Any, zero: Any = None, bias: Any = None
) -> Any:
    y = dynamic_matmul(x, centered(w, zero), scale)
    return y if bias is None else y + bias


@op("com.microsoft.MatMulIntegerToFloat", "tensors")
def matmul_integer_to_float(at: Call, a: Any, b: Any, sa: Any, sb: Any, za: Any = None,
                            zb: Any = None, bias: Any = None) -> Any:  # fmt: skip
    total = exact(ml.matmul, centered(a, za, by_row=True), centered(b, zb), a.shape[-1])
    y = ml.astype(total, ml.float32) * sa * sb
    return y if bias is None else y + bias


def _requantized(y: Any, scale: Any, zero: Any) -> Any:
    dtype = zero.dtype
    info = np.iinfo(dtype.numpy)
    made = ml.round(y / scale) + ml.astype(zero, ml.float32)
    return ml.astype(ml.clip(made, float(info.min), float(info.max)), dtype)


@op("QLinearMatMul", "tensors")
def qlinear_matmul(at: Call, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any,
                   zy: Any) -> Any:  # fmt: skip
    total = exact(ml.matmul, centered(a, za, by_row=True), centered(b, zb), a.shape[-1])
    sa, sb, sy = (ml.astype(s, ml.float32) for s in (sa, sb, sy))
    sa = ml.expand_dims(sa, axis=-1) if sa.ndim == 1 and sa.shape[0] > 1 else sa
    y = ml.astype(total, ml.float32) * (sa * sb)
    return _requantized(y, sy, zy)


def _integer_conv(at: Call, x: Value, xz: Any, w: Value, wz: Any, place: int) -> Any:
    """The convolution of integers, i32, channels last."""
    packed = type(at.node.inputs[place]) is Weight
    kernel = tensor(w) if packed else ml.permute_dims(tensor(w), (*range(2, w.ndim), 1, 0))
    axes = kernel.ndim - 2
    kernel = ml.astype(kernel, ml.float32)
    if wz is not None:
        kernel = kernel - ml.astype(tensor(wz), ml.float32)
    image = centered(channels_last(x), None if xz is None else tensor(xz))
    inner = math.prod(kernel.shape[:-1])
    return exact(lambda x, w: convolved(at, x, w, axes), image, kernel, inner)


@op("ConvInteger", "raw", packed={1: _kernel})
def conv_integer(at: Call, x: Value, w: Value, xz: Value = None, wz: Value = None) -> Value:
    return channels_second(_integer_conv(at, x, xz, w, wz, 1))


@op("QLinearConv", "raw", packed={3: _kernel})
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


def _nibbles(node: Any, w: Any) -> Any:
    """Weights of MatMulNBits, whose numbers lie two (or four) in a byte, as a byte each."""
    bits = node.attributes.get("bits", 4)
    if bits == 8:
        return w
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (w[..., None] >> shifts & (1 << bits) - 1).reshape(*w.shape[:-1], -1)


@op("com.microsoft.MatMulNBits", "raw", packed={1: _nibbles})
def matmul_nbits(at: Call, x: Value, w: Value, scales: Value, zeros: Value = None,
                 groups: Value = None, bias: Value = None) -> Value:  # fmt: skip
    k, n, block, bits = at["K"], at["N"], at["block_size"], at.get("bits", 4)
    if groups is not None:
        raise ModelError("its weights are in groups of their own (g_idx)")
    x = tensor(x)
    codes = (
        tensor(w)
        if type(at.node.inputs[1]) is Weight
        else ml.asarray(_nibbles(at.node, np.asarray(tensor(w))))
    )
    count = -(-k // block)
    codes = ml.astype(ml.reshape(codes, (n, count, -1)), ml.float32)
    by = ml.astype(ml.reshape(tensor(scales), (n, count, 1)), ml.float32)
    if zeros is None:
        middle: Any = float(1 << bits - 1)
    elif DType.of(zeros.dtype).is_float:
        middle = ml.astype(ml.reshape(tensor(zeros), (n, count, 1)), ml.float32)
    else:
        flat = np.asarray(zeros) if isinstance(zeros, np.ndarray) else np.asarray(tensor(zeros))
        flat = _nibbles(at.node, flat.reshape(n, -1))[:, :count]
        middle = ml.asarray(flat.reshape(n, count, 1).astype(np.float32))
    weights = ml.reshape((codes - middle) * by, (n, -1))[:, :k]
    y = ml.matmul(x, ml.astype(weights, x.dtype), transpose_y=True)
    return y if bias is None else y + tensor(bias)
