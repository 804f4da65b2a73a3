"""Indexing ops: transposes of each other, numpy's answers, and indices that do not exist."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.types import Array
from tests.brief import cases
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


@cases("along", False, True)
@given(data=st.data())
def test_takes_are_numpys_and_scatter_adds_their_transposes(
    along: bool, data: st.DataObject
) -> None:
    x, indices, axis = data.draw(choices(along=along))
    suffix, numpys = ("_along_axis", np.take_along_axis) if along else ("", np.take)
    gathered = evaluate(f"take{suffix}", x, indices, axis=axis)
    if indices.size:
        np.testing.assert_array_equal(gathered, numpys(x, indices.astype(int), axis))
    y = integers(gathered.shape)
    scattered = evaluate(f"scatter_add{suffix}", y, indices, axis=axis, length=x.shape[axis])
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
