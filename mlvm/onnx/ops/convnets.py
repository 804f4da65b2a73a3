"""Convolutions, pools, norms and losses, on channels-last images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.ops.windows import resolve_padding, span_of
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType, Shape
from mlvm.eager.tensor import primitives
from mlvm.onnx.ops.elementwise import activation
from mlvm.onnx.ops.reductions import widened
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import PermutedTensor, Value, in_memory, ordered, permuted, tensor

Sides = list[tuple[int, int]]


def channels_last(x: Value) -> Any:
    """Return [N, C, ...] as a tensor [N, ..., C]."""
    n = x.ndim
    if type(x) is PermutedTensor:
        if x.axes == (0, n - 1, *range(1, n - 1)):
            return x.x
        return ordered(x.x, [x.axes[0], *x.axes[2:], x.axes[1]])
    return ordered(tensor(x), (0, *range(2, n), 1))


def channels_second(y: Any) -> Value:
    """Return [N, ..., C] as [N, C, ...], without a copy."""
    n = y.ndim
    return permuted(y, (0, n - 1, *range(1, n - 1)))


def steps_of(at: NodeCall, window: Sequence[int]) -> tuple[list[int], list[int], Shape]:
    """Return the strides, the dilation, and the span of the dilated window."""
    ones = [1] * len(window)
    strides, dilation = at.get("strides") or ones, at.get("dilations") or ones
    return strides, dilation, span_of(tuple(window), tuple(dilation))


def sides(at: NodeCall, size: Shape, span: Shape, strides: list[int], *, up: bool = False) -> Sides:
    """Return the padding of each axis.

    With `up`, the last window may extend past the end, as with `ceil_mode`.
    """
    axes, kind = len(size), at.get("auto_pad", "NOTSET")
    if kind in ("SAME_UPPER", "SAME_LOWER"):
        pairs = resolve_padding("SAME", span, tuple(strides), size)
        return [(low, high) if kind == "SAME_UPPER" else (high, low) for low, high in pairs]
    pads = at.get("pads") if kind != "VALID" else None
    pads = pads or [0] * (2 * axes)
    padding = [(pads[i], pads[i + axes]) for i in range(axes)]
    if up:
        for i, (low, high) in enumerate(padding):
            n = size[i] + low + high
            count = -(-(n - span[i]) // strides[i]) + 1
            if (count - 1) * strides[i] >= size[i] + low:
                count -= 1
            padding[i] = low, max((count - 1) * strides[i] + span[i] - size[i] - low, high)
    return padding


def _kernel(xp: Any, node: Any, w: Any) -> Any:
    """Return [O, I, ...] as [..., I, O]."""
    return xp.permute_dims(w, (*range(2, w.ndim), 1, 0))


@op("Conv com.microsoft.FusedConv", "raw", packed={1: _kernel})
def conv(at: NodeCall, x: Value, kernel: Value, b: Value = None, z: Value = None) -> Value:
    y = convolved(at, channels_last(x), kernel, kernel.ndim - 2)
    if b is not None:
        y = y + tensor(b)
    if z is not None:
        y = y + channels_last(z)
    if at.get("activation"):
        y = activation(at["activation"], at.get("activation_params", ()))(y)
    return channels_second(y)


def _rows_kernel(xp: Any, node: Any, w: Any) -> Any:
    """Return [O, ..., I] as [..., I, O]."""
    return xp.moveaxis(w, 0, -1)


@op("com.microsoft.NhwcConv", "raw", packed={1: _rows_kernel})
def nhwc_conv(at: NodeCall, x: Value, kernel: Value, b: Value = None) -> Value:
    y = convolved(at, tensor(x), kernel, kernel.ndim - 2)
    return y if b is None else y + tensor(b)


def convolved(at: NodeCall, x: Any, kernel: Any, axes: int) -> Any:
    """Convolve x, channels last, with a kernel.

    Strides, padding and dilation are attributes of the call.
    """
    if axes > 3 or x.ndim != axes + 2:
        raise ModelError(f"expected 1 to 3 spatial axes, got {axes}")
    strides, dilation, span = steps_of(at, kernel.shape[:axes])
    function: Any = (ml.conv1d, ml.conv2d, ml.conv3d)[axes - 1]
    padding = sides(at, x.shape[1:-1], span, strides)
    options = _options(stride=strides, padding=padding, dilation=dilation)
    return function(x, kernel, groups=at.get("group", 1), **options)


def _options(**options: Any) -> dict[str, Any]:
    """Convert options to tuples with one element per axis.

    With a single axis, return the element.
    """
    return {name: tuple(x) if len(x) > 1 else x[0] for name, x in options.items()}


@op("ConvTranspose", "raw", packed={1: _kernel})
def conv_transpose(at: NodeCall, x: Value, kernel: Value, b: Value = None) -> Value:
    x, axes, groups = channels_last(x), kernel.ndim - 2, at.get("group", 1)
    strides, dilation, span = steps_of(at, kernel.shape[:axes])
    more, output_shape = at.get("output_padding") or [0] * axes, at.get("output_shape")
    pads, kind = at.get("pads") or [0] * (2 * axes), at.get("auto_pad", "NOTSET")
    whole, padding = [], []
    for i in range(axes):
        size = (x.shape[i + 1] - 1) * strides[i] + span[i]
        if output_shape is not None or kind.startswith("SAME"):
            target = (
                output_shape[-axes:][i] if output_shape is not None else x.shape[i + 1] * strides[i]
            )
            total = size + more[i] - target
            half = total // 2
            low = total - half if kind != "SAME_UPPER" else half
            low, high = (low, total - low) if total > 0 else (0, total)
        else:
            low, high = pads[i], pads[i + axes]
        padding.append((low, high - more[i]))
        whole.append(size)
    # positive padding cuts the result, negative padding appends zeros
    function: Any = (ml.conv_transpose1d, ml.conv_transpose2d, ml.conv_transpose3d)[axes - 1]
    cut = [(max(low, 0), max(high, 0)) for low, high in padding]
    options = _options(stride=strides, padding=cut, dilation=dilation)
    y = function(x, kernel, groups=groups, **options)
    widths = [(0, 0), *((max(-low, 0), max(-high, 0)) for low, high in padding), (0, 0)]
    if any(low or high for low, high in widths):
        y = ml.pad(y, widths)
    return channels_second(y if b is None else y + tensor(b))


# --- pools --------------------------------------------------------------------------------


def pooled(
    x: Any, how: str, window: list[int], strides: list[int], dilation: list[int], padding: Sides,
    **more: Any
) -> Any:  # fmt: skip
    """Pool x, channels last, by "max" (padded with the smallest value) or "avg" (with zeros)."""
    if len(window) > 3:
        raise ModelError(f"expected 1 to 3 spatial axes, got {len(window)}")
    span = span_of(tuple(window), tuple(dilation))
    room = [n + sum(p) - m for n, p, m in zip(x.shape[1:-1], padding, span, strict=True)]
    if any(-by <= n < 0 for n, by in zip(room, strides, strict=True)):  # no window fits
        counts = [max(n // by + 1, 0) for n, by in zip(room, strides, strict=True)]
        y = ml.zeros((x.shape[0], *counts, x.shape[-1]), dtype=x.dtype)
        return (y, ml.astype(y, ml.int64)) if more else y
    options = _options(window=window, stride=strides, padding=padding, dilation=dilation)
    return getattr(ml, f"{how}_pool{len(window)}d")(x, **options, **more)


def _windows(at: NodeCall, x: Any) -> tuple[list[int], list[int], list[int], Sides]:
    window = at["kernel_shape"]
    strides, dilation, span = steps_of(at, window)
    up = bool(at.get("ceil_mode", 0))
    return window, strides, dilation, sides(at, x.shape[1:-1], span, strides, up=up)


@op("MaxPool", "raw")
def max_pool(at: NodeCall, x: Value) -> Value:
    x = channels_last(x)
    dtype, options = x.dtype, _windows(at, x)
    x = x if DType.of(dtype).is_float else ml.astype(x, ml.float32)
    if not any(at.node.outputs[1:]):
        return channels_second(ml.astype(pooled(x, "max", *options), dtype))
    y, index = pooled(x, "max", *options, return_indices=True)
    n, *places, c = x.shape
    if at.get("storage_order", 0):
        numbers = np.arange(math.prod(places)).reshape(places, order="F")
        index = ml.take(ml.asarray(numbers.reshape(-1)), index, axis=0)
    image = np.arange(n * c).reshape(n, *[1] * len(places), c) * math.prod(places)
    return channels_second(ml.astype(y, dtype)), channels_second(index + ml.asarray(image))


@op("AveragePool", "raw")
def average_pool(at: NodeCall, x: Value) -> Value:
    return channels_second(averaged(at, channels_last(x)))


def averaged(at: NodeCall, x: Any) -> Any:
    """Average windows of x, channels last."""
    window, strides, dilation, padding = _windows(at, x)
    y = pooled(x, "avg", window, strides, dilation, padding)
    if any(low or high for low, high in padding):
        counted: Any = np.ones(x.shape[1:-1])
        if at.get("count_include_pad", 0):
            own_padding = sides(at, x.shape[1:-1], steps_of(at, window)[2], strides)
            counted = np.pad(counted, own_padding, constant_values=1.0)
            rest = [(0, max(b[1] - a[1], 0)) for a, b in zip(own_padding, padding, strict=True)]
            counted = np.pad(counted, rest)
        else:
            counted = np.pad(counted, padding)
        ones = ml.asarray(counted[None, ..., None], dtype=y.dtype)
        share = pooled(ones, "avg", window, strides, dilation, [(0, 0)] * len(window))
        y = y / ml.maximum(share, 1.0 / math.prod(window))
    return y


@op("LpPool", "raw")
def lp_pool(at: NodeCall, x: Value) -> Value:
    x, p = channels_last(x), at.get("p", 2)
    window, strides, dilation, padding = _windows(at, x)
    y = widened(ml, x)
    powers = ml.square(y) if p == 2 else ml.pow(ml.abs(y), float(p))
    total = pooled(powers, "avg", window, strides, dilation, padding) * float(math.prod(window))
    y = ml.sqrt(total) if p == 2 else ml.pow(total, 1.0 / p)
    return channels_second(ml.astype(y, x.dtype))


@op("GlobalAveragePool GlobalMaxPool GlobalLpPool", "raw")
def global_pool(at: NodeCall, x: Value) -> Value:
    x = channels_last(x)
    axes, name = tuple(range(1, x.ndim - 1)), at.node.type
    if name == "GlobalAveragePool":
        return channels_second(ml.mean(x, axis=axes, keepdims=True))
    if name == "GlobalMaxPool":
        return channels_second(ml.max(x, axis=axes, keepdims=True))
    p = float(at.get("p", 2))
    powers = ml.pow(ml.abs(widened(ml, x)), p)
    y = ml.pow(ml.sum(powers, axis=axes, keepdims=True), 1.0 / p)
    return channels_second(ml.astype(y, x.dtype))


@op("MaxUnpool", "tensors", host=[2])
def max_unpool(at: NodeCall, x: Any, places: Any, shape: Any = None) -> Any:
    window = at["kernel_shape"]
    strides, pads = at.get("strides") or [1] * len(window), at.get("pads") or [0] * 2 * len(window)
    size = [
        (n - 1) * s + k - pads[i] - pads[i + len(window)]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, window, strict=True))
    ]
    whole = (*x.shape[:2], *size)
    flat = ml.zeros((math.prod(whole),), dtype=x.dtype)
    y = primitives.index_set(flat, ml.reshape(x, (-1,)), ml.reshape(places, (-1,)), axis=0)
    y = ml.reshape(y, whole)
    if shape is None:
        return y
    return ml.pad(y, [(0, int(n) - m) for n, m in zip(shape, whole, strict=True)])


# --- norms --------------------------------------------------------------------------------


@op("BatchNormalization", "raw", is_test=1, spatial=1)
def batch_normalization(
    at: NodeCall, x: Value, scale: Value, bias: Value, mean: Value, var: Value
) -> Value:
    eps = at.get("epsilon", 1e-5)
    running: tuple[Any, ...] = ()
    gamma, beta, middle, spread = (tensor(v) for v in (scale, bias, mean, var))
    y, axes = in_memory(x)
    channel = axes[1] if y.ndim > 1 else 1
    shape = [1] * y.ndim
    if y.ndim > 1:
        shape[channel] = y.shape[channel]
    if at.get("training_mode", 0):
        rest = tuple(i for i in range(y.ndim) if i != channel)
        now, around = ml.mean(y, axis=rest), ml.var(y, axis=rest)
        keep = at.get("momentum", 0.9)
        running = middle * keep + now * (1 - keep), spread * keep + around * (1 - keep)
        middle, spread = now, around
    by = gamma / ml.sqrt(ml.astype(spread, gamma.dtype) + eps)
    shift = beta - ml.astype(middle, gamma.dtype) * by
    normal: Value = y * ml.astype(ml.reshape(by, tuple(shape)), y.dtype)
    normal = normal + ml.astype(ml.reshape(shift, tuple(shape)), y.dtype)
    normal = permuted(normal, axes)
    return (normal, *running) if running else normal


@op("InstanceNormalization GroupNormalization", "tensors")
def group_normalization(at: NodeCall, x: Any, scale: Any, bias: Any) -> Any:
    n, c, *places = x.shape
    groups = at.get("num_groups", c)
    if not x.size:
        return x
    if groups < 1 or c % groups:
        raise ModelError(f"expected a number of groups that divides {c} channels, got {groups}")
    inner = ml.reshape(x, (n, groups, math.prod(x.shape[1:]) // groups))
    inner = inner if x.dtype == ml.float64 else ml.astype(inner, ml.float32)
    y = primitives.layer_norm_normalize(inner, eps=at.get("epsilon", 1e-5))
    if scale.shape[0] != c:  # one per group, before opset 21
        scale, bias = (ml.reshape(v, (1, groups, 1)) for v in (scale, bias))
        return ml.reshape(ml.astype(y, x.dtype) * scale + bias, x.shape)
    y = ml.astype(ml.reshape(y, x.shape), x.dtype)
    shape = (1, c, *[1] * len(places))
    return y * ml.reshape(scale, shape) + ml.reshape(bias, shape)


@op("com.microsoft.GroupNorm com.microsoft.SkipGroupNorm", "tensors")
def group_norm(
    at: NodeCall, x: Any, scale: Any, bias: Any, skip: Any = None, added: Any = None
) -> Any:
    place, dtype, groups = (-1 if at.get("channels_last", 1) else 1), x.dtype, at["groups"]
    for each in (skip, added):
        if each is not None and each.ndim < x.ndim:
            each = ml.moveaxis(
                ml.reshape(each, (-1, *[1] * (x.ndim - 2), each.shape[-1])), -1, place
            )
        x = x if each is None else x + each
    y = ml.moveaxis(ml.astype(x, ml.float32), place, 1)
    if groups < 1 or y.shape[1] % groups:
        raise ModelError(f"expected groups that divide {y.shape[1]} channels, got {groups}")
    rows = ml.reshape(y, (y.shape[0], groups, math.prod(y.shape[1:]) // groups))
    rows = primitives.layer_norm_normalize(rows, eps=at.get("epsilon", 1e-5))
    by, shift = (ml.reshape(v, (-1, *[1] * (x.ndim - 2))) for v in (scale, bias))
    y = ml.reshape(rows, y.shape) * by + shift
    y = ml.silu(y) if at["activation"] else y
    return ml.astype(ml.moveaxis(y, 1, place), dtype), x


def normalized(x: Any, scale: Any, bias: Any, axis: int, eps: float) -> Any:
    """Apply layer norm over the axes from `axis` on."""
    inner, size = x.shape[axis:], math.prod(x.shape[axis:])
    rows = ml.reshape(x, (*x.shape[:axis], size))
    if bias is not None and scale.shape == bias.shape == inner and x.dtype == scale.dtype:
        by, shift = ml.reshape(scale, (size,)), ml.reshape(bias, (size,))
        return ml.reshape(primitives.layer_norm(rows, by, shift, eps=eps), x.shape)
    wide = rows if x.dtype == ml.float64 else ml.astype(rows, ml.float32)
    y = primitives.layer_norm_normalize(wide, eps=eps)
    y = ml.astype(ml.reshape(y, x.shape), x.dtype) * scale
    return y if bias is None else y + bias


@op("Normalized", "tensors")
def normalized_rows(at: NodeCall, x: Any) -> Any:
    """Normalise rows; graphs before opset 17 use seven nodes for this."""
    return primitives.layer_norm_normalize(x, eps=at["epsilon"])


@op("LayerNormalization", "tensors")
def layer_normalization(at: NodeCall, x: Any, scale: Any, bias: Any = None) -> Any:
    axis, eps = normalize_axis(at.get("axis", -1), x.ndim), at.get("epsilon", 1e-5)
    y = normalized(x, scale, bias, axis, eps)
    if not any(at.node.outputs[1:]):
        return y
    return y, *_statistics(x, axis, eps)


def _statistics(x: Any, axis: int, eps: float) -> list[Any]:
    """Return the means over the axes from `axis` on, and the inverse standard deviations."""
    axes, wide = tuple(range(axis, x.ndim)), widened(ml, x)
    spread = ml.rsqrt(ml.var(wide, axis=axes, keepdims=True) + eps)
    return [ml.astype(v, ml.float32) for v in (ml.mean(wide, axis=axes, keepdims=True), spread)]


@op("RMSNormalization SimplifiedLayerNormalization", "tensors")
def rms_normalization(at: NodeCall, x: Any, scale: Any) -> Any:
    axes = tuple(range(normalize_axis(at.get("axis", -1), x.ndim), x.ndim))
    wide = x if x.dtype == ml.float64 else ml.astype(x, ml.float32)
    by = ml.rsqrt(ml.mean(wide * wide, axis=axes, keepdims=True) + at.get("epsilon", 1e-5))
    return ml.astype(wide * by, x.dtype) * scale, ml.astype(by, ml.float32)


@op(
    "com.microsoft.SkipLayerNormalization com.microsoft.SkipSimplifiedLayerNormalization",
    "tensors",
    absent=[3, 4],
)
def skip_layer_normalization(at: NodeCall, x: Any, skip: Any, scale: Any, *rest: Any) -> Any:
    is_simple = "Simplified" in at.node.type
    beta, bias = [*[None] * is_simple, *rest, None, None][:2]  # simplified layer norm has no beta
    total = x + skip
    total = total if bias is None else total + bias
    eps = at.get("epsilon", 1e-12)
    statistics: list[Any] = [None, None]
    if is_simple:
        wide = widened(ml, total)
        by = ml.rsqrt(ml.mean(wide * wide, axis=-1, keepdims=True) + eps)
        y, statistics = ml.astype(wide * by, x.dtype) * scale, [ml.zeros_like(by), by]
    else:
        y = normalized(total, scale, beta, x.ndim - 1, eps)
        if any(at.node.outputs[1:3]):
            statistics = _statistics(total, x.ndim - 1, eps)
    return y, *statistics, total


@op("LRN", "raw")
def lrn(at: NodeCall, x: Value) -> Value:
    x, size = channels_last(x), at["size"]
    low, y = (size - 1) // 2, widened(ml, x)
    squares = ml.pad(y * y, [*[(0, 0)] * (x.ndim - 1), (low, size - 1 - low)])
    c = x.shape[-1]
    total = sum(squares[..., i : i + c] for i in range(size))
    by = at.get("bias", 1.0) + total * (at.get("alpha", 1e-4) / size)
    return channels_second(ml.astype(y / ml.pow(by, at.get("beta", 0.75)), x.dtype))


# --- training -----------------------------------------------------------------------------


@op("Dropout", "raw", host=[1, 2], older={1: "ratio"}, is_test=1)
def dropout(at: NodeCall, x: Value, ratio: Any = None, training: Any = None) -> Value:
    rate = 0.5 if ratio is None else float(ratio.reshape(-1)[0])
    is_training = training is not None and bool(training.reshape(-1)[0])
    if not is_training or rate == 0.0:
        return (x, np.ones(x.shape, np.bool_)) if any(at.node.outputs[1:]) else x
    ones = ml.dropout(ml.ones(x.shape, dtype=ml.float32), rate)
    x = tensor(x)
    return x * ml.astype(ones, x.dtype), ml.not_equal(ones, 0.0)


@op("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", "tensors")
def losses(at: NodeCall, x: Any, labels: Any, weight: Any = None) -> Any:
    is_softmax = at.node.type == "SoftmaxCrossEntropyLoss"
    scores = ml.log_softmax(x, axis=1) if is_softmax else x
    ignored, reduction = at.get("ignore_index"), at.get("reduction", "mean")
    labels = ml.astype(labels, ml.int64)
    if ignored is None:
        place, is_counted = labels, None
    else:
        is_counted = ml.not_equal(labels, ignored)
        place = ml.where(is_counted, labels, ml.zeros_like(labels))
    picked = ml.squeeze(ml.take_along_axis(scores, ml.expand_dims(place, axis=1), axis=1), axis=1)
    share = None
    if weight is not None:
        share = ml.take(weight, place, axis=0)
    if is_counted is not None:
        ones = ml.ones_like(picked) if share is None else share
        share = ml.where(is_counted, ones, ml.zeros_like(ones))
    loss = -picked if share is None else -picked * share
    if reduction == "sum":
        loss = ml.sum(loss)
    elif reduction == "mean":
        loss = ml.mean(loss) if share is None else ml.sum(loss) / ml.sum(share)
    return (loss, scores) if len(at.node.outputs) > 1 else loss
