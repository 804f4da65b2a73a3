"""Layout ops: transposes of each other, edges, order, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from mlvm.core.types import Array
from tests.brief import cases, refuses
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


def test_roll_of_a_scalar_along_no_axis() -> None:
    assert evaluate("roll", np.array(5), shift=1, axis=()) == 5


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


@pytest.mark.parametrize("name", ["tril", "triu"])
def test_triangles_of_infinities_hold_no_nan(name: str) -> None:
    result = evaluate(name, np.full((2, 3, 3), INF))
    assert np.count_nonzero(result == 0) == 6
    assert np.count_nonzero(result == INF) == 12


def test_astype() -> None:
    x = np.array([-1.9, 1.9, 300.7])
    assert evaluate("astype", x, dtype="i32").tolist() == [-1, 1, 300]
    assert evaluate("astype", np.array([300, -1]), dtype="u8").tolist() == [44, 255]
    assert evaluate("astype", np.array([0.0, NAN, 0.1]), dtype="bool").tolist() == [0, 1, 1]


@cases(
    "name, attributes",
    ("flip", {}),
    ("roll", {"shift": 1}),
    ("pad", {"widths": ()}),
    ("slice", {"start": (), "length": (), "step": ()}),
    ("embed", {"shape": (), "start": (), "step": ()}),
)
def test_of_a_scalar(name: str, attributes: dict[str, Any]) -> None:
    assert evaluate(name, np.array(2.0), **attributes) == 2.0


@cases(
    "name, attributes",
    ("flip", {}),
    ("roll", {"shift": 1, "axis": 0}),
    ("tril", {}),
    ("triu", {"k": 1}),
    ("sort", {}),
    ("argsort", {"axis": 0, "descending": True}),
    ("concat", {}),
)
def test_of_nothing(name: str, attributes: dict[str, Any]) -> None:
    assert evaluate(name, np.zeros((0, 3)), **attributes).shape == (0, 3)


# --- refusals --------------------------------------------------------------------------


@cases(
    "dtype, value",
    (np.uint8, -1),
    (np.uint8, 256),
    (np.int32, 0.5),
    (np.int32, INF),
    (np.bool_, 2),
    ("i8", NAN),
)
def test_pad_with_a_value_the_dtype_does_not_have(dtype: Any, value: float) -> None:
    with pytest.raises(ArgumentError, match=r"is not a value of \w+ \("):
        evaluate("pad", np.zeros(2, dtype), widths=((1, 1),), value=value)


def test_triangles_and_orders_refuse() -> None:
    for name in ("tril", "triu"):
        refuses(ShapeError, "expected 2 dimensions or more, got 1", evaluate, name, np.zeros(3))
    for name in ("sort", "argsort"):
        refuses(DTypeError, "dtype bool is not allowed", evaluate, name, np.array([True]))
        refuses(ArgumentError, "out of range for 0 dimensions", evaluate, name, np.array(1.0))
