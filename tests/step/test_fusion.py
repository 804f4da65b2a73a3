"""Calls that become chains, and that a chain is one that `fused` takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.machine.fused import parse
from mlvm.machines.native import extension
from mlvm.step import fusion
from mlvm.step.blocks import without_dead_calls
from mlvm.step.flow import Unit
from mlvm.step.fusion import NATIVE, REFERENCE, FusionPolicy, chain_of, fused, with_slopes
from mlvm.step.schedule import Run, Schedule
from tests.brief import cases, with_long
from tests.step.flows import Step, assert_runs, floats, in_turn, steps


def names(unit: Unit) -> list[str]:
    return [call.name.removesuffix(".out") for call in unit.calls]


def step_of(*shape: int) -> Step:
    step = Step()
    step.cell("input", floats(*shape))
    return step


def apply(step: Step, name: str, *operands: int, **attributes: Any) -> None:
    """The op on cells of the step by number, as their own types."""
    step.apply(name, *[step.cells[i] for i in operands], **attributes)


SHORT = REFERENCE._replace(shortest=2)
TASTES = st.sampled_from([SHORT, NATIVE])


@given(steps(), TASTES)
def test_groups_have_every_call_once_in_an_order_that_they_can_run_in(
    step: Step, policy: FusionPolicy
) -> None:
    assert_runs(fused(step.calls, policy=policy), step.calls)


@given(steps(), TASTES)
def test_each_chain_fits_what_it_writes_and_reads(step: Step, policy: FusionPolicy) -> None:
    units = fused(without_dead_calls(step.flow), policy=policy)
    needed = step.flow.live_out().union(*[unit.reads for unit in units])
    for unit in units:
        if len(unit.calls) > 1:
            run = Run(unit, *unit.operands(needed))
            chain = chain_of(run)
            chain.infer([use.type for use in (*run.outs, *run.ins)])
            assert {use.value for use in run.outs} <= needed
            assert parse(chain.attributes()).links == chain.links


@given(steps(), TASTES)
@settings(max_examples=with_long(80, 200))
def test_chains_take_no_more_memory_than_there_may_be(step: Step, policy: FusionPolicy) -> None:
    calls, live_out = without_dead_calls(step.flow), step.flow.live_out()
    most = Schedule(in_turn(calls), live_out).most_alive
    assert Schedule(fused(calls, most, policy), live_out).most_alive <= most


def test_a_chain_ends_where_the_next_operand_would_be_one_too_many() -> None:
    """Each `add` reads the sum so far, and one more product, which a chain needs at its start."""
    step = step_of(16, 16)
    for _ in range(6):
        apply(step, "matmul", 0, 0)
        apply(step, "add", len(step.cells) - 1, max(0, len(step.cells) - 2))
    one = 16 * 16 * 4
    for most, lengths in [(2 * one, [1] * 6), (3 * one, [3, 1, 1, 1]), (7 * one, [6])]:
        units = fused(step.calls, most)
        assert [len(unit.calls) for unit in units if "matmul" not in names(unit)] == lengths


@cases("rows, lengths", (1, [1, 2]), (2, [3]))
def test_a_product_of_one_row_begins_no_chain(rows: int, lengths: list[int]) -> None:
    step = step_of(rows, 16)
    apply(step, "matmul", 0, 0, transpose_x=False, transpose_y=True)
    apply(step, "tanh", 1)
    apply(step, "exp", 2)
    assert [len(unit.calls) for unit in fused(step.calls, policy=NATIVE)] == lengths


@cases("shape, units", ((), [["exp", "tanh", "negative"]]), ((2,), [["exp", "negative"], ["tanh"]]))
def test_ops_on_one_element_need_no_common_value(
    shape: tuple[int, ...], units: list[list[str]]
) -> None:
    step = step_of(*shape)
    step.cell("input", floats(*shape))
    apply(step, "exp", 0)
    apply(step, "tanh", 1)
    apply(step, "negative", 2)
    together = [names(unit) for unit in fused(step.calls, policy=NATIVE)]
    assert sorted(together) == units


def test_a_chain_is_all_ops_between_two_that_are_not_elementwise() -> None:
    step = step_of(4, 6)
    apply(step, "tanh", 0)
    apply(step, "multiply", 1, 0)
    apply(step, "softmax", 2, axis=-1)
    apply(step, "exp", 3)
    apply(step, "add", 4, 2)
    apply(step, "negative", 5)
    units = [["tanh"], ["multiply"], ["softmax"], ["exp", "add", "negative"]]
    assert [names(unit) for unit in fused(step.calls)] == units
    unit = fused(step.calls)[-1]
    run = Run(unit, *unit.operands({step.cells[-1].value}))
    chain = chain_of(run)
    assert (chain.outputs, len(run.outs), len(run.ins)) == (1, 1, 2)
    assert {link.target for link in chain.links} == {-1, 0}


def test_a_chain_has_the_same_numbers_each_time() -> None:
    """Wherever in memory its values lie: a saved step is the same bytes in every process."""
    chains = []
    for _ in range(20):
        step = step_of(4, 6)
        apply(step, "tanh", 0)
        apply(step, "exp", 0)
        apply(step, "add", 1, 2)
        apply(step, "negative", 3)
        [unit] = fused(step.calls)
        chains.append(str(chain_of(Run(unit, *unit.operands({step.cells[-1].value}))).links))
    assert len(set(chains)) == 1


@cases(
    "rows, axis, readers",
    (4, -1, [("divide", 2, 3)]),
    (1, 0, [("abs", 3)]),  # although the sum keeps the shape
    (4, 0, [("multiply", 0, 3), ("add", 2, 4)]),  # two chains do not join
)
def test_a_chain_may_end_in_reductions_which_nothing_in_it_reads(
    rows: int, axis: int, readers: list[Any]
) -> None:
    step = step_of(rows, 6)
    apply(step, "tanh", 0)
    apply(step, "exp", 1)
    apply(step, "sum", 2, axis=axis, keepdims=True)
    for name, *operands in readers:
        apply(step, name, *operands)
    units = [names(unit) for unit in fused(step.calls)]
    assert units == [["tanh", "exp", "sum"], *([name] for name, *_ in readers)]


def test_a_large_reduction_is_left_as_it_is() -> None:
    step = step_of(4, 6)
    for name in ("tanh", "exp", "abs"):
        apply(step, name, len(step.cells) - 1)
    apply(step, "sum", 3, axis=-1)
    with mock.patch.object(fusion, "BLOCK_SIZE", 23):
        assert [names(unit) for unit in fused(step.calls)] == [["tanh", "exp", "abs"], ["sum"]]


def test_what_is_seen_as_another_type_is_in_no_chain_with_it() -> None:
    step = step_of(4, 6)
    apply(step, "tanh", 0)
    cell = step.cells[-1]
    step.call("abs", {}, [(cell, cell.type.with_shape((24,)))])
    step.call("abs", {}, [(cell, cell.type.with_shape((24,)))])
    assert all(len(unit.calls) == 1 for unit in fused(step.calls))


def test_nothing_is_written_over_what_its_chain_reads_as_another_type() -> None:
    step = step_of(4, 4)
    state = step.cell("state", floats(4, 1))
    row = state.type.with_shape((1, 4))
    x = step.cells[0]
    product = step.call("multiply", {}, [(x, x.type), (state, row)])
    assert product is not None
    apply(step, "tanh", 2)
    apply(step, "exp", 3)
    sums = {"axis": 1, "keepdims": True}
    assert step.call("sum", sums, [(step.cells[-1], x.type)], into=state) is state
    units = [["multiply", "tanh", "exp"], ["sum"]]
    assert [names(unit) for unit in fused(step.calls)] == units


@pytest.mark.parametrize("length", range(1, 5))
def test_short_chains_are_calls_again(length: int) -> None:
    step = step_of(3)
    for _ in range(length):
        apply(step, "tanh", len(step.cells) - 1)
    assert len(fused(step.calls)) == (1 if length >= REFERENCE.shortest else length)


def test_a_slope_stands_behind_the_value_of_the_same_operand() -> None:
    """A captured gradient makes both at once, also where the value is made again."""
    step = step_of(4, 6)
    apply(step, "gelu", 0, approximate=True)
    apply(step, "gelu", 0, approximate=False)
    apply(step, "softmax", 0, axis=1)
    apply(step, "negative", 1)
    apply(step, "gelu_slope", 0, approximate=True)
    apply(step, "multiply", 4, 5)
    calls = with_slopes(step.calls)
    assert [names(unit) for unit in fused(calls, policy=NATIVE)][:2] == [["gelu"], ["softmax"]]
    assert [names(Unit([call])) for call in calls[:2]] == [["gelu"], ["gelu"]]
    assert with_slopes(step.calls[1:]) == step.calls[1:]  # that of another formula


# --- windows ------------------------------------------------------------------------------


def stencil(turns: int = 1) -> tuple[Any, Any]:
    x = ml.asarray(np.random.default_rng(0).random((20, 30)))

    def smooth(x: Any, y: Any) -> Any:
        for _ in range(turns):
            y[1:-1, 1:-1] = x[1:-1, 1:-1] + x[:-2, 1:-1] * 0.5 + x[1:-1, 2:]
            x[1:-1, 1:-1] = y[1:-1, 1:-1] - y[2:, 1:-1]
        return x, y

    return ml.capture(lambda x: smooth(ml.copy(x), ml.zeros_like(x))), x


def test_a_stencil_is_one_chain_that_copies_no_slice() -> None:
    if not extension.is_native(None):
        pytest.skip("the reference machine copies slices")
    step, x = stencil(3)
    step(x)
    text = ml.disassemble(step.program)
    assert text.count('"fused"') == 6
    assert '"slice.out"' not in text
    assert '"slice_set.out"' not in text
    assert step.plan.nbytes == 0  # both tensors are updated where the results are; no slice


def test_a_slice_that_is_a_result_is_copied() -> None:
    x = ml.asarray(np.arange(12.0))
    step = ml.capture(lambda x: (x[1:5], x[1:5] + x[4:8]))
    part, total = step(x)
    np.testing.assert_array_equal(part.numpy(), np.arange(1.0, 5.0))
    np.testing.assert_array_equal(total.numpy(), np.arange(5.0, 13.0, 2.0))


def test_a_large_formula_is_one_chain() -> None:
    if not extension.is_native(None):
        pytest.skip("the reference machine fuses by its own policy")

    def formula(x: Any, y: Any) -> Any:
        total = x
        for i in range(150):
            total = total * (y if i % 2 else x) + i * 0.25
        return total

    x, y = ml.asarray(np.random.default_rng(0).random((2, 3000)) - 0.5)
    step = ml.capture(formula)
    assert (step(x, y).numpy() == formula(x, y).numpy()).all()
    assert ml.disassemble(step.program).count('"fused"') == 1
    assert step.plan.nbytes == 0
