"""Reductions: empty and 0-d tensors, not-a-numbers, large sums, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import DTypeError, MlvmError, ShapeError
from mlvm.core.types import Array
from tests.brief import cases, refuses
from tests.cases.evaluate import evaluate, printed_on_threads

INF, NAN = np.inf, np.nan
REDUCTIONS = [
    "sum",
    "mean",
    "prod",
    "var",
    "logsumexp",
    "max",
    "min",
    "argmax",
    "argmin",
    "all",
    "any",
]
MANY_AXES = ["sum", "mean", "prod", "var", "logsumexp", "max", "min", "all", "any"]


# --- values ---------------------------------------------------------------------------


@cases(
    "name, of_nothing",
    ("sum", 0.0),
    ("prod", 1.0),
    ("mean", NAN),
    ("var", NAN),
    ("logsumexp", -INF),
    ("all", True),
    ("any", False),
)
def test_of_nothing(name: str, of_nothing: Any) -> None:
    result = evaluate(name, np.zeros((2, 0, 3)), axis=1)
    np.testing.assert_array_equal(result, np.full((2, 3), of_nothing))
    assert evaluate(name, np.zeros((0, 3)), axis=1).shape == (0,)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_of_a_scalar(name: str) -> None:
    one = {"var": 0.0, "argmax": 0, "argmin": 0, "all": True, "any": True}
    for keepdims in (False, True):
        result = evaluate(name, np.array(2.5), keepdims=keepdims)
        assert result.shape == ()
        assert result == one.get(name, 2.5)


@pytest.mark.parametrize("name", MANY_AXES)
def test_no_axes_reduce_each_element_by_itself(name: str) -> None:
    x = np.array([[0.5, -1.5], [2.0, 0.0]])
    alone = {"var": 0 * x, "all": x != 0, "any": x != 0}
    np.testing.assert_array_equal(evaluate(name, x, axis=()), alone.get(name, x))


@pytest.mark.parametrize("name", ["max", "min", "sum", "mean", "logsumexp", "prod", "var"])
def test_nan_is_contagious(name: str) -> None:
    assert np.isnan(evaluate(name, np.array([1.0, NAN, 3.0])))


def test_the_first_nan_is_the_extreme() -> None:
    for name in ("argmax", "argmin"):
        assert evaluate(name, np.array([1.0, NAN, 9.0, NAN])) == 1


@cases(
    "x, expected",
    ([1000.0, 1000.0], 1000 + np.log(2)),
    ([-1000.0, -1000.0], -1000 + np.log(2)),
    ([-INF, -INF], -INF),
    ([-INF, 3.0], 3.0),
    ([INF, 3.0], INF),
    ([INF, -INF], INF),
)
def test_logsumexp_neither_overflows_nor_underflows(x: list[float], expected: float) -> None:
    assert evaluate("logsumexp", np.array(x)) == pytest.approx(expected, rel=1e-15)


def test_var_with_too_few_elements() -> None:
    assert np.isnan(evaluate("var", np.array([3.0]), correction=1.0))
    for correction in (2.0, 3.0):
        assert evaluate("var", np.array([1.0, 2.0]), correction=correction) == INF


def test_var_far_from_zero_keeps_its_accuracy() -> None:
    x = np.array([1e8, 1e8 + 1, 1e8 + 2])
    assert evaluate("var", x) == pytest.approx(2 / 3, rel=1e-12)


def test_small_integers_do_not_overflow() -> None:
    bytes_ = np.full(1000, 255, np.uint8)
    assert evaluate("sum", bytes_) == 255_000
    assert evaluate("sum", bytes_, dtype="u8") == 255_000 % 256
    assert evaluate("cumulative_sum", bytes_)[-1] == 255_000


LARGE = np.random.default_rng(7).standard_normal((300, 7, 11)).astype(np.float32)


@pytest.mark.parametrize("axis", [0, (0,), (0, 1), (0, 2), (1, 0), (-3, 1), 1, (1, 2), None])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("x", [LARGE, LARGE.reshape(25, 12, 77), LARGE.reshape(3, 7, 1100)])
def test_large_sums(x: Array, axis: Any, keepdims: bool) -> None:
    expected = x.astype(np.float64).sum(axis, keepdims=keepdims)
    for name, divisor in [("sum", 1.0), ("mean", x.size / expected.size)]:
        result = evaluate(name, x, axis=axis, keepdims=keepdims)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected / divisor, rtol=1e-4, atol=1e-4 / divisor)


def test_a_sum_has_the_same_bits_on_any_number_of_threads() -> None:
    script = (
        "import numpy as np\n"
        "from tests.cases.evaluate import evaluate\n"
        "x = np.random.default_rng(0).standard_normal((50_000, 31), dtype=np.float32)\n"
        "print(evaluate('sum', x, axis=0).tobytes().hex())"
    )
    assert len(printed_on_threads(script)) == 1


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=20))
def test_cumulative_sum_ends_with_the_sum(values: list[int]) -> None:
    x = np.array(values, np.int8)
    sums = evaluate("cumulative_sum", x)
    assert sums[-1] == evaluate("sum", x) == sum(values)
    assert np.diff(sums, prepend=0).tolist() == values


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_no_rows_have_no_extremes(name: str) -> None:
    assert evaluate(name, np.zeros((0, 2)), axis=1).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "message"), [("f8", "no dtype 'f8'"), ("bool", "dtype bool is not allowed")]
)
def test_dtypes_to_sum_in(dtype: str, message: str) -> None:
    for name in ("sum", "prod", "cumulative_sum"):
        refuses(DTypeError, message, evaluate, name, np.ones(3), dtype=dtype)


def test_cumulative_sum_needs_to_know_along_what() -> None:
    for shape in [(), (2, 3)]:
        refuses(ShapeError, "name the axis to go along", evaluate, "cumulative_sum", np.ones(shape))


@given(st.sampled_from(REDUCTIONS), st.lists(st.integers(-4, 4), max_size=3), st.booleans())
def test_axes_are_numpys_or_refused(name: str, axes: list[int], keepdims: bool) -> None:
    x = np.arange(1.0, 25.0).reshape(2, 3, 4)
    axis = tuple(axes) if name in MANY_AXES else (axes[0] if axes else None)
    try:
        expected: Array | None = np.sum(x, axis, keepdims=keepdims)
    except ValueError:
        expected = None
    if expected is None:
        refuses(MlvmError, "", evaluate, name, x, axis=axis, keepdims=keepdims)
    else:
        assert evaluate(name, x, axis=axis, keepdims=keepdims).shape == expected.shape


def test_statistics_of_large_integers_are_rounded_once() -> None:
    times = np.array([1_700_000_001, 1_700_000_003, 1_700_000_005])
    assert evaluate("var", times) == np.float32(8 / 3)
    assert evaluate("mean", times) == np.float32(1_700_000_003)
    ends = np.array([2**31 - 1, -(2**31), -1, 5], np.int32)
    assert evaluate("mean", ends) == 0.75
