"""Order and sets against numpy, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml

RNG = np.random.default_rng(0)
t = ml.asarray
untyped: Any = ml

VECTORS: dict[str, np.ndarray[Any, Any]] = {
    "i64": np.array([3, 1, 3, 2, -5, 1, 3]),
    "u8": np.array([3, 1, 255, 2, 0, 1, 3], np.uint8),
    "f32": np.array([0.0, -0.0, math.inf, 1.5, -math.inf, 1.5, 0.0], np.float32),
    "nan": np.array([math.nan, 1, math.nan, 0], np.float64),
    "bool": np.array([True, False, True]),
    "grid": RNG.integers(0, 4, (3, 4)),
    "one": np.array([7]),
    "empty": np.zeros(0, np.float32),
}


@pytest.mark.parametrize("name", VECTORS)
def test_sets(name: str) -> None:
    x = VECTORS[name]
    expected = np.unique_all(x)
    result = ml.unique_all(t(x))
    assert result._fields == expected._fields
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.type == t(theirs).type
        np.testing.assert_array_equal(ours.numpy(), theirs)
    for part in (ml.unique_counts(t(x)), ml.unique_inverse(t(x))):
        for field, ours in part._asdict().items():
            np.testing.assert_array_equal(ours.numpy(), getattr(expected, field))
    np.testing.assert_array_equal(ml.unique_values(t(x)).numpy(), expected.values)


def test_sets_of_complex_numbers() -> None:
    x = np.array([1 + 1j, 1 - 1j, 1 + 1j, complex(1, math.nan), 0, -0.0, complex(math.nan, 1)])
    result = ml.unique_all(t(x))
    assert result.counts.tolist() == [2, 1, 2, 1, 1]
    assert result.indices.tolist() == [4, 1, 0, 3, 6]
    np.testing.assert_array_equal(ml.take(result.values, result.inverse_indices).numpy(), x)
    assert ml.isin(t(x), t([1j, 1 + 1j])).tolist() == [True, False, True, *[False] * 4]


def test_a_gradient_flows_into_the_different_values() -> None:
    x = t([3.0, 1.0, 3.0])
    grad = ml.grad(lambda x: ml.sum(ml.unique_values(x) * t([2.0, 5.0])))(x)
    assert grad.tolist() == [5.0, 2.0, 0.0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in VECTORS if name != "grid"])
def test_searchsorted(name: str, side: Any) -> None:
    x = VECTORS[name]
    needles = np.concatenate([x, np.arange(3).astype(x.dtype)]).reshape(-1, 1)
    place = ml.searchsorted(t(np.sort(x)), t(needles), side=side)
    assert place.type == ml.TensorType("i64", needles.shape)
    np.testing.assert_array_equal(place.numpy(), np.searchsorted(np.sort(x), needles, side))
    order = np.argsort(x, kind="stable")
    again = ml.searchsorted(t(x), t(needles), side=side, sorter=t(order))
    np.testing.assert_array_equal(again.numpy(), place.numpy())


def test_searchsorted_of_numbers() -> None:
    edges = t([0, 2, 4])
    assert ml.searchsorted(edges, 2).type == ml.TensorType("i64", ())
    assert [ml.searchsorted(edges, x).item() for x in (-1, 2, 2.5, 9)] == [0, 1, 2, 3]
    assert ml.searchsorted(edges, t([1.5, 4.0]), side="right").tolist() == [1, 3]


def test_isin() -> None:
    x = t(VECTORS["grid"])
    for values in ([], [2], [3, 0, 0, 9]):
        expected = np.isin(x.numpy(), values)
        of = t(np.array(values, np.int64))
        np.testing.assert_array_equal(ml.isin(x, of).numpy(), expected)
        np.testing.assert_array_equal(ml.isin(x, of, invert=True).numpy(), ~expected)
    assert ml.isin(2, t([1, 2])).item() is True
    assert ml.isin(t([1, 2]), 2).tolist() == [False, True]
    assert ml.isin(t([math.nan]), t([math.nan])).tolist() == [False]
    assert ml.isin(t([True, False]), t([True])).tolist() == [True, False]


@pytest.mark.parametrize("descending", [False, True])
def test_bools_are_in_order(descending: bool) -> None:
    x = VECTORS["bool"]
    order = np.argsort(-x.astype(int) if descending else x, kind="stable")
    assert ml.argsort(t(x), descending=descending, stable=False).tolist() == order.tolist()
    assert ml.sort(t(x), 0, descending=descending).tolist() == x[order].tolist()
    assert ml.topk(t(x), 2)[1].tolist() == [0, 2]


def test_sorts_write_into_out() -> None:
    x = t([3, 1, 2])
    values, order = ml.zeros_like(x), ml.zeros_like(x)
    assert ml.sort(x, out=values) is values
    assert ml.argsort(x, out=order) is order
    assert (values.tolist(), order.tolist()) == ([1, 2, 3], [1, 2, 0])
