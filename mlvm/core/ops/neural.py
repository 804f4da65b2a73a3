"""Ops of neural networks: activations, losses, normalization.

An op `x_vjp` is the gradient of op `x` in one kernel: the first operand is the cotangent g of x's
result, followed by the operands of x. Float operands have one dtype, which is also the dtype of the
result. `out` must not be an operand, as kernels use it as workspace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mlvm.core.errors import ArgumentError, PositionError, ShapeError
from mlvm.core.op import op
from mlvm.core.ops.block_memory import block_length, blocks, memory_of
from mlvm.core.ops.erf import write_erf
from mlvm.core.ops.random import generator, require_key
from mlvm.core.ops.rows import row_sums, sum_rows
from mlvm.core.rules import normalize_axis, require, require_cotangent, require_one_float_dtype
from mlvm.core.types import Array, TensorType, f32


def _activation(x: TensorType, **_: object) -> TensorType:
    require("float", x)
    return x


def _vjp(g: TensorType, result: TensorType, x: TensorType) -> TensorType:
    """Return the type of x; check that `g` is the cotangent of a result of that type."""
    require_one_float_dtype(g, x)
    require_cotangent(g, result)
    return x


# --- activations ---------------------------------------------------------------------


@op(infer=_activation, elementwise=True, is_cheap=True)
def relu(out: Array, x: Array) -> None:
    """max(x, 0).

    >>> ml.relu([-1.0, 2.0])
    Tensor([0., 2.], f32[2])
    """
    np.maximum(x, 0, out=out)


@op(infer=_activation, links=True, slope="gelu_slope", is_cheap=True)
def gelu(out: Array, x: Array, *, approximate: bool = True) -> None:
    """x Phi(x), with Phi the standard normal distribution function (arXiv 1606.08415).

    Phi(x) is (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 if `approximate`, else exactly (1 +
    erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel).

    x: [...], floats, and so is the result. Raises `DTypeError` for a different dtype.

        >>> ml.gelu([-1.0, 0.0, 1.0])
        Tensor([-0.15880801,  0.        ,  0.841192  ], f32[3])
    """
    number = _numbers(x.dtype)
    for y, part in _pieces(out, x):
        if approximate:
            np.square(part, y)
            _tanh_of_cubic(y, y, part, number)
        else:
            write_erf(y, part * number.sqrt_half)
        y += number.one
        y *= number.half
        y *= part


@op(infer=_activation, links=True, in_place=1, public=False)
def gelu_slope(out: Array, x: Array, *, approximate: bool) -> None:
    """The derivative of `gelu`, Phi(x) + x Phi'(x)."""
    number = _numbers(x.dtype)
    work = memory_of(3, block_length(out.size), dtype=x.dtype)
    for y, piece in _pieces(out, x):
        slope, other, part = work[:, : y.size].reshape(3, *y.shape)
        np.clip(piece, -number.far, number.far, part)  # powers of larger numbers would overflow
        np.square(part, slope)
        if approximate:  # with t = tanh(u): (1 + t) (1/2 + (1 - t) x u' / 2)
            _tanh_of_cubic(y, slope, part, number)
            slope *= number.half_cubic_slope
            slope += number.half_linear
            slope *= part
            slope *= np.subtract(number.one, y, other)
            slope += number.half
            y += number.one
            y *= slope
        else:  # (1 + erf(x / sqrt(2)) + 2 x Phi'(x)) / 2
            write_erf(y, np.multiply(part, number.sqrt_half, other))
            slope *= -number.half
            np.exp(slope, slope)
            slope *= number.linear
            slope *= part
            y += number.one
            y += slope
            y *= number.half


def _pieces(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield blocks of arrays of the same shape; strided arrays are yielded whole.

    Strided arrays are already a block of a chain.
    """
    if not all(x.flags.c_contiguous for x in arrays):
        yield arrays
        return
    flat = [x.reshape(-1) for x in arrays]
    for block in blocks(arrays[0].size):
        yield tuple([x[block] for x in flat])


class _Numbers(NamedTuple):
    """Constants of `gelu` as 0-d arrays, which numpy processes twice as fast as Python's floats.

    u(x) = linear x + cubic x^3, so x u'(x) / 2 = x (half_linear + half_cubic_slope x^2). From `far`
    on, the slope is 0 or 1.
    """

    one: Array
    half: Array
    sqrt_half: Array
    linear: Array
    cubic: Array
    half_linear: Array
    half_cubic_slope: Array
    far: Array


@functools.cache
def _numbers(dtype: np.dtype[Any]) -> _Numbers:
    linear = math.sqrt(2 / math.pi)
    cubic = 0.044715 * linear
    values = (1, 0.5, math.sqrt(0.5), linear, cubic, linear / 2, 1.5 * cubic, 64)
    return _Numbers(*[np.array(value, dtype) for value in values])


def _tanh_of_cubic(out: Array, square: Array, x: Array, number: _Numbers) -> None:
    """Write tanh(sqrt(2 / pi) (x + 0.044715 x^3)). `square` is x^2, and may be `out`."""
    np.multiply(square, number.cubic, out)
    out += number.linear
    out *= x
    np.tanh(out, out)


def _dropout(x: TensorType, key: TensorType, rate: float) -> TensorType:
    require("float", x)
    require_key(key)
    if not 0 <= rate < 1:
        raise ArgumentError(f"expected rate in [0, 1), got {rate}")
    return x


@op(infer=_dropout)
def dropout(out: Array, x: Array, key: Array, *, rate: float) -> None:
    """x with each element kept with probability 1 - rate and divided by 1 - rate, or set to 0.

    The key and the shape determine which elements are kept (Srivastava et al., JMLR 15, 2014).
    """
    np.multiply(x, 1 / (1 - rate), out)
    draws, flat_out = generator(key), out.reshape(-1)
    for block in blocks(out.size):
        part = flat_out[block]
        np.copyto(part, 0, where=draws.random(part.size, np.float32) < rate)


# --- softmax and cross entropy -------------------------------------------------------


def _softmax(x: TensorType, axis: int) -> TensorType:
    require("float", x)
    normalize_axis(axis, x.ndim)
    return x


@op(infer=_softmax, precision="f32")
def softmax(out: Array, x: Array, *, axis: int = -1) -> None:
    """exp(x) / sum(exp(x)) along the axis, computed from x - max(x) to avoid overflow.

    x: [...], floats, and so is the result. Raises `AxisError` for an axis that x does not have,
    `DTypeError` for a different dtype.

        >>> ml.softmax([[0.0, 0.0], [1.0, 1001.0]])
        Tensor([[0.5, 0.5],
                [0. , 1. ]], f32[2,2])
    """
    np.subtract(x, _max(x, axis), out)
    np.exp(out, out)
    out /= np.add.reduce(out, axis, keepdims=True)


@op(infer=_softmax, precision="f32")
def log_softmax(out: Array, x: Array, *, axis: int = -1) -> None:
    """x - log(sum(exp(x))) along the axis, computed from x - max(x) to avoid overflow.

    x: [...], floats, and so is the result. Raises `AxisError` for an axis that x does not have,
    `DTypeError` for a different dtype.

        >>> ml.log_softmax([0.0, 0.0])
        Tensor([-0.6931472, -0.6931472], f32[2])
    """
    np.subtract(x, _max(x, axis), out)
    out -= np.log(np.add.reduce(np.exp(out), axis, keepdims=True))


def _max(x: Array, axis: int) -> Array:
    largest: Array = np.maximum.reduce(x, axis, keepdims=True, initial=-np.inf)
    return largest


def _cross_entropy(logits: TensorType, labels: TensorType) -> TensorType:
    require("float", logits)
    require("integer", labels)
    if not logits.ndim or labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"expected labels of shape {logits.shape[:-1]}, which is the shape of logits without "
            f"the class axis, got {labels.shape}"
        )
    return labels.with_dtype(logits.dtype)


@op(infer=_cross_entropy, precision="f32", may_raise=True)
def softmax_cross_entropy(out: Array, logits: Array, labels: Array) -> None:
    """log(sum(exp(logits))) - logits[label] along the last axis, one loss per label.

    labels contains class indices 0 .. K-1 for logits of K classes; any other raises
    `PositionError`.
    """
    picked = _picked(logits, labels)
    shifted = _rows(logits - _max(logits, -1))
    chosen = shifted[picked]
    np.log(np.add.reduce(np.exp(shifted, shifted), -1), out.reshape(-1))
    out -= chosen.reshape(out.shape)


@op(
    infer=lambda g, logits, labels: _vjp(g, _cross_entropy(logits, labels), logits),
    public=False,
    may_raise=True,
)
def softmax_cross_entropy_vjp(out: Array, g: Array, logits: Array, labels: Array) -> None:
    """(softmax(logits) - one_hot(labels)) * g[..., None]: the gradient for logits."""
    picked = _picked(logits, labels)
    softmax.kernel(out, logits)
    _rows(out)[picked] -= 1
    out *= g[..., None]


def _picked(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the indices of each label's logit in `_rows(logits)`. Labels are read only once."""
    labels = labels.copy()
    classes = logits.shape[-1]
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        position = tuple(map(int, np.argwhere(bad)[0]))
        reason = f"label {labels[position]} at position {position} is none of the {classes} classes"
        raise PositionError(f"{reason} 0 .. {classes - 1}", position)
    return np.arange(labels.size), labels.reshape(-1)


def _rows(x: Array) -> Array:
    """Return x as a matrix; the last axis of x becomes the rows."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# --- layer normalisation -------------------------------------------------------------


def _layer_norm_normalize(x: TensorType, eps: float) -> TensorType:
    require("float", x)
    if not x.ndim:
        raise ShapeError("expected x with at least one axis, got a scalar")
    if not eps >= 0:
        raise ArgumentError(f"expected eps >= 0, got {eps}")
    return x


def _layer_norm(x: TensorType, *vectors: TensorType, eps: float) -> TensorType:
    """Return the type of the result. x may be in half precision if the vectors are f32."""
    _layer_norm_normalize(x, eps)
    if x.dtype.is_half and vectors and vectors[0].dtype is f32:
        x = x.with_dtype(f32)
    require_one_float_dtype(x, *vectors)
    for vector in vectors:
        if vector.shape != x.shape[-1:]:
            raise ShapeError(
                f"expected scale and bias of the shape of x's last axis, {x.shape[-1:]}, got "
                f"{vector.shape}"
            )
    return x


def _layer_norm_vjp(g: TensorType, x: TensorType, scale: TensorType, eps: float) -> TensorType:
    require_cotangent(g, _layer_norm(x, scale, eps=eps))
    return x


def _layer_norm_scale_vjp(g: TensorType, x: TensorType, eps: float) -> TensorType:
    result = _layer_norm(x, eps=eps)
    if x.dtype.is_half and g.dtype is f32:
        result = result.with_dtype(f32)
    return _vjp(g, result, result).with_shape(x.shape[-1:])


@op(infer=_layer_norm, precision="f32")
def layer_norm(out: Array, x: Array, scale: Array, bias: Array, *, eps: float) -> None:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axis (Ba et al., 2016).

    scale and bias are vectors with the length of that axis; var is the biased variance (arXiv
    1607.06450).

    x: [..., n], scale and bias: [n], floats of the same dtype -> [..., n]; with f32 vectors, x in
    half precision is widened. Raises `ShapeError` for a scale or bias of a different shape,
    `DTypeError` for other dtypes.

        >>> ml.layer_norm([[1.0, 2.0, 3.0]], ml.ones(3), ml.zeros(3), eps=1e-6)
        Tensor([[-1.224744,  0.      ,  1.224744]], f32[1,3])
    """
    rows_out, rows_x = _rows(out), _rows(x)
    ones, scales, biases = np.ones_like(scale), _repeated(scale, rows_x), _repeated(bias, rows_x)
    for block in blocks(*rows_x.shape):
        y = rows_out[block]
        y *= _center(y, rows_x[block], ones, eps)
        y *= scales[: len(y)]
        y += biases[: len(y)]


@op(infer=_layer_norm_normalize, public=False)
def layer_norm_normalize(out: Array, x: Array, *, eps: float) -> None:
    """(x - mean) / sqrt(var + eps) over the last axis: `layer_norm` before scale and bias."""
    rows_out, rows_x = _rows(out), _rows(x)
    ones = np.ones(x.shape[-1], x.dtype)
    for block in blocks(*rows_x.shape):
        y = rows_out[block]
        y *= _center(y, rows_x[block], ones, eps)


@op(infer=_layer_norm_vjp, public=False)
def layer_norm_vjp(out: Array, g: Array, x: Array, scale: Array, *, eps: float) -> None:
    """The gradient of `layer_norm` for x: (h - mean(h) - n mean(h n)) / sqrt(var + eps).

    Here h = g * scale, and n is x normalized.
    """
    rows_out, rows_g, rows_x = _rows(out), _rows(g), _rows(x)
    ones, scales = np.ones_like(scale), _repeated(scale, rows_x)
    length = x.shape[-1]
    centered_rows = memory_of(block_length(*rows_x.shape), length, dtype=x.dtype)
    for block in blocks(*rows_x.shape):
        y = rows_out[block]
        centered = centered_rows[: len(y)]
        inverse = _center(centered, rows_x[block], ones, eps)
        np.multiply(rows_g[block], scales[: len(y)], y)
        centered *= row_sums(y, centered) * np.square(inverse) / length  # n mean(h n)
        centered += row_sums(y, ones) / length
        y -= centered
        y *= inverse


@op(infer=_layer_norm_scale_vjp, public=False)
def layer_norm_scale_vjp(out: Array, g: Array, x: Array, *, eps: float) -> None:
    """The gradient of `layer_norm` for scale: the sum of g * n over all axes but the last.

    n is the result of `layer_norm_normalize`.
    """
    rows_g, rows_x = _rows(g), _rows(x)
    ones = np.ones(x.shape[-1], x.dtype)
    products = memory_of(block_length(*rows_x.shape), x.shape[-1], dtype=x.dtype)
    out.fill(0)
    for block in blocks(*rows_x.shape):
        part = rows_x[block]
        product = products[: len(part)]
        inverse = _center(product, part, ones, eps)
        product *= rows_g[block]
        out += sum_rows(product, inverse[:, 0])


def _center(out: Array, x: Array, ones: Array, eps: float) -> Array:
    """Write x - mean(x) of each row into `out`; return 1 / sqrt(var + eps) as a column.

    The variance is computed in a second pass, as the mean of the squares of `out`.
    """
    length = x.shape[-1]
    np.subtract(x, row_sums(x, ones) / length, out)
    inverse: Array = 1 / np.sqrt(row_sums(out, out) / length + eps)
    return inverse


def _repeated(vector: Array, rows: Array) -> Array:
    """Repeat the vector for each row of a block; return one row if there is only one block.

    numpy is half as fast with broadcasting, so a copy pays off if several blocks use it.
    """
    height = block_length(*rows.shape)
    return vector[None] if height == len(rows) else np.tile(vector, (height, 1))
