"""Cases of panels, written element by element, and of products with weights that lie in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlvm.core.types import Array
from tests.cases import windows
from tests.cases.case import Case

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


CASES: dict[str, list[Case]] = {
    "pack_panels": [
        Case((_noise(dtype, *shape),), _panels, {"transpose_y": turned})
        for dtype in ("f4", "f8", "u1", "i2")
        for shape in ((64, 32), (3, 70), (130, 5))
        for turned in (False, True)
    ]
    + [Case((_noise("f4", *shape),), _panels) for shape in ((3, 2, 4, 40), (0, 3), (3, 0))],
    "packed_matmul": [
        _matmul(_noise("f4", 3, 5), _noise("f4", 5, 40)),
        _matmul(_noise("f4", 1, 7), _noise("f4", 7, 1)),
        _matmul(_noise("f8", 2, 70, 9), _noise("f8", 9, 33)),
        _matmul(_noise("f4", 2, 9, 6), _noise("f4", 9, 64), transposed=True),
    ],
    "packed_conv2d": [
        _of_windows(case)
        for case in windows.CASES["conv2d"]
        if case.attributes.get("groups", 1) == 1
    ],
}
