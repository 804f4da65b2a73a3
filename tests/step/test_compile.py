"""Planned steps: the bits of the calls one by one, whatever was fused, moved, or made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from mlvm.core.machine import fused
from mlvm.core.program.assembly import assemble, disassemble
from mlvm.core.program.program import Opcode, Program
from mlvm.core.types import ALIGNMENT, TensorType
from mlvm.step import fusion, recompute
from mlvm.step.blocks import without_dead_calls, without_moves
from mlvm.step.compile import Planned, compile_flow
from mlvm.step.flow import Flow
from tests.brief import cases, with_long
from tests.cases.claim_tests import claims
from tests.step.flows import Step, assert_same_bits, floats, mlp, run, steps

BLOCK_SIZE = 8


@contextmanager
def eager_to_change() -> Iterator[None]:
    """Blocks are small, chains short, and what is cheap is made again at once."""
    with (
        mock.patch.object(fused, "BLOCK_SIZE", BLOCK_SIZE),
        mock.patch.object(fusion, "BLOCK_SIZE", BLOCK_SIZE),
        mock.patch.object(recompute, "FAR", 2),
    ):
        yield


def assert_faithful(step: Step, planned: Planned) -> None:
    """Running the plan leaves what the calls of the step leave one by one."""
    outputs = [TensorType.of(array) for array in step.expected("output")]
    inputs, states, results = run(planned, step.inputs, step.states, outputs)
    assert_same_bits(inputs, step.expected("input"))
    assert_same_bits(states, step.expected("state"))
    assert_same_bits(results, step.expected("output"))


def calls_of(planned: Planned) -> list[str]:
    """The names of the functions that the program calls, in order; of chains, their links'."""
    names = []
    code = planned.program.main.code
    for name, call in pairwise(code):
        if name.opcode is Opcode.push_str:
            chain = call.immediates[2]["chain"] if name.immediates == ("fused",) else None
            names += [name.immediates[0]] if chain is None else [f"{each[0]}.out" for each in chain]
    return names


# --- faithful ------------------------------------------------------------------------


TASTES = [fusion.REFERENCE._replace(shortest=2), fusion.NATIVE]


@given(steps(), st.booleans(), st.booleans(), st.sampled_from(TASTES))
@settings(max_examples=with_long(50, 100))
def test_a_plan_leaves_what_the_calls_leave_one_by_one(
    step: Step, fuse: bool, recompute: bool, policy: fusion.FusionPolicy
) -> None:
    with eager_to_change():
        planned = compile_flow(step.flow, fuse=fuse, recompute=recompute, policy=policy)
        assert_faithful(step, planned)


@cases("fuse", False, True)
@cases("recompute", False, True)
def test_a_deep_mlp_leaves_the_same_bits(fuse: bool, recompute: bool) -> None:
    step = mlp(layers=12)
    assert_faithful(step, compile_flow(step.flow, fuse=fuse, recompute=recompute))


# --- memory --------------------------------------------------------------------------


@given(steps(), st.booleans(), st.booleans())
def test_no_two_tensors_that_live_at_once_share_a_byte(
    step: Step, fuse: bool, recompute: bool
) -> None:
    with eager_to_change():
        planned = compile_flow(step.flow, fuse=fuse, recompute=recompute)
    for x, y in combinations(planned.lifetimes, 2):
        together = x.start < y.end and y.start < x.end
        overlap = x.offset < y.offset + y.nbytes and y.offset < x.offset + x.nbytes
        assert not (together and overlap), (x, y)
    top = max((x.offset + x.nbytes for x in planned.lifetimes), default=0)
    assert planned.plan.nbytes == top >= planned.plan.lower_bound
    assert planned.recording().lifetimes == list(planned.lifetimes)


@given(steps())
def test_scratch_is_only_for_what_has_no_other_place(step: Step) -> None:
    planned = compile_flow(step.flow, fuse=False, recompute=False)
    flow = without_moves(Flow(without_dead_calls(step.flow), step.flow.results))
    values = {
        use.value.home or use.value
        for call in flow.calls
        for use in call.outs
        if use.value.home is None or use.value.home.role == "scratch"
    }
    assert len(planned.lifetimes) == len(values)
    for role, place, type in planned.arguments:
        if role == "scratch":
            assert 0 <= place <= planned.plan.nbytes - type.nbytes
            assert place % ALIGNMENT == 0


@given(steps())
@settings(max_examples=with_long(50, 100))
def test_neither_chains_nor_calls_made_again_make_a_plan_larger(step: Step) -> None:
    with eager_to_change():
        plain, again, chains, both = [
            compile_flow(step.flow, fuse=fuse, recompute=recompute)
            for fuse in (False, True)
            for recompute in (False, True)
        ]
    for planned in (plain, again, chains, both):
        assert planned.plan.unfused == plain.plan.lower_bound
        assert_faithful(step, planned)
    assert again.plan.nbytes <= plain.plan.nbytes
    assert chains.plan.nbytes <= plain.plan.nbytes
    assert both.plan.nbytes <= min(again.plan.nbytes, chains.plan.nbytes)


def test_what_moves_to_its_operand_joins_the_chain_that_makes_it() -> None:
    """As the update of a parameter does, whose gradient was a half: it was recorded far behind."""
    step = Step()
    step.cell("input", floats(4, 6))
    parameter = step.cell("state", floats(4, 6))
    gradient = step.apply("negative", step.apply("softmax", step.cells[0]))
    last = step.apply("softmax", step.cells[0])
    for _ in range(fusion.REFERENCE.near):
        last = step.apply("softmax", last)
    step.apply("add", parameter, gradient, into=parameter)
    step.result(last)
    planned = compile_flow(step.flow, policy=fusion.NATIVE)
    assert [each.immediates for each in planned.program.main.code].count(("fused",)) == 1
    assert_faithful(step, planned)


def test_a_chain_ends_before_all_that_it_would_read_is_there_at_once() -> None:
    """As the gradient of `for t in range(32): h = tanh(h + x[t])` sums those of the x[t]."""
    step = sum_of_products(32)
    plain = compile_flow(step.flow, fuse=False).plan
    chains = compile_flow(step.flow).plan
    assert chains.nbytes <= plain.nbytes == plain.unfused == chains.unfused
    assert_faithful(step, compile_flow(step.flow))


def sum_of_products(count: int) -> Step:
    """Return a step that adds `count` products of matrices, which no chain can make."""
    step = Step()
    x = step.cell("input", floats(16, 16))
    total = x
    for i in range(count):
        weight = step.cell("state", floats(16, 16, seed=i))
        total = step.apply("add", total, step.apply("matmul", x, weight))
    step.result(total)
    return step


def chain(*names: str) -> Step:
    """A step of these ops, one on the other."""
    step = Step()
    cell = step.cell("input", floats(2, 8))
    for name in names:
        attributes: Any = {"axis": -1} if name == "softmax" else {}
        cell = step.apply(name, cell, **attributes)
    step.result(cell)
    return step


# --- programs ------------------------------------------------------------------------


@given(steps(), st.booleans())
def test_a_plan_calls_what_lives_and_nothing_else(step: Step, fuse: bool) -> None:
    """Each call knows a line that it is from. The same step has the same plan, whose program
    survives text and bytes."""
    with eager_to_change():
        planned, again = [compile_flow(step.flow, fuse=fuse, recompute=False) for _ in range(2)]
    flow = without_moves(Flow(without_dead_calls(step.flow), step.flow.results))
    assert sorted(calls_of(planned)) == sorted(each.name for each in flow.calls)
    program = planned.program
    calls = [pc for pc, each in enumerate(program.main.code) if each.opcode is Opcode.cfunc]
    assert sorted(planned.lines) == [("main", pc) for pc in calls]
    assert set(planned.lines.values()) <= {each.line for each in step.calls}
    assert planned == again
    assert assemble(disassemble(program)) == program
    assert Program.from_bytes(program.to_bytes()) == program


test_rows = claims("compile", globals())
