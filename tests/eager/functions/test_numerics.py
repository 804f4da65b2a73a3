"""Statistics and functions of a few ops where they are particular; their values are rows of a
table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(12)
t = ml.asarray
nan, inf = math.nan, math.inf


def test_gradients_past_nan() -> None:
    x = t(np.array([[1.0, nan, 3.0], [nan, nan, nan], [2.0, 5.0, 4.0]]))
    for fn in (ml.nansum, ml.nanmean, ml.nanvar, ml.nanmax, ml.nanmin):
        of: Any = fn
        gradient = ml.grad(lambda x, of=of: ml.nansum(of(x, axis=1)))(x).numpy()
        assert not np.isnan(gradient[[0, 2]]).any()
        assert gradient[0, 1] == 0.0


@pytest.mark.parametrize("dtype", ["i8", "u8", "i64"])
def test_integers(dtype: str) -> None:
    x = ml.astype(t([[5, 2, 9], [7, 2, 0]]), ml.TensorType(dtype, ()).dtype)
    a = x.numpy()
    assert ml.cummax(x, 1).tolist() == np.maximum.accumulate(a, axis=1).tolist()
    assert ml.ptp(x, axis=1).tolist() == [7, 7]
    assert (ml.nansum(x).item(), ml.nanmax(x).item(), ml.nanmin(x).item()) == (25, 9, 0)
    assert ml.nan_to_num(x).tolist() == a.tolist()
    assert ml.kron(x, x).tolist() == np.kron(a, a).tolist()
    assert ml.diag(x[0]).tolist() == np.diag(a[0]).tolist()
    assert ml.isclose(x, x[0]).tolist() == np.isclose(a, a[0]).tolist()
    for name in ("median", "average", "cov", "nanmean", "nanstd", "corrcoef"):
        result = getattr(ml, name)(x[:, :2])
        assert result.dtype is ml.float32
        with np.errstate(all="ignore"):
            expected = getattr(np, name)(a[:, :2].astype(np.float64))
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
    assert ml.fmod(t([7, -7]), t([-3, 3])).tolist() == [1, -1]


def test_i0_is_accurate() -> None:
    x = np.concatenate([np.linspace(0, 60, 301), [100.0, 500.0, 700.0]])
    np.testing.assert_allclose(ml.i0(t(x)).numpy(), np.i0(x), rtol=3e-15)
    assert math.isfinite(ml.i0(t(np.array(712.0))).item())  # where e^x is infinite
    narrow = x[x < 91].astype(np.float32)
    expected = np.i0(narrow.astype(np.float64))
    np.testing.assert_allclose(ml.i0(t(narrow)).numpy(), expected, rtol=2e-6)


def test_logit_is_accurate_around_its_zero() -> None:
    away = np.array([1e-12, -3e-10, 1e-6, -0.1, 0.2499, 0.2501])
    expected = 2 * np.arctanh(2 * away)
    np.testing.assert_allclose(ml.logit(t(0.5 + away)).numpy(), expected, rtol=1e-4)
    close = np.array([0.5 + 2.0**-40, 0.5 - 2.0**-45])
    np.testing.assert_allclose(ml.logit(t(close)).numpy(), 4 * (close - 0.5), rtol=1e-15)
    assert ml.logit(t([0.0, 1.0])).tolist() == [-inf, inf]
    assert math.isnan(ml.logit(t([1.5])).item())
    gradient = ml.grad(lambda x: ml.sum(ml.logit(x)))(t([0.5, 0.1, 1e-6])).numpy()
    np.testing.assert_allclose(gradient, [4.0, 1 / 0.09, 1e6], rtol=1e-5)


# --- unique --------------------------------------------------------------------------

SETS: dict[str, Array] = {
    "rows": RNG.integers(0, 2, (9, 3)),
    "five columns": RNG.integers(-1, 2, (20, 5)),
    "grid": RNG.integers(0, 2, (4, 3, 2)),
    "floats": np.array([[0.0, 1.0], [-0.0, 1.0], [-inf, 2.0], [0.0, 0.5]], np.float32),
    "bools": RNG.random((6, 2)) > 0.5,
    "no columns": np.zeros((3, 0)),
    "no rows": np.zeros((0, 3)),
    "one": np.array([[7, 8]]),
    "u8": np.array([[255, 0], [1, 255], [255, 0]], np.uint8),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("axis", [0, -1, None])
def test_unique_is_numpys(name: str, axis: int | None) -> None:
    x = SETS[name]
    expected = np.unique(x, True, True, True, axis)
    results = ml.unique(t(x), True, True, True, axis)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.dtype.numpy == theirs.dtype
        np.testing.assert_array_equal(ours.numpy(), theirs.reshape(ours.shape))
    np.testing.assert_array_equal(ml.unique(t(x), axis=axis).numpy(), expected[0])


def test_unique_and_nan() -> None:
    x = np.array([nan, 1.0, nan, 0.0])
    for equal in (True, False):
        expected = np.unique(x, return_counts=True, equal_nan=equal)
        results = ml.unique(t(x), return_counts=True, equal_nan=equal)
        for ours, theirs in zip(results, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
    rows = t(np.array([[nan, 1.0], [nan, 1.0]]))
    assert ml.unique(rows, axis=0).shape == (1, 2)
    assert ml.unique(rows, axis=0, equal_nan=False).shape == (2, 2)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_fmod_has_the_ends_of_its_dtype(dtype: str) -> None:
    ends = np.iinfo(dtype)
    dividends = np.array([ends.min, ends.max, 5, 0, 1], dtype)
    divisors = dividends[dividends != 0]
    expected = np.fmod(dividends[:, None], divisors)
    result = ml.fmod(ml.asarray(dividends[:, None]), ml.asarray(divisors))
    np.testing.assert_array_equal(result.numpy(), expected)
