"""Lifetimes of values in a schedule, the most alive at once, and reuse of their places."""

from __future__ import annotations

from hypothesis import given

from mlvm.arena.placement import rounded
from mlvm.step.blocks import without_dead_calls
from mlvm.step.compile import compile_flow
from mlvm.step.flow import Unit
from mlvm.step.schedule import Run, Schedule, in_place, placed
from tests.step.flows import Step, floats, in_turn, steps


def schedule_of(step: Step) -> Schedule:
    return Schedule(in_turn(without_dead_calls(step.flow)), step.flow.live_out())


@given(steps())
def test_what_is_placed_lives_from_the_group_that_makes_it_to_the_last_that_reads_it(
    step: Step,
) -> None:
    schedule = schedule_of(step)
    for each, start in schedule.start.items():
        users = [
            i
            for i, run in enumerate(schedule.runs)
            if any(placed(use.value) is each for use in (*run.outs, *run.ins))
        ]
        taken_over = any(
            schedule.root[other] is schedule.root[each] and begun == users[-1] != start
            for other, begun in schedule.start.items()
        )
        assert (start, schedule.end[each]) == (users[0], users[-1] + (not taken_over))


@given(steps())
def test_the_most_alive_is_the_largest_sum_of_what_lives(step: Step) -> None:
    """A value that takes a place is as large as the other, and comes when that ends."""
    schedule = schedule_of(step)
    totals = [
        sum(
            rounded(schedule.size[each])
            for each in schedule.start
            if schedule.start[each] <= moment < schedule.end[each]
        )
        for moment in range(len(schedule.runs))
    ]
    assert schedule.most_alive == max(totals, default=0)
    for each, root in schedule.root.items():
        if each is not root:
            assert schedule.size[each] == schedule.size[root]
            assert schedule.start[each] >= schedule.end[root]


def test_an_operand_that_is_read_later_keeps_its_place() -> None:
    step = Step()
    x = step.cell("input", floats(4, 4))
    step.apply("tanh", step.apply("exp", x))
    [_, tanh] = step.calls
    run = Run(Unit([tanh]), tanh.outs, tanh.ins)
    operand, result = tanh.ins[0].value, tanh.outs[0].value
    assert in_place(run, {operand}) == {result: operand}
    assert in_place(run, ()) == {}


def test_the_schedule_of_a_planned_step_is_that_of_its_lifetimes() -> None:
    step = Step()
    step.cell("input", floats(4, 4))
    for name in ("exp", "tanh", "abs"):
        step.apply(name, step.cells[-1])
    step.result(step.cells[-1])
    planned = compile_flow(step.flow, fuse=False)
    schedule = schedule_of(step)
    assert planned.plan.unfused == planned.plan.lower_bound == schedule.most_alive == 64
    assert [(x.start, x.end) for x in planned.lifetimes] == [(0, 1), (1, 3)]
