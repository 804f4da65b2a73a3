"""A step as one program, with a plan of the memory it works in.

`compile_flow` takes a recorded step apart into what needs to run, puts chains together, decides in
which order, and where everything lies: it makes a `Planned`, whose program takes all tensors as
arguments, and says of each of them what it has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mlvm.arena.placement import rounded
from mlvm.arena.planner import Block, Plan, plan
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.errors import ProgramError
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.fused import Chain
from mlvm.core.op import Attributes
from mlvm.core.program.program import Instruction, Opcode, Program
from mlvm.core.types import TensorType
from mlvm.input import queue_get
from mlvm.step.flow import Call, Flow, Group, Home, Role, Use, Value, without_dead_calls
from mlvm.step.fusion import chain_of, fused
from mlvm.step.order import earlier_where_it_frees
from mlvm.step.recompute import recomputed

ROLES: Final[tuple[Role, ...]] = ("input", "output", "state", "scratch")
"""In this order a planned program takes its arguments."""


class Argument(NamedTuple):
    """What a planned program takes as one argument: the `input`, `output` or `state` of number
    `place`, seen as `type`; or the `scratch` at byte `place`."""

    role: Role
    place: int
    type: TensorType


@dataclass(frozen=True)
class Planned:
    """A program and its plan.

    `arguments` says what to launch it with, `plan.nbytes` how much scratch memory it needs.
    `lines` has the line of Python that each call comes from, by the pc of its `cfunc`.
    `lifetimes` are those of what lies in the scratch memory, in moments of a group of calls each.
    """

    program: Program
    arguments: tuple[Argument, ...]
    plan: Plan
    lines: dict[int, str]
    lifetimes: tuple[Lifetime, ...]

    def recording(self) -> Recording:
        """What lies where in the scratch memory, and when, for a picture."""
        moments = max((each.end for each in self.lifetimes), default=1)
        return Recording("captured", self.plan.nbytes, moments, list(self.lifetimes))


def looped(program: Program) -> Program:
    """The program, which begins by taking an element from a queue, again and again until that queue
    is closed and drained.

    Raises `ProgramError` for one that does not begin so, or takes from a queue once more.
    """
    code = program.main.code
    gets = [pc for pc, i in enumerate(code) if i == Instruction(Opcode.push_str, (queue_get.NAME,))]
    if gets != [1]:
        raise ProgramError(
            f"a loop is over one queue, taken from at the start; this takes {len(gets)} times"
        )
    _, nresults, _ = code[2].immediates
    ahead, body = code[:2], code[3:-1]
    start = [*ahead, Instruction(Opcode.cfunc, (1, nresults + 1))]
    end = len(start) + 1 + len(body) + 1
    return Program.straight(
        [
            *start,
            Instruction(Opcode.jump_if_false, (end,)),
            *body,
            Instruction(Opcode.jump, (0,)),
            Instruction(Opcode.pop, (nresults,)),
            Instruction(Opcode.halt),
        ]
    )


def _reshaped(type: TensorType) -> list[Instruction]:
    """What makes of the tensor on top one of that shape."""
    name = Instruction(Opcode.push_str, ("reshape",))
    return [name, Instruction(Opcode.cfunc, (1, 1, {"shape": type.shape}))]


class _Run(NamedTuple):
    """A group as it is called."""

    name: str
    attributes: Attributes
    outs: Sequence[Use]
    ins: Sequence[Use]
    chain: Chain | None
    group: Group


def compile_flow(flow: Flow, *, fuse: bool = True, recompute: bool = True) -> Planned:
    """The step as a program with its plan."""
    calls = without_dead_calls(flow)
    if recompute:
        calls = without_dead_calls(Flow(recomputed(calls), flow.results))
    groups = fused(calls) if fuse else [Group([call]) for call in calls]
    wanted = flow.wanted()
    groups = earlier_where_it_frees(groups, wanted)
    runs = _runs(groups, wanted)
    places, lifetimes, made = _place(runs)

    def argument(use: Use) -> Argument:
        key = _key(use.value)
        if key is None:
            home = use.value.home
            assert home is not None  # else it has a key
            return Argument(home.role, home.index, use.type)
        return Argument("scratch", places[key], use.type)

    operands = [[argument(use) for use in (*run.outs, *run.ins)] for run in runs]
    found = dict.fromkeys(each for row in operands for each in row if each.role != "element")
    arguments = sorted(found, key=lambda each: (ROLES.index(each.role), each.place))
    numbers = {each: number for number, each in enumerate(arguments)}
    code: list[Instruction] = []
    lines: dict[int, str] = {}
    elements: dict[int, TensorType] = {}  # what queues have left on the stack, by slot
    for run, row in zip(runs, operands, strict=True):
        [first, *_] = run.group.calls
        if first.queue is not None:
            elements.update((each.place, each.type) for each in row)
            row, results = [], len(row)
            code.append(Instruction(Opcode.push_int, (first.queue,)))
        else:
            results = 0
        for each in row:
            if each.role != "element":
                code.append(Instruction(Opcode.load_arg, (numbers[each],)))
                continue
            code.append(Instruction(Opcode.get, (each.place,)))
            if each.type is not elements[each.place]:
                code += _reshaped(each.type)
        code.append(Instruction(Opcode.push_str, (run.name,)))
        rest = (run.attributes,) if run.attributes else ()
        line = next((call.line for call in run.group.calls if call.line), None)
        if line is not None:
            lines[len(code)] = line
        code.append(Instruction(Opcode.cfunc, (len(row) if not results else 1, results, *rest)))
    if elements:
        code.append(Instruction(Opcode.pop, (len(elements),)))
    program = Program.straight([*code, Instruction(Opcode.halt)])
    return Planned(program, tuple(arguments), made, lines, lifetimes)


def _runs(groups: Sequence[Group], wanted: set[Value]) -> list[_Run]:
    needed = set(wanted)
    for group in groups:
        needed |= group.reads
    runs = []
    for group in groups:
        if len(group.calls) == 1:
            [call] = group.calls
            operands = ([], call.outs) if call.op is None else (call.outs, call.ins)
            runs.append(_Run(call.name, call.attributes, *operands, None, group))
        else:
            chain, outs, ins = chain_of(group, needed)
            runs.append(_Run("fused", chain.attributes(), outs, ins, chain, group))
    return runs


def _place(runs: Sequence[_Run]) -> tuple[dict[Any, int], tuple[Lifetime, ...], Plan]:
    """Where each value without a home lies, and each scratch home."""
    start: dict[Any, int] = {}
    end: dict[Any, int] = {}
    size: dict[Any, int] = {}
    first: dict[Any, tuple[TensorType, Call]] = {}
    maker = {use.value: call for run in runs for call in run.group.calls for use in call.outs}
    for i, run in enumerate(runs):
        for use in (*run.outs, *run.ins):
            key = _key(use.value)
            if key is None:
                continue
            start.setdefault(key, i)
            end[key] = i + 1
            size[key] = max(size.get(key, 0), use.value.nbytes)
            first.setdefault(key, (use.type, maker[use.value]))
    host = _in_place(runs, end)
    until = dict(end)  # when nothing is left in the place that a value was the first to take
    for key in start:
        root = _root(host, key)
        until[root] = max(until[root], end[key])
    for successor, key in host.items():
        end[key] = start[successor]
    roots = [key for key in start if key not in host]
    found = plan([Block(size[key], start[key], until[key]) for key in roots])
    places = dict(zip(roots, found.offsets, strict=True))
    places = {key: places[_root(host, key)] for key in start}
    lifetimes = tuple(
        Lifetime(
            type,
            places[key],
            rounded(size[key]),
            start[key],
            end[key],
            made_by.name.removesuffix(OUT),
            made_by.line,
        )
        for key, (type, made_by) in first.items()
    )
    return places, lifetimes, found


def _key(value: Value) -> Value | Home | None:
    """What is placed for the value: itself, its scratch home, or nothing."""
    if value.home is None:
        return value
    return value.home if value.home.role == "scratch" else None


def _root(host: dict[Any, Any], key: Any) -> Any:
    while key in host:
        key = host[key]
    return key


def _in_place(runs: Sequence[_Run], end: dict[Any, int]) -> dict[Any, Any]:
    """Which values take the place of an operand that nobody reads any more: value -> operand."""
    host: dict[Any, Any] = {}
    for i, run in enumerate(runs):
        taken: set[Value] = set()
        for number, out in sorted(enumerate(run.outs), key=lambda each: -each[1].value.nbytes):
            if out.value.home is not None:
                continue
            for other, use in enumerate(run.ins, len(run.outs)):
                value = use.value
                if (
                    value.home is None
                    and value not in taken
                    and end[value] == i + 1
                    and use.type.shape == out.type.shape
                    and value.nbytes == out.value.nbytes
                    and len({each.type for each in run.ins if each.value is value}) == 1
                    and _may_replace(run, number, other)
                ):
                    host[out.value] = value
                    taken.add(value)
                    break
    return host


def _may_replace(run: _Run, out: int, operand: int) -> bool:
    if run.chain is not None:
        return run.chain.may_replace(out, operand)
    op = run.group.calls[0].op
    return op is not None and op.in_place
