"""Layout ops: transposes of each other, edges, order, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import ShapeError
from mlvm.core.types import Array
from tests.brief import refuses
from tests.cases.evaluate import evaluate

RNG = np.random.default_rng(9)
INF, NAN = np.inf, np.nan

lengths = st.integers(0, 4)
shapes = st.lists(lengths, max_size=3).map(tuple)


def integers(shape: tuple[int, ...]) -> Array:
    """Small whole numbers, so that inner products are exact."""
    return RNG.integers(-9, 10, shape).astype(np.float64)


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], list[slice], dict[str, Any]]:
    """A shape, Python slices of it, and the same as attributes of `slice`."""
    shape = draw(shapes)
    slices = [draw(st.slices(n)) for n in shape]
    ranges = [range(*s.indices(n)) for s, n in zip(slices, shape, strict=True)]
    attributes = {
        "start": tuple(r.start for r in ranges),
        "length": tuple(map(len, ranges)),
        "step": tuple(r.step if len(r) > 1 else 1 for r in ranges),  # else of any length
    }
    return shape, slices, attributes


# --- values ---------------------------------------------------------------------------


@given(windows())
def test_slice_is_pythons(window: tuple[tuple[int, ...], list[slice], dict[str, Any]]) -> None:
    shape, slices, attributes = window
    x = integers(shape)
    np.testing.assert_array_equal(evaluate("slice", x, **attributes), x[tuple(slices)])


@given(windows())
def test_embed_is_the_transpose_of_slice(
    window: tuple[tuple[int, ...], list[slice], dict[str, Any]],
) -> None:
    shape, _, attributes = window
    x, y = integers(shape), integers(attributes["length"])
    embedded = evaluate("embed", y, shape=shape, start=attributes["start"], step=attributes["step"])
    assert np.sum(evaluate("slice", x, **attributes) * y) == np.sum(x * embedded)


@given(shapes, st.data())
def test_reshape_to_any_shape_of_the_same_size(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = integers(shape)
    other = data.draw(st.permutations(shape).map(tuple))
    assert evaluate("reshape", x, shape=other).ravel().tolist() == x.ravel().tolist()


@given(shapes, st.data())
def test_permute_dims_there_and_back(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = integers(shape)
    axes = data.draw(st.permutations(range(x.ndim)).map(tuple))
    there = evaluate("permute_dims", x, axes=axes)
    assert there.shape == tuple(shape[i] for i in axes)
    back = evaluate("permute_dims", there, axes=tuple(np.argsort(axes).tolist()))
    np.testing.assert_array_equal(back, x)


@given(st.lists(lengths, min_size=1, max_size=3), lengths, lengths, st.data())
def test_slices_of_concat_are_its_operands(
    shape: list[int], n: int, m: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    xs = [integers((*shape[:axis], k, *shape[axis:][1:])) for k in (n, m)]
    joined = evaluate("concat", *xs, axis=axis)
    assert joined.shape[axis] == n + m
    for x, part in zip(xs, np.split(joined, [n], axis), strict=True):
        np.testing.assert_array_equal(x, part)


@given(shapes, shapes)
def test_broadcast_to_is_numpys_or_refused(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    x = integers(shape)
    try:
        expected: Array | None = np.broadcast_to(x, to)
    except ValueError:
        expected = None
    if expected is None:
        refuses(ShapeError, "not broadcast", evaluate, "broadcast_to", x, shape=to)
    else:
        np.testing.assert_array_equal(evaluate("broadcast_to", x, shape=to), expected)


@given(shapes, st.data())
def test_pad_then_slice_gives_it_back(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = integers(shape)
    widths = tuple((data.draw(lengths), data.draw(lengths)) for _ in shape)
    padded = evaluate("pad", x, widths=widths, value=0.5)
    start, step = tuple(before for before, _ in widths), (1,) * x.ndim
    inner = evaluate("slice", padded, start=start, length=shape, step=step)
    np.testing.assert_array_equal(inner, x)
    assert np.count_nonzero(padded == 0.5) == padded.size - x.size


@given(shapes, st.integers(-9, 9))
def test_roll_there_and_back(shape: tuple[int, ...], shift: int) -> None:
    x = integers(shape)
    there = evaluate("roll", x, shift=shift)
    np.testing.assert_array_equal(evaluate("roll", there, shift=-shift), x)


@given(st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, INF, NAN]), max_size=8), st.booleans())
def test_argsort_sorts_and_keeps_the_order_of_equals(values: list[float], down: bool) -> None:
    x = np.array(values)
    order = evaluate("argsort", x, descending=down)
    ordered = evaluate("sort", x, descending=down)
    np.testing.assert_array_equal(x[order], ordered)
    np.testing.assert_array_equal(np.signbit(x[order]), np.signbit(ordered))
    rank = np.nan_to_num(x, nan=1e9, posinf=1e8, neginf=-1e8)[order] * (-1 if down else 1)
    assert (np.diff(rank) >= 0).all()
    assert (np.diff(order)[np.diff(rank) == 0] > 0).all()
