"""Names that captured functions rebind: fields of Modules become state as in eager; any other name
that would keep a tensor made inside is refused, and names again what it named."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, OperandValueError, StaleTensorError
from mlvm.eager import nn
from tests.brief import cases, refuses

pytestmark = pytest.mark.usefixtures("weights")

HERE = Path(__file__).name
TOTAL: Any = None


# --- fields of Modules ---------------------------------------------------------------------


class State(nn.Module):
    """Fields to rebind: `a`, `b` and `view` of three elements, `inner.a` too."""

    def __init__(self, *, inner: bool = True) -> None:
        self.a = ml.arange(3.0) + 1.0
        self.b = ml.arange(3.0) + 11.0
        self.view = ml.stop_gradient(ml.arange(3.0) + 21.0)
        self.tied = self.a
        self.on = False
        if inner:
            self.inner = State(inner=False)


def running_mean(state: State, x: ml.Tensor) -> Any:
    state.a = state.a * 0.5 + x * 0.5
    return x - state.a


def mean(state: State, x: ml.Tensor) -> Any:
    return state.a * x


def several_times(state: State, x: ml.Tensor) -> Any:
    state.a = state.a + x
    before = state.a * 2.0
    state.a = state.a * state.a
    state.a = state.a + before
    return before


def swapped(state: State, x: ml.Tensor) -> Any:
    state.a, state.b = state.b, state.a
    return state.a - x


def all_round(state: State, x: ml.Tensor) -> Any:
    state.a, state.b, state.inner.a = state.b, state.inner.a, state.a + x


def bound_to_the_argument(state: State, x: ml.Tensor) -> Any:
    difference = x - state.a
    state.a = x
    return difference


def bound_to_a_view_of_the_argument(state: State, x: ml.Tensor) -> Any:
    state.a = ml.stop_gradient(x)
    return state.a * 2.0, ml.stop_gradient(state.b)


def bound_to_other_state(state: State, x: ml.Tensor) -> Any:
    state.a = state.b
    state.b = state.b + x


def bound_to_a_view_of_other_state(state: State, x: ml.Tensor) -> Any:
    state.a = ml.reshape(ml.reshape(state.b, (3, 1)), (3,))
    state.b = state.b + x
    return state.a * x


def a_view_rebound(state: State, x: ml.Tensor) -> Any:
    state.view = state.view + x
    state.inner.view = ml.reshape(ml.reshape(x, (3, 1)) * 2.0, (3,))


def returned_too(state: State, x: ml.Tensor) -> Any:
    state.a = y = state.a + x
    return y, ml.reshape(y, (3, 1)), {"again": state.a}


def one_for_two_fields(state: State, x: ml.Tensor) -> Any:
    state.a = state.inner.b = state.a + x
    return state.inner.b * 2.0


def only_written(state: State, x: ml.Tensor) -> Any:
    state.b = x * 2.0


def then_updated_in_place(state: State, x: ml.Tensor) -> Any:
    state.a = state.a + x
    state.a *= 2.0
    state.b += state.a


def updated_in_place_then_rebound(state: State, x: ml.Tensor) -> Any:
    state.a *= 2.0
    state.a = state.a + x


def back_to_what_it_was(state: State, x: ml.Tensor) -> Any:
    before, state.a = state.a, state.a + x
    after, state.a = state.a, before
    return after


def within_a_gradient(state: State, x: ml.Tensor) -> Any:
    def loss(w: ml.Tensor) -> ml.Tensor:
        state.b = state.b * 0.5 + ml.stop_gradient(w) * x
        return ml.sum(w * w * x)

    return ml.grad(loss)(state.inner.a)


def every_other_time(state: State, x: ml.Tensor) -> Any:
    state.on = not state.on
    if state.on:
        state.a = state.a + x
    return state.a * 1.0


STEPS = [
    running_mean,
    several_times,
    swapped,
    all_round,
    bound_to_the_argument,
    bound_to_a_view_of_the_argument,
    bound_to_other_state,
    bound_to_a_view_of_other_state,
    a_view_rebound,
    returned_too,
    one_for_two_fields,
    only_written,
    then_updated_in_place,
    updated_in_place_then_rebound,
    back_to_what_it_was,
    within_a_gradient,
    every_other_time,
]


def history(step: Callable[..., Any], state: State, *, same_argument: bool) -> Any:
    """All that four calls leave: of each tensor that was ever returned or named by a field, the
    values at the end, whether it is a view, and what else is the same object or memory."""
    tensors: list[ml.Tensor] = []
    xs = [ml.arange(3.0) * float(i + 1) for i in range(4)]
    for i in range(4):
        collect([vars(state), vars(state.inner), xs[i]], tensors)
        collect(step(state, xs[0] if same_argument else xs[i]), tensors)
    collect([vars(state), vars(state.inner)], tensors)
    objects, roots = [id(x) for x in tensors], [id(x.root) for x in tensors]
    return [
        (x.tolist(), x.base is None, objects.index(id(x)), roots.index(id(x.root))) for x in tensors
    ]


def collect(tree: Any, tensors: list[ml.Tensor]) -> None:
    if isinstance(tree, ml.Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            collect(part, tensors)


@pytest.mark.parametrize("same_argument", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_fields_are_rebound_as_in_eager(step: Any, fuse: bool, same_argument: bool) -> None:
    expected = history(step, State(), same_argument=same_argument)
    captured = ml.capture(step, fuse=fuse)
    assert history(captured, State(), same_argument=same_argument) == expected
    reached = State()
    by_itself = ml.capture(lambda x: step(reached, x), fuse=fuse)
    result = history(lambda state, x: by_itself(x), reached, same_argument=same_argument)
    assert result == expected


@pytest.mark.parametrize("fn", [running_mean, returned_too])
def test_what_is_rebound_each_time_is_one_program_and_no_memory(vm: Any, fn: Any) -> None:
    state, batch = State(), ml.Arena(vm, "batch")
    step = ml.capture(fn)
    usage = []
    for i in range(8):
        with batch:
            step(state, ml.full((3,), float(i)))
        gc.collect()  # what the traces have left
        usage.append((vm.consumed_size_in_mib(), state.a.arena.used, state.a.arena.views_created))
    assert step.signatures == 1
    assert usage[-1] == usage[3]
    assert state.a.arena.name == "weights"


def test_a_field_of_a_closed_arena_is_rebound_in_the_current_one(vm: Any) -> None:
    state, old = State(), ml.Arena(vm, "old")
    with old.allocating():
        state.b = ml.ones(3)
    old.close()
    ml.capture(only_written)(state, ml.ones(3))
    assert state.b.tolist() == [2.0] * 3


class Normalize(nn.Module):
    """Batch normalisation, whose running mean is a buffer that each call rebinds."""

    def __init__(self) -> None:
        self.scale = ml.ones((3,))
        self.mean = nn.buffer(ml.zeros((3,)))

    def __call__(self, x: ml.Tensor) -> ml.Tensor:
        mean = ml.mean(x, axis=0)
        self.mean = self.mean * 0.9 + 0.1 * ml.stop_gradient(mean)
        return (x - mean) * self.scale


def test_a_buffer_is_rebound_within_the_gradient_of_its_module() -> None:
    def trained(wrap: Callable[..., Any]) -> Any:
        layer = Normalize()
        optimizer = ml.optim.SGD(layer, 0.1)

        def step(x: ml.Tensor) -> Any:
            loss, grads = ml.value_and_grad(lambda layer: ml.mean(layer(x) ** 2))(layer)
            optimizer.update(grads)
            return loss

        call, draws = wrap(step), np.random.default_rng(0)
        for _ in range(5):
            x = ml.asarray(draws.normal(size=(4, 3)).astype(np.float32))
            yield [each.tolist() for each in (call(x), layer.mean, layer.scale)]
        assert list(layer.named_buffers()) == ["mean"]

    assert list(trained(ml.capture)) == list(trained(lambda fn: fn))


def test_a_function_that_raises_has_rebound_nothing() -> None:
    state, fails = State(), [True]
    before = dict(vars(state))

    @ml.capture
    def step(x: ml.Tensor) -> None:
        state.a = state.a + x
        state.inner.b = x
        state.b = ml.reshape(state.b * x, (3, 1))
        if fails:
            raise ValueError("mine")
        state.b = x * 1.0

    def unchanged() -> bool:
        return all(vars(state)[name] is each for name, each in before.items())

    inner = state.inner.b
    for _ in range(2):
        refuses(ValueError, "mine", step, ml.ones((3,)))
        assert unchanged()
        assert state.inner.b is inner
    fails.clear()
    step(ml.ones((3,)))
    assert state.a.tolist() == [2, 3, 4]
    step(ml.ones((3,)))
    before = dict(vars(state))
    fails.append(True)
    refuses(ValueError, "mine", lambda: step(ml.ones((3,))))
    assert unchanged()


def test_a_launch_that_raises_has_rebound_nothing() -> None:
    state = State()

    @ml.capture
    def step(labels: ml.Tensor) -> ml.Tensor:
        state.a = state.a + 1.0
        return ml.softmax_cross_entropy(ml.reshape(state.a, (1, 3)), labels)

    good, bad = ml.asarray(np.array([1])), ml.asarray(np.array([5]))
    for _ in range(3):
        before = state.a
        refuses(OperandValueError, "", step, bad)
        assert state.a is before
        step(good)
        assert state.a.tolist() == [x + 1.0 for x in before.tolist()]


def test_measuring_rebinds_nothing() -> None:
    state = State()
    a = state.a
    measured = ml.measure(running_mean, state, ml.TensorType("f32", (3,)))
    assert state.a is a
    step = ml.capture(running_mean)
    step(state, ml.ones((3,)))
    assert step.plan == measured.plan


def test_a_field_bound_to_what_ends_is_stale_as_in_eager(vm: Any) -> None:
    for wrap in (lambda fn: fn, ml.capture):
        state = State()
        step = wrap(bound_to_the_argument)
        batch = ml.Arena(vm, "batch")
        with batch:
            step(state, ml.ones((3,)))
        with pytest.raises(StaleTensorError, match="batch"), batch:
            step(state, ml.ones((3,)))


def test_what_rebinds_is_neither_looped_nor_saved(vm: Any, tmp_path: Path) -> None:
    queue, state = ml.QueueTensor(vm, ["f32[3]"], 2), State()
    step = ml.capture(lambda: running_mean(state, queue.get()[0]))
    for _ in range(2):
        queue.put([np.ones(3, np.float32)])
        step()
    refuses(CaptureError, "rebinds 'a' of State", step.drain)
    both = ml.capture(lambda training: (running_mean if training else mean)(state, *queue.get()))
    for training in (True, True, False):
        queue.put([np.ones(3, np.float32)])
        both(training)
    queue.put([np.ones(3, np.float32)])
    queue.close()
    assert both.drain(False).tolist() == state.a.tolist()
    plain = ml.capture(lambda x: running_mean(state, x))
    for _ in range(2):
        plain(ml.ones((3,)))
        with pytest.raises(CaptureError, match="rebinds 'a' of State, which cannot be saved"):
            plain.save(tmp_path / "step.mlvm")


# --- what cannot be kept ---------------------------------------------------------------------


class Holder:
    """An object that is no Module."""

    attached: Any = None

    def __init__(self) -> None:
        self.total: Any = ml.zeros((3,))
        self.history: list[Any] = [1.0]
        self.named: dict[str, Any] = {"a": 0}
        self.state = State()

    def contents(self) -> Any:
        fields = dict(vars(self.state))
        return self.total, [*self.history], dict(self.named), fields, TOTAL


def kept_by_a_global(holder: Holder, y: Any) -> None:
    global TOTAL
    TOTAL = y


@cases(
    "keep, where",
    (lambda holder, y: setattr(holder, "total", y), "attribute 'total' of Holder"),
    (lambda holder, y: setattr(holder, "more", y), "attribute 'more' of Holder"),
    (lambda holder, y: holder.history.append(y), "item 1 of a list"),
    (
        lambda holder, y: holder.history.insert(0, {"nested": (1, SimpleNamespace(y=y))}),
        "item 0 of a list",
    ),
    (lambda holder, y: holder.named.update(a=y, b=1), "item 'a' of a dict"),
    (kept_by_a_global, "global 'TOTAL'"),
    (lambda holder, y: setattr(holder.state, "cache", y), "field 'cache' of State"),
    (lambda holder, y: setattr(holder.state, "a", ml.concat([y, y])), "field 'a' of State"),
    (lambda holder, y: setattr(holder.state, "a", [y]), "field 'a' of State"),
)
@pytest.mark.parametrize("build", [lambda x: x * 2.0, lambda x: ml.reshape(x * 2.0, (1, 3))[0]])
def test_any_other_name_that_keeps_a_tensor_is_refused(keep: Any, where: str, build: Any) -> None:
    holder = Holder()

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        holder.state.b = holder.state.b + x
        keep(holder, build(x))
        return x + 1.0

    before = holder.contents()
    for _ in range(2):
        refuses(CaptureError, f"{HERE}:.* stored in {where}", step, ml.ones((3,)))
        after = holder.contents()
        after[2].pop("b", None)
        same(after, before)
        assert not hasattr(holder, "more")
    assert step.signatures == 0


def same(result: Any, expected: Any) -> None:
    """The same objects, in the same places."""
    if isinstance(expected, (tuple, list)):
        assert len(result) == len(expected)
        for each, value in zip(result, expected, strict=True):
            same(each, value)
    elif isinstance(expected, dict):
        same(list(result.items()), list(expected.items()))
    else:
        assert result is expected or result == expected


def test_a_variable_around_is_refused_and_put_back() -> None:
    total = ml.zeros((3,))
    zeros = total
    last: Any

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        nonlocal total
        total = total + x
        return total * 1.0

    @ml.capture
    def keeps_a_first_value(x: ml.Tensor) -> ml.Tensor:
        nonlocal last
        last = x
        return x * 1.0

    refuses(CaptureError, "stored in variable 'total'", lambda: step(ml.ones((3,))))
    assert total is zeros
    with pytest.raises(CaptureError, match=r"f32\[3\] passed to .* stored in variable 'last'"):
        keeps_a_first_value(ml.ones((3,)))
    with pytest.raises(NameError):
        last  # noqa: B018


def test_what_a_cache_keeps_is_refused_and_forgotten() -> None:
    for cached in (functools.cache, functools.lru_cache(maxsize=4), functools.lru_cache):

        class Tables:
            @staticmethod
            @cached
            def table(n: int) -> Any:
                return {"rows": [ml.arange(n) * 2.0]}

        table = Tables.table

        for _ in range(2):
            step = ml.capture(lambda x, table=table: x + table(3)["rows"][0])
            refuses(CaptureError, "was stored in the cache of 'table'", step, ml.ones((3,)))
        read = ml.capture(lambda x, table=table: float(table(3)["rows"][0][0]))
        refuses(CaptureError, "cannot read a tensor", read, ml.ones((3,)))
        assert table(3)["rows"][0].tolist() == [0.0, 2.0, 4.0]
        assert step(ml.ones((3,))).tolist() == [1.0, 3.0, 5.0]


def test_what_is_hidden_from_sight_is_refused_too() -> None:
    def returns_a_function(x: ml.Tensor) -> Any:
        y = x + 1.0
        return lambda: y

    for wrap in (ml.capture, lambda fn: functools.partial(ml.measure, fn)):
        call = wrap(returns_a_function)
        refuses(
            CaptureError, f"{HERE}:.* stored in an object that was not found", call, ml.ones((3,))
        )


def test_what_only_a_cycle_keeps_is_not_refused() -> None:
    @ml.capture
    def step(x: ml.Tensor) -> Any:
        ring: list[Any] = [x * 2.0]
        ring.append(ring)
        return ring[0] + 1.0

    for _ in range(2):
        assert step(ml.ones((3,))).tolist() == [3, 3, 3]
    assert step.signatures == 1


# --- what else a function changes ----------------------------------------------------------------


def test_a_function_that_changes_what_decides_its_program_is_recorded_each_time() -> None:
    first, second = ml.full((2,), 1.0), ml.full((2,), 2.0)

    def step(x: ml.Tensor) -> ml.Tensor:
        nonlocal first, second
        first, second = second, first
        return first * x

    captured = ml.capture(step)
    assert [captured(ml.ones((2,))).tolist()[0] for _ in range(5)] == [2, 1, 2, 1, 2]
    assert captured.signatures == 0


def test_a_view_that_a_field_names_is_updated_alone() -> None:
    state = State()

    @ml.capture
    def step(x: ml.Tensor) -> None:
        state.a += x
        state.a = state.a * 1.0

    step(ml.ones((3,)))
    step(ml.ones((3,)))
    base = state.a
    before = base.tolist()
    state.a = ml.stop_gradient(base)
    step(ml.ones((3,)))
    assert (base.tolist(), state.a.tolist()) == (before, [x + 1 for x in before])
