"""`scatter_add`, `x.at[key]` and segments against numpy's `ufunc.at`, with repeated indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import refuses, with_long
from tests.eager.functions.test_indexing import AGAIN, KEYS, ours
from tests.eager.functions.test_indexing import X as INDEXED
from tests.slopes import check_slopes

Array = np.ndarray[Any, Any]
t = ml.asarray
untyped: Any = ml
RNG = np.random.default_rng(5)

X = np.sin(INDEXED.astype(np.float64))

METHODS: dict[str, np.ufunc] = {
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


PLACES = [key for key in KEYS if getattr(key, "shape", None) != () or key.dtype != bool]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("key", with_long([*PLACES[::3], *PLACES[-3:]], PLACES), ids=repr)
def test_each_value_for_an_element_counts(name: str, key: Any) -> None:
    values = RNG.normal(size=X[key].shape)
    for value in (values, np.array(1.5)):
        expected = X.copy()
        METHODS[name].at(expected, key, value)
        x = t(X)
        result = getattr(x.at[ours(key)], name)(t(value))
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-14)
        np.testing.assert_array_equal(x.numpy(), X)  # as it was
    if name == "add":
        np.testing.assert_array_equal(
            ml.scatter_add(t(X), ours(key), t(values)).numpy(),
            x.at[ours(key)].add(t(values)).numpy(),
        )


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_set_and_get(key: Any) -> None:
    x = t(X)
    expected = X.copy()
    expected[key] = 7.0
    np.testing.assert_array_equal(x.at[ours(key)].set(7.0).numpy(), expected)
    np.testing.assert_array_equal(x.at[ours(key)].get().numpy(), X[key])
    np.testing.assert_array_equal(x.numpy(), X)


@pytest.mark.parametrize("name", [*METHODS, "set"])
@pytest.mark.parametrize("key", [(0, ..., slice(1, 3)), AGAIN, (AGAIN, AGAIN)], ids=str)
def test_gradients(name: str, key: Any) -> None:
    values = t(RNG.normal(size=X[key].shape))

    def fn(x: ml.Tensor, values: ml.Tensor) -> ml.Tensor:
        return ml.sin(getattr(x.at[ours(key)], name)(values))

    check_slopes(fn, t(X), values, order=2 if name == "add" else 1, tolerance=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_captured_as_eager(name: str) -> None:
    x, places, values = t(X), t(AGAIN), t(RNG.normal(size=(5, 3, 4, 5)))
    mask = t([True, False])

    def fn(x: ml.Tensor, places: ml.Tensor, values: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return getattr(x.at[places], name)(values), getattr(x.at[mask], name)(2.0)

    captured = ml.capture(fn)
    captured(x, places, values)
    for eager, replayed in zip(fn(x, places, values), captured(x, places, values), strict=True):
        np.testing.assert_array_equal(eager.numpy(), replayed.numpy())
    np.testing.assert_array_equal(x.numpy(), X)


def test_dtypes() -> None:
    counts = ml.zeros(3, dtype=ml.uint8).at[t([0, 0, 2])].add(1)
    assert (counts.dtype, counts.tolist()) == (ml.uint8, [2, 0, 1])
    assert t([3, 1]).at[t([0, 0])].max(t([9, 4])).tolist() == [9, 1]
    half = ml.ones(2, dtype=ml.bfloat16).at[t([1, 1])].multiply(3.0)
    assert (half.dtype, half.tolist()) == (ml.bfloat16, [1.0, 9.0])
    assert ml.scatter_add(t([1j, 0j]), t([0, 0]), t([1.0, 2j])).tolist() == [1 + 3j, 0]


@pytest.mark.local(reason="lists for indices and values")
def test_lists() -> None:
    assert untyped.scatter_add([1, 2], [0, 0], [3, 4]).tolist() == [8, 2]
    assert ml.zeros(2).at[[1, 1]].add([0.5, 2]).tolist() == [0.0, 2.5]
    refuses(IndexError, r"scatter_add\(f32\[1\]\): index 1", untyped.scatter_add, [1.0], [1], 1.0)


# --- segments ------------------------------------------------------------------------

IDS = np.array([3, 0, 3, 1, 3, 0])
ROWS = RNG.normal(size=(6, 2))


def by_segment(of: Callable[[Array], Any], rows: Array, empty: float, count: int = 5) -> Array:
    parts = [rows[i == IDS] for i in range(count)]
    return np.array([of(part) if len(part) else np.full(rows.shape[1:], empty) for part in parts])


SEGMENTS: dict[str, tuple[Callable[[Array], Any], float]] = {
    "segment_sum": (lambda part: part.sum(0), 0.0),
    "segment_mean": (lambda part: part.mean(0), 0.0),
    "segment_max": (lambda part: part.max(0), -np.inf),
    "segment_min": (lambda part: part.min(0), np.inf),
    "segment_prod": (lambda part: part.prod(0), 1.0),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str) -> None:
    of, empty = SEGMENTS[name]
    fn: Any = getattr(ml, name)
    rows, ids = t(ROWS), t(IDS)
    expected = by_segment(of, ROWS, empty)
    np.testing.assert_allclose(fn(rows, ids, 5).numpy(), expected, rtol=1e-14)
    np.testing.assert_array_equal(fn(rows, ids).numpy(), fn(rows, ids, 5).numpy()[:4])
    check_slopes(lambda x: fn(ml.exp(x), ids, 4)[:2], rows)
    captured = ml.capture(lambda x: fn(x, ids, 5))
    captured(rows)
    np.testing.assert_array_equal(captured(rows).numpy(), fn(rows, ids, 5).numpy())
    half = fn(ml.astype(rows, ml.float16), ids, 5)
    assert half.dtype is ml.float16
    np.testing.assert_allclose(half.numpy(), expected, rtol=2e-3, atol=1e-3)


def test_segments_of_integers() -> None:
    rows = t(np.array([5, 1, 7, 2, 6, 3]))
    assert ml.segment_max(rows, t(IDS), 5).tolist() == [3, 2, -(2**63), 7, -(2**63)]
    assert ml.segment_min(rows, t(IDS), 5).tolist() == [1, 2, 2**63 - 1, 5, 2**63 - 1]
    assert ml.segment_sum(rows, t(IDS)).tolist() == [4, 2, 0, 18]
    assert ml.segment_sum(ml.zeros((0, 3)), ml.zeros(0, dtype="i64")).shape == (0, 3)


def test_a_nan_in_one_product_is_in_no_other_gradient() -> None:
    """It was: rows that do not meet were multiplied with each other, and left out afterwards."""
    x, places = ml.asarray([1.0, 2.0, 3.0]), ml.asarray([1, 1, 2])
    updates = ml.asarray([2.0, np.nan, 5.0])
    of_x, of_updates = ml.grad(
        lambda x, updates: ml.sum(x.at[places].multiply(updates)), argnums=(0, 1)
    )(x, updates)
    assert np.isnan(of_x.numpy()).tolist() == [False, True, False]
    assert (of_x.numpy()[[0, 2]].tolist(), float(of_updates[2])) == ([1.0, 5.0], 3.0)
    rows = ml.grad(lambda x: ml.sum(ml.segment_prod(x, places, 3)))(updates)
    assert float(rows[2]) == 1.0
