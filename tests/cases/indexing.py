"""Cases of the ops that choose by indices or masks, as loops over the positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case
from tests.rows import grouped

_rng = np.random.default_rng(6)

_X = (_rng.permutation(24) - 11.6).reshape(2, 3, 4) * 0.1  # distinct, away from 0
_F32 = _X.astype(np.float32)
_MATRIX = np.array([[2, -1, 0], [2, 2, -3]])
_ALONG = _rng.integers(-3, 3, (2, 5, 4))
_MASK = np.array([[True, False, True], [False, False, True]])


def _take(x: Array, indices: Array, axis: int) -> Array:
    axis %= x.ndim
    front = np.moveaxis(x, axis, 0)
    rows = np.stack([front[i] for i in indices.ravel().tolist()] or [front[:0].sum(0)])
    rows = rows[: indices.size].reshape(indices.shape + front.shape[1:])
    return np.moveaxis(rows, range(indices.ndim), range(axis, axis + indices.ndim))


def _weighted_take(x: Array, indices: Array, weights: Array) -> Array:
    out = np.zeros((len(x), indices.shape[1], x.shape[2]))
    for n, p, k in np.ndindex(len(x), *indices.shape[1:]):
        b = n % len(indices)
        out[n, p] += weights[b, p, k] * x[n, indices[b, p, k]].astype("d")
    return out


def _scatter_add(updates: Array, indices: Array, axis: int, length: int) -> Array:
    axis %= updates.ndim - indices.ndim + 1
    front = np.moveaxis(updates, range(axis, axis + indices.ndim), range(indices.ndim))
    result = np.zeros((length, *front.shape[indices.ndim :]), updates.dtype)
    for position in np.ndindex(indices.shape):
        result[indices[position]] += front[position]
    return np.moveaxis(result, 0, axis)


def _index_add(x: Array, updates: Array, indices: Array, axis: int) -> Array:
    result, front = np.moveaxis(x.copy(), axis, 0), axis % x.ndim
    rows = np.moveaxis(updates, range(front, front + indices.ndim), range(indices.ndim))
    for position in np.ndindex(indices.shape):
        result[indices[position]] += rows[position]
    return np.moveaxis(result, 0, axis)


def _index_reduce(x: Array, updates: Array, indices: Array, by: str) -> Array:
    result = x.copy()
    for position in np.ndindex(indices.shape):
        result[indices[position]] = getattr(np, by)(result[indices[position]], updates[position])
    return result


def _index_set(x: Array, values: Array, indices: Array, axis: int, axes: int = 1) -> Array:
    axis %= x.ndim
    result = x.copy()
    flat = result.reshape(*x.shape[:axis], -1, *x.shape[axis + axes :])
    source = np.broadcast_to(values, flat.shape[:axis] + indices.shape + flat.shape[axis + 1 :])
    for at in np.ndindex(*source.shape):
        index = int(indices[at[axis : axis + indices.ndim]])
        flat[(*at[:axis], index, *at[axis + indices.ndim :])] = source[at]
    return result


def _mask_set(x: Array, values: Array, mask: Array) -> Array:
    result, rows = x.copy(), iter(values)
    for position in np.ndindex(mask.shape):
        if mask[position]:
            result[position] = next(rows)
    return result


def _at(position: tuple[int, ...], axis: int, index: Any) -> tuple[int, ...]:
    axis %= len(position)
    return (*position[:axis], int(index), *position[axis + 1 :])


def _take_along_axis(x: Array, indices: Array, axis: int) -> Array:
    result = np.zeros(indices.shape, x.dtype)
    for position in np.ndindex(indices.shape):
        result[position] = x[_at(position, axis, indices[position])]
    return result


def _scatter_add_along_axis(updates: Array, indices: Array, axis: int, length: int) -> Array:
    result = np.zeros(_at(updates.shape, axis, length), updates.dtype)
    for position in np.ndindex(indices.shape):
        result[_at(position, axis, indices[position])] += updates[position]
    return result


def _one_hot(indices: Array, num_classes: int, dtype: str = "f32") -> Array:
    chosen = indices[..., None] == np.arange(num_classes)
    return np.asarray(chosen, DType.named(dtype).numpy)


def _dynamic_update(x: Array, update: Array, start: Array, axis: int) -> Array:
    result, first = np.moveaxis(x.copy(), axis, 0), int(start) % x.shape[axis]
    for i, row in enumerate(np.moveaxis(update, axis, 0)):
        result[first + i] = row
    return np.moveaxis(result, 0, axis)


def _nonzero_indices(x: Array) -> Array:
    positions = [position for position in np.ndindex(x.shape) if x[position]]
    return np.array(positions, np.int64).reshape(len(positions), x.ndim)


def _boolean_index(x: Array, mask: Array) -> Array:
    rows = [x[position] for position in np.ndindex(mask.shape) if mask[position]]
    return np.array(rows, x.dtype).reshape(len(rows), *x.shape[mask.ndim :])


def _mask_scatter(updates: Array, mask: Array, shape: tuple[int, ...]) -> Array:
    result, rows = np.zeros(shape, updates.dtype), iter(updates)
    for position in np.ndindex(mask.shape):
        if mask[position]:
            result[position] = next(rows)
    return result


CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
