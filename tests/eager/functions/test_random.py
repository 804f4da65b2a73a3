"""Keys, the global key of each VM, and the draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import OperandValueError
from mlvm.eager.functions import random
from mlvm.eager.tensor.templates import disabled
from mlvm.machines.native.extension import EXTENSION
from tests.brief import count_calls
from tests.cases.tables import lines
from tests.threads import in_threads, taking_turns
from tests.trees import assert_close

R = ml.random
_SPACE = {"R": R, "ml": ml, "np": np}
_LINES: list[str] = [*lines("draws.txt")]
DRAWS = {line: eval(f"lambda key: {line}", _SPACE) for line in _LINES if "  =>  " not in line}
CONTINUOUS = [line.split("  =>  ") for line in _LINES if "  =>  " in line]


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


@pytest.mark.parametrize("name", DRAWS)
def test_draws_captured_as_eager(name: str) -> None:
    captured = ml.capture(DRAWS[name])
    captured(R.key(1))
    np.testing.assert_array_equal(captured(R.key(2)).numpy(), DRAWS[name](R.key(2)).numpy())
    captured(None)
    for seed in (1, 2):
        R.seed(seed)
        expected = [DRAWS[name](None).numpy() for _ in range(2)]
        R.seed(seed)
        assert_close([captured(None) for _ in range(2)], expected)


@pytest.mark.parametrize("draw", [lambda key: R.split(key, 5), lambda key: R.fold_in(key, 3)])
def test_keys_of_keys(draw: Callable[[ml.Tensor], ml.Tensor]) -> None:
    first, again, other = (draw(R.key(seed)).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_categorical_draws_as_often_as_the_logits_say() -> None:
    p = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    with np.errstate(divide="ignore"):
        logits = np.log(p) + 3.0
    for axis, shaped, shape in ((-1, logits, (4000, 2)), (0, logits.T, (4000, 2))):
        for dtype in ("f4", "f8"):
            drawn = R.categorical(ml.asarray(shaped.astype(dtype)), axis, shape, key=R.key(3))
            assert drawn.dtype is ml.int64
            counts = [np.bincount(row, minlength=3) for row in drawn.numpy().T]
            np.testing.assert_allclose(np.array(counts) / 4000, p, atol=0.03)


def test_choice() -> None:
    drawn = R.choice(3, (3000,), key=R.key(1)).numpy()
    np.testing.assert_allclose(np.bincount(drawn) / 3000, [1 / 3] * 3, atol=0.04)
    p = ml.asarray([0.5, 0.0, 1.5])
    drawn = R.choice(3, (3000,), p=p, key=R.key(1)).numpy()
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 3000, [0.25, 0, 0.75], atol=0.04)
    for weights in (None, ml.ones(7)):
        once = R.choice(7, (7,), replace=False, p=weights, key=R.key(2)).tolist()
        assert sorted(once) == list(range(7))
    firsts = [R.choice(3, 2, replace=False, p=p, key=R.key(i)).numpy()[0] for i in range(300)]
    assert abs(np.mean(np.array(firsts) == 2) - 0.75) < 0.1
    assert all(R.choice(3, 2, replace=False, p=p, key=R.key(i)).numpy().min() != 1 for i in (1, 2))
    x = np.arange(24).reshape(2, 3, 4)
    columns = R.choice(ml.asarray(x), (2, 2), axis=1, key=R.key(3)).numpy()
    assert columns.shape == (2, 2, 2, 4)
    assert all(columns[0, i, j].tolist() in x[0].tolist() for i in (0, 1) for j in (0, 1))
    assert R.choice(0, (0, 3)).type == ml.zeros((0, 3), dtype=ml.int64).type
    assert R.choice(ml.zeros((0, 2)), 0).shape == (0, 2)


def test_truncated_normal_is_between_its_bounds() -> None:
    bounds = ml.asarray([[0.0], [5.0]]), ml.asarray([1.0, 5.5, 6.0])
    drawn = R.truncated_normal(*bounds).numpy()
    assert drawn.shape == (2, 3)
    assert ((drawn >= 0) & (drawn <= [1, 5.5, 6])).all()
    assert R.truncated_normal(0, 1, (3, 0)).shape == (3, 0)


# --- the global key ------------------------------------------------------------------


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


def test_each_vm_has_a_state_of_its_own_and_a_seed_reaches_all() -> None:
    before, vm = ml.Arena(ml.VM("before"), "there"), ml.VM("after")
    with before:
        R.normal(4)
    R.seed(9)
    later = ml.Arena(vm, "there")
    drawn = []
    for arena in (before, later):
        with arena:
            assert R.state().tolist() == [9, 1]
            drawn.append(R.normal(4).tolist())
            assert R.state().tolist() == [9, 2]
    assert drawn == [R.normal(4).tolist()] * 2
    with later:
        R.seed(0)
    with before:
        assert R.state().tolist() == [9, 2]


@pytest.mark.parametrize("kind", ["threads:2", "processes:2"])
def test_a_seed_reaches_the_members_of_a_group(kind: str) -> None:
    with ml.parallel.group(kind) as group:
        for seed in (3, 4):
            R.seed(seed)
            states = group.run(_states)
            assert states == [([seed, 1], [seed + rank, 2]) for rank in range(2)]
        assert group.run(_state_now) == [[4, 2], [5, 2]]


def _states(rank: int, _: object) -> tuple[list[int], list[int]]:
    """Return the member's keys at first, and after it has set a seed and drawn from it."""
    before = R.state().tolist()
    R.seed(before[0] + rank)
    R.normal(2)
    return before, R.state().tolist()


def _state_now(*_: object) -> list[int]:
    return R.state().tolist()


def test_a_draw_that_no_seed_reaches_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.process, "number", 0)
    one, other = ml.Arena(ml.VM("one"), "there"), ml.Arena(ml.VM("other"), "there")
    with other:
        R.normal(2)
    with one:
        R.seed(5)
        R.normal(2)
    with other, pytest.warns(ml.NoEffectWarning, match="VM 'other'.*seed.*VM 'one'") as caught:
        R.normal(2)
    assert caught[0].filename == __file__
    with other:
        R.normal(2)  # it is said once
        R.seed(5)
    with ml.Arena(ml.VM("third"), "there"), pytest.warns(ml.NoEffectWarning, match="third"):
        R.normal(2)
    R.seed(5)
    with ml.Arena(ml.VM("fourth"), "there"):
        R.normal(2)


def test_a_pipeline_shuffles_by_the_seed() -> None:
    numbers = np.arange(100)
    orders = []
    for seed in (1, 2, 1):
        pipeline = ml.Pipeline((numbers,), 100, shuffle=True)
        R.seed(seed)
        orders.append(pipeline.get()[0].tolist())
        R.seed(9)
        assert pipeline.state()["seed"] == seed  # the one of its first batch
    explicit = ml.Pipeline((numbers,), 100, shuffle=True, seed=2).get()[0].tolist()
    assert orders[0] == orders[2] != orders[1] == explicit


def test_the_state_outlives_the_arena_it_is_first_used_in() -> None:
    vm = ml.VM("other")
    R.seed(0)
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


# --- of their distributions ----------------------------------------------------------

N = 20_000


def gaussian(x: Any) -> Any:
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


def between(x: Any, low: float, high: float) -> Any:
    """The share of a truncated normal distribution that is below x."""
    return 1 - (gaussian(-x) - gaussian([-high])) / (gaussian([-low]) - gaussian([-high]))


def distance(x: Any, below: Callable[[Any], Any]) -> float:
    """Return the distance of Kolmogorov and Smirnov between draws and a distribution."""
    x = np.sort(x.numpy().astype(np.float64))
    assert np.isfinite(x).all()
    share, steps = below(x), np.arange(N + 1) / N
    return float(max((steps[1:] - share).max(), (share - steps[:-1]).max()))


@pytest.mark.parametrize(("draw", "below"), CONTINUOUS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_the_distance_of_kolmogorov_and_smirnov(draw: str, below: str, dtype: str) -> None:
    names = {**_SPACE, "N": N, "key": R.key(11), "dtype": dtype}
    names |= {"gaussian": gaussian, "between": between}
    drawn = eval(draw, names)
    assert (drawn.dtype.name, drawn.shape) == (dtype, (N,))
    found = distance(drawn, lambda x: eval(below, {**names, "x": x}))
    assert found < (1.63 / math.sqrt(N) if dtype != "bf16" else 0.04)  # 1.63: one key in 100


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("low", "high"), [(8.0, 9.0), (20.0, math.inf), (-31.0, -30.0)])
def test_truncated_normals_far_from_zero(low: float, high: float, dtype: str) -> None:
    how: Any = {"key": R.key(11), "dtype": dtype}
    drawn = R.truncated_normal(low, high, N, **how)
    mirrored = R.truncated_normal(ml.asarray(-high, dtype=dtype), -low, N, **how)
    assert mirrored.tolist() == (-drawn).tolist()
    above, bounds = (drawn, (low, high)) if low > 0 else (mirrored, (-high, -low))
    assert distance(above, lambda x: between(x, *bounds)) < 1.63 / math.sqrt(N)


@pytest.mark.parametrize("low", [5.0, 8.0, 30.0, 37.0, 38.2, 38.45, 38.57, 40.0, 1e3, 1e30])
@pytest.mark.parametrize("width", [0.01, 1.0, math.inf])
def test_truncated_normals_where_the_tail_is_subnormal_or_0(low: float, width: float) -> None:
    after = np.nextafter(low, math.inf)
    high, deep = max(low + width, after), max(low + 20 / low, after)
    first, last = log_tail([low, high])

    def below(x: Any) -> Any:
        return np.expm1(log_tail(x) - first) / np.expm1(last - first)

    for dtype in ("f32", "f64"):
        how: Any = {"key": R.key(11), "dtype": dtype}
        least, most = ml.asarray([low, min(high, deep)], dtype=dtype).tolist()
        for drawn in (
            R.truncated_normal(low, high, N, **how),
            -R.truncated_normal(-high, -low, N, **how),
        ):
            assert least <= float(ml.min(drawn)) <= float(ml.max(drawn)) <= most
            if dtype == "f64" and low <= 1e3:
                assert distance(drawn, below) < 1.63 / math.sqrt(N)


def log_tail(x: Any) -> Any:
    """The logarithm of twice the share of a normal distribution above x, for x > 0."""
    x = np.asarray(x)
    exact = [math.log(math.erfc(min(each, 25.0) / math.sqrt(2))) for each in x]
    far = np.maximum(x, 25.0)
    series = math.log(2 / math.pi) / 2 - np.log(far) + np.log1p(3 / far**4 - 1 / far**2)
    return np.where(x < 25, exact, series - x**2 / 2)


def test_counts_are_of_their_distribution() -> None:
    for rate in (0.3, 4.0, 50.0):
        drawn = R.poisson(rate, N, key=R.key(4)).numpy()
        assert abs(drawn.mean() - rate) < 4 * math.sqrt(rate / N)
        none = np.mean(drawn == 0)
        assert abs(none - math.exp(-rate)) < 0.015
        assert abs(drawn.var() / rate - 1) < 0.06
    for n, p in ((1, 0.2), (7, 0.9), (1000, 0.4)):
        drawn = R.binomial(n, p, N, key=R.key(4)).numpy()
        assert 0 <= drawn.min() <= drawn.max() <= n
        assert abs(drawn.mean() - n * p) < 4 * math.sqrt(n * p * (1 - p) / N)
        assert abs(drawn.var() / (n * p * (1 - p)) - 1) < 0.06
    odds = ml.asarray([[1.0, 2.0, 1.0], [0.0, 3.0, 1.0]])
    drawn = R.multinomial(ml.asarray([8, 5]), odds, (N, 2), key=R.key(4)).numpy()
    assert drawn.shape == (N, 2, 3)
    assert (drawn.sum(-1) == [8, 5]).all()
    np.testing.assert_allclose(drawn.mean(0), np.array([[2, 4, 2], [0, 3.75, 1.25]]), atol=0.05)
    signs = R.rademacher(N, key=R.key(4), dtype=ml.float32).numpy()
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.mean()) < 0.03
    assert R.poisson(ml.asarray([0.0, 1e18]), dtype="i64").tolist()[0] == 0


def test_draws_of_threads_take_different_keys() -> None:
    """Each key is split off and the state advanced at once, by templates and without them."""
    drawn: list[list[tuple[int, ...]]] = [[] for _ in range(4)]

    def draw(mine: list[tuple[int, ...]]) -> None:
        for i in range(200):
            with disabled() if i % 50 == 49 else nullcontext():
                mine.append(tuple(R.next_key().tolist()))

    R.seed(3)
    with taking_turns():
        in_threads(draw, drawn)
    assert R.state().tolist() == [3, 801]
    R.seed(3)
    in_order = {tuple(R.next_key().tolist()) for _ in range(800)}
    assert {key for mine in drawn for key in mine} == in_order
    assert len(in_order) == 800


def test_a_draw_that_fails_takes_one_key() -> None:
    """The function explains the error of a template, with the keys that were drawn."""
    good, bad = ml.asarray([0.5, 0.25]), ml.asarray([0.5, 2.0])
    R.seed(4)
    for p in (good, good, good, bad, good):
        before = R.state()[1]
        with pytest.raises(OperandValueError, match="bernoulli") if p is bad else nullcontext():
            R.bernoulli(2, p)
        assert R.state()[1] == before + 1


@pytest.mark.skipif(EXTENSION is None, reason="without the C extension each draw runs in Python")
def test_a_known_draw_does_not_run_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, random, "integers")
    for draw in (R.normal, R.uniform, R.bernoulli):
        calls.clear()
        for _ in range(5):
            draw((3, 7))
        assert calls.total() == 2
