"""`einsum` of any subscripts, and the products that it makes; single ones are rows of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml

RNG = np.random.default_rng(5)


def _operands(shapes: list[tuple[int, ...]], dtype: str = "f8") -> list[Any]:
    return [RNG.normal(size=shape).astype(dtype) for shape in shapes]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_einsum_is_numpys_for_any_subscripts(data: st.DataObject) -> None:
    lengths = {"a": 2, "b": 3, "c": 1, "d": 4}
    parts = data.draw(st.lists(st.text("abcd", max_size=4), min_size=1, max_size=4))
    named = sorted(set("".join(parts)))
    out = "".join(data.draw(st.permutations(named))[: data.draw(st.integers(0, len(named)))])
    subscripts = ",".join(parts) + data.draw(st.sampled_from(["->" + out, ""]))
    xs = _operands([tuple(lengths[label] for label in part) for part in parts])
    result = ml.einsum(subscripts, *map(ml.asarray, xs)).numpy()
    np.testing.assert_allclose(result, np.einsum(subscripts, *xs), rtol=1e-9, atol=1e-9)
    whole = [np.round(9 * x).astype("i4") for x in xs]
    result = ml.einsum(subscripts, *map(ml.asarray, whole)).numpy()
    np.testing.assert_array_equal(result, np.einsum(subscripts, *whole), strict=True)


@pytest.mark.filterwarnings("ignore::mlvm.eager.PrecisionWarning")
def test_dtypes_promote() -> None:
    x, y = _operands([(2, 3), (3, 4)])
    result = ml.einsum("ij,jk", ml.asarray(x.astype("f4")), ml.asarray(y))
    assert result.dtype is ml.float64


def test_the_smallest_product_is_made_first() -> None:
    """A matrix times a matrix times a vector: two products of a matrix and a vector."""
    operands = ml.zeros((40, 40)), ml.zeros((40, 40)), ml.zeros(40)
    with ml.Arena(ml.default_vm(), "einsum") as arena:
        ml.einsum("ij,jk,k", *operands)
        assert arena.high_water < 40 * 40 * 4
