"""Reductions, scans along an axis, and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError
from mlvm.core.rules import normalize_axis
from mlvm.core.types import DType
from mlvm.onnx.arrays import is_known
from mlvm.onnx.ops.elementwise import activated_as
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import PermutedTensor, Value, in_memory, permuted, tensor

Reduce = Callable[[Any, Any, tuple[int, ...], bool], Any]


def widened(xp: Any, x: Any) -> Any:
    """Convert f16 and bf16 to f32, in which sums and squares do not overflow."""
    return xp.astype(x, xp.float32) if DType.of(x.dtype).is_half else x


def _sum(xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return xp.astype(xp.sum(x, axis=axes, keepdims=keep), x.dtype)


def _mean(xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    if DType.of(x.dtype).is_integer:
        total = xp.sum(x, axis=axes, keepdims=keep)  # in 64 bits: a narrow sum may wrap
        quotient = xp.floor_divide(xp.abs(total), math.prod(x.shape[axis] for axis in axes))
        return xp.astype(xp.sign(total) * quotient, x.dtype)  # round towards 0
    return xp.mean(x, axis=axes, keepdims=keep)


def _extreme(name: str) -> Reduce:
    def run(xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
        dtype = DType.of(x.dtype)
        if 0 in [x.shape[axis] for axis in axes]:
            shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
            if dtype.is_float:
                least = math.inf if name == "min" else -math.inf
            elif dtype.kind == "bool":
                least = name == "min"
            else:
                info = np.iinfo(str(dtype.numpy))
                least = info.max if name == "min" else info.min
            return xp.full(tuple(shape), least, dtype=x.dtype)
        if dtype.kind == "bool":
            return (xp.all if name == "min" else xp.any)(x, axis=axes, keepdims=keep)
        return getattr(xp, name)(x, axis=axes, keepdims=keep)

    return run


def _log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    if xp is np:
        for axis in axes:
            x = np.logaddexp.reduce(x, axis=axis, keepdims=True)
        return x if keep else np.squeeze(x, axes)
    if 0 in [x.shape[axis] for axis in axes]:
        return ml.log(_sum(ml, x, axes, keep))
    return ml.logsumexp(x, axis=axes, keepdims=keep)


_REDUCTIONS: dict[str, Reduce] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _extreme("max"),
    "ReduceMin": _extreme("min"),
    "ReduceProd": lambda xp, x, axes, keep: xp.astype(
        xp.prod(x, axis=axes, keepdims=keep), x.dtype
    ),
    "ReduceL1": lambda xp, x, axes, keep: _sum(xp, xp.abs(x), axes, keep),
    "ReduceL2": lambda xp, x, axes, keep: xp.sqrt(_sum(xp, x * x, axes, keep)),
    "ReduceLogSum": lambda xp, x, axes, keep: xp.log(_sum(xp, x, axes, keep)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": lambda xp, x, axes, keep: _sum(xp, x * x, axes, keep),
}


_IN_FLOATS: Final = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
_WIDENED: Final = (*_IN_FLOATS, "ReduceL1", "ReduceSumSquare", "ReduceSum", "ReduceProd")


def _reduced(name: str, xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    """Reduce x by an op: half precision in f32, and integers in f64 if the op needs floats."""
    wide = widened(xp, x) if name in _WIDENED else x
    if name in _IN_FLOATS and not DType.of(x.dtype).is_float:
        wide = xp.astype(x, xp.float64)
    y = _REDUCTIONS[name](xp, wide, axes, keep)
    return y if y.dtype == x.dtype else xp.astype(y, x.dtype)


_IDENTITIES: Final = (
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp"),
)
"""Reductions that are the identity without axes."""


@op(" ".join(_REDUCTIONS), "raw", host=[1], older={1: "axes"})
def reduction(at: NodeCall, x: Value, axes: Any = None) -> Value:
    name, node_axes = at.node.type, [] if axes is None else axes.reshape(-1).tolist()
    if not node_axes and at.get("noop_with_empty_axes", 0):
        if name in _IDENTITIES:
            return x
        chosen = []
    else:
        chosen = [normalize_axis(n, max(x.ndim, 1)) for n in node_axes or range(x.ndim)]
    keep = bool(at.get("keepdims", 1))
    if is_known(x):
        return np.asarray(_reduced(name, np, x, tuple(chosen), keep))
    y, order = in_memory(x)
    y = _reduced(name, ml, y, tuple(sorted(order[axis] for axis in chosen)), keep)
    if keep:
        return permuted(y, order)
    rest = [order[axis] for axis in range(x.ndim) if axis not in chosen]
    return permuted(y, [sorted(rest).index(axis) for axis in rest])


@op("ArgMax ArgMin")
def arg_extreme(at: NodeCall, x: Any) -> Any:
    axis, keep = at.get("axis", 0), bool(at.get("keepdims", 1))
    find = at.xp.argmax if at.node.type == "ArgMax" else at.xp.argmin
    if at.get("select_last_index", 0):
        y = x.shape[axis] - 1 - find(at.xp.flip(x, axis=axis), axis=axis, keepdims=keep)
    else:
        y = find(x, axis=axis, keepdims=keep)
    return at.xp.astype(y, at.xp.int64)


@op("Softmax LogSoftmax Hardmax", "raw")
def softmax(at: NodeCall, x: Value) -> Value:
    axis = at.get("axis", -1 if at.opset >= 13 else 1)
    function: Any = {"Softmax": ml.softmax, "LogSoftmax": ml.log_softmax, "Hardmax": _hardmax}
    name, shape = at.node.type.removeprefix("com.microsoft.Bias"), x.shape
    if at.opset < 13 and math.prod(shape[axis % x.ndim + 1 :]) != 1:
        outer, inner = shape[: axis % x.ndim], shape[axis % x.ndim :]
        rows = ml.reshape(tensor(x), (math.prod(outer), math.prod(inner)))
        y = function[name](rows, axis=-1)
        return ml.reshape(y, shape)
    y, order = in_memory(x)
    return permuted(function[name](y, axis=order[axis]), order)


@op("com.microsoft.BiasSoftmax", "raw")
def bias_softmax(at: NodeCall, x: Value, bias: Value) -> Value:
    return softmax(at, tensor(x) + tensor(bias))


def _hardmax(x: Any, axis: int) -> Any:
    if not x.size:
        return x
    hot = ml.one_hot(ml.argmax(x, axis=axis), x.shape[axis], dtype=x.dtype)
    return ml.moveaxis(hot, -1, axis)


@op("CumSum CumProd", host=[1])
def cumulate(at: NodeCall, x: Any, axis: Any) -> Any:
    along, xp = normalize_axis(int(axis.reshape(-1)[0]), x.ndim), at.xp
    is_sum = at.node.type == "CumSum"
    function = xp.cumulative_sum if is_sum else xp.cumulative_prod
    if at.get("reverse", 0):
        x = xp.flip(x, axis=along)
    if at.get("exclusive", 0):
        before = (slice(None),) * along
        first, rest = x[(*before, slice(0, 1))], x[(*before, slice(0, -1))]
        start = xp.zeros_like(first) if is_sum else xp.ones_like(first)
        x = xp.concat([start, rest], axis=along)
    y = xp.astype(function(widened(xp, x), axis=along), x.dtype)
    return xp.flip(y, axis=along) if at.get("reverse", 0) else y


@op("LpNormalization", "tensors")
def lp_normalization(at: NodeCall, x: Any) -> Any:
    axis, wide = at.get("axis", -1), widened(ml, x)
    if at.get("p", 2) == 1:
        length = ml.sum(ml.abs(wide), axis=axis, keepdims=True)
    else:
        length = ml.sqrt(ml.sum(wide * wide, axis=axis, keepdims=True))
    y = ml.where(ml.equal(length, 0.0), ml.zeros_like(wide), wide / length)
    return ml.astype(y, x.dtype)


@op("MeanVarianceNormalization", "tensors", across_channels=0, normalize_variance=1)
def mean_variance_normalization(at: NodeCall, x: Any) -> Any:
    axes = tuple(at.get("axes", [0, 2, 3]))
    wide = widened(ml, x)
    centered = wide - ml.mean(wide, axis=axes, keepdims=True)
    y = centered / (ml.sqrt(ml.mean(centered * centered, axis=axes, keepdims=True)) + 1e-9)
    return ml.astype(y, x.dtype)


@op("Det", "tensors")
def det(at: NodeCall, x: Any) -> Any:
    return ml.linalg.det(x)


@op("Einsum", "tensors")
def einsum(at: NodeCall, *xs: Any) -> Any:
    return ml.einsum(at["equation"].replace(" ", ""), *xs)


# --- products -----------------------------------------------------------------------------


def _turned(x: Value) -> tuple[Any, bool]:
    """Return a tensor, and whether its last two axes are swapped in memory."""
    if type(x) is PermutedTensor:
        n = x.ndim
        if n > 1 and x.axes == (*range(n - 2), n - 1, n - 2):
            return x.x, True
    return tensor(x), False


@op("MatMul", "raw")
def matmul(at: NodeCall, x: Value, y: Value) -> Value:
    if is_known(x) and is_known(y) and x.dtype.kind != "f":
        return np.matmul(x, y)
    (a, left), (b, right) = _turned(x), _turned(y)
    if b.ndim == 2 and a.ndim > 2 and not left:
        rows = ml.reshape(a, (-1, a.shape[-1])) if a.size else a
        product = ml.matmul(rows, b, transpose_y=right)
        return ml.reshape(product, (*a.shape[:-1], product.shape[-1]))
    return ml.matmul(a, b, transpose_x=left, transpose_y=right)


@op("Gemm com.microsoft.FusedGemm com.microsoft.TransposeMatMul com.microsoft.FusedMatMul", "raw")
def gemm(at: NodeCall, x: Value, y: Value, c: Value = None) -> Value:
    if at.get("transBatchA", 0):
        x = ml.moveaxis(tensor(x), 0, -2)
    if at.get("transBatchB", 0):
        y = ml.moveaxis(tensor(y), 0, -2)
    (a, left), (b, right) = _turned(x), _turned(y)
    left ^= bool(at.get("transA", 0)) and a.ndim > 1  # onnxruntime transposes no vectors
    right ^= bool(at.get("transB", 0)) and b.ndim > 1
    if DType.of(a.dtype).is_integer:
        a, b = (ml.swapaxes(m, -1, -2) if t else m for m, t in ((a, left), (b, right)))
        product = ml.matmul(a, b)
    else:
        product = ml.matmul(a, b, transpose_x=left, transpose_y=right)
    alpha, beta = at.get("alpha", 1.0), at.get("beta", 1.0)
    product = product if alpha == 1.0 else product * alpha
    if c is not None:
        product = product + (tensor(c) if beta == 1.0 else tensor(c) * beta)
    if at.get("activation"):
        names = "activation_alpha", "activation_beta", "activation_gamma"
        product = activated_as(at, at["activation"], product, *names)
    return product


@op("com.microsoft.Inverse", "tensors")
def inverse(at: NodeCall, x: Any) -> Any:
    wide = x if x.dtype == ml.float64 else ml.astype(x, ml.float32)
    return ml.astype(ml.linalg.inv(wide), x.dtype)


@op("com.microsoft.CDist", "tensors")
def cdist(at: NodeCall, x: Any, y: Any) -> Any:
    metric = at.get("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise ModelError(f"expected metric as sqeuclidean or euclidean, got {metric!r}")
    distance = ml.cdist(x, y)
    return distance if metric == "euclidean" else ml.square(distance)
