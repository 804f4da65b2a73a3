"""Statistics and functions of a few ops where they are particular; their values are rows of a
table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import refuses
from tests.slopes import check_slopes

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(12)
t = ml.asarray
nan, inf = math.nan, math.inf

X = RNG.normal(size=(3, 4, 5))
V = RNG.normal(size=7)


def test_quantiles_of_a_list() -> None:
    expected = np.quantile(X, [0.1, 0.7], axis=0)
    np.testing.assert_allclose(ml.quantile(t(X), [0.1, 0.7], axis=0).numpy(), expected, rtol=1e-12)
    assert ml.quantile(ml.ones(3), np.array([0.5])).dtype is ml.float32


def test_quantiles_of_a_captured_tensor() -> None:
    x, q = t(X), t([0.25, 2.0, -0.5])
    captured = ml.capture(lambda x, q: ml.quantile(x, q, axis=0))
    captured(x, q)
    for result in (captured(x, q), ml.quantile(x, q, axis=0)):
        np.testing.assert_allclose(result.numpy()[0], np.quantile(X, 0.25, axis=0))
        assert np.isnan(result.numpy()[1:]).all()


def test_gradients_past_nan() -> None:
    x = t(np.array([[1.0, nan, 3.0], [nan, nan, nan], [2.0, 5.0, 4.0]]))
    for fn in (ml.nansum, ml.nanmean, ml.nanvar, ml.nanmax, ml.nanmin):
        of: Any = fn
        gradient = ml.grad(lambda x, of=of: ml.nansum(of(x, axis=1)))(x).numpy()
        assert not np.isnan(gradient[[0, 2]]).any()
        assert gradient[0, 1] == 0.0


def test_bincount() -> None:
    x = np.array([4, 1, 1, 0, 4, 4])
    weights = RNG.normal(size=6)
    np.testing.assert_array_equal(ml.bincount(t(x)).numpy(), np.bincount(x))
    np.testing.assert_array_equal(ml.bincount(t(x), None, 9).numpy(), np.bincount(x, minlength=9))
    np.testing.assert_allclose(ml.bincount(t(x), t(weights)).numpy(), np.bincount(x, weights))
    assert ml.bincount(t(x.astype(np.uint8)), length=300).shape == (300,)
    assert ml.bincount(ml.zeros(0, dtype="i64"), minlength=2).tolist() == [0, 0]
    check_slopes(lambda w: ml.bincount(t(x), w), t(weights))
    captured = ml.capture(lambda x: ml.bincount(x, length=5))
    captured(t(x))
    assert captured(t(x)).tolist() == np.bincount(x).tolist()
    refuses(ml.errors.CaptureError, "", ml.capture(ml.bincount), t(x))


@pytest.mark.parametrize("dtype", ["i8", "u8", "i64"])
def test_integers(dtype: str) -> None:
    x = ml.astype(t([[5, 2, 9], [7, 2, 0]]), dtype)
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


def test_xlogy_has_no_gradient_where_nothing_is() -> None:
    x, y = t([0.0, 0.0, 2.0]), t([0.0, 3.0, 4.0])
    of_x, of_y = ml.grad(lambda p: ml.sum(ml.xlogy(*p)))((x, y))
    np.testing.assert_allclose(of_x.numpy(), [0.0, math.log(3), math.log(4)], rtol=1e-6)
    assert of_y.tolist() == [0.0, 0.0, 0.5]


def test_equal_rows_have_distance_0_and_no_slope() -> None:
    x = t([[1.0, 2.0], [3.0, 4.0]])
    gradient = ml.grad(lambda x: ml.sum(ml.cdist(x, x)))(x)
    assert np.isfinite(gradient.numpy()).all()
    assert ml.linalg.diagonal(ml.cdist(x, x)).tolist() == [0.0, 0.0]


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


def test_a_gradient_flows_into_unique_rows() -> None:
    x = t([[3.0, 1.0], [0.0, 2.0], [3.0, 1.0]])
    gradient = ml.grad(lambda x: ml.sum(ml.unique(x, axis=0) * t([[2.0], [5.0]])))(x)
    assert gradient.tolist() == [[5.0, 5.0], [2.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_fmod_has_the_ends_of_its_dtype(dtype: str) -> None:
    ends = np.iinfo(dtype)
    dividends = np.array([ends.min, ends.max, 5, 0, 1], dtype)
    divisors = dividends[dividends != 0]
    expected = np.fmod(dividends[:, None], divisors)
    result = ml.fmod(ml.asarray(dividends[:, None]), ml.asarray(divisors))
    np.testing.assert_array_equal(result.numpy(), expected)


def test_fmod_has_a_gradient_at_zero() -> None:
    x = ml.asarray([0.0, -0.0, 1.0, -1.0])
    assert ml.grad(lambda x: ml.sum(ml.fmod(x, 3.0)))(x).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert np.signbit(ml.fmod(x, 3.0).numpy()).tolist() == [False, True, False, True]


def test_a_line_meets_both_of_its_ends() -> None:
    for result in (ml.lerp(ml.asarray([1e20, 1.0]), ml.asarray([1.0, 1e20]), 1.0),):
        assert result.tolist() == [1.0, float(np.float32(1e20))]
    xp, fp = ml.asarray([0.0, 1.0]), ml.asarray([1e20, 1.0])
    assert ml.interp(ml.asarray([1.0, 2.0]), xp, fp).tolist() == [1.0, 1.0]
    x = ml.asarray([0.3, 0.7])
    assert ml.lerp(x, x, ml.asarray([0.1, 0.9])).tolist() == x.tolist()
    assert ml.grad(lambda x: ml.sum(ml.lerp(0.0 * x, 3.0, x)))(x).tolist() == [3.0, 3.0]


def test_the_edges_of_a_histogram_may_be_an_array_or_a_list() -> None:
    x = ml.asarray([0.5, 1.0, 2.5])
    for edges in ([0.0, 1.0, 3.0], (0, 1, 3), np.array([0.0, 1.0, 3.0])):
        counts, bounds = ml.histogram(x, edges)
        assert (counts.tolist(), bounds.tolist()) == ([1, 2], [0.0, 1.0, 3.0])
