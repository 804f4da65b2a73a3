"""Cases of the ops that choose by indices or masks, as loops over the positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case

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
    shape = *updates.shape[:axis], length, *updates.shape[axis + indices.ndim :]
    return _index_add(np.zeros(shape, updates.dtype), updates, indices, axis)


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


def _flat_indices(*indices: Array, lengths: tuple[int, ...]) -> Array:
    positions = [index % max(n, 1) for index, n in zip(indices, lengths, strict=True)]
    return np.asarray(np.ravel_multi_index(tuple(positions), tuple(max(n, 1) for n in lengths)))


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
    result, rows = x.copy(), iter(np.broadcast_to(values, (len(values), *x.shape[mask.ndim :])))
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


CASES: dict[str, list[Case]] = {
    "take": [
        Case((_X, np.array([2, 0, 2, -1])), _take, {"axis": 1}),
        Case((_X, _MATRIX), _take, {"axis": -1}),
        Case((_X, np.array(1, np.uint64)), _take, {"axis": 0}),
        Case((np.arange(200), np.array([5, -100, -3], np.int8)), _take, {"axis": 0}),
    ],
    "weighted_take": [
        Case((_X, _rng.integers(0, 3, (2, 2, 3)), _rng.random((2, 2, 3)) + 0.1), _weighted_take),
        Case((_X, _rng.integers(0, 3, (1, 5, 2)), _rng.random((1, 5, 2)) + 0.1), _weighted_take),
        Case(
            (
                _F32,
                _rng.integers(0, 3, (1, 2, 9)),
                np.arange(18.0).reshape(1, 2, 9).astype("f") - 4,
            ),
            _weighted_take,
        ),
        Case(
            (_F32, np.array([[[0, 2]], [[1, 1]]], np.uint8), np.array([[[0, 1]], [[2, 0]]], "f")),
            _weighted_take,
        ),
    ],
    "scatter_add": [
        Case((_X, np.array([5, 0, 5])), _scatter_add, {"axis": 1, "length": 7}),
        Case((_X, _MATRIX), _scatter_add, {"axis": 0, "length": 3}),
        Case((_X[0], np.array(-1, np.int8)), _scatter_add, {"axis": -1, "length": 2}),
        Case((_X.astype("f"), np.array([1, 0], "B")), _scatter_add, {"axis": 0, "length": 2}),
        Case((_MATRIX, np.array([0, 0, 1])), _scatter_add, {"axis": 1, "length": 2}),
        Case((_X[0, 0], np.array([2, 0, 2, -1])), _scatter_add, {"axis": -1, "length": 3}),
    ],
    "index_add": [
        Case((_X[:, ::-1], _X, np.array([2, 0, 2])), _index_add, {"axis": 1}),
        Case((_X[0], _X, _MATRIX), _index_add, {"axis": 0}),
        Case((_X[0, 0], np.array(0.25), np.array(3, "B")), _index_add, {"axis": -1}),
        Case((_F32[:, 0], _F32[0].T[:2], np.array([1, 0, 1])), _index_add, {"axis": -1}),
        Case((_MATRIX, _MATRIX[:, :0], np.zeros(0, "i")), _index_add, {"axis": 1}),
        Case((_MATRIX, _MATRIX, np.array([0, 0, 1])), _index_add, {"axis": 1}),
    ],
    "index_reduce": [
        *[
            Case(
                (_X[0] * 3, _X.reshape(6, 4)[2:], np.array([2, 0, -1, 2])),
                _index_reduce,
                {"by": by},
            )
            for by in ("multiply", "minimum", "maximum")
        ],
        Case(
            (_F32[:, 0], _F32[0, :2, None] * 2, np.array([[1], [1]], "B")),
            _index_reduce,
            {"by": "maximum"},
        ),
        Case((_F32[0], _F32[1, :2], np.array([1, 1])), _index_reduce, {"by": "multiply"}),
        *[
            Case((_MATRIX, _MATRIX[[1, 0]] * 2, np.array([0, 0], "h")), _index_reduce, {"by": by})
            for by in ("multiply", "minimum", "maximum")
        ],
        Case((_MATRIX, _MATRIX[:0], np.zeros(0, "i")), _index_reduce, {"by": "minimum"}),
    ],
    "take_along_axis": [
        Case((_X, _ALONG), _take_along_axis, {"axis": 1}),
        Case((_X, np.array([[[3], [0], [-1]]] * 2, "h")), _take_along_axis, {"axis": -1}),
        Case((_MATRIX, np.array([[1, 0, 1]], "B")), _take_along_axis, {"axis": 0}),
    ],
    "scatter_add_along_axis": [
        Case((_X, _rng.integers(-5, 5, _X.shape)), _scatter_add_along_axis, _along)
        for _along in ({"axis": 0, "length": 5}, {"axis": -1, "length": 6})
    ],
    "dynamic_update": [
        Case((_X, -_X[:, 1:2], np.array(0)), _dynamic_update, {"axis": 1}),
        Case((_X, -_X[..., :2], np.array(-3, "b")), _dynamic_update, {"axis": -1}),
        Case((_MATRIX, -_MATRIX, np.array(0, "B")), _dynamic_update, {"axis": 0}),
    ],
    "one_hot": [
        Case((np.array([1, 0, 3]),), _one_hot, {"num_classes": 4}),
        Case((_MATRIX % 3,), _one_hot, {"num_classes": 3, "dtype": "f64"}),
        Case((np.array(2, np.uint8),), _one_hot, {"num_classes": 3, "dtype": "bool"}),
    ],
    "nonzero_indices": [
        Case((_MATRIX,), _nonzero_indices),
        Case((_MASK,), _nonzero_indices),
        Case((np.array([0.0, np.nan, 1.0]),), _nonzero_indices),
    ],
    "flat_indices": [
        Case((_MATRIX % 3, -1 - _MATRIX % 2), _flat_indices, {"lengths": (3, 2)}),
        Case((np.array([2, -3, 0], "b"),), _flat_indices, {"lengths": (3,)}),
        Case(
            (np.array(1, "B"), np.array(-4), np.array(0, "H")),
            _flat_indices,
            {"lengths": (2, 5, 1)},
        ),
        Case((np.zeros((0, 3), int),) * 2, _flat_indices, {"lengths": (0, 4)}),
    ],
    "index_set": [
        Case((_X[:, ::-1], _X, np.array([2, 0, 2])), _index_set, {"axis": 1}),
        Case((_X[0], _X[..., :1] * 3.0, _MATRIX), _index_set, {"axis": 0}),
        Case((_X, _X[:, 0] * 2.0, np.array([-12, 7, 11, 0])), _index_set, {"axis": 1, "axes": 2}),
        Case((_F32[:, 0], _F32[0, 0, 1], np.array([1, 3], "B")), _index_set, {"axis": -1}),
        Case((_MATRIX, _MATRIX[:, :0], np.zeros(0, "i")), _index_set, {"axis": 1}),
        Case((_MASK, np.array([True]), np.array([[1], [-1]], "h")), _index_set, {"axis": 1}),
    ],
    "mask_set": [
        Case((_X, _X[1, :, ::-1], _MASK), _mask_set),
        Case((_X, _X[0, :, :1], _MASK), _mask_set),
        Case((_X[:, :, 1:], _X[0, 0, 1:], _MASK), _mask_set),
        Case((_MATRIX, np.zeros((0, 3), int), np.array([False, False])), _mask_set),
        Case((_F32, _F32[_F32 > 0] * 2, _F32 > 0), _mask_set),
    ],
    "boolean_index": [
        Case((_X, _MASK), _boolean_index),
        Case((_X, _X > 0), _boolean_index),
        Case((_MATRIX, np.array([False, False])), _boolean_index),
    ],
    "mask_scatter": [
        Case((_X[0], _MASK), _mask_scatter, {"shape": (2, 3, 4)}),
        Case((_X.ravel(), np.ones((4, 6), bool)), _mask_scatter, {"shape": (4, 6)}),
        Case((np.zeros((0, 3), "i"), np.zeros(2, bool)), _mask_scatter, {"shape": (2, 3)}),
        Case((np.eye(2, 5, 1, "i1"), np.array([1, 0, 1], "?")), _mask_scatter, {"shape": (3, 5)}),
    ],
}
