"""Shape arithmetic and type rules, beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from mlvm.core.rules import broadcast_shapes, reduced_shape, require, require_representable
from mlvm.core.types import DType, TensorType
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=3))
def test_broadcast_shapes_is_numpys(given_shapes: list[tuple[int, ...]]) -> None:
    try:
        expected = np.broadcast_shapes(*given_shapes)
    except ValueError:
        with pytest.raises(ShapeError, match=r"do not broadcast: .* on axis -\d, got \d and \d"):
            broadcast_shapes(*given_shapes)
    else:
        assert broadcast_shapes(*given_shapes) == expected


@given(shapes, st.lists(st.integers(-5, 4), max_size=3).map(tuple), st.booleans())
def test_reduced_shape_is_numpys(
    shape: tuple[int, ...], axis: tuple[int, ...], keepdims: bool
) -> None:
    try:
        expected = np.sum(np.zeros(shape), axis=axis, keepdims=keepdims).shape
    except ValueError:  # numpy's AxisError is one
        with pytest.raises(ArgumentError, match=r"out of range|expected distinct axes"):
            reduced_shape(shape, axis, keepdims)
    else:
        assert reduced_shape(shape, axis, keepdims) == expected


@cases("allowed", "numeric", "real", "integer", "inexact", "float", "bool")
def test_require_names_what_is_allowed(allowed: str) -> None:
    accepted = []
    for dtype in DType.all.values():
        try:
            require(allowed, TensorType(dtype))
            accepted.append(dtype.name)
        except DTypeError as error:
            refusal = error
    assert f"it must be {allowed} ({', '.join(accepted)})" in str(refusal)


@pytest.mark.parametrize("dtype", [d for d in DType.all.values() if d.is_integer], ids=str)
def test_representable_integers(dtype: DType) -> None:
    bounds = np.iinfo(dtype.numpy.name)
    for value in (bounds.min, bounds.max, 1.0):
        require_representable(value, dtype)
    for value in (bounds.min - 1, bounds.max + 1, 0.5, np.inf, np.nan):
        refuses(
            ArgumentError, f"is not a value of {dtype.name}", require_representable, value, dtype
        )


test_rows = claims("rules", globals())
