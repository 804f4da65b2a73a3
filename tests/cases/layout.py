"""Cases of the layout ops: one result element after the other, from its position."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case

_rng = np.random.default_rng(4)

_X = (_rng.permutation(24) - 11.6).reshape(2, 3, 4) * 0.1  # distinct, away from 0
_F32 = _X.astype(np.float32)
_INTS = np.arange(-6, 6, dtype=np.int16).reshape(3, 4)
_BOOLS = np.array([[True, False, True], [False, False, True]])


def _build(shape: Sequence[int], dtype: Any, of: Callable[..., Any]) -> Array:
    """The tensor whose element at (i, j, ...) is of(i, j, ...)."""
    result = np.zeros(shape, dtype)
    for index in itertools.product(*map(range, shape)):
        result[index] = of(*index)
    return result


def _reshape(x: Array, shape: Sequence[int]) -> Array:
    return np.array(x.ravel().tolist(), x.dtype).reshape(shape)


def _permute_dims(x: Array, axes: Sequence[int]) -> Array:
    def source(*index: int) -> Any:
        places = dict(zip([a % x.ndim for a in axes], index, strict=True))
        return x[tuple(places[axis] for axis in range(x.ndim))]

    return _build([x.shape[a] for a in axes], x.dtype, source)


def _broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    def source(*index: int) -> Any:
        last = index[len(index) - x.ndim :]
        return x[tuple(0 if n == 1 else i for i, n in zip(last, x.shape, strict=True))]

    return _build(shape, x.dtype, source)


def _concat(*xs: Array, axis: int = 0) -> Array:
    rows = [row for x in xs for row in np.moveaxis(x, axis, 0)]
    return np.stack(rows, axis).astype(np.result_type(*xs))


def _flip(x: Array, axis: Any = None) -> Array:
    axes = range(x.ndim) if axis is None else np.atleast_1d(axis) % x.ndim
    index = tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim))
    return x[index]


def _roll(x: Array, shift: Any, axis: Any = None) -> Array:
    if axis is None:
        return _roll(x.ravel(), shift, 0).reshape(x.shape)
    for by, along in zip(*np.broadcast_arrays(np.atleast_1d(shift), axis), strict=True):
        x = np.take(x, (np.arange(x.shape[along]) - by) % x.shape[along], along)
    return x


def _pad(x: Array, widths: Any, value: float = 0.0) -> Array:
    return np.pad(x, widths, constant_values=value)


def _positions(start: Any, length: Any, step: Any) -> tuple[Array, ...]:
    columns = zip(start, length, step, strict=True)
    return np.ix_(*[np.array([i + k * by for k in range(n)], int) for i, n, by in columns])


def _slice(x: Array, start: Any, length: Any, step: Any) -> Array:
    return x[_positions(start, length, step)]


def _embed(x: Array, shape: Any, start: Any, step: Any) -> Array:
    result = np.zeros(shape, x.dtype)
    result[_positions(start, x.shape, step)] = x
    return result


def _slice_set(x: Array, values: Array, start: Any, length: Any, step: Any) -> Array:
    result, source = x.copy(), np.broadcast_to(values, length)
    for at in np.ndindex(*length):
        place = tuple(a + i * s for a, i, s in zip(start, at, step, strict=True))
        result[place] = source[at]
    return result


def _slice_add(x: Array, updates: Array, start: Any, step: Any) -> Array:
    return x + _embed(updates, x.shape, start, step)


def _tril(x: Array, k: int = 0) -> Array:
    return _build(x.shape, x.dtype, lambda *at: x[at] if at[-1] - at[-2] <= k else 0)


def _triu(x: Array, k: int = 0) -> Array:
    return _build(x.shape, x.dtype, lambda *at: x[at] if at[-1] - at[-2] >= k else 0)


def _rank(value: Any) -> Any:
    """Complex numbers are in the order of their real parts, then of their imaginary parts."""
    return (value.real, value.imag) if isinstance(value, complex) else value


def _order(x: Array, axis: int = -1, descending: bool = False) -> Array:
    def order(row: Array) -> list[int]:
        ranks = list(map(_rank, row.tolist()))
        return sorted(range(len(row)), key=ranks.__getitem__, reverse=descending)

    return np.apply_along_axis(order, axis, x).astype(np.int64)


def _first_of_order(x: Array, axis: int, count: int, descending: bool) -> Array:
    return np.moveaxis(np.moveaxis(_order(x, axis, descending), axis, 0)[:count], 0, axis)


def _sort(x: Array, axis: int = -1, descending: bool = False) -> Array:
    return np.apply_along_axis(
        lambda row: np.array(sorted(row.tolist(), key=_rank, reverse=descending), x.dtype), axis, x
    )


def _astype(x: Array, dtype: str) -> Array:
    return np.array(x.ravel().tolist()).astype(DType.named(dtype).numpy).reshape(x.shape)


def _counted_before(edges: Array, x: Array, right: bool) -> Array:
    """Count the edges before each element, of all; nan is the largest."""
    low, high = (edges[..., None, :], x[..., :, None])[:: -1 if right else 1]
    is_less = (low < high) | (np.isnan(high) & ~np.isnan(low))
    return np.sum(~is_less if right else is_less, axis=-1)


_TIES = np.array([[2, 1, 2, 1], [0, 0, 0, -1]], np.int32)
_ORDERS: list[tuple[Array, dict[str, Any]]] = [
    (_X, {}),
    (_X, {"axis": 0, "descending": True}),
    (_TIES, {"axis": -1}),
    (_TIES, {"axis": 1, "descending": True}),
    ((_TIES + 1j * _TIES[::-1]).astype(np.complex64), {}),
    (np.array([2 + 1j, 1 + 2j, 2 - 1j, 1, 1 + 2j], np.complex64), {"descending": True}),
    (np.array([2 + 1j, 1 + 2j, 3 - 1j]), {"descending": True}),
]
_SEARCHES: list[tuple[Array, Array]] = [
    (_X[0], _X[0][:, 1:]),
    (np.zeros((2, 0)), np.ones((2, 3))),
    (np.array([0.0, 1.0, 2.0, np.nan]), np.array([-1.0, 2.0, 7.0, np.nan, -0.0])),
    (np.array([-np.inf, 0.0, np.inf]), np.array([-np.inf, 5.0, np.inf])),
    (_TIES, _TIES[:, 1:]),
    (np.array([0, 1, 2, 3, 100], np.uint8), np.array([99, 100, 101, 0], np.uint8)),
]
_WINDOWS: list[dict[str, Any]] = [
    {"start": (0, 1, 3), "length": (2, 2, 2), "step": (1, 1, -2)},
    {"start": (1, 2, 0), "length": (2, 3, 0), "step": (-1, -1, 1)},
    {"start": (1, 2, 0), "length": (1, 1, 2), "step": (-5, 5, 3)},
]

_SMALL = {"start": (2, 3), "length": (2, 2), "step": (-1, -3)}
_TALL = {"start": (0, 0), "length": (2, 2), "step": (1, 2)}


def _view(x: Array, dtype: str) -> Array:
    return x.view(
        {"c128": np.complex128, "f64": np.float64}.get(dtype) or f"{dtype[0]}{int(dtype[1:]) // 8}"
    )


CASES: dict[str, list[Case]] = {
    "reshape": [
        Case((_X,), _reshape, {"shape": (4, 6)}),
        Case((_INTS,), _reshape, {"shape": (12, 1)}),
        Case((_X[:1, :1, :1],), _reshape, {"shape": ()}),
        Case((_X[:0],), _reshape, {"shape": (7, 0)}),
    ],
    "view": [
        Case((_X.reshape(3, 8),), _view, {"dtype": "c128"}),
        Case((_X * 1j,), _view, {"dtype": "f64"}),
        Case((_X,), _view, {"dtype": "i64"}),
        Case((_INTS.astype("i4"),), _view, {"dtype": "u8"}),
        Case((_X[0, 0, 0],), _view, {"dtype": "u64"}),
    ],
    "permute_dims": [
        Case((_X,), _permute_dims, {"axes": (2, 0, 1)}),
        Case((_INTS,), _permute_dims, {"axes": (-1, 0)}),
        Case((np.array(1.5),), _permute_dims, {"axes": ()}),
    ],
    "broadcast_to": [
        Case((_X[:, :1],), _broadcast_to, {"shape": (2, 2, 3, 4)}),
        Case((_INTS[:, :1],), _broadcast_to, {"shape": (3, 0)}),
        Case((np.array(1.5),), _broadcast_to, {"shape": (2, 2)}),
    ],
    "concat": [
        Case((_X, _X[:1] + 3.0), _concat),
        Case((_X, _X[:, :0], _X[:, 1:] + 3.0), _concat, {"axis": -2}),
        Case((_INTS, _INTS.astype(np.int64)), _concat, {"axis": 1}),
        Case((_BOOLS,), _concat, {"axis": 1}),
        Case((_INTS, _INTS * 0.5, _INTS * 1j), _concat, {"axis": 1}),
    ],
    "flip": [
        Case((_X,), _flip),
        Case((_X,), _flip, {"axis": (0, -1)}),
        Case((_INTS,), _flip, {"axis": 1}),
    ],
    "roll": [
        Case((_X,), _roll, {"shift": 5}),
        Case((_X,), _roll, {"shift": (1, -6), "axis": (0, -1)}),
        Case((_X,), _roll, {"shift": 2, "axis": (1, 2)}),
        Case((_INTS,), _roll, {"shift": -1, "axis": 1}),
    ],
    "pad": [
        Case((_X,), _pad, {"widths": ((0, 0), (1, 0), (2, 3))}),
        Case((_INTS,), _pad, {"widths": ((1, 1), (0, 2)), "value": -7}),
        Case((_BOOLS,), _pad, {"widths": ((1, 1), (0, 2)), "value": 1.0}),
        Case((_X[0, 0].astype("f"),), _pad, {"widths": ((1, 1),), "value": float("-inf")}),
    ],
    "slice": [
        *[Case((_X,), _slice, window) for window in _WINDOWS],
        Case((_INTS,), _slice, {"start": (2, 3), "length": (3, 2), "step": (-1, -3)}),
    ],
    "embed": [
        *[
            Case(
                (_slice(_X, **window),),
                _embed,
                {"shape": _X.shape, "start": window["start"], "step": window["step"]},
            )
            for window in _WINDOWS
        ],
        Case((_INTS,), _embed, {"shape": (5, 9), "start": (4, 0), "step": (-2, 2)}),
    ],
    "slice_add": [
        *[
            Case(
                (_X, _slice(_X[:, ::-1], **window)),
                _slice_add,
                {"start": window["start"], "step": window["step"]},
            )
            for window in _WINDOWS
        ],
        Case((_INTS, _INTS[1:, :2]), _slice_add, {"start": (2, 3), "step": (-1, -3)}),
        Case((np.array(1.5), np.array(-0.25)), _slice_add, {"start": (), "step": ()}),
        Case((_F32[0], _F32[1, :2, 1:]), _slice_add, {"start": (1, 1), "step": (1, 1)}),
    ],
    "slice_set": [
        *[Case((_X, _slice(_X[:, ::-1], **window)), _slice_set, window) for window in _WINDOWS],
        Case((_INTS, -_INTS[:1, 1]), _slice_set, _SMALL),
        Case((_INTS[:, :2].T, np.array([[7], [8]], "h")), _slice_set, _TALL),
        Case((np.array(1.5), np.array(-0.25)), _slice_set, {"start": (), "length": (), "step": ()}),
        Case((_X[0] > 0, np.array(True)), _slice_set, _TALL | {"start": (1, 1)}),
        Case(
            (_F32[0], _F32[1, 0, 1:]),
            _slice_set,
            {"start": (1, 0), "length": (2, 3), "step": (1, 1)},
        ),
    ],
    "tril": [
        Case((_X,), _tril),
        Case((_INTS,), _tril, {"k": 1}),
        Case((_BOOLS,), _tril, {"k": -1}),
    ],
    "triu": [
        Case((_X,), _triu),
        Case((_INTS,), _triu, {"k": 1}),
        Case((_BOOLS,), _triu, {"k": -1}),
    ],
    "sort": [Case((x,), _sort, attributes) for x, attributes in _ORDERS],
    "argsort": [Case((x,), _order, attributes) for x, attributes in _ORDERS],
    "searchsorted": [
        Case((np.sort(x), y), _counted_before, {"right": right})
        for x, y in _SEARCHES
        for right in (False, True)
    ],
    "top_indices": [
        Case((_X,), _first_of_order, {"axis": 1, "count": 2, "descending": False}),
        Case((_X,), _first_of_order, {"axis": -1, "count": 1, "descending": True}),
        Case((_TIES,), _first_of_order, {"axis": -1, "count": 3, "descending": True}),
        Case((_TIES,), _first_of_order, {"axis": 0, "count": 0, "descending": False}),
    ],
    "astype": [
        Case((_X,), _astype, {"dtype": "f32"}),
        Case((_X.astype("f"),), _astype, {"dtype": "f64"}),
        Case((10 * _X,), _astype, {"dtype": "i8"}),
        Case((_INTS,), _astype, {"dtype": "bool"}),
        Case((_BOOLS,), _astype, {"dtype": "f32"}),
        Case((_X,), _astype, {"dtype": "c64"}),
        Case((_X[0] * 1j,), _astype, {"dtype": "c64"}),
        Case((_X.astype("F"),), _astype, {"dtype": "c128"}),
        Case((_X[0] * np.array([0, 1j, 1, 0]),), _astype, {"dtype": "bool"}),
    ],
    "copy": [Case((x,), lambda x: x) for x in (_X, _INTS, _BOOLS, np.array(1.5))],
}
