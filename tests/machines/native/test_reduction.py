"""Native reductions: odd shapes and axes, lengths around the borders of blocks, special values,
exactness, and the same bits on any number of threads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.types import Array, DType
from mlvm.machines.native.planners.reduction import collapsed
from tests.brief import cases
from tests.machines.native.planners import assert_same_bits, native, on_threads, reference

INF, NAN = np.inf, np.nan
LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 1023, 1024, 1025, 2079]
LENGTHS += [4095, 4097, 8191, 16385, 40_001]
MANY_AXES = ["sum", "mean", "prod", "var", "max", "min", "all", "any"]
ONE_AXIS = ["argmax", "argmin"]
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), None), ((1, 1), (0, 1)), ((17,), ()), ((5, 7), 0), ((7, 5), 1), ((3, 1, 5), 1),
    ((9, 10, 11), (0, 2)), ((3, 4, 5, 6), (0, 2)), ((3, 4, 5, 6), (1, 3)),
    ((2, 3, 4, 5, 6), (1, 3)), ((32, 32, 64), (0, 2)), ((4, 2000, 3), 1), ((2, 3, 5000), (0, 2)),
    ((700, 3, 40), (0, 2)), ((300, 2, 130, 7), (0, 2)), ((20_001, 3), 0), ((2_001, 64), 0),
    ((129, 257), 0), ((8, 5000), 0), ((3, 100_001), 1), ((3, 2500), 0), ((17, 17_000), 1),
    ((18, 90, 200), 1), ((20, 50, 2, 170), (1, 3)),
]  # fmt: skip
THREADS = (1, 2, 3, 5)


def random(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    rng = np.random.default_rng(math.prod(shape))
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if np.dtype(dtype).kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def check(name: str, x: Array, **attributes: Any) -> None:
    """Against the reference kernel of f64, and on any number of threads the same bits."""
    if name == "prod":  # neither too large nor too small
        x = (1 + 0.01 * x).astype(x.dtype)
    result = on_threads(name, x, threads=THREADS, **attributes)
    if x.dtype == np.float32:
        expected = reference(name, x.astype(np.float64), **attributes)
        tolerance = 1e-4 if name == "prod" else 3e-7
        scale = np.abs(x).max() if name in ("sum", "mean") else 0
        count = x.size // max(1, expected.size)
        slack = scale * 1e-7 * (math.sqrt(count) if name == "sum" else 1)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=slack)
    else:
        expected = reference(name, x, **attributes)
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-12 * x.size)
    assert result.shape == expected.shape


# --- shapes ---------------------------------------------------------------------------


@cases("dtype", np.float32, np.float64)
@pytest.mark.parametrize("name", MANY_AXES)
def test_rows_and_columns_of_any_length(name: str, dtype: Any) -> None:
    for n in LENGTHS:
        check(name, random((n,), dtype))
        check(name, random((3, n), dtype), axis=1)
        check(name, random((n, 5), dtype), axis=0)


@pytest.mark.parametrize("name", MANY_AXES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_axes(name: str, shape: tuple[int, ...], axis: Any) -> None:
    for dtype in (np.float32, np.float64):
        x = random(shape, dtype)
        check(name, x, axis=axis)
        check(name, np.array(x[(slice(9),) * x.ndim]), axis=axis, keepdims=True)


@pytest.mark.parametrize("name", ONE_AXIS)
@cases("dtype", np.float32, np.float64, np.int8, np.uint16, np.int32, np.int64)
def test_positions(name: str, dtype: Any) -> None:
    for i, n in enumerate(LENGTHS):
        others = [((3, n), 1), ((n, 5), 0), ((2, n, 3), 1)]
        for shape, axis in [((n,), None), others[i % 3]]:
            x = random(shape, dtype)
            check(name, x, axis=axis)
            check(name, x // 64 if x.dtype.kind in "iu" else np.round(x), axis=axis)  # ties


@given(st.lists(st.integers(1, 4), max_size=5), st.data())
def test_collapsed_axes_hold_the_same_elements(shape: list[int], data: st.DataObject) -> None:
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1)) if shape else st.just(set())))
    new = collapsed(tuple(shape), axes)
    x = np.arange(math.prod(shape)).reshape(shape)
    if new is None:
        assert len(shape) == 5 or axes
    else:
        assert x.reshape(new).sum((1, 3)).ravel().tolist() == x.sum(axes).ravel().tolist()


# --- dtypes ---------------------------------------------------------------------------


INTEGERS = [dtype for dtype in DType.all.values() if not dtype.is_inexact]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@cases("shape, axis",
    ((1,), 0), ((1025,), 0), ((5, 300), 1), ((300, 5), 0), ((40_000,), 0), ((9000, 3), 0),
)  # fmt: skip
def test_integers(dtype: DType, shape: tuple[int, ...], axis: int) -> None:
    x = random(shape, dtype.numpy)
    names = ["sum", "all", "any"]
    if dtype.is_integer:
        names += ["max", "min", "prod", "cumulative_sum", "cumulative_prod", *ONE_AXIS]
    for name in names:
        expected = reference(name, x, axis=axis)
        for threads in THREADS:
            result = native(name, x, axis=axis, threads=threads)
            np.testing.assert_array_equal(result, expected)


@cases("dtype", np.float32, np.float64, np.int32)
@cases("shape, axis", ((1,), 0), ((1000,), 0), ((3, 7), 1), ((7, 3), 0), ((3, 50, 2001), 1))
def test_running_sums_and_products(dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    for name in ("cumulative_sum", "cumulative_prod"):
        assert_same_bits(name, random(shape, dtype), axis=axis, threads=THREADS)


@cases("dtype", np.float32, np.float64)
@cases("axis", 0, 1)
def test_running_products_of_zeros_and_overflow(dtype: Any, axis: int) -> None:
    values = np.array([0, -0.0, 2, -3, 1e30, np.inf, -np.inf, np.nan, 1e-30], dtype)
    x = np.random.default_rng(3).choice(
        values, (40, 30), p=[0.08, 0.08, *[0.2] * 3, *[0.02] * 3, 0.18]
    )
    result = native("cumulative_prod", x, axis=axis, threads=2)
    expected = reference("cumulative_prod", x, axis=axis)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(
        np.signbit(result) & (result == 0), np.signbit(expected) & (expected == 0)
    )
    for row in x:
        products = native("cumulative_prod", row, axis=0, threads=1)
        is_zero = np.logical_and.accumulate(np.isfinite(row)) & np.logical_or.accumulate(row == 0)
        assert not products[is_zero].any()


# --- values ---------------------------------------------------------------------------


@cases("dtype", np.float32, np.float64)
@cases("n", 1, 2, 5, 40, 100, 2000, 20_000)
def test_special_values_anywhere(dtype: Any, n: int) -> None:
    for value, position in itertools.product([NAN, INF, -INF], [0, n // 2, n - 1]):
        plain = (1 + 0.01 * random((n,), dtype)).astype(dtype)  # their product is no 0, no inf
        x = plain.copy()
        x[position] = value
        columns = np.stack([x, -x, plain], 1)
        for name in ("sum", "mean", "max", "min", "prod", "var", "all", "any", *ONE_AXIS):
            for y, axis in [(x, 0), (columns, 0)]:
                expected = reference(name, y, axis=axis)
                np.testing.assert_allclose(
                    native(name, y, axis=axis), expected, rtol=1e-4, atol=1e-4
                )


@cases("dtype", np.float32, np.float64)
def test_the_first_of_equals_and_the_first_nan(dtype: Any) -> None:
    x = np.zeros((10_000, 4), dtype)
    for rows in ([5000, 9000], [3, 4100], [9999]):
        y = x.copy()
        y[rows, :2] = [3, -3]
        y[rows, 2:] = NAN
        for transposed in (False, True):
            z = y.T.copy() if transposed else y
            axis = int(transposed)
            first = rows[0]
            assert native("argmax", z, axis=axis).tolist() == [first, 0, first, first]
            assert native("argmin", z, axis=axis).tolist() == [0, first, first, first]
            assert np.array_equal(native("max", z, axis=axis), [3, 0, NAN, NAN], equal_nan=True)
            assert np.array_equal(native("min", z, axis=axis), [0, -3, NAN, NAN], equal_nan=True)


@cases("shape", (1_000_000,), (1_000_000, 1), (100_000, 10), (1000, 1000))
def test_large_sums_are_as_exact_as_pairwise_ones(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    errors, numpys = [], []
    for _ in range(5):
        x = rng.random(shape, np.float32)
        exact = x.astype(np.float64).sum(0)
        errors.append(np.abs(native("sum", x, axis=0) / exact - 1).max())
        pairwise = np.array([np.ascontiguousarray(c).sum() for c in x.reshape(len(x), -1).T])
        numpys.append(np.abs(pairwise.reshape(exact.shape) / exact - 1).max())
    assert max(errors) <= 1.5 * max(numpys) + 6e-8
