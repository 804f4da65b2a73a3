"""Statistics, products, diagonals and other functions of a few ops against numpy: values, dtypes,
gradients, halves, and captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases, refuses
from tests.cases.special import digamma, inverse_of_erf, polygamma
from tests.slopes import check_slopes

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(12)
t = ml.asarray
untyped: Any = ml
nan, inf = math.nan, math.inf

X = RNG.normal(size=(3, 4, 5))
V = RNG.normal(size=7)
W = RNG.uniform(0.1, 2.0, size=7)
M = RNG.normal(size=(3, 6))
N = RNG.normal(size=(2, 6))
HOLES = np.where(RNG.random((4, 5)) < 0.3, nan, RNG.normal(size=(4, 5)))
HOLES[2] = nan
RISING = np.array([-1.0, 0.0, 0.5, 2.0, 3.5])
P = RNG.uniform(0.02, 0.98, size=9)


SPECIAL: dict[str, tuple[Callable[[float], float], Array]] = {
    "erfc": (math.erfc, 2 * V),
    "erfinv": (inverse_of_erf, P / 2),
    "lgamma": (math.lgamma, 5 * W),
    "digamma": (digamma, 5 * W),
}


class Row(NamedTuple):
    """`fn` of the namespace (mlvm's or numpy's) and operands, in f64; `expected`, where numpy has
    no such function. `smooth`: for which operands there are gradients."""

    fn: Callable[..., Any]
    operands: tuple[Any, ...]
    expected: Callable[..., Any] | None = None
    smooth: bool = True


def row(
    fn: Callable[..., Any],
    *operands: Any,
    expected: Callable[..., Any] | None = None,
    smooth: bool = True,
) -> Row:
    return Row(fn, operands, expected, smooth)


def logs(x: Array, axis: int) -> Array:
    return np.logaddexp.accumulate(x, axis)


def distances(p: float) -> Callable[..., Array]:
    return lambda x, y: np.linalg.norm(x[..., :, None, :] - y[..., None, :, :], ord=p, axis=-1)


ROWS: dict[str, Row] = {
    # --- statistics ---
    "median": row(lambda f, x: f.median(x), X),
    "median odd": row(lambda f, x: f.median(x), V),
    "median axis": row(lambda f, x: f.median(x, axis=1), X),
    "median axes": row(lambda f, x: f.median(x, axis=(0, 2), keepdims=True), X),
    "median nan": row(lambda f, x: f.median(x, axis=0), HOLES, smooth=False),
    "median inf": row(lambda f, x: f.median(x), np.array([inf, inf, 1.0, inf]), smooth=False),
    "quantile": row(lambda f, x: f.quantile(x, 0.3), X),
    "quantile axis": row(lambda f, x: f.quantile(x, 0.85, axis=-1, keepdims=True), X),
    "quantile ends": row(lambda f, x: (f.quantile(x, 0.0), f.quantile(x, 1, axis=1)), X),
    "quantiles": row(
        lambda f, x, q: f.quantile(x, q, axis=1), X, np.array([[0.01, 0.4], [0.9, 0.99]])
    ),
    "quantiles kept": row(
        lambda f, x, q: f.quantile(x, q, axis=(0, 1), keepdims=True), X, np.array([0.1, 0.4])
    ),
    **{
        f"quantile {how}": row(lambda f, x, how=how: f.quantile(x, 0.37, axis=0, method=how), X)
        for how in ("lower", "higher", "midpoint", "nearest")
    },
    "percentile": row(lambda f, x: f.percentile(x, 30.0, axis=1), X),
    "percentiles": row(lambda f, x, q: f.percentile(x, q), X, np.array([3.0, 50.0, 99.0])),
    "nansum": row(lambda f, x: f.nansum(x, axis=1), HOLES, smooth=False),
    "nansum all": row(lambda f, x: f.nansum(x, keepdims=True), HOLES, smooth=False),
    "nanmean": row(lambda f, x: f.nanmean(x, axis=0), HOLES, smooth=False),
    "nanmean smooth": row(lambda f, x: f.nanmean(x, axis=0), X),
    "nanvar": row(lambda f, x: f.nanvar(x, axis=0, correction=1), HOLES, smooth=False),
    "nanvar smooth": row(lambda f, x: f.nanvar(x, axis=(0, 1)), X),
    "nanstd": row(lambda f, x: f.nanstd(x), HOLES, smooth=False),
    "nanstd smooth": row(lambda f, x: f.nanstd(x, axis=2, keepdims=True), X),
    "nanmax": row(lambda f, x: f.nanmax(x, axis=0), HOLES, smooth=False),
    "nanmax smooth": row(lambda f, x: f.nanmax(x, axis=1), X),
    "nanmin": row(lambda f, x: f.nanmin(x, axis=1), HOLES, smooth=False),
    "nanmin smooth": row(lambda f, x: f.nanmin(x), X),
    "average": row(lambda f, x: f.average(x, axis=1), X),
    "average weights": row(lambda f, x, w: f.average(x, weights=w), V, W),
    "average axis": row(lambda f, x, w: f.average(x, axis=1, weights=w), X, W[:4]),
    "ptp": row(lambda f, x: f.ptp(x, axis=1), X),
    "cov": row(lambda f, x: f.cov(x), M),
    "cov vector": row(lambda f, x: f.cov(x), V),
    "cov y": row(lambda f, x, y: f.cov(x, y), M, N),
    "cov columns": row(
        lambda f, x: f.cov(x, rowvar=False, correction=0),
        M,
        expected=lambda x: np.cov(x, rowvar=False, ddof=0),
    ),
    "cov complex": row(lambda f, x: f.cov(x), M + 1j * M[::-1]),
    "corrcoef": row(lambda f, x: f.corrcoef(x), M),
    "corrcoef y": row(lambda f, x, y: f.corrcoef(x, y), V, W),
    "histogram": row(lambda f, x: f.histogram(x), X, smooth=False),
    "histogram bins": row(lambda f, x: f.histogram(x, 4, (-1, 1.5)), X, smooth=False),
    "histogram edges": row(lambda f, x, e: f.histogram(x, e), X, RISING, smooth=False),
    "histogram weights": row(lambda f, x, w: f.histogram(x, 5, weights=w)[0], V, W, smooth=False),
    "histogram density": row(lambda f, x: f.histogram(x, 6, density=True)[0], V, smooth=False),
    "histogram of one": row(lambda f, x: f.histogram(x, 3), np.full(4, 2.0), smooth=False),
    "histogram of none": row(lambda f, x: f.histogram(x, 3), np.zeros(0), smooth=False),
    "digitize": row(lambda f, x, b: f.digitize(x, b), X, RISING, smooth=False),
    "digitize one": row(lambda f, x, b: f.digitize(x[0, 0, 0], b), X, RISING, smooth=False),
    "digitize right": row(
        lambda f, x, b: f.digitize(x, b, right=True), RISING, RISING, smooth=False
    ),
    "digitize falling": row(
        lambda f, x, b: (f.digitize(x, b), f.digitize(b, b, right=True)),
        X,
        RISING[::-1].copy(),
        smooth=False,
    ),
    # --- running, and over places ---
    "cummax": row(
        lambda f, x: f.cummax(x, 1), X, expected=lambda x: np.maximum.accumulate(x, axis=1)
    ),
    "cummin": row(lambda f, x: f.cummin(x), V, expected=np.minimum.accumulate),
    "logcumsumexp": row(
        lambda f, x: f.logcumsumexp(x, axis=-1), X * 30, expected=lambda x: logs(x, -1)
    ),
    "trapezoid": row(lambda f, y: f.trapezoid(y, dx=0.5, axis=1), X),
    "trapezoid x": row(lambda f, y, x: f.trapezoid(y, x), X, RISING),
    "trapezoid grid": row(lambda f, y, x: f.trapezoid(y, x, axis=0), X, X**3),
    "interp": row(lambda f, x, xp, fp: f.interp(x, xp, fp), 3 * X, RISING, V[:5]),
    "interp ends": row(lambda f, x, xp, fp: f.interp(x, xp, fp, -1.5, 9.0), 3 * X, RISING, V[:5]),
    "interp one": row(lambda f, x, xp, fp: f.interp(x, xp, fp), V, RISING[:1], V[:1]),
    # --- products ---
    "dot": row(lambda f, x, y: f.dot(x, y), V, W),
    "dot matrix": row(lambda f, x, y: f.dot(x, y), M, N.T.copy()),
    "dot grid": row(lambda f, x, y: f.dot(x, y), X, RNG.normal(size=(2, 5, 3))),
    "dot scalar": row(lambda f, x, y: f.dot(x, y), X, np.array(2.5)),
    "inner": row(lambda f, x, y: f.inner(x, y), M, N),
    "inner scalar": row(lambda f, x, y: f.inner(x, y), np.array(2.5), X),
    "vdot": row(lambda f, x, y: f.vdot(x, y), M + 1j, N.repeat(3).reshape(6, 6)[:3] * 1j),
    "kron": row(lambda f, x, y: f.kron(x, y), M, N),
    "kron dimensions": row(lambda f, x, y: f.kron(x, y), X, V[:2]),
    "kron more": row(lambda f, x, y: f.kron(x, y), V[:3], X),
    "cross": row(lambda f, x, y: f.cross(x, y), X[..., :3], X[0, :, 2:]),
    **{
        f"cdist {p}": row(lambda f, x, y, p=p: f.cdist(x, y, p), M, N, expected=distances(p))
        for p in (0.0, 1.0, 2.0, 3.5, inf)
    },
    # --- diagonals and turns ---
    "diag": row(lambda f, x: (f.diag(x), f.diag(x, 2), f.diag(x, -1)), V),
    "diag of": row(lambda f, x: (f.diag(x), f.diag(x, 2), f.diag(x, -1)), M),
    "diagonal": row(lambda f, x: (f.diagonal(x), f.diagonal(x, 1, 2, 0)), X),
    "trace": row(lambda f, x: (f.trace(x), f.trace(x, -1, 2, 1)), X),
    "rot90": row(lambda f, x: tuple(f.rot90(x, k) for k in range(-1, 5)), M),
    "rot90 axes": row(lambda f, x: f.rot90(x, 1, (2, 1)), X),
    "tril_indices": row(
        lambda f, _: (*f.tril_indices(4), *f.tril_indices(3, -1, 5), *f.tril_indices(2, -4)),
        V,
        smooth=False,
    ),
    "triu_indices": row(
        lambda f, _: (*f.triu_indices(4), *f.triu_indices(3, 2, 5), *f.triu_indices(2, -4)),
        V,
        smooth=False,
    ),
    # --- elements ---
    "isclose": row(
        lambda f, x, y: (f.isclose(x, y), f.isclose(x, y, 0.1, 0.0, True), f.isclose(y, x, atol=1)),
        np.array([1.0, 1.0, inf, -inf, nan, 0.0, 2.0]),
        np.array([1 + 1e-6, 1.1, inf, inf, nan, 1e-9, 2.5]),
        smooth=False,
    ),
    "allclose": row(lambda f, x: (f.allclose(x, x + 1e-7), f.allclose(x, 0.5)), X, smooth=False),
    "array_equal": row(
        lambda f, x: (f.array_equal(x, x), f.array_equal(x, x[1:]), f.array_equal(x, x, True)),
        HOLES,
        smooth=False,
    ),
    "nan_to_num": row(
        lambda f, x: (f.nan_to_num(x), f.nan_to_num(x, nan=2.0, posinf=3.0, neginf=-4.0)),
        np.array([1.0, nan, inf, -inf]),
        smooth=False,
    ),
    "nan_to_num complex": row(
        lambda f, x: f.nan_to_num(x, nan=2.0, posinf=3.0),
        np.array([complex(1, nan), complex(inf, -2), complex(nan, inf)]),
        smooth=False,
    ),
    "lerp": row(
        lambda f, x, y, w: f.lerp(x, y, w),
        V,
        W,
        P[:7],
        expected=lambda x, y, w: x * (1 - w) + y * w,
    ),
    "fmod": row(lambda f, x, y: f.fmod(x, y), 9 * X, np.array([1.3, -2.1, 0.7, -0.9, 3.0])),
    "fmod edges": row(
        lambda f, x, y: f.fmod(x, y),
        np.array([1.0, -1.0, inf, 5.0, -0.0]),
        np.array([inf, -inf, 2.0, 0.0, 3.0]),
        smooth=False,
    ),
    "xlogy": row(lambda f, x, y: f.xlogy(x, y), V, W, expected=lambda x, y: x * np.log(y)),
    "xlogy edges": row(
        lambda f, x, y: f.xlogy(x, y),
        np.array([0.0, 0.0, 0.0, 2.0, 0.0]),
        np.array([0.0, inf, -1.0, 0.0, nan]),
        expected=lambda x, y: np.array([0.0, 0.0, 0.0, -inf, nan]),
        smooth=False,
    ),
    "logit": row(lambda f, x: f.logit(x), P, expected=lambda x: np.log(x / (1 - x))),
    "i0": row(lambda f, x: f.i0(x), np.linspace(-12, 12, 25)),
    **{
        name: row(
            lambda f, x, name=name: getattr(f, name)(x),
            SPECIAL[name][1],
            expected=np.vectorize(SPECIAL[name][0], otypes="d"),
        )
        for name in ("erfc", "erfinv", "lgamma", "digamma")
    },
    "polygamma": row(
        lambda f, x: f.polygamma(2, x), 3 * W, expected=np.vectorize(lambda v: polygamma(2, v))
    ),
    # --- counting ---
    "argwhere": row(lambda f, x: f.argwhere(x > 0), X, smooth=False),
    "flatnonzero": row(lambda f, x: f.flatnonzero(x > 0), X, smooth=False),
}
DYNAMIC = {"argwhere", "flatnonzero"}
"""Functions whose result's shape depends on values: no captured function has them."""

parametrized = pytest.mark.parametrize("name", ROWS)


def several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def expected_of(row: Row, operands: tuple[Any, ...]) -> tuple[Array, ...]:
    of = row.expected or (lambda *xs: row.fn(np, *xs))
    with np.errstate(all="ignore"):
        return tuple(map(np.asarray, several(of(*operands))))


@parametrized
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_as_numpy(name: str) -> None:
    row = ROWS[name]
    results = several(row.fn(ml, *map(t, row.operands)))
    for result, reference in zip(results, expected_of(row, row.operands), strict=True):
        assert (result.numpy().dtype, result.shape) == (reference.dtype, reference.shape)
        np.testing.assert_allclose(result.numpy(), reference, rtol=1e-12, atol=1e-13)


@parametrized
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_f32_and_in_halves(name: str) -> None:
    row = ROWS[name]
    if any(np.iscomplexobj(x) for x in row.operands):
        return
    for dtype, tolerance in (("f32", 2e-5), ("f16", 1e-2), ("bf16", 5e-2)):
        operands = [ml.astype(t(x), dtype) for x in row.operands]
        wide = tuple(x.numpy().astype(np.float64) for x in operands)
        for result, expected in zip(
            several(row.fn(ml, *operands)), expected_of(row, wide), strict=True
        ):
            if expected.dtype.kind != "f":
                assert result.numpy().dtype == expected.dtype
            else:
                assert result.dtype is operands[0].dtype
            if expected.dtype.kind == "b" or name.startswith(("nan_to_num", "histogram")):
                continue  # edges are rounded, the largest of a dtype is another one
            size = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
            most = float(ml.finfo(operands[0].dtype).max)
            expected = np.where(np.abs(expected) > most, np.sign(expected) * inf, expected)
            np.testing.assert_allclose(
                result.numpy().astype(np.float64), expected, rtol=tolerance, atol=tolerance * size
            )


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.smooth])
def test_gradients(name: str) -> None:
    row = ROWS[name]
    check_slopes(lambda *xs: row.fn(ml, *xs), *map(t, row.operands), tolerance=2e-6)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in DYNAMIC])
def test_captured_as_eager(name: str) -> None:
    row = ROWS[name]
    operands = [ml.astype(t(x), "c64" if np.iscomplexobj(x) else "f32") for x in row.operands]
    fn = row.fn
    captured = ml.capture(lambda *xs: fn(ml, *xs))
    captured(*operands)
    for eager, replayed in zip(
        several(row.fn(ml, *operands)), several(captured(*operands)), strict=True
    ):
        np.testing.assert_array_equal(eager.numpy(), replayed.numpy())


# --- what the table does not have ----------------------------------------------------


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


@cases(
    "call, error, text",
    (lambda: ml.quantile(t(V), 1.5), ValueError, r"quantile\(f64\[7\]\): expected q from 0 to 1"),
    (lambda: untyped.quantile(t(V), 0.5, method="most"), ValueError, "method as one of linear,"),
    (lambda: ml.median(ml.zeros(0)), ml.errors.ShapeError, "no elements"),
    (lambda: ml.median(t([1j])), ml.errors.DTypeError, "c64"),
    (lambda: ml.bincount(t([-1])), IndexError, "out of range"),
    (lambda: ml.bincount(t([3]), length=2), IndexError, "index 3"),
    (lambda: ml.histogram(t(V), 0), ValueError, "one bin or more"),
    (lambda: ml.histogram(t(V), 3, (1.0, 0.0)), ValueError, "low <= high"),
    (lambda: ml.histogram(t(V), t([1.0])), ml.errors.ShapeError, "2 or more"),
    (lambda: ml.cov(t(X)), ml.errors.ShapeError, "1 or 2 dimensions"),
    (lambda: ml.cov(t(M), t(V)), ml.errors.ShapeError, "6 observations, and y 7"),
    (lambda: ml.cummax(t(M)), ml.errors.ShapeError, "expected an axis"),
    (lambda: ml.interp(t(V), t(V), t(W[:3])), ml.errors.ShapeError, "one length"),
    (lambda: ml.cdist(t(M), t(M[:, :2])), ml.errors.ShapeError, "lengths 6 and 2"),
    (lambda: ml.cdist(t(M), t(M), -1.0), ValueError, ">= 0"),
    (lambda: ml.trapezoid(t(M), t(V)), ml.errors.ShapeError, "vector of 6"),
    (lambda: ml.rot90(t(V)), IndexError, ""),
    (lambda: ml.unique(t([[1j]]), axis=0), ml.errors.DTypeError, "no order"),
)
def test_refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    refuses(error, text, call)


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


@pytest.mark.parametrize("ends", [5, ("a", 1), (0.0, 1.0, 2.0)])
def test_a_range_that_is_none_is_refused(ends: Any) -> None:
    refuses(ml.errors.ArgumentError, "expected range as", ml.histogram, ml.ones(3), 2, ends)
