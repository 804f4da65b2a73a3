"""The order in which units may run, and which of them run earlier."""

from __future__ import annotations

from hypothesis import given

from mlvm.step.flow import Home
from mlvm.step.order import earlier_where_it_frees
from tests.step.flows import TYPE, Step, assert_runs, call, floats, in_turn, steps, value


@given(steps())
def test_an_order_keeps_what_depends_on_each_other(step: Step) -> None:
    units = earlier_where_it_frees(in_turn(step.calls), step.flow.live_out())
    assert_runs(units, step.calls)


def test_an_update_runs_as_soon_as_it_frees_its_gradient() -> None:
    weights = Home("state", 0, TYPE)
    weight, updated, g1, g2, result = value(weights), value(weights), value(), value(), value()
    calls = [
        call("abs", g1, weight), call("negative", g2, weight), call("exp", result, g2),
        call("add", updated, weight, g1),
    ]  # fmt: skip
    order = earlier_where_it_frees(in_turn(calls), [result, updated])
    assert [unit.calls[0] for unit in order] == [calls[0], calls[1], calls[3], calls[2]]


def test_an_update_waits_for_whoever_reads_what_it_overwrites() -> None:
    weights = Home("state", 0, TYPE)
    weight, updated, g, result = value(weights), value(weights), value(), value()
    calls = [call("abs", g, weight), call("exp", result, weight), call("add", updated, weight, g)]
    order = earlier_where_it_frees(in_turn(calls), [result, updated])
    assert [unit.calls[0] for unit in order] == calls


def test_what_makes_a_scalar_runs_early_as_an_update_may_wait_for_it() -> None:
    step = Step()
    x, rate = step.cell("input", floats(8, 8)), step.cell("input", floats())
    weight = step.cell("state", floats(8, 8))
    gradient = step.apply("matmul", x, x)
    result = step.apply("exp", x)
    minus_rate = step.apply("negative", rate)
    step.apply("multiply_add", gradient, minus_rate, weight, into=weight)
    step.result(result)
    order = earlier_where_it_frees(in_turn(step.calls), step.flow.live_out())
    matmul, exp, negative, update = step.calls
    assert [unit.calls[0] for unit in order] == [matmul, negative, update, exp]
