"""Steps as data flow: what is dead, in which order calls may run, and what is made again."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

from hypothesis import given

from mlvm.core.op import OPS
from mlvm.core.types import TensorType, f32
from mlvm.step import flow as dataflow
from mlvm.step.flow import (
    Call,
    Flow,
    Group,
    Home,
    Use,
    Value,
    earlier_where_it_frees,
    recomputed,
    without_dead_calls,
)
from tests.step.flows import Step, mlp, steps

TYPE = TensorType(f32, (4,))


def value(home: Home | None = None) -> Value:
    return Value(TYPE.nbytes, home)


def call(name: str, out: Value, *operands: Value) -> Call:
    op = OPS[name]
    return Call(
        f"{name}.out", op, op.bind({}), [Use(out, TYPE)], [Use(each, TYPE) for each in operands]
    )


def in_turn(calls: list[Call]) -> list[Group]:
    return [Group([each]) for each in calls]


# --- dead calls ----------------------------------------------------------------------


@given(steps())
def test_what_lives_is_what_something_wanted_comes_from(step: Step) -> None:
    maker = {use.value: each for each in step.calls for use in each.outs}
    wanted = step.flow.wanted()
    todo = [maker[each] for each in wanted if each in maker]
    todo += [each for each in step.calls if each.op is None]
    alive: set[int] = set()
    while todo:
        each = todo.pop()
        if id(each) not in alive:
            alive.add(id(each))
            todo += [maker[use.value] for use in each.ins if use.value in maker]
    assert without_dead_calls(step.flow) == [each for each in step.calls if id(each) in alive]


def test_an_update_that_another_overwrites_unread_is_dead() -> None:
    home = Home("state", 0, TYPE)
    x, first, second = value(home), value(home), value(home)
    other = value()
    calls = [call("abs", other, x), call("negative", first, x), call("exp", second, other)]
    assert without_dead_calls(Flow(calls, [])) == [calls[0], calls[2]]


def test_host_functions_live_whatever_they_do() -> None:
    home = Home("scratch", 0, TYPE)
    effect = Call("print", None, {}, [Use(value(home), TYPE)], [])
    assert without_dead_calls(Flow([effect], [])) == [effect]


# --- order ---------------------------------------------------------------------------


@given(steps())
def test_an_order_keeps_what_depends_on_each_other(step: Step) -> None:
    groups = in_turn(step.calls)
    order = earlier_where_it_frees(groups, step.flow.wanted())
    assert sorted(map(id, order)) == sorted(map(id, groups))
    place = {group: i for i, group in enumerate(order)}
    for earlier, later in combinations(groups, 2):
        if earlier.must_precede(later):
            assert place[earlier] < place[later]


def test_an_update_runs_as_soon_as_it_frees_its_gradient() -> None:
    weights = Home("state", 0, TYPE)
    weight, updated, g1, g2, result = value(weights), value(weights), value(), value(), value()
    calls = [
        call("abs", g1, weight),
        call("negative", g2, weight),
        call("exp", result, g2),
        call("add", updated, weight, g1),
    ]
    order = earlier_where_it_frees(in_turn(calls), [result, updated])
    assert [group.calls[0] for group in order] == [calls[0], calls[1], calls[3], calls[2]]


def test_an_update_waits_for_whoever_reads_what_it_overwrites() -> None:
    weights = Home("state", 0, TYPE)
    weight, updated, g, result = value(weights), value(weights), value(), value()
    calls = [
        call("abs", g, weight),
        call("exp", result, weight),
        call("add", updated, weight, g),
    ]
    order = earlier_where_it_frees(in_turn(calls), [result, updated])
    assert [group.calls[0] for group in order] == calls


# --- making again --------------------------------------------------------------------


def test_a_backward_pass_finds_activations_made_again() -> None:
    calls = recomputed(without_dead_calls(mlp(layers=20).flow))
    again = [each for each in calls if each.again]
    assert {each.name for each in again} == {"gelu.out"}
    for each in again:
        twin = each.outs[0].value
        [original] = [
            other for other in calls if other.ins == each.ins and not other.again
        ]  # on the same operand
        assert any(use.value is twin for other in calls for use in other.ins)
        assert calls.index(original) < calls.index(each)


@given(steps())
def test_what_is_made_again_finds_its_operands_as_they_were(step: Step) -> None:
    with mock.patch.object(dataflow, "FAR", 1):
        calls = recomputed(step.calls)
    assert [each.name for each in calls if not each.again] == [each.name for each in step.calls]
    holds: dict[Home, Value] = {}
    for each in calls:
        for use in each.ins:
            home = use.value.home
            if home is not None:
                assert holds.setdefault(home, use.value) is use.value
        holds.update({use.value.home: use.value for use in each.outs if use.value.home})
