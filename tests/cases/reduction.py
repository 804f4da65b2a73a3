"""Cases of the reductions: Python's own `math` and numpy's methods along one axis after another."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlvm.core.types import Array, DType
from tests.cases.case import Case

_rng = np.random.default_rng(2)

_X = (_rng.permutation(24) - 11.6).reshape(2, 3, 4) * 0.1  # distinct, away from 0
_F32 = _X.astype(np.float32)
_INTS = _rng.integers(-100, 100, (3, 4)).astype(np.int8)
_BYTES = _rng.integers(100, 255, (3, 4)).astype(np.uint8)
_BOOLS = np.array([[True, True], [True, False], [False, False]])


def _lists(of: Callable[[list[Any]], Any], dtype: Any = None) -> Callable[..., Array]:
    """`of` the list of elements that each result is made of, along the axes that are reduced."""

    def expected(x: Array, axis: Any = None, keepdims: bool = False, **rest: Any) -> Array:
        axes = range(x.ndim) if axis is None else np.atleast_1d(axis) % max(1, x.ndim)
        outer = [i for i in range(x.ndim) if i not in axes]
        moved = x.transpose(*outer, *[i for i in range(x.ndim) if i in axes])
        shape = [x.shape[i] for i in outer]
        rows = moved.reshape(math.prod(shape), -1)
        named = rest.pop("dtype", None)
        result = np.array([of(row.tolist(), **rest) for row in rows])
        full = [1 if i in axes else n for i, n in enumerate(x.shape)]
        result = result.reshape(full if keepdims else shape)
        return result.astype(DType.named(named).numpy if named else dtype or x.dtype)

    return expected


def _axes(of: Callable[..., Any], dtype: Any = None) -> list[Case]:
    """The axes that a reduction can be asked for."""
    expected = _lists(of, dtype)
    return [
        Case((_X,), expected),
        Case((_X,), expected, {"axis": 1}),
        Case((_X,), expected, {"axis": (-1, 0), "keepdims": True}),
        Case((_F32,), expected, {"axis": -1}),
    ]


def _sums(of: Callable[..., Any]) -> list[Case]:
    return [
        *_axes(of),
        Case((_INTS,), _lists(of, np.int64), {"axis": 0}),
        Case((_BYTES,), _lists(of, np.uint64), {"axis": (0,)}),
        Case((_F32,), _lists(of), {"axis": (), "dtype": "f64"}),
        Case((_BYTES[:, :1] - 99,), _lists(of), {"dtype": "i32"}),
    ]


def _var(values: list[float], correction: float = 0.0) -> float:
    n = len(values)
    mean = math.fsum(values) / n
    return math.fsum((v - mean) ** 2 for v in values) / (n - correction)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _logsumexp(values: list[float]) -> float:
    return math.log(math.fsum(map(math.exp, values)))


def _first(of: Callable[[list[Any]], Any]) -> list[Case]:
    expected = _lists(lambda values: values.index(of(values)), np.int64)
    ties = np.array([[1, 3, 3], [0, 0, 2]], np.int16)
    return [
        Case((_X,), expected),
        Case((_X,), expected, {"axis": 1, "keepdims": True}),
        Case((_X,), expected, {"keepdims": True}),
        Case((_F32,), expected, {"axis": -1}),
        Case((ties,), expected, {"axis": 1}),
    ]


def _decisions(of: Callable[[list[Any]], bool]) -> list[Case]:
    expected = _lists(of, np.bool_)
    return [
        Case((_BOOLS,), expected, {"axis": 1}),
        Case((_BOOLS,), expected),
        Case((_INTS * _BOOLS[:, :1],), expected, {"axis": (0,), "keepdims": True}),
        Case((np.array([0.0, np.nan]),), expected),
    ]


def _running(
    of: Callable[[Any, Any], Any], x: Array, axis: int | None = None, dtype: str | None = None
) -> Array:
    wide = {"i": np.int64, "u": np.uint64}.get(x.dtype.kind, x.dtype.type)
    along = np.moveaxis(x, axis or 0, -1)
    rows = along.reshape(-1, along.shape[-1]).tolist()
    result = [list(itertools.accumulate(row, of)) for row in rows]
    results = np.array(result, DType.named(dtype).numpy if dtype else wide)
    return np.moveaxis(results.reshape(along.shape), -1, axis or 0)


def _cumulative(of: Callable[[Any, Any], Any]) -> list[Case]:
    expected = partial(_running, of)
    return [
        Case((_X[0, 0],), expected),
        Case((_X,), expected, {"axis": 1}),
        Case((_F32,), expected, {"axis": -3, "dtype": "f64"}),
        Case((_INTS,), expected, {"axis": -1}),
        Case((_Z,), expected, {"axis": 1}),
    ]


_Z = (_X + 1j * _X[:, ::-1])[..., :2]


def _complex(of: Callable[..., Any], dtype: Any = None) -> list[Case]:
    return [
        Case((_Z,), _lists(of, dtype), {"axis": 1}),
        Case((_Z.astype("c8"),), _lists(of, dtype), {"axis": (0, 2), "keepdims": True}),
    ]


CASES: dict[str, list[Case]] = {
    "sum": [
        *_sums(math.fsum),
        Case((_BYTES,), _lists(sum, np.int32), {"axis": 1, "dtype": "i32"}),
        Case((_BYTES.view(np.int8),), _lists(sum, np.int32), {"axis": 0, "dtype": "i32"}),
        Case((_BOOLS,), _lists(sum, np.int64), {"axis": 0}),
        *_complex(sum),
        Case((_F32,), _lists(sum), {"dtype": "c128", "axis": 0}),
    ],
    "prod": [*_sums(math.prod), *_complex(math.prod)],
    "mean": [
        *_axes(_mean),
        Case((_INTS,), _lists(_mean, np.float32), {"axis": 0}),
        Case((_BOOLS,), _lists(_mean, np.float32)),
        *_complex(lambda values: sum(values) / len(values)),
    ],
    "var": [
        *_axes(_var),
        Case((_X,), _lists(_var), {"axis": (0, 1), "correction": 1}),
        Case((_X + 1000.0,), _lists(_var), {"axis": 2, "correction": 1.5}),
    ],
    "logsumexp": _axes(_logsumexp),
    "max": [*_axes(max), Case((_INTS,), _lists(max), {"axis": 0})],
    "min": [*_axes(min), Case((_BYTES,), _lists(min), {"axis": 0})],
    "argmax": _first(max),
    "argmin": _first(min),
    "all": [*_decisions(all), *_complex(all, np.bool_)],
    "any": [
        *_decisions(any),
        *_complex(any, np.bool_),
        Case((_Z * 0 + 1j,), _lists(any, np.bool_)),
    ],
    "cumulative_sum": _cumulative(operator.add),
    "cumulative_prod": [
        *_cumulative(operator.mul),
        Case((np.array([2.0, 0.0, 3.0, 0.0]),), partial(_running, operator.mul)),
    ],
}
