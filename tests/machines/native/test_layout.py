"""The native layout kernels: boxes of every kind and size against numpy's own views."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.types import Array
from tests.brief import cases
from tests.machines.native.planners import assert_same_bits, assert_same_in_place

DTYPES = ["?", "u1", "i2", "f4", "f8"]
SIZES = [0, 1, 3, 7, 17, 64, 255]


def _distinct(shape: Any, dtype: str = "f4") -> Array:
    """Elements that differ from their neighbours near and far, whatever the dtype holds."""
    x = np.arange(np.prod(shape, dtype=int)) * 2654435761 % 251
    return (x % 2 if dtype == "?" else x).astype(dtype).reshape(shape)


# --- permute_dims --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@cases("shape", *itertools.product(SIZES, SIZES))
def test_matrices_transposed(shape: tuple[int, int], dtype: str) -> None:
    assert_same_bits("permute_dims", _distinct(shape, dtype), axes=(1, 0))


@cases("axes", *itertools.permutations(range(4)))
@cases("shape", (3, 5, 4, 17), (2, 1, 33, 8), (4, 16, 16, 4), (2, 2, 2, 2))
def test_axes_in_any_order(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        assert_same_bits("permute_dims", _distinct(shape, dtype), axes=axes)


@given(st.data())
def test_permute_dims_of_any_shape(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), max_size=6))
    axes = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from(DTYPES))
    assert_same_bits("permute_dims", _distinct(shape, dtype), axes=tuple(axes))


# --- one operand after the other, pieces, borders ------------------------------------


@cases("axis", 0, 1, 2)
def test_concat(axis: int) -> None:
    for dtype in DTYPES:
        shapes = [[4, 3, 5] for _ in range(4)]
        for i, length in enumerate((1, 0, 7, 16)):
            shapes[i][axis] = length
        assert_same_bits("concat", *[_distinct(shape, dtype) for shape in shapes], axis=axis)


@given(st.data())
def test_windows_of_any_step(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    start, length, step = [], [], []
    for n in shape:
        first, by = data.draw(st.integers(0, n - 1)), data.draw(st.sampled_from([-3, -1, 1, 2, 5]))
        room = (n - 1 - first if by > 0 else first) // abs(by)
        start.append(first)
        step.append(by)
        length.append(data.draw(st.integers(0, room + 1)))
    window: dict[str, Any] = {"start": tuple(start), "step": tuple(step)}
    x = _distinct(shape, dtype)
    assert_same_bits("slice", x, length=tuple(length), **window)
    assert_same_bits("embed", _distinct(length, dtype), shape=tuple(shape), **window)
    for number in ("u1", "i2", "i4", "u8", "f4", "f8"):
        x, updates = _distinct(shape, number), _distinct(length, number)
        assert_same_in_place("slice_add", x, updates, **window)


@given(st.data())
def test_borders_flips_and_rolls(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = _distinct(shape, dtype)
    widths = [(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))) for _ in shape]
    value = data.draw(st.sampled_from([0.0, 1.0, *[1e300] * (dtype[0] == "f")]))
    assert_same_bits("pad", x, widths=tuple(widths), value=value)
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    assert_same_bits("flip", x, axis=axes)
    shift = data.draw(st.integers(-30, 30))
    assert_same_bits("roll", x, shift=shift, axis=axes)
    assert_same_bits("roll", x, shift=shift)


# --- triangles -----------------------------------------------------------------------


@cases("k", -(2**40), -3, -1, 0, 1, 2, 2**40)
@cases("shape", (5, 3), (3, 5), (2, 4, 4), (0, 3), (3, 0), (1, 1), (2, 300, 70))
def test_triangles(shape: tuple[int, ...], k: int) -> None:
    for dtype in DTYPES:
        x = _distinct(shape, dtype)
        assert_same_bits("tril", x, k=k)
        assert_same_bits("triu", x, k=k)
    assert_same_bits("tril", np.full(shape, np.nan), k=k)
