"""Cases of the creation ops, element by element."""

from __future__ import annotations

import math

import numpy as np

from mlvm.core.types import Array, DType, Shape
from tests.cases.case import Case
from tests.rows import grouped


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


CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
