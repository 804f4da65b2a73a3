"""Cases of the creation ops, element by element."""

from __future__ import annotations

import math

import numpy as np

from mlvm.core.types import Array, DType, Shape
from tests.cases.case import Case


def _full(value: Array, shape: tuple[int, ...]) -> Array:
    return np.array([value.item()] * int(np.prod(shape)), value.dtype).reshape(shape)


def _arange(start: float, stop: float, step: float, dtype: str) -> Array:
    elements: list[float] = []
    while (start + len(elements) * step - stop) * step < 0:
        elements.append(start + len(elements) * step)
    return np.array(elements, DType.named(dtype).numpy)


def _linspace(start: float, stop: float, num: int, dtype: str, endpoint: bool = True) -> Array:
    gaps = max(1, num - 1) if endpoint else num
    elements = [(start * (gaps - i) + stop * i) / gaps for i in range(num)]
    return np.array(elements, DType.named(dtype).numpy)


def _zeros(shape: Shape, dtype: str) -> Array:
    return np.array([0] * math.prod(shape), DType.named(dtype).numpy).reshape(shape)


def _eye(rows: int, columns: int, dtype: str, k: int = 0) -> Array:
    elements = [[j - i == k for j in range(columns)] for i in range(rows)]
    return np.array(elements, DType.named(dtype).numpy).reshape(rows, columns)


def _range(start: float, stop: float, step: float, dtype: str) -> Case:
    return Case((), _arange, {"start": start, "stop": stop, "step": step, "dtype": dtype})


CASES: dict[str, list[Case]] = {
    "full": [
        Case((np.array(2.5),), _full, {"shape": (2, 3)}),
        Case((np.array(7, np.uint8),), _full, {"shape": ()}),
        Case((np.array(True),), _full, {"shape": (0, 2)}),
    ],
    "zeros": [
        Case((), _zeros, {"shape": (2, 3), "dtype": "f64"}),
        Case((), _zeros, {"shape": (), "dtype": "bool"}),
    ],
    "arange": [
        _range(0, 5, 1, "i64"),
        _range(10, -1, -3, "i8"),
        _range(-100, 120, 50, "i8"),
        _range(5, 0, -2, "u8"),
        _range(2**63, 2**63 + 5, 2, "u64"),
        _range(3, 3, 1, "i32"),
        _range(0, 1, 0.1, "f32"),
        _range(1.5, -2, -0.25, "f64"),
        _range(0.0, -5, 1, "f64"),
    ],
    "linspace": [
        Case((), _linspace, {"start": 0, "stop": 1, "num": 5, "dtype": "f64"}),
        Case((), _linspace, {"start": 2.0, "stop": -1.0, "num": 7, "dtype": "f32"}),
        Case((), _linspace, {"start": 1.0, "stop": 3, "num": 4, "endpoint": False, "dtype": "f64"}),
        Case((), _linspace, {"start": 1.0, "stop": 3, "num": 1, "dtype": "f64"}),
        Case((), _linspace, {"start": 1.0, "stop": 3, "num": 0, "dtype": "f32"}),
    ],
    "eye": [
        Case((), _eye, {"rows": 3, "columns": 3, "dtype": "f32"}),
        Case((), _eye, {"rows": 2, "columns": 4, "k": 1, "dtype": "i32"}),
        Case((), _eye, {"rows": 4, "columns": 2, "k": -2, "dtype": "f64"}),
        Case((), _eye, {"rows": 2, "columns": 2, "k": 5, "dtype": "bool"}),
        Case((), _eye, {"rows": 2, "columns": 3, "k": -7, "dtype": "f64"}),
    ],
}
