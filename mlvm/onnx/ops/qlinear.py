"""Low-bit quantized numbers with scales: conversions, and ops on integers."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.ops.few import integers
from mlvm.core.types import Array, DType, i8, i32, u8
from mlvm.eager.tensor import primitives
from mlvm.onnx.arrays import FLOATS, INTEGERS, NAMES, dtype_of, is_array
from mlvm.onnx.few import rounded
from mlvm.onnx.ops.convnets import (
    averaged,
    channels_last,
    channels_second,
    convolved,
    max_pool,
    sides,
    steps_of,
)
from mlvm.onnx.ops.elementwise import ACTIVATIONS, activation
from mlvm.onnx.ops.transformers import embedded, projected_attention, segment_rows
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import (
    PermutedTensor,
    Value,
    alike,
    are_known,
    bounded,
    in_memory,
    permuted,
    tensor,
)


def _spread(xp: Any, v: Any, shape: Any, axis: int, block: int) -> Any:
    """Expand scales or zeros of a tensor, an axis or blocks, to broadcast with the elements."""
    if v is None or v.ndim == 0 or (v.ndim == 1 and v.shape[0] == 1 and not block):
        return v if v is None else xp.reshape(v, ())
    if block:
        bounded((*v.shape, block), xp is np)
        return xp.repeat(v, block, axis=axis)[tuple(slice(0, n) for n in shape)]
    return xp.reshape(v, tuple(-1 if i == axis else 1 for i in range(len(shape))))


def _range(number: int) -> tuple[int, int]:
    if number in INTEGERS:
        own = integers(INTEGERS[number])
        return own[0], own[-1]
    info = np.iinfo(str(dtype_of(number, "it").numpy))
    return int(info.min), int(info.max)


def _float(xp: Any, v: Any) -> Any:
    return xp.astype(v, xp.float32)


def _along(v: Value, x: Any, axis: int, dtype: DType) -> Any:
    """Reshape a scale or zero point, per tensor or per axis, to broadcast with x."""
    values = ml.zeros((), dtype=dtype) if v is None else ml.astype(tensor(v), dtype)
    if values.size == 1:
        return ml.reshape(values, ())
    return ml.reshape(values, tuple(-1 if i == axis else 1 for i in range(x.ndim)))


@op("QuantizeLinear com.microsoft.QuantizeLinear", "raw")
def quantize_linear(at: NodeCall, x: Value, scale: Value, zero: Value = None) -> Value:
    xp, number = at.xp, at.get("output_dtype", 0)
    if not number and zero is not None:
        number = at.node.numbers[2] or NAMES[DType.of(zero.dtype)]
    number = number or 2
    axis, block = at.get("axis", 1), at.get("block_size", 0)
    axis %= max(x.ndim, 1)
    if xp is ml and not block and number in (2, 3):
        x, order = in_memory(x)
        axis, dtype = order[axis] if order else 0, dtype_of(number, "it")
        by, add = _along(scale, x, axis, ml.float32), _along(zero, x, axis, dtype)
        return permuted(primitives.quantize_linear(_float(ml, x), by, add), order)
    x, scale, zero = (_either(xp, v) for v in (x, scale, zero))
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


@op("DequantizeLinear com.microsoft.DequantizeLinear", "raw")
def dequantize_linear(at: NodeCall, x: Value, scale: Value, zero: Value = None) -> Value:
    xp, axis, block = at.xp, at.get("axis", 1), at.get("block_size", 0)
    axis %= max(x.ndim, 1)
    number = at.get("output_dtype", 0)
    dtype = dtype_of(number, "it") if number else DType.of(scale.dtype)
    own = DType.of(x.dtype)
    if xp is ml and not block and own in (i8, u8, i32):
        x, order = in_memory(x)
        axis = order[axis] if order else 0
        by, add = _along(scale, x, axis, ml.float32), _along(zero, x, axis, own)
        return permuted(ml.astype(primitives.dequantize_linear(x, by, add), dtype), order)
    x, scale, zero = (_either(xp, v) for v in (x, scale, zero))
    by = _spread(xp, scale, x.shape, axis, block)
    add = _spread(xp, zero, x.shape, axis, block)
    if own.is_float:
        y = _float(xp, x) if add is None else _float(xp, x) - _float(xp, add)
    else:
        y = xp.astype(x, xp.int32)
        y = _float(xp, y if add is None else y - xp.astype(add, xp.int32))
    return xp.astype(y * _float(xp, by), dtype.numpy if xp is np else dtype)


def _either(xp: Any, v: Value) -> Any:
    return v if v is None or xp is np else tensor(v)


@op("DynamicQuantizeLinear", "raw")
def dynamic_quantize_linear(at: NodeCall, x: Value) -> Value:
    y, order = in_memory(x)
    q, scale, zero = ml.dynamic_quantize_linear(y)
    return permuted(q, order), scale, zero


_ONE: Final = np.ones((), np.float32)


class Rows(NamedTuple):
    """Second operand of a product of integers.

    q: rows, [n, k].
    zero: zero points of the rows, i32; None if all are 0.
    sums: sum of each row minus the zero points, i32[n].
    """

    q: Any
    zero: Any

    sums: Any


def rows_of(q: Any, zero: Value) -> Rows:
    """Bundle q [..., n, k] with a single zero point, or one per row."""
    sums = ml.sum(q, axis=-1, dtype=ml.int32)
    sums = ml.expand_dims(sums, axis=-2) if q.ndim > 2 else sums
    wide = _zero(zero)
    return Rows(q, wide, sums if wide is None else sums - wide * q.shape[-1])


def _zero(zero: Value) -> Any:
    """Convert a zero to i32; None if it is 0."""
    if zero is None or (isinstance(zero, np.ndarray) and not zero.any()):
        return None
    wide = ml.astype(tensor(zero), ml.int32)
    return ml.reshape(wide, ()) if wide.size == 1 else wide


def product(x: Any, zero: Value, rows: Rows) -> Any:
    """Compute (x - zero) @ (rows - zeros).T, i32.

    x: [..., k], with a single zero point, or one per row.
    """
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


def _turned(xp: Any, node: Any, w: Any) -> Any:
    """Transpose [..., k, n] to rows, [..., n, k]."""
    return xp.matrix_transpose(w)


@op("MatMulInteger com.microsoft.MatMulInteger16", "raw", packed={1: _turned})
def matmul_integer(at: NodeCall, a: Value, b: Value, az: Value = None, bz: Value = None) -> Value:
    return product(tensor(a), az, rows_of(b, bz))


def dynamic_matmul(x: Any, rows: Rows, scale: Any) -> Any:
    """Multiply x, which is quantised dynamically, by rows."""
    if not x.size:
        return ml.zeros((*x.shape[:-1], rows.q.shape[-2]))
    q, by, zero = ml.dynamic_quantize_linear(x)
    return ml.astype(product(q, zero, rows), ml.float32) * by * scale


@op("com.microsoft.DynamicQuantizeMatMul", "raw", packed={1: _turned})
def dynamic_quantize_matmul(
    at: NodeCall, x: Value, w: Value, scale: Value, zero: Value = None, bias: Value = None
) -> Value:
    y = dynamic_matmul(tensor(x), rows_of(w, zero), tensor(scale))
    return y if bias is None else y + tensor(bias)


@op("com.microsoft.MatMulIntegerToFloat", "raw", packed={1: _turned})
def matmul_integer_to_float(
    at: NodeCall, a: Value, b: Value, sa: Value, sb: Value, za: Value = None, zb: Value = None,
    bias: Value = None,
) -> Value:  # fmt: skip
    of_a, of_b = (ml.astype(tensor(v), ml.float32) for v in (sa, sb))
    y = ml.astype(product(tensor(a), za, rows_of(b, zb)), ml.float32) * of_a * of_b
    y = y if bias is None else y + tensor(bias)
    return ml.astype(y, DType.of(sa.dtype))


@op("com.microsoft.QAttention", "raw", packed={1: _turned}, do_rotary=0,
    past_present_share_buffer=0)  # fmt: skip
def qattention(at: NodeCall, x: Value, w: Value, bias: Value, sx: Value, sw: Value,
               mask: Value = None, zx: Value = None, zw: Value = None, past: Value = None
) -> Value:  # fmt: skip
    y = _scaled(product(tensor(x), zx, rows_of(w, zw)), None, sx, sw) + tensor(bias)
    mask, past = (_either(ml, each) for each in (mask, past))
    result, dtype = projected_attention(at, y, mask, past), DType.of(bias.dtype)
    if isinstance(result, tuple):
        return tuple(ml.astype(each, dtype) for each in result)
    return ml.astype(result, dtype)


@op("com.microsoft.QEmbedLayerNormalization", "tensors", absent=[1, 4, 7, 10, 15])
def qembed_layer_normalization(at: NodeCall, ids: Any, segments: Any, *rest: Any) -> Any:
    tables, mask, scales, zeros = rest[:5], rest[5], rest[6:11], rest[11:]
    words, positions, kinds, gamma, beta = tables
    values = (
        *(ml.take(words, ids, axis=0), positions[: ids.shape[1]]),
        *(segment_rows(kinds, segments, ids), gamma, beta),
    )
    parts = [
        x if x is None else _floats(x, *pair)
        for x, *pair in zip(values, scales, zeros, strict=True)
    ]
    *sums, by, shift = parts
    return embedded(at, sums, by, shift, mask)[:2]


@op("com.microsoft.MulInteger", "tensors", absent=[1])
def mul_integer(at: NodeCall, a: Any, za: Any, b: Any, zb: Any = None) -> Any:
    pairs = [(ml.astype(x, ml.int32), _zero(zero)) for x, zero in ((a, za), (b, zb))]
    x, y = (wide if zero is None else wide - zero for wide, zero in pairs)
    return x * y


def _quantized(y: Any, scale: Value, zero: Value, otherwise: Any = ml.uint8) -> Any:
    """Quantise y, f32, by a scale and zero point (default of the latter: 0 in `otherwise`)."""
    dtype = otherwise if zero is None else DType.of(zero.dtype)
    by, add = _along(scale, y, -1, ml.float32), _along(zero, y, -1, dtype)
    return primitives.quantize_linear(y, by, add)


def _floats(x: Any, scale: Value, zero: Value) -> Any:
    """Dequantise x by a scale and zero point."""
    by, add = _along(scale, x, -1, ml.float32), _along(zero, x, -1, DType.of(x.dtype))
    return primitives.dequantize_linear(x, by, add)


def _singles(*values: Value) -> list[Any]:
    """Convert scales and zeros to f32, with numpy if all are on the host; None becomes 0."""
    if are_known(values):
        return [np.float32(0) if v is None else np.asarray(v, np.float32) for v in values]
    return [0.0 if v is None else ml.astype(tensor(v), ml.float32) for v in values]


def _scaled(y: Any, bias: Value, sx: Value, sw: Value, sy: Value = None) -> Any:
    """Scale sums of products of integers, plus a bias in the same unit, to floats.

    `sw` contains a scale for each column. With `sy`, the result is in the unit of `sy`: onnxruntime
    multiplies by a single quotient.
    """
    y = y if bias is None else y + tensor(bias)
    of_x, of_w, of_y = _singles(sx, sw, sy)
    by = of_x * of_w if sy is None else of_x * of_w / of_y
    by = ml.reshape(tensor(by), ()) if by.size == 1 else tensor(by)
    return primitives.dequantize_linear(y, by, ml.zeros((), dtype=ml.int32))


@op("QuantizedMatMul", "raw", packed={3: _turned})
def quantized_matmul(at: NodeCall, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value,
                     bias: Value = None, sy: Value = None) -> Value:  # fmt: skip
    """Multiply quantised factors to floats; `fold` creates this op from pairs of nodes."""
    sa = ml.expand_dims(tensor(sa), axis=-1) if sa.ndim == 1 and sa.shape[0] > 1 else sa
    return _scaled(product(tensor(a), za, rows_of(b, zb)), bias, sa, sb, sy)


@op("QLinearMatMul", "raw", packed={3: _turned})
def qlinear_matmul(at: NodeCall, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value,
                   sy: Value, zy: Value) -> Value:  # fmt: skip
    return _quantized(quantized_matmul(at, a, sa, za, b, sb, zb, sy=sy), _ONE, zy)


def _turned_once(xp: Any, node: Any, w: Any) -> Any:
    """Lay out the second factor of a QGemm as rows, [n, k]."""
    return w if node.attributes.get("transB", 0) else xp.matrix_transpose(w)


@op("QuantizedGemm com.microsoft.QGemm", "raw", packed={3: _turned_once})
def qgemm(at: NodeCall, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value,
          bias: Value = None, sy: Value = None, zy: Value = None) -> Value:  # fmt: skip
    if (sy is None) != (zy is None):
        raise ModelError("expected y_scale and y_zero_point, or neither, got one of them")
    x = tensor(a)
    x = ml.matrix_transpose(x) if at.get("transA", 0) else x
    y = product(x, za, rows_of(b, zb))
    (sa,) = _singles(sa)
    y = _scaled(y, bias, sa * np.float32(at.get("alpha", 1.0)), sb, sy)
    return y if sy is None else _quantized(y, _ONE, zy)


def _filters(xp: Any, node: Any, w: Any) -> Any:
    """Transpose [O, I, ...] to [O, ..., I]."""
    return xp.moveaxis(w, 1, -1)


def _integer_conv(at: NodeCall, x: Value, xz: Value, q: Any, wz: Value) -> Any:
    """Convolve integers, channels last, to i32.

    With a zero point per channel, or over volumes, it computes in f64, which represents the sums
    exactly.
    """
    image, (outputs, *window, inputs), axes = channels_last(x), q.shape, q.ndim - 2
    if isinstance(wz, np.ndarray) and wz.size > 1 and (wz == wz.flat[0]).all():
        wz = wz.reshape(-1)[:1]
    if axes not in (1, 2) or (wz is not None and wz.size > 1):
        kernel, zero = _wide(q), None if wz is None else _wide(tensor(wz))
        if zero is not None:
            kernel = kernel - ml.reshape(zero, (-1, *[1] * (axes + 1)))
        flat = _wide(image) if xz is None else _wide(image) - _wide(tensor(xz))
        y = convolved(at, flat, ml.permute_dims(kernel, (*range(1, axes + 2), 0)), axes)
        return ml.astype(y, ml.int32)
    strides, dilation, span = steps_of(at, window)
    padding: Any = [(0, 0)] * (2 - axes) + sides(at, image.shape[1:-1], span, strides)
    above: Any = [1] * (2 - axes)
    image = ml.reshape(image, (image.shape[0], *above, *image.shape[1:]))
    y = primitives.integer_conv2d(
        image,
        ml.reshape(q, (outputs, *above, *window, inputs)),
        *(_along(zero, each, -1, each.dtype) for zero, each in ((xz, image), (wz, q))),
        stride=(*above, *strides),
        padding=tuple(padding),
        dilation=(*above, *dilation),
        groups=at.get("group", 1),
    )
    return y if axes == 2 else ml.reshape(y, (y.shape[0], *y.shape[2:]))


def _wide(x: Any) -> Any:
    return ml.astype(x, ml.float64)


@op("ConvInteger", "raw", packed={1: _filters})
def conv_integer(at: NodeCall, x: Value, w: Value, xz: Value = None, wz: Value = None) -> Value:
    return channels_second(_integer_conv(at, x, xz, w, wz))


@op("QuantizedConv", "raw", packed={3: _filters})
def quantized_conv(at: NodeCall, x: Value, sx: Value, zx: Value, w: Value, sw: Value, zw: Value,
                   b: Value = None) -> Value:  # fmt: skip
    """Convolve quantised images to floats; `fold` creates this op from pairs of nodes."""
    return channels_second(_scaled(_integer_conv(at, x, zx, w, zw), b, sx, sw))


@op("QLinearConv com.microsoft.QLinearConv", "raw", packed={3: _filters})
def qlinear_conv(at: NodeCall, x: Value, sx: Value, zx: Value, w: Value, sw: Value, zw: Value,
                 sy: Value, zy: Value, b: Value = None) -> Value:  # fmt: skip
    last = at.get("channels_last", 0)
    x = channels_second(tensor(x)) if last else x
    y = _scaled(_integer_conv(at, x, zx, w, zw), b, sx, sw, sy)
    y = _quantized(y, _ONE, zy)
    return y if last else channels_second(y)


@op("com.microsoft.NhwcMaxPool", "raw")
def nhwc_max_pool(at: NodeCall, x: Value) -> Value:
    return channels_last(max_pool(at, channels_second(tensor(x))))


@op("com.microsoft.QLinearAdd", "elementwise", absent=[2, 5])
def qlinear_add(at: NodeCall, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any,
                zy: Any = None) -> Any:  # fmt: skip
    """Add as onnxruntime does: the zeros contribute one number, which affects rounding of ties."""
    sa, za, sb, zb, sy, of_y = _singles(sa, za, sb, zb, sy, zy)
    of_a, of_b = sa / sy, sb / sy
    rest = ml.reshape(tensor(of_y - (of_a * za + of_b * zb)), ())
    total = _floats(tensor(a), of_a, None) + (_floats(tensor(b), of_b, None) + rest)
    return _quantized(total, _ONE, None, DType.of(a.dtype))


@op("com.microsoft.QLinearMul", "elementwise", absent=[2, 5])
def qlinear_mul(at: NodeCall, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any,
                zy: Any = None) -> Any:  # fmt: skip
    sa, sb, sy, of_y = _singles(sa, sb, sy, zy)
    y = _floats(tensor(a), _ONE, za) * _floats(tensor(b), _ONE, zb)
    by, add = (ml.reshape(tensor(v), ()) for v in (sa * sb / sy, of_y))
    return _quantized(y * by + add, _ONE, None, DType.of(a.dtype))


@op("com.microsoft.QLinearSigmoid com.microsoft.QLinearLeakyRelu", "raw", absent=[2])
def qlinear_unary(
    at: NodeCall, x: Value, sx: Value, zx: Value, sy: Value, zy: Value = None
) -> Value:
    q, order = in_memory(x)
    name = at.node.type.removeprefix("com.microsoft.QLinear")
    params = [at.get("alpha", alpha) for alpha in ACTIVATIONS[name][1]]
    y = activation(name, params)(_floats(q, sx, zx))
    return permuted(_quantized(y, sy, zy, q.dtype), order)


@op("com.microsoft.QLinearSoftmax", "tensors", absent=[2])
def qlinear_softmax(at: NodeCall, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    axis, wide = at.get("axis", -1) % x.ndim, _floats(x, sx, zx)
    if at.get("opset", 13) >= 13:
        return _quantized(ml.softmax(wide, axis=axis), sy, zy, x.dtype)
    flat = ml.reshape(wide, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return _quantized(ml.reshape(ml.softmax(flat), x.shape), sy, zy, x.dtype)


@op("com.microsoft.QLinearReduceMean", "tensors", absent=[2])
def qlinear_reduce_mean(at: NodeCall, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    y = ml.mean(_floats(x, sx, zx), axis=tuple(at["axes"]), keepdims=bool(at["keepdims"]))
    return _quantized(y, sy, zy, x.dtype)


@op("com.microsoft.ReduceSumInteger", "tensors")
def reduce_sum_integer(at: NodeCall, x: Any) -> Any:
    dtype = ml.uint32 if x.dtype == ml.uint8 else ml.int32
    return ml.sum(x, axis=tuple(at["axes"]), keepdims=bool(at["keepdims"]), dtype=dtype)


@op("com.microsoft.QLinearWhere", "tensors")
def qlinear_where(at: NodeCall, c: Any, x: Any, sx: Any, zx: Any, y: Any, sy: Any, zy: Any,
                  s: Any, z: Any) -> Any:  # fmt: skip
    return _quantized(ml.where(c, _floats(x, sx, zx), _floats(y, sy, zy)), s, z)


@op("com.microsoft.QLinearGlobalAveragePool com.microsoft.QLinearAveragePool", "raw", absent=[2])
def qlinear_pool(
    at: NodeCall, x: Value, sx: Value, zx: Value, sy: Value, zy: Value = None
) -> Value:
    last, dtype = at.get("channels_last", 0), DType.of(x.dtype)
    image = tensor(x) if last else channels_last(x)
    of_x, of_y, add = _singles(sx, sy, zy)
    if at.node.type.endswith("GlobalAveragePool"):  # the sums are exact, as in onnxruntime
        axes, zero = tuple(range(1, image.ndim - 1)), _zero(zx)
        wide = ml.astype(image, ml.int32)
        wide = wide if zero is None else wide - zero
        total = ml.sum(wide, axis=axes, keepdims=True, dtype=ml.int32)
        by = of_x / (of_y * np.float32(math.prod(image.shape[1:-1])))
        y = _quantized(_scaled(total, None, by, _ONE), _ONE, zy, dtype)
    else:
        by, add = (ml.reshape(tensor(v), ()) for v in (of_y, add))
        y = _quantized(averaged(at, _floats(image, sx, zx)) / by + add, _ONE, None, dtype)
    return y if last else channels_second(y)


@op("com.microsoft.QLinearConcat", "raw")
def qlinear_concat(at: NodeCall, sy: Value, zy: Value, *rest: Value) -> Value:
    """Concatenate; a part with the scale and zero of the result is not quantised again."""

    def part(x: Value, s: Value, z: Value) -> Any:
        pairs = (s, sy), (z, zy)
        if all(are_known(pair) and np.array_equal(*pair) for pair in pairs):
            return x
        return _quantized(_floats(x, s, z), sy, zy)

    parts, axes = alike([tensor(x) if type(x) is not PermutedTensor else x for x in rest[::3]])
    axis = at["axis"] % parts[0].ndim
    rescaled = [part(*each) for each in zip(parts, rest[1::3], rest[2::3], strict=True)]
    if axes is None:
        return ml.concat(rescaled, axis=axis)
    return permuted(ml.concat(rescaled, axis=axes[axis]), axes)


def low_bit_rows(xp: Any, node: Any, w: Array, bits: int, zeros: int) -> Array:
    """Convert weights [..., bytes] to rows of a low-bit dtype.

    They are signed integers if the zero point is in the middle, unsigned if the node has zero
    points, its operand `zeros`.
    """
    has_zeros = any(is_array(x) or x for x in node.inputs[zeros : zeros + 1])
    if xp is not np:
        raise ModelError("expected weights that are constants of the file, got computed weights")
    if bits not in (2, 4, 8):
        raise ModelError(f"{node}: expected weights of 2, 4 or 8 bits, got {bits}")
    signs = sum(1 << i for i in range(bits - 1, 8, bits))
    flipped = w ^ np.uint8(0 if has_zeros else signs)
    return flipped.view(DType.named(f"{'u' if has_zeros else 'i'}{bits}").numpy)


def _codes(packed: Any, bits: int) -> Any:
    """Unpack bytes [..., n] to codes i32 [..., n * 8 / bits]; the first is in the low bits."""
    if bits == 8:
        return ml.astype(packed, ml.int32)
    shifts = ml.asarray(1 << np.arange(0, 8, bits), dtype=ml.int32)
    codes = ml.expand_dims(ml.astype(packed, ml.int32), axis=-1) // shifts % (1 << bits)
    return ml.reshape(codes, (*packed.shape[:-1], packed.shape[-1] * (8 // bits)))


def scales_of_rows(scales: Any, zeros: Value, bits: int, shape: tuple[int, int]) -> Any:
    """Return scales f32[n, groups] of low-bit rows, or f32[n, groups, 2] with offsets.

    Zero points are floats, or codes that are packed along the last axis of the scales.
    """
    by = ml.astype(scales, ml.float32)
    if zeros is None:
        return ml.reshape(by, shape)
    middle = tensor(zeros)
    if not DType.of(middle.dtype).is_float:
        rows = ml.reshape(middle, (math.prod(by.shape[:-1]), -1))
        middle = _codes(rows, bits)[:, : by.shape[-1]]
    offset = -by * ml.astype(ml.reshape(middle, by.shape), ml.float32)
    return ml.reshape(ml.stack([by, offset], axis=-1), (*shape, 2))


def _rows_of_nbits(xp: Any, node: Any, w: Array) -> Array:
    return low_bit_rows(xp, node, w.reshape(len(w), -1), node.attributes.get("bits", 4), 3)


@op("com.microsoft.MatMulNBits", "raw", packed={1: _rows_of_nbits}, weight_prepacked=0)
def matmul_nbits(at: NodeCall, x: Value, w: Value, scales: Value, zeros: Value = None,
                 groups: Value = None, bias: Value = None) -> Value:  # fmt: skip
    k, n, block, bits = at["K"], at["N"], at["block_size"], at.get("bits", 4)
    if groups is not None:
        raise ModelError(
            "weights in reordered groups (g_idx) are not supported; export without g_idx"
        )
    x, count = tensor(x), -(-k // block)
    wide = ml.astype(x, ml.float32)
    if count * block > k:
        wide = ml.pad(wide, [*[(0, 0)] * (x.ndim - 1), (0, count * block - k)])
    by = scales_of_rows(ml.reshape(tensor(scales), (n, count)), zeros, bits, (n, count))
    y = ml.astype(ml.quantized_matmul(wide, w, by), x.dtype)
    return y if bias is None else y + tensor(bias)


_BITSANDBYTES: Final = (
    "0 0.00520833333 0.66666667 1 0.33333333 0.5 0.16666667 0.25",  # FP4, its positive values
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1",  # NF4
)


@op("com.microsoft.MatMulBnb4", "raw", training_mode=0, transB=1)
def matmul_bnb4(at: NodeCall, x: Value, w: Value, scales: Value) -> Value:
    """Multiply by weights in the 4-bit formats of bitsandbytes, the first in the high bits."""
    k, n, block, kind = at["K"], at["N"], at["block_size"], at["quant_type"]
    values = np.array(_BITSANDBYTES[kind].split(), np.float32)
    values = values if kind else np.concatenate([values, -values])
    bytes_ = ml.astype(tensor(w), ml.int32)
    codes = ml.reshape(ml.stack([bytes_ // 16, bytes_ % 16], axis=-1), (-1,))[: n * k]
    rows = ml.take(ml.asarray(values), codes, axis=0)
    by = ml.repeat(ml.astype(tensor(scales), ml.float32), block)[: n * k]
    kernel, x = ml.reshape(rows * by, (n, k)), tensor(x)
    y = ml.matmul(ml.astype(x, ml.float32), kernel, transpose_y=True)
    return ml.astype(y, x.dtype)


@op("com.microsoft.GatherBlockQuantized", "raw")
def gather_block_quantized(
    at: NodeCall, x: Value, indices: Value, scales: Value, zeros: Value = None
) -> Value:
    number, ndim, dtype = at.node.numbers[0], x.ndim, DType.of(scales.dtype)
    x, indices, scales, zeros = (_either(ml, v) for v in (x, indices, scales, zeros))
    axis, along = at.get("gather_axis", 0) % ndim, at.get("quantize_axis", 1) % ndim
    n, bits, block = x.shape[axis], at.get("bits", 4), at.get("block_size", 128)
    block = block or max(x.shape[along], 1)
    if axis == along:
        raise ModelError(f"expected different axes to gather and to quantize, got {axis} for both")
    if not number and along != ndim - 1:
        raise ModelError(f"expected quantize_axis={ndim - 1} of packed bytes, got {along}")
    flat = ml.reshape(indices, (-1,))
    flat = ml.where(ml.less(flat, 0), flat + n, flat)
    is_inside = ml.logical_and(ml.greater_equal(flat, 0), ml.less(flat, n))
    places = ml.where(is_inside, flat, ml.zeros_like(flat))

    def rows(v: Any) -> Any:
        return v if v is None or v.shape[axis] != n else ml.take(v, places, axis=axis)

    x, scales, zeros = rows(x), rows(scales), rows(zeros)
    if not number:  # bytes of unsigned codes
        x = _codes(x, bits)
        middle = ml.full(scales.shape, 1 << bits - 1, dtype=ml.int32)
        zeros = middle if zeros is None else _codes(zeros, bits)[..., : scales.shape[-1]]
    by, add = (_spread(ml, v, x.shape, along, block) for v in (scales, zeros))
    y = _float(ml, x) if add is None else _float(ml, x) - _float(ml, add)
    y = y * _float(ml, by)
    shown = ml.reshape(is_inside, (-1, *[1] * (ndim - axis - 1)))
    y = ml.astype(ml.where(shown, y, ml.zeros_like(y)), dtype)
    return ml.reshape(y, (*y.shape[:axis], *indices.shape, *y.shape[axis + 1 :]))
