"""Order and sets against numpy, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml

RNG = np.random.default_rng(0)
t = ml.asarray

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


@pytest.mark.parametrize("descending", [False, True])
def test_bools_are_in_order(descending: bool) -> None:
    x = VECTORS["bool"]
    order = np.argsort(-x.astype(int) if descending else x, kind="stable")
    assert ml.argsort(t(x), descending=descending, stable=False).tolist() == order.tolist()
    assert ml.sort(t(x), 0, descending=descending).tolist() == x[order].tolist()
    assert ml.topk(t(x), 2)[1].tolist() == [0, 2]
