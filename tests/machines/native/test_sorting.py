"""Native order: the reference kernel's, to the bit, on any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.types import Array, DType, bool_
from tests.brief import cases
from tests.machines.native.planners import assert_same_bits
from tests.machines.native.test_elementwise import REAL, special

SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((7, 1), -1), ((3, 2), -1), ((2, 16), 1), ((3, 65), 1), ((2, 192), 1), ((2, 193), 1),
    ((5, 300), -1), ((70_000,), 0), ((64, 5), 0), ((2, 90, 3), 1),
]  # fmt: skip


def _values(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Of all sizes, with nans, zeros of both signs and many that are equal."""
    rng, common = np.random.default_rng(shape), special(dtype)
    size = int(np.prod(shape))
    noise = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype.numpy)
    x: Array = np.where(rng.random(size) < 0.5, rng.choice(common, size), noise)
    return x.reshape(shape)


@cases("name", "sort", "argsort")
@pytest.mark.parametrize("dtype", [dtype for dtype in REAL if dtype is not bool_], ids=str)
@cases("descending", False, True)
def test_is_that_of_the_reference(name: str, dtype: DType, descending: bool) -> None:
    for shape, axis in SHAPES:
        x = _values(dtype, shape)
        assert_same_bits(name, x, axis=axis, descending=descending)


@pytest.mark.parametrize("dtype", [dtype for dtype in REAL if dtype is not bool_], ids=str)
@cases("descending", False, True)
@cases("shape, axis", ((7, 1), 1), ((3, 100), 1), ((520, 3), 0), ((2, 90, 3), 1))
def test_first_positions(shape: tuple[int, ...], axis: int, descending: bool, dtype: DType) -> None:
    length = shape[axis]
    for count in {1, min(3, length), length // 8 or 1, min(length, 70), length}:
        attributes: dict[str, Any] = {"axis": axis, "count": count, "descending": descending}
        assert_same_bits("top_indices", _values(dtype, shape), **attributes)


@pytest.mark.parametrize("dtype", [dtype for dtype in REAL if dtype is not bool_], ids=str)
@cases("right", False, True)
def test_places_among_edges_of_any_spacing(dtype: DType, right: bool) -> None:
    """The guess for equal spacing changes no place: edges are equally spaced, in clusters, equal,
    one, infinite, and largest."""
    x = _values(dtype, (999,))
    spaced = np.arange(101).astype(dtype.numpy)
    for edges in (spaced, spaced[:1], spaced[[7] * 9], spaced[[0, 1, 2, 98]], np.sort(x)):
        for keys in (x, spaced, spaced[::-1], x[:1]):
            assert_same_bits("searchsorted", edges, keys, right=right)
