"""Cases of the matrix products, as einsum with the axes spelt out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlvm.core.types import Array
from tests.cases.case import Case
from tests.rows import grouped

_rng = np.random.default_rng(3)


def _f64(*shape: int) -> Array:
    return _rng.standard_normal(shape)


def _einsum(subscripts: str) -> Callable[..., Array]:
    def expected(x: Array, y: Array, **_: bool) -> Array:
        return np.asarray(np.einsum(subscripts, x, y, optimize=False))

    return expected


def _z(*shape: int) -> Array:
    return _f64(*shape) + 1j * _f64(*shape)


def _in_f32(x: Array, y: Array) -> Array:
    return np.asarray(x.astype("f") @ y)


_T_X, _T_Y = {"transpose_x": True}, {"transpose_y": True}
_INTS = np.arange(6, dtype=np.int8).reshape(2, 3) * 20, np.arange(6, dtype=np.int32).reshape(3, 2)

CASES: dict[str, list[Case]] = grouped(globals(), "CASES")
