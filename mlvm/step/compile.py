"""A step as one program, with a plan of the memory it works in.

`compile_flow` takes a recorded step apart into what needs to run, puts chains together, decides in
which order, and where everything lies: it makes a `Planned`, whose program takes all tensors as
arguments, and says of each of them what it has to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlvm.arena.placement import rounded
from mlvm.arena.planner import Plan, plan
from mlvm.arena.recording import Lifetime, Recording
from mlvm.core.errors import ProgramError
from mlvm.core.machine.callee import OUT
from mlvm.core.program.program import Instruction, Opcode, Program
from mlvm.core.types import TensorType
from mlvm.step.flow import Call, Flow, Location, Role, Unit, Use, Value, without_dead_calls
from mlvm.step.fusion import REFERENCE, Taste, chain_of, fused
from mlvm.step.order import earlier_where_it_frees
from mlvm.step.recompute import recomputed
from mlvm.step.schedule import Placed, Schedule, placed

ROLES: Final[tuple[Role, ...]] = ("input", "output", "state", "scratch")
"""In this order a planned program takes its arguments."""


@dataclass(frozen=True)
class Planned:
    """A program and its plan.

    `arguments` says what to launch it with, `plan.nbytes` how much scratch memory it needs.
    `lines` has the line of Python that each call comes from, by the pc of its `cfunc`; `takes` has
    those pcs at which an element is taken from a queue.
    `lifetimes` are those of what lies in the scratch memory, in moments of a unit of calls each.
    """

    program: Program
    arguments: tuple[Location, ...]
    plan: Plan
    lines: dict[int, str]
    lifetimes: tuple[Lifetime, ...]
    takes: tuple[int, ...] = ()

    def recording(self) -> Recording:
        """What lies where in the scratch memory, and when, for a picture."""
        moments = max((each.end for each in self.lifetimes), default=1)
        return Recording("captured", self.plan.nbytes, moments, list(self.lifetimes))

    def looped(self) -> Program:
        """The program, which begins by taking an element from a queue, again and again until that
        queue is closed and drained.

        Raises `ProgramError` for one that does not begin so, or takes from a queue once more.
        """
        if self.takes != (2,):  # after the queue's handle and the function's name
            raise ProgramError(
                "a loop is over one queue, taken from at the start; this takes "
                f"{len(self.takes)} times"
            )
        code = self.program.main.code
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


def compile_flow(
    flow: Flow, *, fuse: bool = True, recompute: bool = True, taste: Taste = REFERENCE
) -> Planned:
    """The step as a program with its plan.

    With `fuse` calls may run as chains that suit a machine's `taste`, with `recompute` cheap ones
    may run again. Of all that is allowed, what has the smallest plan is done; so neither makes a
    plan larger.
    """
    schedule, found = _smallest(_schedules(flow, fuse=fuse, recompute=recompute, taste=taste))
    offsets = dict(zip(schedule.roots, found.offsets, strict=True))
    places = {each: offsets[root] for each, root in schedule.root.items()}

    def location(use: Use) -> Location:
        each, home = placed(use.value), use.value.home
        if each is not None:
            return Location("scratch", places[each], use.type)
        assert home is not None  # or it would be placed
        return home.seen_as(use.type)

    operands = [[location(use) for use in (*run.outs, *run.ins)] for run in schedule.runs]
    given = dict.fromkeys(each for row in operands for each in row if each.role != "element")
    arguments = sorted(given, key=lambda each: (ROLES.index(each.role), each.place))
    numbers = {each: number for number, each in enumerate(arguments)}
    code: list[Instruction] = []
    lines: dict[int, str] = {}
    takes: list[int] = []
    elements: dict[int, TensorType] = {}  # what queues have left on the stack, by slot
    for run, row in zip(schedule.runs, operands, strict=True):
        [first, *others] = run.unit.calls
        name, attributes = first.name, first.attributes
        if others:
            name, attributes = "fused", chain_of(run).attributes()
        nparams, nresults = len(row), 0
        if first.queue is not None:
            elements.update((each.place, each.type) for each in row)
            nparams, nresults, row = 1, len(row), []
            code.append(Instruction(Opcode.push_int, (first.queue,)))
        for each in row:
            if each.role != "element":
                code.append(Instruction(Opcode.load_arg, (numbers[each],)))
                continue
            code.append(Instruction(Opcode.get, (each.place,)))
            if each.type is not elements[each.place]:
                code += _reshaped(each.type)
        code.append(Instruction(Opcode.push_str, (name,)))
        line = next((call.line for call in run.unit.calls if call.line), None)
        if line is not None:
            lines[len(code)] = line
        if first.queue is not None:
            takes.append(len(code))
        rest = (attributes,) if attributes else ()
        code.append(Instruction(Opcode.cfunc, (nparams, nresults, *rest)))
    if elements:
        code.append(Instruction(Opcode.pop, (len(elements),)))
    program = Program.straight([*code, Instruction(Opcode.halt)])
    lifetimes = _lifetimes(schedule, places)
    return Planned(program, tuple(arguments), found, lines, lifetimes, tuple(takes))


def _lifetimes(schedule: Schedule, places: Mapping[Placed, int]) -> tuple[Lifetime, ...]:
    """How long each value and scratch home is in its place, and which call made it."""
    maker: dict[Value, Call] = {}
    first: dict[Placed, Use] = {}
    for run in schedule.runs:
        maker.update((use.value, call) for call in run.unit.calls for use in call.outs)
        for use in (*run.outs, *run.ins):
            each = placed(use.value)
            if each is not None:
                first.setdefault(each, use)
    return tuple(
        Lifetime(
            use.type,
            places[each],
            rounded(schedule.size[each]),
            schedule.start[each],
            schedule.end[each],
            maker[use.value].name.removesuffix(OUT),
            maker[use.value].line,
        )
        for each, use in first.items()
    )


def _schedules(flow: Flow, *, fuse: bool, recompute: bool, taste: Taste) -> list[Schedule]:
    """The ways to run the step, the fastest first. The last is the step as it was recorded: its
    calls one by one, each once."""
    wanted = flow.wanted()

    def one_by_one(calls: Sequence[Call]) -> Schedule:
        return _ordered([Unit([call]) for call in calls], wanted)

    def in_chains(plain: Schedule, calls: Sequence[Call]) -> list[Schedule]:
        most = plain.most_alive
        found = [_ordered(fused(calls, most, taste), wanted, enough=most)]
        if found[0].most_alive > most:  # chains that were made in an order may keep it instead
            calls = [call for run in plain.runs for call in run.unit.calls]
            found.append(Schedule(fused(calls, most, taste), wanted))
        return found

    calls = without_dead_calls(flow)
    plain = one_by_one(calls)
    chained = in_chains(plain, calls) if fuse else []
    if recompute:
        calls = without_dead_calls(Flow(recomputed(calls), flow.results))
        if any(call.again for call in calls):
            again = one_by_one(calls)
            if again.most_alive < plain.most_alive:
                chained += in_chains(again, calls) if fuse else []
                return [*chained, again, plain]
    return [*chained, plain]


def _ordered(units: Sequence[Unit], wanted: set[Value], enough: int = 0) -> Schedule:
    """The units in the better of two orders: earlier where it frees or, if that needs more than
    `enough` bytes, as they are."""
    best = Schedule(earlier_where_it_frees(units, wanted), wanted)
    if best.most_alive > enough:
        best = min(best, Schedule(units, wanted), key=lambda each: each.most_alive)
    return best


def _smallest(schedules: Sequence[Schedule]) -> tuple[Schedule, Plan]:
    """The schedule with the smallest plan, of equals the first, and that plan."""
    best: tuple[int, int, Plan] | None = None
    for i in sorted(range(len(schedules)), key=lambda i: schedules[i].most_alive):
        if best is None or (schedules[i].most_alive, i) < best[:2]:
            found = plan(schedules[i].blocks)
            if best is None or (found.nbytes, i) < best[:2]:
                best = found.nbytes, i, found
    assert best is not None  # there is a last schedule
    _, i, found = best
    return schedules[i], found._replace(unfused=schedules[-1].most_alive)
