"""Indexing ops: transposes of each other, numpy's answers, and indices that do not exist."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import OperandValueError
from mlvm.core.types import Array
from tests.brief import cases, refuses
from tests.cases.evaluate import evaluate

RNG = np.random.default_rng(10)

lengths = st.integers(0, 4)
index_dtypes = st.sampled_from([np.int8, np.int16, np.int32, np.int64])


def integers(shape: tuple[int, ...]) -> Array:
    """Small whole numbers, so that inner products are exact."""
    return RNG.integers(-9, 10, shape).astype(np.float64)


@st.composite
def choices(draw: st.DrawFn, *, along: bool) -> tuple[Array, Array, int]:
    """A tensor, indices into one of its axes (with its other axes if `along`), and the axis."""
    shape = draw(st.lists(lengths, min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    n = shape[axis]
    if along:
        at = tuple(draw(lengths) if i == axis else k for i, k in enumerate(shape))
    else:
        at = tuple(draw(st.lists(lengths, max_size=2)))
    size = int(np.prod(at)) if n else 0
    if n == 0:
        at = tuple(0 if i == axis or not along else k for i, k in enumerate(at)) or (0,)
    values = draw(st.lists(st.integers(-n, max(n - 1, 0)), min_size=size, max_size=size))
    indices = np.array(values, draw(index_dtypes)).reshape(at)
    return integers(tuple(shape)), indices, axis - draw(st.sampled_from([0, len(shape)]))


# --- values ---------------------------------------------------------------------------


@given(choices(along=False))
def test_take_is_numpys_and_scatter_add_its_transpose(choice: tuple[Array, Array, int]) -> None:
    x, indices, axis = choice
    gathered = evaluate("take", x, indices, axis=axis)
    if indices.size:
        np.testing.assert_array_equal(gathered, np.take(x, indices, axis))
    y = integers(gathered.shape)
    scattered = evaluate("scatter_add", y, indices, axis=axis, length=x.shape[axis])
    assert scattered.shape == x.shape
    assert np.sum(gathered * y) == np.sum(x * scattered)


@given(choices(along=True))
def test_take_along_axis_is_numpys_and_has_a_transpose(choice: tuple[Array, Array, int]) -> None:
    x, indices, axis = choice
    gathered = evaluate("take_along_axis", x, indices, axis=axis)
    np.testing.assert_array_equal(gathered, np.take_along_axis(x, indices.astype(int), axis))
    y = integers(gathered.shape)
    scattered = evaluate("scatter_add_along_axis", y, indices, axis=axis, length=x.shape[axis])
    assert scattered.shape == x.shape
    assert np.sum(gathered * y) == np.sum(x * scattered)


@given(st.lists(lengths, max_size=3).map(tuple), st.data())
def test_boolean_index_is_numpys_and_mask_scatter_its_transpose(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    x = integers(shape)
    mask = RNG.random(shape[: data.draw(st.integers(0, len(shape)))]) < 0.5
    mask = np.asarray(mask)
    chosen = evaluate("boolean_index", x, mask)
    assert chosen.flags.c_contiguous
    np.testing.assert_array_equal(chosen, x[mask])
    y = integers(chosen.shape)
    scattered = evaluate("mask_scatter", y, mask, shape=shape)
    assert np.sum(chosen * y) == np.sum(x * scattered)


@given(st.lists(lengths, max_size=3).map(tuple))
def test_nonzero_indices_are_numpys(shape: tuple[int, ...]) -> None:
    x = RNG.integers(0, 2, shape)
    positions = evaluate("nonzero_indices", x)
    assert positions.dtype == np.int64
    assert positions.flags.c_contiguous
    np.testing.assert_array_equal(positions, np.argwhere(x))


def test_many_updates_of_few_places() -> None:
    indices = RNG.integers(0, 3, 10_000)
    counts = evaluate("scatter_add", np.ones((10_000, 2)), indices, axis=0, length=3)
    assert counts.tolist() == [[n, n] for n in np.bincount(indices).tolist()]


def test_one_hot_is_a_selection() -> None:
    weights = integers((5, 3))
    indices = np.array([[4, 0], [2, 2]], np.uint16)
    chosen = evaluate("one_hot", indices, num_classes=5, dtype="f64") @ weights
    np.testing.assert_array_equal(chosen, weights[indices])
    assert evaluate("one_hot", np.zeros(0, int), num_classes=0).shape == (0, 0)


# --- indices out of range -------------------------------------------------------------


@cases(
    "indices, message",
    (np.array([0, 3, 4]), "index 3 at position [1] is out of range for length 3"),
    (np.array([[0, 1], [-4, 9]]), "index -4 at position [1, 0] is out of range for length 3"),
    (np.array(3, np.int8), "index 3 at position [] is out of range"),
    (np.array([2**64 - 1], np.uint64), "index 18446744073709551615 at position [0]"),
)
def test_the_error_names_the_first_bad_index(indices: Array, message: str) -> None:
    with pytest.raises(OperandValueError, match=re.escape(message)):
        evaluate("take", np.zeros((3, 2)), indices, axis=0)
    with pytest.raises(OperandValueError, match=re.escape(message)):
        evaluate("scatter_add", np.zeros((*indices.shape, 2)), indices, axis=0, length=3)


def test_indices_along_an_axis_out_of_range() -> None:
    x, indices = np.zeros((2, 3)), np.array([[0], [-4]])
    message = re.escape("index -4 at position [1, 0] is out of range for length 3")
    refuses(OperandValueError, message, evaluate, "take_along_axis", x, indices, axis=1)
    with pytest.raises(OperandValueError, match=message):
        evaluate("scatter_add_along_axis", x[:, :1], indices, axis=1, length=3)


@pytest.mark.parametrize("index", [-1, 3])
def test_one_hot_has_no_negative_indices(index: int) -> None:
    with pytest.raises(OperandValueError, match=f"index {index} at position .1. is out of range"):
        evaluate("one_hot", np.array([0, index]), num_classes=3)


def test_an_empty_axis_has_no_index() -> None:
    with pytest.raises(OperandValueError, match="out of range for length 0"):
        evaluate("take", np.zeros((0, 2)), np.array([0]), axis=0)
    empty = evaluate("take", np.zeros((0, 2)), np.zeros((3, 0), int), axis=0)
    assert empty.shape == (3, 0, 2)


# --- refusals --------------------------------------------------------------------------


def test_a_mask_has_as_many_places_as_updates() -> None:
    message, mask = "the mask has 2 places for 1 updates", np.ones(2, bool)
    refuses(
        OperandValueError, message, evaluate, "mask_scatter", np.zeros((1, 3)), mask, shape=(2, 3)
    )
