"""Steps with blocks: a branch or a loop leaves what its calls leave, however it is planned."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.core.program.program import Opcode
from mlvm.core.types import Array, TensorType, bool_, f32
from mlvm.step.blocks import (
    free_variables,
    outline_blocks,
    renewed,
    without_dead_calls,
    without_moves,
)
from mlvm.step.compile import compile_flow
from mlvm.step.flow import Block, Call, Flow, Home, Use, Value
from tests.brief import cases
from tests.cases.claim_tests import claims
from tests.step.flows import assert_same_bits, floats, run

TYPE = TensorType(f32, (4, 6))
FLAG = TensorType(bool_, ())
OPERATIONS = ["add", "multiply", "maximum", "subtract", "negative", "abs", "relu", "copy"]
SIZES = [("state", 0), ("state", 1), ("scratch", 0), ("scratch", 1), ("scratch", 2)]


def op_call(name: str, out: Use, *ins: Use) -> Call:
    op = OPS[name]
    return Call(f"{name}.out", op, op.bind({}), [out], list(ins), f"line of {name}")


class Machine:
    """Calls recorded as a recorder does it, and what numpy makes of them when they run: variables
    with a home keep what was written last, other values are made by one call."""

    def __init__(self) -> None:
        self.homes = [Home(role, i, TYPE) for role, i in SIZES]  # type: ignore[arg-type]
        self.now = [Value(TYPE.nbytes, home) for home in self.homes]
        self.flag = Value(FLAG.nbytes, Home("input", 0, FLAG))
        self.calls: list[Call] = []
        self.temporaries: list[Value] = []
        self.run: list[Any] = []  # functions of (arrays by home, arrays by value)

    def read(self, which: int) -> Use:
        values = [*self.now, *self.temporaries]
        return Use(values[which % len(values)], TYPE)

    def op(self, name: str, into: int | None, operands: list[int]) -> None:
        ins = [self.read(each) for each in operands[: len(OPS[name].inputs)]]
        home = None if into is None else self.homes[into]
        if home is not None and any(use.value.home is home for use in ins[OPS[name].in_place :]):
            return
        out = Use(Value(TYPE.nbytes, home), TYPE)
        self.calls.append(op_call(name, out, *ins))
        keys = [use.value.home or use.value for use in ins]

        def compute(there: dict[Any, Array]) -> None:
            output = np.empty(TYPE.shape, np.float32)
            OPS[name].kernel(output, *[there[key] for key in keys])
            there[home or out.value] = output

        self.run.append(compute)
        if into is None:
            self.temporaries.append(out.value)
        else:
            self.now[into] = out.value

    def control(self, name: str, blocks: list[Any]) -> None:
        """Control flow whose blocks the functions write. A loop turns until a flag is set, which
        its body sets at once."""
        written: set[int] = set()
        inner: list[Block] = []
        runs: list[list[Any]] = []
        before, temporaries = [*self.now], [*self.temporaries]
        outer_calls, outer_run = self.calls, self.run
        for write in blocks:
            block = Block()
            self.calls, self.run = block.calls, []
            self.now, self.temporaries = [*before], [*temporaries]
            write()
            inner.append(block)
            runs.append(self.run)
            written |= {i for i in range(len(before)) if self.now[i] is not before[i]}
        self.calls, self.run = outer_calls, outer_run
        self.now, self.temporaries = [*before], temporaries
        ins = [
            Use(self.flag, FLAG), *free_variables(inner), *[Use(before[i], TYPE) for i in written],
        ]  # fmt: skip
        for i in written:
            self.now[i] = Value(TYPE.nbytes, self.homes[i])
        outs = [Use(self.now[i], TYPE) for i in sorted(written)]
        self.calls.append(
            Call(name, None, {}, outs, list(dict.fromkeys(ins)), "line", blocks=tuple(inner))
        )

        def compute(there: dict[Any, Array]) -> None:
            for each in runs[0 if there["flag"] else 1]:
                each(there)

        self.run.append(compute)


def cond(machine: Machine, first: Any, second: Any) -> None:
    machine.control("cond", [first, second])


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    machine = Machine()

    def write(depth: int) -> None:
        for _ in range(draw(st.integers(1, 5))):
            if depth and draw(st.integers(0, 3)) == 0:
                cond(machine, lambda: write(depth - 1), lambda: write(depth - 1))
            else:
                into = draw(st.sampled_from([None, None, *range(len(SIZES))]))
                numbers = draw(st.lists(st.integers(0, 20), min_size=2, max_size=2))
                machine.op(draw(st.sampled_from(OPERATIONS)), into, numbers)

    for i in range(2, len(SIZES)):  # what is in scratch memory is written first
        machine.op("negative", i, [i % 2])
    write(2)
    machine.op("add", 0, [1, 2])
    machine.op("multiply", 1, [1, 3])
    return machine


@given(machines(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_branches_leave_what_their_calls_leave(
    machine: Machine, flag: bool, fuse: bool, recompute: bool
) -> None:
    states = [floats(4, 6, seed=i) for i in range(2)]
    there: dict[Any, Array] = {"flag": np.array(flag)}
    there |= {machine.homes[i]: states[i] for i in range(2)}
    with np.errstate(all="ignore"):
        for each in machine.run:
            each(there)
    planned = compile_flow(Flow(machine.calls, []), fuse=fuse, recompute=recompute)
    with np.errstate(all="ignore"):
        _, results, _ = run(planned, [np.array(flag)], states, [])
    assert_same_bits(results, [there[machine.homes[i]] for i in range(2)])
    plain = compile_flow(Flow(machine.calls, []), fuse=False, recompute=recompute)
    assert planned.plan.nbytes <= plain.plan.nbytes


# --- what nobody needs ---------------------------------------------------------------


def state() -> tuple[Machine, Call]:
    """Return a branch that writes state 0, and scratch 0, which no call reads."""
    machine = Machine()

    def first() -> None:
        machine.op("tanh", 2, [0])
        machine.op("relu", 0, [1])

    cond(machine, first, lambda: machine.op("negative", 2, [1]))
    return machine, machine.calls[0]


def test_a_loop_keeps_what_its_next_turn_reads() -> None:
    """State 0 is what is asked for; it reads scratch 0 of the turn before, and that scratch 1."""
    machine = Machine()
    test, body = Block(result=Use(machine.flag, FLAG)), Block()
    for name, into, source in (("tanh", 0, 2), ("relu", 2, 3), ("negative", 3, 1), ("tanh", 4, 1)):
        machine.calls = body.calls
        machine.op(name, into, [source])
    outs = [Use(machine.now[i], TYPE) for i in (0, 2, 3, 4)]
    ins = [Use(Value(TYPE.nbytes, machine.homes[i]), TYPE) for i in (0, 2, 3, 4)]
    call = Call("while", None, {}, outs, [*free_variables([test, body]), *ins], blocks=(test, body))
    [loop] = without_dead_calls(Flow([call], []))
    assert [each.name for each in loop.blocks[1].calls] == ["tanh.out", "relu.out", "negative.out"]
    assert {use.value.home for use in loop.outs} == {machine.homes[i] for i in (0, 2, 3)}


# --- moves ---------------------------------------------------------------------------


@cases(
    "name, operand, others",
    ("tanh", 1, []),
    ("tanh", 1, ["negative.out", "copy.out"]),
    ("tanh", 0, []),
    ("flip", 0, ["copy.out"]),  # which may not write over its operand
)
def test_a_result_is_made_in_its_place(name: str, operand: int, others: list[str]) -> None:
    """A result is copied to state 0: it is made there, unless the old state 0 is read then."""
    machine = Machine()

    def write() -> None:
        machine.op(name, None, [operand])
        if "negative.out" in others:
            machine.op("negative", 1, [0])
        machine.op("copy", 0, [len(machine.now)])

    cond(machine, write, lambda: None)
    [call] = without_moves(Flow(machine.calls, [])).calls
    assert [each.name for each in call.blocks[0].calls] == [f"{name}.out", *others]


@cases("written", False, True)
@cases("returned", False, True)
def test_a_copy_of_what_nobody_writes_is_read_there(written: bool, returned: bool) -> None:
    """In a branch a copy of state 0 is read, and a copy of a copy from outside of it."""
    machine = Machine()
    first = len(machine.now)
    machine.op("copy", None, [0])
    machine.op("copy", None, [first])

    def write() -> None:
        machine.op("copy", None, [0])
        machine.op("add", 1, [first + 1, first + 2])

    cond(machine, write, lambda: None)
    if written:
        machine.op("abs", 0, [0])
    flow = without_moves(Flow(machine.calls, [machine.temporaries[1]] if returned else []))
    assert [call.name for call in flow.calls if call.name == "copy.out"] == ["copy.out"] * (
        2 if written else returned
    )
    [block] = [call.blocks[0] for call in flow.calls if call.blocks]
    homes = [use.value.home for use in block.calls[-1].ins]
    steady = machine.homes[0]
    assert homes == [None if written or returned else steady, None if written else steady]


def test_a_block_taken_out_names_what_lies_outside() -> None:
    machine, call = state()
    blocks, outer = outline_blocks(call)
    inner = [each for block in blocks for each in block.calls]
    homes = {use.value.home for each in inner for use in (*each.outs, *each.ins)}
    roles = {home.role for home in homes if home is not None}
    assert roles == {"outer", "state"}
    assert {value.home for value in outer.values()} == {machine.homes[2]}


def test_blocks_become_jumps() -> None:
    machine, _ = state()
    code = compile_flow(Flow(machine.calls, [])).program.main.code
    jumps = [each.opcode for each in code if "label" in each.opcode.immediates]
    assert jumps == [Opcode.jump_if_false, Opcode.jump]
    ends = [each.immediates[0] for each in code if each.opcode in jumps]
    assert all(0 < end < len(code) for end in ends)


def test_calls_that_nothing_renames_stay() -> None:
    x, y, z = (Value(4) for _ in range(3))
    type = TensorType(f32)
    calls = [
        Call("negative", OPS["negative"], {}, [Use(y, type)], [Use(x, type)]),
        Call("negative", OPS["negative"], {}, [Use(z, type)], [Use(y, type)]),
    ]
    new = Value(4)
    first, second = renewed(calls, {z: new})
    assert first is calls[0]
    assert second.ins == [Use(y, type)]
    assert second.outs == [Use(new, type)]


@cases("old_is_read", False, True)
def test_updates_of_one_result_are_done_in_its_memory(*, old_is_read: bool) -> None:
    """A copy of the value between two updates is a second result, with its own memory."""
    x = ml.asarray(np.arange(12.0))

    def updated(x: Any) -> Any:
        x = ml.copy(x)
        x[0] = 5.0
        first = x * 1.0 if not old_is_read else ml.copy(x)
        x[1:3] = ml.sum(first)
        x[5] = 7.0
        return x, first if old_is_read else ml.sum(first)

    step = ml.capture(updated, fuse=False)
    expected = updated(x)
    for _ in range(2):
        for a, b in zip(step(x), expected, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    code = step.program.main.code
    updates = [i for i, each in enumerate(code) if "slice_set.out" in map(str, each.immediates)]
    outs = {str(code[i - 3]) for i in updates}
    assert len(updates) == 3
    assert len(outs) == (2 if old_is_read else 1)


test_rows = claims("step_blocks", globals())
