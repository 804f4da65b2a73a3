"""x[key] against numpy, its gradient, and the keys it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.errors import IndexingError, PositionError
from tests.brief import cases, refuses

X = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
ROW = np.array([1, 0])
GRID = np.array([[0, -1], [1, 0]])
MASK = np.array([True, False, True])
AGAIN = np.array([1, 0, 1, 1, -1])


def ours(key: Any) -> Any:
    """The key with its numpy arrays as tensors."""
    if isinstance(key, tuple):
        return tuple(map(ours, key))
    return ml.asarray(key) if isinstance(key, np.ndarray) else key


KEYS: list[Any] = [
    0,
    -1,
    np.int64(1),
    (1, -1),
    (1, 2, 3, 4),
    slice(None),
    slice(1, 1),
    slice(None, None, -1),
    (slice(None), slice(2, 0, -1), slice(-3, None), slice(0, 99, 2)),
    (slice(None), slice(4, 4)),
    ...,
    (..., 1),
    (0, ..., slice(None, None, -2)),
    (None, 0, None, ..., None),
    (0, 0, 0, 0, ...),
    (),
    ROW,
    GRID,
    np.array(1),
    (slice(None), GRID),
    (..., ROW),
    (0, ROW),
    (ROW, 0),
    (slice(None), ROW, 0),
    (slice(None), 0, ROW),
    (0, slice(None), ROW),  # numpy puts the axes of ROW in front
    (ROW, slice(None), GRID),
    (ROW, None, 0),
    (ROW, ..., 0),
    (slice(None), ROW, np.array(1), ..., ROW),
    (slice(None), ROW, GRID, 1),
    (ROW, ROW, ROW, ROW),
    (np.zeros((0,), np.int64), slice(1, 3)),
    (slice(0, 0), ROW),
    X > 50,
    X[..., 0] > 50,
    X[:, 0, 0, 0] > 50,
    X > 1000,
    np.array(True),
    np.array(False),
    (slice(None), MASK),
    (..., MASK, slice(1, 3), 0),
    (0, MASK, 1),
    (X[..., 0, 0] > 50, None, 2),
    [1, 0],
    [[0, 1], [1, 0]],
    [],
    [True, False],
    (slice(None), [0, 2]),
    ([0, 1], [2, 0]),
    (np.array([[0], [1]]), [2, 0]),
    (None, [1]),
    AGAIN,
    (AGAIN, AGAIN),
    (AGAIN, slice(None), AGAIN),
    np.zeros(0, bool),
    (slice(None), np.zeros((0, 4), bool)),
    (..., np.zeros(0, bool)),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_getitem_is_numpys(key: Any) -> None:
    for index in (ours(key), key):
        np.testing.assert_array_equal(ml.asarray(X)[index].numpy(), X[key], strict=True)


@cases("key", np.zeros(0, bool), (slice(None), np.zeros((0, 4), bool)))
def test_a_mask_without_elements_sets_none(key: Any) -> None:
    for index in (ours(key), key):
        x = ml.asarray(X)
        x[index] = 5.0
        x[index] = ml.zeros(X[key].shape)
        np.testing.assert_array_equal(x.numpy(), X)


_integers = st.integers(-2, 1)
_items = st.one_of(
    _integers,
    st.slices(5),
    st.none(),
    st.sampled_from([ROW, GRID, np.array(-1), MASK, X[..., 0, 0] > 50]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_items, max_size=5), st.integers(0, 5) | st.none())
def test_getitem_and_setitem_are_numpys_for_any_mixture(items: list[Any], dots: int | None) -> None:
    if dots is not None:
        items.insert(dots, ...)
    key = tuple(items)
    try:
        expected = X[key]
    except IndexError:
        with pytest.raises(IndexError):
            ml.asarray(X)[ours(key)]
        with pytest.raises(IndexError):
            ml.asarray(X)[ours(key)] = 1.0
        return
    np.testing.assert_array_equal(ml.asarray(X)[ours(key)].numpy(), expected, strict=True)
    numbers = np.arange(expected.size, dtype=X.dtype).reshape(expected.shape)
    rows = numbers[..., :1] if numbers.size and numbers.ndim else numbers
    for values in (numbers, rows, np.array(5, X.dtype)):
        x, updated = ml.asarray(X), X.copy()
        x[ours(key)] = ml.asarray(values)
        updated[key] = values
        np.testing.assert_array_equal(x.numpy(), updated)


def test_every_order_of_items_reads_and_sets_as_numpy_does() -> None:
    """A `...` may stand for no axis: it separates the items beside it nevertheless."""
    array = X[..., 0]
    values: list[Any] = [0, slice(None), slice(1, 2), None, ROW, GRID, ...]
    for key in itertools.chain(*[itertools.product(values, repeat=n) for n in (2, 3, 4)]):
        if sum(item is ... for item in key) > 1 or array.ndim < sum(
            item is not None and item is not ... for item in key
        ):
            continue
        expected = array[key]
        np.testing.assert_array_equal(ml.asarray(array)[key].numpy(), expected, repr(key))
        numbers = np.arange(expected.size, dtype=X.dtype).reshape(expected.shape)
        x, updated = ml.asarray(array), array.copy()
        x[key], updated[key] = numbers, numbers
        np.testing.assert_array_equal(x.numpy(), updated, repr(key))


@cases(
    "key, at", ((3, 0), "0 of length 3"), ((0, 4), "1 of length 4"), ((0, 0, 5), "2 of length 5")
)
def test_an_index_out_of_range_is_told_by_the_key_and_the_axis(key: Any, at: str) -> None:
    x = ml.ones((3, 4, 5))
    ours_key = tuple([ml.asarray(i) if i > 2 else i for i in key])
    text = rf"index \d is out of range for axis {at}"
    refuses(PositionError, rf"^setitem\(f32\[3,4,5\], .*{text}", x.__setitem__, ours_key, 1.0)
    refuses(PositionError, rf"^getitem\(f32\[3,4,5\], .*{text}", x.__getitem__, ours_key)


@cases("key", (AGAIN, AGAIN), (0, AGAIN), (slice(None), AGAIN, 1), (..., AGAIN, AGAIN), ids=repr)
def test_several_indices_set_no_more_than_they_choose(key: Any) -> None:
    """The last value for an element stays, and an index out of range changes nothing."""
    x, updated = ml.asarray(X), X.copy()
    values = np.arange(X[key].size, dtype=X.dtype).reshape(X[key].shape)
    x[ours(key)], updated[key] = values, values
    np.testing.assert_array_equal(x.numpy(), updated)
    far = tuple([AGAIN + 5 if isinstance(item, np.ndarray) else item for item in key])
    for _ in range(3):
        refuses(PositionError, "is out of range for .*length", x.__setitem__, ours(far), 1.0)
        refuses(PositionError, "is out of range for .*length", x.__getitem__, ours(far))
    np.testing.assert_array_equal(x.numpy(), updated)


@cases("key", (slice(1, None), 0), (ROW, slice(None), GRID), X > 50, (0, MASK), ids=repr)
def test_the_gradient_of_a_sum_counts_how_often_an_element_is_chosen(key: Any) -> None:
    gradient = ml.grad(lambda x: ml.sum(x[ours(key)] * 2.0))(ml.asarray(X))
    expected = np.zeros_like(X)
    np.add.at(expected, key, 2)
    np.testing.assert_array_equal(gradient.numpy(), expected)


@pytest.mark.parametrize("form", [lambda key: key, lambda key: (key, 2), lambda key: (..., key)])
def test_equal_keys_of_other_classes_are_other_indices(form: Callable[[Any], Any]) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    x = ml.asarray(array)
    for key in (1, np.int64(1), 0, slice(1), slice(1, None), slice(True)):
        for _ in range(2):
            np.testing.assert_array_equal(x[form(key)].numpy(), array[form(key)])
    refuses(IndexingError, "integers as index, got a bool", x.__getitem__, form(True))
    refuses(IndexingError, "integers as index, got a float", x.__getitem__, form(1.0))


def test_the_first_error_of_a_bound_is_raised() -> None:
    class Bound:
        errors = iter([KeyboardInterrupt, None])

        def __index__(self) -> int:
            if error := next(self.errors):
                raise error
            return 1

    x, bound = ml.asarray(X), Bound()
    with pytest.raises(KeyboardInterrupt):
        x[bound:]
    assert x[bound:].shape == (1, 3, 4, 5)


def test_iteration_and_length() -> None:
    x = ml.asarray(X)
    assert len(x) == 2
    for row, expected in zip(x, X, strict=True):
        np.testing.assert_array_equal(row.numpy(), expected)
    refuses(ml.errors.ShapeError, "no rows to iterate over", list, ml.asarray(1.0))


def test_an_update_of_a_temporary_warns() -> None:
    x, holder = ml.ones((3, 3)), [ml.ones((3, 3))]

    def updates() -> None:
        x[0][0] = 5
        x.T[0] = 5
        x[0][0] += 5
        x.reshape(-1)[0] = 5
        ml.zeros(3)[1:] = 5
        holder[0][0][0] = 5

    with pytest.warns(ml.NoEffectWarning, match=r"is a temporary.*x\[i, j\]") as caught:
        updates()
    assert [each.filename for each in caught] == [__file__] * 6
    assert bool(ml.all(x == 1))


def test_an_update_of_a_named_tensor_does_not_warn() -> None:
    x = ml.ones((3, 3))
    fields = type("Fields", (), {})()
    fields.x, items = x[0], {"a": [x[1]]}

    def update(y: ml.Tensor) -> ml.Tensor:
        y[0] = 2
        return y

    x[0] = 5
    x[0] += 5
    x[0, 0] *= 2
    fields.x[0] = 5
    items["a"][0][0] = 5
    (y := x[1])[0] = 5
    y.__setitem__(0, y.at[0].set(5)[0])
    update(x[0])
    ml.capture(lambda z: update(z * 2))(y)
    ml.grad(lambda z: ml.sum(update(z * 2)))(y)
    x.__setitem__(0, 5)
    ml.Tensor.__setitem__(x, 0, 5)
    with pytest.raises(ml.errors.DTypeError):  # and no warning before it
        ml.zeros(2, dtype="i64")[0] = 1.5
    assert fields.x[0].item() == items["a"][0][0].item() == 5
