"""Gather, scatter and selection by indices, masks or order."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

import mlvm.eager as ml
from mlvm.core.errors import ModelError, ShapeError
from mlvm.core.rules import normalize_axis
from mlvm.core.types import Array
from mlvm.onnx.arrays import is_known
from mlvm.onnx.table import NodeCall, op
from mlvm.onnx.values import Value, bounded, plain, tensor


def positive(indices: Any, length: int) -> Any:
    """Check indices on the host, and let negative indices count from the end; return tensors."""
    if not isinstance(indices, np.ndarray):
        return indices
    if indices.size and not (-length <= indices.min() and indices.max() < length):
        raise ModelError(
            f"expected indices of {length} positions, got {indices.min()} to {indices.max()}"
        )
    return np.where(indices < 0, indices + length, indices)


def _require_shape(what: str, x: Any, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ShapeError(f"expected {what} of shape {list(shape)}, got {list(x.shape)}")


@op("Gather", "raw")
def gather(at: NodeCall, x: Value, indices: Value) -> Value:
    x, indices = plain(x), plain(indices)
    axis = normalize_axis(at.get("axis", 0), x.ndim)
    if is_known(indices):
        indices = positive(indices, x.shape[axis])
        if is_known(x):
            return np.take(x, indices, axis=axis)
        if indices.ndim == 0:
            return tensor(x)[(slice(None),) * axis + (int(indices),)]
    return ml.take(tensor(x), tensor(indices), axis=axis)


@op("GatherElements")
def gather_elements(at: NodeCall, x: Any, indices: Any) -> Any:
    axis = normalize_axis(at.get("axis", 0), x.ndim)
    indices = positive(indices, x.shape[axis])
    for i, n in enumerate(indices.shape):
        if i != axis and x.shape[i] != n:
            x = x[(slice(None),) * i + (slice(0, n),)]
    shape = (*x.shape[:axis], *indices.shape[axis : axis + 1], *x.shape[axis + 1 :])
    _require_shape("indices", indices, shape)
    return at.xp.take_along_axis(x, indices, axis=axis)


@op("GatherND com.microsoft.GatherND")
def gather_nd(at: NodeCall, x: Any, indices: Any) -> Any:
    b = at.get("batch_dims", 0)
    shape = (*x.shape[:b], *indices.shape[:-1][b:], *indices.shape[-1:])
    _require_shape("indices", indices, shape)
    batch = np.indices(indices.shape[:b], sparse=True)
    inner = (1,) * (indices.ndim - 1 - len(batch))
    return x[(*(each.reshape(each.shape + inner) for each in batch), *_columns(indices))]


def _columns(indices: Any) -> tuple[Any, ...]:
    """Return the indices of each axis, which are stored along the last axis."""
    return tuple(indices[..., k] for k in range(indices.shape[-1]))


_COMBINE: Final = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


def _scattered_on_host(x: Array, index: tuple[Array, ...], updates: Array, how: str) -> Array:
    """Replace elements of a copy of x at `index`, or combine them with `updates`."""
    y, by = x.copy(), _COMBINE[how]
    if by == "set":
        y[index] = updates
    else:
        getattr(np, {"max": "maximum", "min": "minimum"}.get(by, by)).at(y, index, updates)
    return y


@op("ScatterND")
def scatter_nd(at: NodeCall, x: Any, indices: Any, updates: Any) -> Any:
    how = at.get("reduction", "none")
    _require_shape("updates", updates, (*indices.shape[:-1], *x.shape[indices.shape[-1] :]))
    if at.is_host:
        return _scattered_on_host(x, _columns(indices), updates, how)
    return getattr(x.at[_columns(indices)], _COMBINE[how])(updates)


@op("ScatterElements Scatter")
def scatter_elements(at: NodeCall, x: Any, indices: Any, updates: Any) -> Any:
    axis, how = normalize_axis(at.get("axis", 0), x.ndim), at.get("reduction", "none")
    _require_shape("updates", updates, indices.shape)
    if indices.ndim != x.ndim:
        raise ModelError(f"expected indices with {x.ndim} dimensions, as x, got {indices.ndim}")
    indices = positive(indices, x.shape[axis])
    if not at.is_host:
        by = None if how == "none" else _COMBINE[how]
        return ml.scatter(x, axis, indices, updates, reduce=by)
    grid = [*np.indices(indices.shape, sparse=True)]
    grid[axis] = indices
    return _scattered_on_host(x, tuple(grid), updates, how)


@op("TensorScatter", "tensors", host=[2])
def tensor_scatter(at: NodeCall, cache: Any, update: Any, starts: Any = None) -> Any:
    axis = normalize_axis(at.get("axis", -2), cache.ndim)
    n, count = cache.shape[axis], update.shape[axis]
    begin = np.zeros(cache.shape[0], np.int64) if starts is None else starts
    _require_shape("updates", update, (*cache.shape[:axis], count, *cache.shape[axis + 1 :]))
    _require_shape("indices", begin, cache.shape[:1])
    ones = [1] * (cache.ndim - 1)
    lengths = [count if i == axis else 1 for i in range(cache.ndim)]
    places = begin.reshape(-1, *ones) + np.arange(count).reshape(lengths)
    if at.get("mode", "linear") == "circular":
        places = places % n
    return ml.put_along_axis(cache, ml.asarray(places), update, axis, inplace=False)


@op("TopK", host=[1], older={1: "k"})
def top_k(at: NodeCall, x: Any, k: Any) -> Any:
    count, axis = int(k.reshape(-1)[0]), normalize_axis(at.get("axis", -1), x.ndim)
    if not 0 <= count <= x.shape[axis]:
        raise ModelError(f"expected k up to {x.shape[axis]}, got {count}")
    descending = bool(at.get("largest", 1))
    if not at.is_host:
        return ml.topk(x, count, axis, largest=descending)
    order = np.argsort(np.flip(x, axis) if descending else x, axis=axis, stable=True)
    if descending:
        order = np.flip(x.shape[axis] - 1 - order, axis)
    order = order[(slice(None),) * axis + (slice(0, count),)]
    return np.take_along_axis(x, order, axis=axis), order.astype(np.int64)


@op("OneHot", "tensors", host=[1])
def one_hot(at: NodeCall, indices: Any, depth: Any, values: Any) -> Any:
    count, axis = int(np.ravel(depth)[0]), normalize_axis(at.get("axis", -1), indices.ndim + 1)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = bounded((count,))[0]
    places = ml.reshape(ml.arange(count, dtype=ml.int64), tuple(shape))
    whole = ml.astype(indices, ml.int64)
    whole = ml.expand_dims(ml.where(ml.less(whole, 0), whole + count, whole), axis=axis)
    return ml.where(ml.equal(places, whole), values[1], values[0])


@op("NonZero", "raw", host=[0])
def non_zero(at: NodeCall, x: Value) -> Value:
    return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)


@op("Compress", host=[1])
def compress(at: NodeCall, x: Any, condition: Any) -> Any:
    axis = at.get("axis")
    if axis is None:
        x, axis = at.xp.reshape(x, (-1,)), 0
    places = np.flatnonzero(condition[: x.shape[axis]])
    return at.xp.take(x, places if at.is_host else ml.asarray(places), axis=axis)


@op("Unique", host=[0])
def unique(at: NodeCall, x: Any) -> Any:
    axis = at.get("axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not at.get("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@op("NonMaxSuppression", host=[0, 1, 2, 3, 4])
def non_max_suppression(
    at: NodeCall, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    limit = 0 if most is None else int(most.reshape(-1)[0])
    above = 0.0 if overlap is None else float(overlap.reshape(-1)[0])
    bar = -math.inf if least is None else float(least.reshape(-1)[0])
    if at.get("center_point_box", 0):
        middle, half = boxes[..., :2], boxes[..., 2:] / 2
        low, high = middle - half, middle + half
    else:
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    area = np.prod(high - low, axis=-1)
    selected = []
    for n, of_classes in enumerate(scores):
        for k, score in enumerate(of_classes):
            order = np.argsort(-score, kind="stable")
            order = order[score[order] > bar]
            count = 0
            while len(order) and count < limit:
                best, order = order[0], order[1:]
                selected.append((n, k, best))
                count += 1
                end = np.minimum(high[n, best], high[n, order])
                sides = np.maximum(end - np.maximum(low[n, best], low[n, order]), 0)
                shared = np.prod(sides, axis=-1)
                union = area[n, best] + area[n, order] - shared
                order = order[~((shared > above * union) & (union > 0))]
    return np.asarray(selected, np.int64).reshape(-1, 3)


@op("TfIdfVectorizer", host=[0])
def tf_idf(at: NodeCall, x: Any) -> Any:
    pool = at.get("pool_int64s")
    if pool is None:
        raise ModelError("strings are not supported; use numbers")
    starts, columns = at["ngram_counts"], at["ngram_indexes"]
    weights, mode = at.get("weights"), at["mode"]
    low, high, skips = at["min_gram_length"], at["max_gram_length"], at["max_skip_count"]
    grams: dict[tuple[int, ...], int] = {}
    for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for place in range(start, end, n):
            grams[tuple(pool[place : place + n])] = len(grams)
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    counts = np.zeros(bounded((len(rows), max(columns, default=-1) + 1)), np.float32)
    for row, out in zip(rows, counts, strict=True):
        for n in range(low, high + 1):
            for skip in range(1, (skips if n > 1 else 0) + 2):
                for start in range(len(row) - skip * (n - 1)):
                    gram = tuple(int(v) for v in row[start : start + skip * (n - 1) + 1 : skip])
                    if gram in grams:
                        out[columns[grams[gram]]] += 1
    if mode != "TF":
        by = np.ones(counts.shape[1], np.float32)
        if weights is not None:
            for gram, weight in zip(columns, weights, strict=True):
                by[gram] = weight
        counts = (counts > 0) * by if mode == "IDF" else counts * by
    return counts.astype(np.float32).reshape(*x.shape[:-1], counts.shape[1])


@op("ai.onnx.ml.ArrayFeatureExtractor")
def array_feature_extractor(at: NodeCall, x: Any, indices: Any) -> Any:
    features = at.xp.take(x, at.xp.reshape(indices, (-1,)), axis=x.ndim - 1)
    return at.xp.reshape(features, (1, -1)) if x.ndim == 1 else features


@op("ai.onnx.ml.Binarizer", "elementwise")
def binarizer(at: NodeCall, x: Any) -> Any:
    return at.xp.astype(at.xp.greater(x, at.get("threshold", 0.0)), x.dtype)
