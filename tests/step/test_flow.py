"""Steps as data flow: which of their calls are dead."""

from __future__ import annotations

from hypothesis import given

from mlvm.step.blocks import without_dead_calls
from mlvm.step.flow import Call, Flow, Home, Use
from tests.step.flows import TYPE, Step, call, steps, value


@given(steps())
def test_what_lives_is_what_something_wanted_comes_from(step: Step) -> None:
    maker = {use.value: each for each in step.calls for use in each.outs}
    live_out = step.flow.live_out()
    todo = [maker[each] for each in live_out if each in maker]
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
