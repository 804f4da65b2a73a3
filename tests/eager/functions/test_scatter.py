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
from tests.trees import assert_close

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
    assert_close(fn(x, places, values), captured(x, places, values))
    np.testing.assert_array_equal(x.numpy(), X)


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


def test_put_along_axis_updates_its_tensor_as_in_numpy() -> None:
    x, i = ml.asarray(np.arange(6.0).reshape(2, 3)), ml.asarray([[2], [0]])
    expected = x.numpy()
    np.put_along_axis(expected, i.numpy(), 9.0, 1)
    gradient = ml.grad(lambda x: ml.sum(ml.put_along_axis(x, i, 9.0, 1) * x))(x)
    np.testing.assert_array_equal(gradient.numpy(), 2 * np.where(expected == 9, 0, expected))
    fresh = ml.put_along_axis(x, i, 9.0, 1, inplace=False)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ml.put_along_axis(x, i, 9.0, 1) is x
    for each in (x, fresh):
        np.testing.assert_array_equal(each.numpy(), expected)
