"""Cases of panels, written element by element, and of products with weights that lie in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.rows import grouped

_rng = np.random.default_rng(8)


def _noise(dtype: Any, *shape: int) -> Array:
    return _rng.integers(-100, 100, shape).astype(dtype)


def _panels(y: Array, *, transpose_y: bool = False) -> Array:
    y = y.T if transpose_y else y.reshape(math.prod(y.shape[:-1]), y.shape[-1])
    (k, n), size = y.shape, y.dtype.itemsize
    side = {1: 4, 2: 2}.get(size, 1)
    rows = k if side == 1 else -(-k * size // 64) * 16
    out = np.zeros((-(-n // 32), rows, 32, side), y.dtype)
    for i, j in np.ndindex(k, n):
        out[j // 32, i // side, j % 32, i % side] = y[i, j]
    return out


def _matmul(x: Array, y: Array, *, transposed: bool = False) -> Case:
    a = x.swapaxes(-1, -2) if transposed else x
    how = {"columns": y.shape[1], "transpose_x": transposed}
    return Case((x, _panels(y)), lambda *_, **__: a.astype(np.float64) @ y, how)


def _of_windows(case: Case) -> Case:
    x, kernel = case.inputs
    how = {name: n for name, n in case.attributes.items() if name != "groups"}
    how |= {"window": kernel.shape[:-2], "columns": kernel.shape[-1]}
    expected = case.expected(x, kernel, **case.attributes)
    return Case((x, _panels(kernel)), lambda *_, **__: expected, how)


CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
