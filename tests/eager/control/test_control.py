"""Control flow means what JAX's does, eagerly and captured, and refuses what does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, DTypeError, LimitExceededError
from mlvm.core.types import DType
from mlvm.eager.tree import named_leaves
from tests.brief import Fn, cases, refuses

Mode = Callable[[Callable[..., Any]], Callable[..., Any]]

MODES: dict[str, Mode] = {
    "eager": lambda fn: fn,
    "captured": lambda fn: ml.capture(fn, fuse=False),
    "fused": ml.capture,
}


@pytest.fixture(params=[*MODES.values()], ids=[*MODES])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


def numbers(tree: Any) -> list[Any]:
    return [x.numpy().tolist() for _, x in named_leaves(tree, buffers=True)]


def x2() -> ml.Tensor:
    return ml.asarray([1.0, 2.0])


class Pair(NamedTuple):
    first: Any
    second: Any


class Counter(ml.nn.Module):
    def __init__(self) -> None:
        self.weight = ml.ones((2,))
        self.count = ml.nn.buffer(ml.zeros((), dtype="i64"))


# --- branches ------------------------------------------------------------------------


CONDITIONS = [-0.0, 0.5, 1.0, math.nan]
SINGLE = [*DType.all, "f8e4m3", "f8e5m2"]
"""The dtypes of which there is a single element: those of fewer bits fill bytes."""


def decided(dtype: str, x: ml.Tensor) -> Any:
    """A branch and a loop by x in that dtype. The loop ends at -0.0."""
    branch = ml.cond(ml.astype(ml.reshape(x, (1, 1)), DType.named(dtype)), lambda: 1, lambda: 0)
    state = x * 1.0, 0
    turn = lambda s: (ml.full_like(s[0], -0.0), s[1] + 1)  # noqa: E731
    return branch, ml.while_loop(lambda s: ml.astype(s[0], DType.named(dtype)), turn, state)[1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", SINGLE)
def test_a_condition_of_any_dtype_holds_if_it_is_not_zero(dtype: str, native: bool) -> None:
    """A zero of either sign is one, a nan is none: for one input, for lanes, and for batches."""
    inexact = dtype == "bool" or DType.named(dtype).is_inexact or dtype in DType.storage
    expected = [[0, 1, 1, 1] if inexact else [0, 0, 1, 0]] * 2
    fn = partial(decided, dtype)
    each = lambda xs: [ml.stack(rows) for rows in zip(*[fn(x) for x in xs], strict=True)]  # noqa: E731
    with ml.use(ml.VM(native=native)):
        xs = ml.asarray(CONDITIONS)
        for run in (each, ml.vmap(fn), ml.auto_batch(fn)):
            for call in (run, ml.capture(run)):
                assert numbers(call(xs)) == expected


def test_a_python_condition_is_decided_while_it_is_recorded(mode: Mode) -> None:
    def step(x: ml.Tensor) -> Any:
        return ml.cond(True, lambda: x + 1, lambda: ml.zeros((7,))), ml.switch(
            5, [lambda: x, lambda: x * 2]
        )

    assert numbers(mode(step)(x2())) == [[2.0, 3.0], [2.0, 4.0]]


@pytest.mark.parametrize(("index", "name"), [(-3, 0), (0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_switch_takes_the_nearest_branch(mode: Mode, index: int, name: int) -> None:
    branches = [lambda x, k=k: {"x": x * k, "k": k} for k in range(4)]
    result = mode(lambda i, x: ml.switch(i, branches, x))(ml.asarray(index), x2())
    assert numbers(result) == [[1.0 * name, 2.0 * name], name]


def test_numbers_and_arrays_of_branches_are_tensors(mode: Mode) -> None:
    result = mode(lambda p: ml.cond(p, lambda y: (y, 1.5, True), lambda y: (y + 1, 2.5, False), 3))(
        ml.asarray(False)
    )
    assert [str(x.type) for x in result] == ["i64[]", "f32[]", "bool[]"]
    assert numbers(result) == [4, 2.5, False]


def test_results_have_memory_of_their_own(mode: Mode) -> None:
    """A result that no op computed is copied, so that an update of it changes nothing else."""

    def step(x: ml.Tensor, none: ml.Tensor) -> Any:
        same = ml.cond(none < 1, lambda: x, lambda: x * 2)
        passed = ml.while_loop(lambda s: none > 0, lambda s: s, x)
        first, second = ml.fori_loop(0, none + 1, lambda i, s: (s[0], s[0]), (x, x))
        row = ml.scan(lambda s, r: (r, s), x[0], x)[0]
        call = ml.subroutine(lambda x: x)(x)
        for each in (same, passed, first, row, call):
            each += 1
        return same, passed, first, second, row, call

    x = x2()
    more = [2.0, 3.0]
    assert numbers(mode(step)(x, ml.asarray(0))) == [more, more, more, [1.0, 2.0], 3.0, more]
    assert x.numpy().tolist() == [1.0, 2.0]


def test_only_the_branch_that_is_taken_has_effects(mode: Mode) -> None:
    total = ml.zeros(())

    def add(n: float) -> ml.Tensor:
        ml.add(total, n, out=total)
        return total * 1

    step = mode(lambda i: ml.switch(i, [lambda: add(1), lambda: add(10), lambda: add(100)]))
    assert [float(step(ml.asarray(i))) for i in (0, 2, 2, 1)] == [1.0, 101.0, 201.0, 211.0]


# --- loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5])
def test_while_loop_goes_on_for_as_long_as_it_is_true(mode: Mode, n: int) -> None:
    def step(n: ml.Tensor) -> Any:
        return ml.while_loop(
            lambda s: s["i"] < n, lambda s: {"i": s["i"] + 1, "f": s["f"] * (s["i"] + 1)},
            {"i": 0, "f": 1},
        )  # fmt: skip

    assert {name: int(x) for name, x in mode(step)(ml.asarray(n)).items()} == {
        "i": n,
        "f": int(np.prod(range(1, n + 1))),
    }


@cases("lower, upper", (0, 4), (2, 5), (-2, 2), (3, 3), (5, 1), (2**40, 2**40 + 2))
@pytest.mark.parametrize("dtype", [None, "i64"])
def test_fori_loop_counts_as_range_does(mode: Mode, lower: int, upper: int, dtype: Any) -> None:
    def step(bounds: ml.Tensor) -> Any:
        first, last = (bounds[0], bounds[1]) if dtype else (lower, upper)
        return ml.fori_loop(first, last, lambda i, s: s * 3 + i % 7, 1)

    expected = 1
    for i in range(lower, upper):
        expected = expected * 3 + i % 7
    assert int(mode(step)(ml.asarray([lower, upper]))) == expected


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def plain_scan(rows: Any, turns: int, reverse: bool) -> tuple[Any, Any]:
    state, ys = np.array([1, 1], np.float32), np.zeros((len(rows), 2), np.float32)
    for i in reversed(range(turns)) if reverse else range(turns):
        state = state * 2 + rows[i]
        ys[i] = state - 1
    return state, ys


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [None, 0, 2, 3])
@pytest.mark.parametrize("total", [3, 0])
def test_scan(mode: Mode, reverse: bool, length: int | None, total: int) -> None:
    rows = ROWS[:total]
    turns = total if length is None else min(length, total)

    def step(xs: ml.Tensor, n: ml.Tensor) -> Any:
        def body(s: ml.Tensor, x: Any) -> Any:
            s = s * 2 + x["rows"][0]
            return s, {"y": s - 1, "none": None}

        count = n if length is not None else None
        return ml.scan(body, ml.ones((2,)), {"rows": (xs,)}, count, reverse=reverse)

    state, ys = mode(step)(ml.asarray(rows), ml.asarray(turns))
    expected = plain_scan(rows, turns, reverse)
    assert state.numpy().tolist() == expected[0].tolist()
    assert ys["y"].numpy().tolist() == expected[1].tolist()
    assert ys["y"].shape == (total, 2)
    assert ys["none"] is None


def test_scan_without_rows(mode: Mode) -> None:
    step = mode(lambda n: (
        ml.scan(lambda s, x: (s * 2, (s, x)), 1, None, 4, reverse=True),
        ml.scan(lambda s, x: (s * 2, None), 1, length=n),
    ))  # fmt: skip
    (state, (ys, none)), (counted, _) = step(ml.asarray(3))
    assert (int(state), ys.numpy().tolist(), none) == (16, [8, 4, 2, 1], None)
    assert int(counted) == 8
    assert int(step(ml.asarray(-3))[1][0]) == 1  # no turns, as range(-3)


def test_no_turn_has_no_effect(mode: Mode) -> None:
    """A scan of no rows has to know what a row would be, and yet its body does nothing."""
    total = ml.zeros(())

    def body(s: ml.Tensor, x: ml.Tensor) -> Any:
        ml.add(total, 1.0, out=total)
        return s + 1, ml.random.normal((3,)) > x

    ml.random.seed(1)
    before = ml.random.state().tolist()
    state, ys = mode(lambda xs: ml.scan(body, 0, xs))(ml.zeros((0,)))
    assert (int(state), str(ys.type)) == (0, "bool[0,3]")
    assert float(total) == 0
    assert ml.random.state().tolist() == before


def test_a_scan_of_no_rows_changes_nothing() -> None:
    """Its body is recorded for the types of its results, and not run."""

    class Counting(ml.nn.Module):
        new: ml.Tensor

        def __init__(self) -> None:
            self.count = ml.nn.buffer(ml.zeros(()))

    counting, none = Counting(), ml.zeros((0, 2))

    def loss(x: ml.Tensor) -> ml.Tensor:
        total = x * 2.0
        view = total[:1]

        def turn(s: ml.Tensor, row: ml.Tensor) -> Any:
            total.__imul__(s)
            view.__iadd__(1.0)
            s += ml.random.normal(3)
            counting.count = counting.count + 1.0
            counting.new = row
            return s, row

        assert ml.scan(turn, x, none)[1].shape == (0, 2)
        return ml.sum(total) + ml.sum(view)

    state = ml.random.state().tolist()
    x = ml.asarray([1.0, 2.0, 3.0])
    assert ml.grad(loss)(x).tolist() == [4.0, 2.0, 2.0]
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert ml.random.state().tolist() == state
    assert counting.count.item() == 0.0
    assert not hasattr(counting, "new")
    with pytest.raises(CaptureError, match=r"a scan of no rows records its body .* cannot read a"):
        ml.scan(lambda s, row: (s, row * float(ml.sum(row))), x, none)


def test_map(mode: Mode) -> None:
    step = mode(lambda x, y: ml.map(lambda row: [row["x"] * row["y"], row["y"]], {"x": x, "y": y}))
    result = step(ml.asarray(ROWS), ml.arange(3.0))
    assert numbers(result) == [(ROWS * np.arange(3)[:, None]).tolist(), [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("trips", [1, 3])
def test_a_number_of_the_state_has_the_dtype_of_the_body(mode: Mode, trips: int) -> None:
    """As a weak type of JAX. One number may depend on another; a tensor keeps its dtype."""
    wide = np.arange(3.0)

    def rotated(i: ml.Tensor, s: Any) -> Any:
        return s[1] + ml.asarray(wide)[i], s[0] * 2, s[2]

    def step() -> Any:
        pair = ml.fori_loop(0, trips, rotated, (0, 0.1, 2.5))
        below = ml.while_loop(lambda s: s < 5 * trips, lambda s: s * ml.asarray(wide)[2], 1)
        total = ml.scan(lambda s, x: (s + x, s), 0.1, ml.asarray(wide)[:trips])
        return [*pair, below, *total]

    first, second = 0.0, 0.1
    for i in range(trips):
        first, second = second + wide[i], first * 2
    sums = np.add.accumulate([0.1, *wide[:trips]])
    below = {1: 8.0, 3: 16.0}[trips]
    results = mode(step)()
    assert numbers(results) == [first, second, 2.5, below, sums[-1], sums[:-1].tolist()]
    assert [x.dtype.name for x in results] == ["f64", "f64", "f32", "f64", "f64", "f64"]
    with pytest.raises(DTypeError, match=r"expected f32\[\], got i64"):
        mode(lambda: ml.fori_loop(0, 3, lambda i, s: i, 0.5))()


def test_numbers_of_nested_loops_do_not_multiply_traces() -> None:
    traces = []

    def nested(depth: int) -> ml.Tensor:
        def body(i: ml.Tensor, s: ml.Tensor) -> ml.Tensor:
            traces.append(depth)
            return s + (nested(depth - 1) if depth else i)

        return ml.fori_loop(0, 2, body, 0)

    assert int(ml.capture(lambda: nested(3))()) == 8
    assert traces == [3, 2, 1, 0]


def test_an_eager_body_with_numbers_runs_once_for_each_iteration() -> None:
    rows = iter([1.0, 2.0, 3.0, 4.0])
    assert float(ml.fori_loop(0, 3, lambda i, s: s + next(rows), 0.0)) == 6.0
    total, wide = ml.zeros(2), ml.asarray(np.ones(2))

    def updates(i: ml.Tensor, s: ml.Tensor) -> ml.Tensor:
        total[0] = total[0] + 1.0
        return s + wide[0]

    with pytest.raises(DTypeError, match=r"expected f32\[\], got f64"):  # it would update twice
        ml.fori_loop(0, 1, updates, 0.0)
    assert total.tolist() == [1.0, 0.0]


# --- trees ---------------------------------------------------------------------------


def test_every_kind_of_tree_goes_round(mode: Mode) -> None:
    def step(x: ml.Tensor, module: Counter) -> Any:
        def body(i: ml.Tensor, s: Any) -> Any:
            pair, tree = s["pair"], s["tree"]
            module = s["module"]
            module.count = module.count + i
            return {
                "tree": [tree[1] + 1, tree[0], tree[2]],
                "module": module,
                "pair": Pair((pair.second, None), pair.first[0] * 2),
            }

        init = {"pair": Pair((x, None), x + 1), "tree": [1, 10, 2.5], "module": module}
        looped = ml.fori_loop(0, 3, body, init)
        assert type(looped["module"]) is Counter
        return {**looped, "module": (looped["module"].weight, looped["module"].count)}

    module = Counter()
    result = mode(step)(x2(), module)
    assert list(result) == ["pair", "tree", "module"]  # as it was given, not as it came back
    assert type(result["pair"]) is Pair
    assert numbers(result["pair"]) == [[4.0, 6.0], [4.0, 8.0]]
    assert result["pair"].first[1] is None
    assert numbers(result["tree"]) == [12, 2, 2.5]
    assert numbers(result["module"]) == [[1.0, 1.0], 3]
    assert int(module.count) == 0  # which went round as another one


def test_rows_of_a_module_are_a_module(mode: Mode) -> None:
    layers = Counter()
    layers.weight = ml.asarray(ROWS)
    layers.count = ml.asarray([1, 2, 3])

    def step(layers: Counter) -> Any:
        state, rows = ml.scan(lambda s, layer: (s + layer.weight, layer), ml.zeros((2,)), layers)
        assert type(rows) is Counter
        return state, rows.weight, rows.count

    assert numbers(mode(step)(layers)) == [[6.0, 9.0], ROWS.tolist(), [1, 2, 3]]


# --- what bodies reach ---------------------------------------------------------------


def test_bodies_update_tensors_from_outside(mode: Mode) -> None:
    def step(x: ml.Tensor) -> Any:
        total = ml.zeros((2,))

        def body(i: ml.Tensor, s: ml.Tensor) -> ml.Tensor:
            ml.add(total, s, out=total)
            ml.multiply(x, 2.0, out=x)  # which is the state at first, and no longer then
            return s + 1

        return ml.fori_loop(0, 3, body, x), total

    x = x2()
    assert numbers(mode(step)(x)) == [[4.0, 5.0], [6.0, 9.0]]
    assert x.numpy().tolist() == [8.0, 16.0]


def test_a_row_is_what_it_was_in_its_turn(mode: Mode) -> None:
    def step(x: ml.Tensor) -> Any:
        total = ml.zeros(())

        def body(s: Any, row: ml.Tensor) -> Any:
            ml.add(total, row, out=total)
            return None, total

        return ml.scan(body, None, x)[1]

    assert mode(step)(ml.arange(4.0)).numpy().tolist() == [0.0, 1.0, 3.0, 6.0]


@pytest.mark.parametrize("pred", [0, 1, 3])
def test_random_keys(mode: Mode, pred: int) -> None:
    """Global keys advance with the turns that are made; explicit ones go round."""

    def step(n: ml.Tensor, key: ml.Tensor) -> Any:
        drawn = ml.fori_loop(0, n, lambda i, s: s + ml.random.normal((2,)), ml.zeros((2,)))
        either = ml.cond(n > 1, lambda: ml.random.uniform((2,)), lambda: ml.zeros((2,)))

        def turn(key: ml.Tensor, _: Any) -> Any:
            keys = ml.random.split(key)
            return keys[0], ml.random.normal((2,), key=keys[1])

        own = ml.scan(turn, key, None, 2)[1]
        return drawn, either, own, ml.random.uniform(())

    ml.random.seed(5)
    first = numbers(mode(step)(ml.asarray(pred), ml.random.key(3)))
    state = ml.random.state().tolist()
    ml.random.seed(5)
    assert first == numbers(step(ml.asarray(pred), ml.random.key(3)))
    assert state == ml.random.state().tolist()
    assert first[2][0] != first[2][1]


# --- functions -----------------------------------------------------------------------


@ml.subroutine
def fibonacci(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n < 2, lambda: n, lambda: fibonacci(n - 1) + fibonacci(n - 2))


@ml.subroutine
def is_even(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n < 1, lambda: True, lambda: is_odd(n - 1))


@ml.subroutine
def is_odd(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n < 1, lambda: False, lambda: is_even(n - 1))


@ml.subroutine
def endless(n: ml.Tensor) -> ml.Tensor:
    return ml.cond(n < 0, lambda: n, lambda: endless(n + 1))


def test_functions_call_themselves_and_each_other(mode: Mode) -> None:
    step = mode(lambda n: (fibonacci(n), is_even(n), is_odd(n)))
    assert numbers(step(ml.asarray(9))) == [34, False, True]
    assert numbers(step(ml.asarray(2))) == [1, True, False]


def test_too_deep_a_recursion_is_an_error() -> None:
    refuses(LimitExceededError, "call depth exceeds", ml.capture(endless), ml.asarray(0))


def test_a_function_that_is_another_each_time_is_an_error() -> None:
    @ml.subroutine
    def deeper(n: ml.Tensor, module: Counter) -> ml.Tensor:
        return ml.cond(n < 1, lambda: n, lambda: deeper(n - 1, Counter()))

    assert int(deeper(ml.asarray(2), Counter())) == 0
    with pytest.raises(CaptureError, match="calls itself with different argument types"):
        ml.capture(lambda n: deeper(n, Counter()))(ml.asarray(2))


# --- beside JAX ----------------------------------------------------------------------


LOOPS: dict[str, Callable[..., Any]] = {
    "while": lambda body, w: ml.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, body(s[1])), (ml.zeros((), dtype="i32"), w)
    )[1],
    "fori": lambda body, w: ml.fori_loop(0, 3, lambda i, s: body(s), w),
    "scan": lambda body, w: ml.scan(lambda s, x: (body(s), x), w, ml.ones(3))[0],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_update_of_the_state_is_none_of_a_weight_that_a_body_returns(
    mode: Mode, loop: str
) -> None:
    w = ml.asarray([2.0, 3.0])

    def body(s: ml.Tensor) -> ml.Tensor:
        s += 1.0
        return w

    assert mode(lambda: LOOPS[loop](body, w))().tolist() == [2, 3]
    assert w.tolist() == [2, 3]


def test_parts_of_the_state_that_were_one_tensor_are_updated_apart(mode: Mode) -> None:
    def step() -> Any:
        def body(i: ml.Tensor, s: Any) -> Any:
            a, b = s
            a += 1.0
            return b, b

        return ml.fori_loop(0, 3, body, (ml.zeros(2), ml.ones(2)))

    assert [x.tolist() for x in mode(step)()] == [[1, 1], [1, 1]]


# Gradients at x = 1: the first iterations on the backward pass have no cotangent for some part of
# the state, and a logarithm of zero is on its path.
NO_COTANGENTS: dict[str, tuple[Callable[[ml.Tensor], Any], float]] = {
    "last carry unread": (
        lambda x: ml.sum(ml.scan(lambda c, r: (ml.sqrt(c - 2 * x + 1.25), c), x, ml.ones(2))[1]),
        0.0,
    ),
    "from the last row": (
        lambda x: ml.sum(ml.scan(lambda c, r: (ml.log(c - x), c), x, ml.ones(1), reverse=True)[1]),
        1.0,
    ),
    "length known at run time": (
        lambda x: ml.sum(ml.scan(lambda c, r: (ml.log(c - x), c), x, ml.ones(3), ml.asarray(1))[1]),
        1.0,
    ),
    "swapped": (
        lambda x: ml.fori_loop(0, 4, lambda i, s: (ml.log(s[1]), s[0]), (x * 2, x - 1))[0],
        1 / math.log(2),
    ),
    "through three parts": (
        lambda x: ml.fori_loop(
            0, ml.asarray(2), lambda i, s: (s[1] * x, s[2], ml.log(x - 1)), (x, x, x)
        )[0],
        2.0,
    ),
    "while": (
        lambda x: ml.while_loop(
            lambda s: s[2] < 2, lambda s: (s[1] * x, ml.log(s[1] - x) + x, s[2] + 1), (x, x, x)
        )[0],
        2.0,
    ),
}

EVERYWHERE: dict[str, Mode] = {
    **MODES,
    "vmap": lambda fn: lambda x: ml.vmap(fn)(ml.stack([x, x]))[1],
    "batch": lambda fn: lambda x: ml.auto_batch(fn)(ml.stack([x, x]))[1],
}


@cases("wrap", *EVERYWHERE.values(), ids=[*EVERYWHERE])
@pytest.mark.parametrize("case", NO_COTANGENTS)
def test_no_cotangent_is_no_zero_in_any_iteration(case: str, wrap: Mode) -> None:
    fn, expected = NO_COTANGENTS[case]
    assert float(wrap(ml.grad(fn))(ml.asarray(1.0))) == pytest.approx(expected)


@cases("wrap", ml.capture, EVERYWHERE["vmap"], ids=["captured", "vmap"])
@pytest.mark.parametrize("case", [*NO_COTANGENTS, "squared"])
def test_no_cotangent_is_no_zero_in_second_gradients(case: str, wrap: Mode) -> None:
    fn, _ = NO_COTANGENTS.get(case, (squared, 0))
    second = ml.grad(ml.grad(fn))
    x = ml.asarray(1.0)
    assert float(wrap(second)(x)) == pytest.approx(float(second(x)), nan_ok=False)


def squared(x: ml.Tensor) -> ml.Tensor:
    """Sum of cubes of the state of a scan, whose last state is nan, and unread."""
    return ml.sum(ml.scan(lambda c, r: (ml.sqrt(c - 2 * x + 1.25), c * c * c), x, ml.ones(2))[1])


# Functions of x = 0 and of y = log(x), which only branches read that are not taken.
NOT_TAKEN: dict[str, Callable[[ml.Tensor, ml.Tensor], Any]] = {
    "one branch": lambda x, y: ml.cond(x > 0, lambda: y, lambda: 2 * x),
    "a branch of a branch": lambda x, y: ml.cond(
        x < 1, lambda: ml.cond(x > 0, lambda: y * x, lambda: 2 * x), lambda: y
    ),
    "some iterations": lambda x, y: (
        ml.scan(
            lambda c, r: (ml.cond(r > 0, lambda: c * y, lambda: 2 * c), c),
            x,
            ml.asarray([0.0, -1.0]),
        )[0]
        / 2
    ),
    "a loop of no iterations": lambda x, y: ml.fori_loop(
        0, ml.astype(x, "i64"), lambda i, s: s * y, 2 * x
    ),
    "a branch, added to what any call adds": lambda x, y: ml.cond(x > 0, lambda: y, lambda: x) + x,
}


@cases("wrap", *EVERYWHERE.values(), ids=[*EVERYWHERE])
@pytest.mark.parametrize("name", NOT_TAKEN)
def test_a_branch_that_is_not_taken_has_no_cotangent(name: str, wrap: Mode) -> None:
    """The branch may read infinities; zeros would make nan of them."""
    x = ml.asarray(0.0)

    def fn(x: ml.Tensor) -> Any:
        x = x - 1  # which has a cotangent of y, too
        return NOT_TAKEN[name](x + 1, ml.log(x + 1))

    assert float(wrap(ml.grad(fn))(x)) == 2.0
    if wrap is not EVERYWHERE["batch"]:
        assert float(wrap(ml.grad(ml.grad(fn)))(x)) == 0.0


def of_a_sum_in_one_branch(x: ml.Tensor, yes: ml.Tensor) -> Any:
    """Each iteration uses x, and one of two branches uses it once more."""

    def body(s: ml.Tensor, _: Any) -> Any:
        u = ml.tanh(x)
        s = ml.cond(yes, lambda: u * s, lambda: x * u)
        return s, s

    last, rows = ml.scan(body, x * 0 + 1, ml.ones(3))
    return last + ml.sum(rows)


def of_a_sum_in_an_inner_branch(x: ml.Tensor, yes: ml.Tensor) -> Any:
    def body(i: Any, s: ml.Tensor) -> Any:
        u = ml.sin(x)
        s = ml.fori_loop(0, 2, lambda j, s: ml.cond(yes, lambda: s * u, lambda: s * x), s)
        return s * u + ml.cond(yes, lambda: s, lambda: s * x)

    return ml.fori_loop(0, 3, body, x * 2.0)


def of_a_sum_in_an_inner_loop(x: ml.Tensor, yes: ml.Tensor) -> Any:
    """The inner loop may have no iterations."""

    def body(i: Any, s: ml.Tensor) -> Any:
        u = ml.sin(x)
        s = ml.fori_loop(0, 1 - ml.astype(yes, ml.int64), lambda j, s: s * x, s)
        return s * u

    return ml.fori_loop(0, 3, body, x * 2.0)


def of_a_sum_by_rows(x: ml.Tensor, yes: ml.Tensor) -> Any:
    def body(i: Any, s: ml.Tensor) -> Any:
        u = ml.cos(x)
        _, rows = ml.scan(lambda c, r: (c * u, ml.cond(yes, lambda: c, lambda: r * x)), x, s + s)
        return rows * u

    return ml.sum(ml.fori_loop(0, 3, body, ml.ones(2, dtype=ml.float64) * x))


def of_a_sum_in_a_function(x: ml.Tensor, yes: ml.Tensor) -> Any:
    times = ml.subroutine(lambda s: ml.sin(s * x))

    def body(i: Any, s: ml.Tensor) -> Any:
        return times(ml.cond(yes, lambda: times(s), lambda: s * ml.tanh(x)))

    return ml.fori_loop(0, 2, body, x * 2.0)


@cases(
    "fn",
    of_a_sum_in_one_branch,
    of_a_sum_in_an_inner_branch,
    of_a_sum_in_an_inner_loop,
    of_a_sum_by_rows,
    of_a_sum_in_a_function,
)
@pytest.mark.parametrize("yes", [True, False])
def test_a_sum_of_iterations_is_complete_where_a_branch_adds_nothing(fn: Fn, yes: bool) -> None:
    """Eager gradients have no conditions, and differences tell that they are right."""
    x, flag, h = ml.asarray(0.7, dtype=ml.float64), ml.asarray(yes), 1e-6
    gradient = ml.grad(lambda x: fn(x, flag))
    expected = float(gradient(x))
    assert float(fn(x + h, flag) - fn(x - h, flag)) / (2 * h) == pytest.approx(expected, rel=1e-6)
    assert float(ml.capture(lambda x, flag: ml.grad(lambda x: fn(x, flag))(x))(x, flag)) == expected
    second = pytest.approx(float(gradient(x + h) - gradient(x - h)) / (2 * h), rel=1e-5)
    assert float(ml.jvp(gradient, (x,), (x * 0 + 1,))[1]) == second
    assert float(ml.capture(ml.grad(gradient))(x)) == second
    rows = ml.vmap(lambda x, flag: ml.grad(lambda x: fn(x, flag))(x))
    assert float(rows(ml.stack([x, x]), ml.asarray([yes, not yes]))[0]) == pytest.approx(expected)
