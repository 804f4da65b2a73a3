"""Keys, the global key of each VM, and the draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml

R = ml.random


def test_a_key_is_its_seed() -> None:
    key = R.key(7)
    assert key.dtype is ml.uint64
    assert key.numpy().tolist() == [7, 0]
    assert R.key(2**64 - 1).numpy()[0] == 2**64 - 1


DRAWS: dict[str, Callable[[ml.Tensor | None], ml.Tensor]] = {
    "normal": lambda key: R.normal((3, 4), key=key),
    "normal f64": lambda key: R.normal(5, key=key, dtype=ml.float64),
    "uniform": lambda key: R.uniform((3, 4), key=key),
    "uniform low high": lambda key: R.uniform(100, low=-2, high=3.5, key=key),
    "bernoulli": lambda key: R.bernoulli((50,), 0.3, key=key),
    "randint": lambda key: R.randint((50,), -3, 4, key=key),
    "permutation": lambda key: R.permutation(20, key=key),
    "permutation of a tensor": lambda key: R.permutation(ml.arange(20), key=key),
    "split": lambda key: R.split(R.next_key() if key is None else key, 5),
    "fold_in": lambda key: R.fold_in(R.next_key() if key is None else key, 3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_key_draws_the_same_and_another_does_not(name: str) -> None:
    draw = DRAWS[name]
    first, again, other = (draw(R.key(seed)).numpy() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again, strict=True)
    assert np.any(first != other)


@pytest.mark.parametrize("name", DRAWS)
def test_without_a_key_the_seed_decides_and_each_draw_differs(name: str) -> None:
    R.seed(3)
    first, second = DRAWS[name](None).numpy(), DRAWS[name](None).numpy()
    R.seed(3)
    np.testing.assert_array_equal(DRAWS[name](None).numpy(), first)
    assert np.any(first != second)


def test_draws_are_of_their_distribution() -> None:
    key = R.key(0)
    u = R.uniform(10_000, low=-2, high=3, key=key).numpy()
    assert u.min() >= -2
    assert u.max() <= 3
    assert abs(u.mean() - 0.5) < 0.05
    assert abs(R.normal(10_000, key=key).numpy().std() - 1) < 0.05
    assert abs(R.bernoulli(10_000, 0.3, key=key).numpy().mean() - 0.3) < 0.03
    assert set(R.randint(1000, -1, 2, key=key, dtype=ml.int8).numpy()) == {-1, 0, 1}
    assert sorted(R.permutation(9, key=key).numpy()) == list(range(9))
    assert R.normal(key=key).shape == ()


def test_bernoulli_takes_a_tensor_of_probabilities() -> None:
    p = ml.asarray([0.0, 1.0])
    assert R.bernoulli((3, 2), p).numpy().tolist() == [[False, True]] * 3


def test_the_permutation_of_a_tensor_moves_rows() -> None:
    x = np.arange(12).reshape(4, 3)
    rows = R.permutation(ml.asarray(x), key=R.key(0)).numpy()
    assert sorted(rows.tolist()) == x.tolist()


def test_fold_in_takes_a_tensor() -> None:
    key, step = R.key(0), ml.asarray(3)
    np.testing.assert_array_equal(R.fold_in(key, step).numpy(), R.fold_in(key, 3).numpy())


# --- the global key ------------------------------------------------------------------


def test_global_keys_are_not_the_keys_of_the_same_seed() -> None:
    R.seed(0)
    keys = {tuple(R.next_key().numpy().tolist()) for _ in range(100)}
    assert len(keys) == 100
    assert (0, 0) not in keys


def test_global_draws_are_independent_of_the_key_of_the_same_seed() -> None:
    R.seed(7)
    globals_ = {tuple(R.next_key().tolist()) for _ in range(20)}
    key = R.key(7)
    splits = {tuple(row) for row in R.split(key, 20).tolist()}
    folds = {tuple(R.fold_in(key, i).tolist()) for i in range(20)}
    assert not globals_ & (splits | folds)


def test_state_continues() -> None:
    R.seed(5)
    R.next_key()
    state = R.state()
    expected = [R.next_key().numpy().tolist() for _ in range(3)]
    R.set_state(state)
    assert [R.next_key().numpy().tolist() for _ in range(3)] == expected
    assert state.tolist() == [5, 2]


def test_each_vm_has_a_state_of_its_own_from_seed_0() -> None:
    R.seed(9)
    with ml.Arena(ml.VM("other"), "there"):
        assert R.state().tolist() == [0, 1]
        first = R.normal(4).numpy()
        R.seed(0)
        np.testing.assert_array_equal(R.normal(4).numpy(), first)
    assert R.state().tolist() == [9, 1]


def test_the_state_outlives_the_arena_it_is_first_used_in() -> None:
    vm = ml.VM("other")
    for _ in range(3):
        with ml.Arena(vm, "step"):
            R.normal(3)
    with ml.Arena(vm, "step"):
        assert R.state().tolist() == [0, 4]


def test_steady_state_allocates_nothing() -> None:
    arena = ml.Arena(ml.VM("other"), "step")
    created = []
    for _ in range(5):
        with arena:
            ml.dropout(R.normal((3,)), 0.5)
        created.append(arena.views_created)
    assert created[1:] == created[:1] * 4


# --- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: R.key(-1), ml.errors.OperandValueError, "-1"),
        (lambda: R.key(2**64), ml.errors.OperandValueError, "2\\*\\*64"),
        (lambda: R.seed(1.5), ml.errors.OperandValueError, "1.5"),  # type: ignore[arg-type]
        (lambda: R.normal(3, dtype=ml.int32), ml.errors.DTypeError, "float"),
        (lambda: R.normal("a"), ml.errors.AttributeRefused, "shape"),  # type: ignore[arg-type]
        (lambda: R.normal(3, key=7), ml.errors.DTypeError, "random.key"),  # type: ignore[arg-type]
        (lambda: R.normal(3, key=ml.zeros(2)), ml.errors.ShapeError, r"u64\[2\]"),
        (lambda: R.uniform(3, low=1, high=1), ml.errors.AttributeRefused, "less than"),
        (lambda: R.uniform(3, high=math.inf), ml.errors.AttributeRefused, "finite"),
        (lambda: R.uniform(3, low=-1e308, high=1e308), ml.errors.AttributeRefused, "finite"),
        (lambda: R.bernoulli(3, 1.5), ml.errors.OperandValueError, "probability"),
        (lambda: R.randint(3, 2, 2), ml.errors.AttributeRefused, "less than"),
        (lambda: R.randint(3, 0, 300, dtype=ml.uint8), ml.errors.AttributeRefused, "299"),
        (lambda: R.permutation(-1), ml.errors.AttributeRefused, "n = -1"),
        (lambda: R.permutation(ml.zeros(())), ml.errors.ShapeError, "scalar"),
        (lambda: R.split(R.key(0), -1), ml.errors.AttributeRefused, "n = -1"),
        (lambda: R.fold_in(R.key(0), ml.zeros(())), ml.errors.DTypeError, "integer"),
        (lambda: R.set_state(np.zeros(2)), ml.errors.ShapeError, r"u64\[2\]"),
        (lambda: R.set_state([0, 0]), ml.errors.ShapeError, r"u64\[2\]"),  # type: ignore[arg-type]
    ],
)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_bounds_and_probabilities_are_numbers() -> None:
    for low in ("a", None, [0.0]):
        with pytest.raises(ml.errors.AttributeRefused, match="must be less than"):
            ml.random.uniform((2,), low=low)  # type: ignore[arg-type]
        with pytest.raises(ml.errors.DTypeError, match="p is a number or a tensor"):
            ml.random.bernoulli((2,), low)  # type: ignore[arg-type]
