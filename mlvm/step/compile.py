"""A step as one program, with a plan of the memory it works in.

`compile_flow` takes a recorded step apart into what needs to run, puts chains together, decides in
which order, and where everything lies: it makes a `Planned`, whose program takes all tensors as
arguments, and says of each of them what it has to be.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Final, NamedTuple

from mlvm.arena.placement import rounded
from mlvm.arena.planner import Plan, plan
from mlvm.arena.recording import Lifetime, Recording
from mlvm.arena.writes import leave_out
from mlvm.core.errors import ProgramError
from mlvm.core.machine.callee import OUT
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.protocol import StorageHandle
from mlvm.core.types import TensorType, u8
from mlvm.machines import residuals
from mlvm.step.blocks import taken, with_blocks, without_dead_calls, without_moves
from mlvm.step.flow import (
    Block,
    Call,
    Flow,
    Home,
    Location,
    Procedure,
    Role,
    Unit,
    Units,
    Use,
    Value,
)
from mlvm.step.fusion import REFERENCE, FusionPolicy, chain_of, fused, joined, with_slopes
from mlvm.step.halves import in_halves
from mlvm.step.hoist import Hoist, split_flow
from mlvm.step.order import earlier_where_it_frees
from mlvm.step.recompute import recomputed
from mlvm.step.schedule import Placed, Run, Schedule, placed
from mlvm.step.transposes import without_transposes

ROLES: Final[tuple[Role, ...]] = ("input", "output", "state", "scratch")
"""In this order a planned program takes its arguments."""

_AT_START: Final = 2
"""The pc of an element's taking: after the queue's handle and the function's name."""


@dataclass(frozen=True)
class Planned:
    """A program and its plan.

    `arguments` says what to launch it with, `plan.nbytes` how much scratch memory it needs.
    `lines` has the line of Python that each call comes from, by function and pc; `takes` has
    those pcs at which an element is taken from a queue.
    `lifetimes` are those of what lies in the scratch memory, in moments of a unit of calls each;
    `moments` has the pc in main of each moment's call.
    `hoisted` computes the last of its states of the others, when one of these has changed.
    """

    program: Program
    arguments: tuple[Location, ...]
    plan: Plan
    lines: dict[tuple[str, int], str]
    lifetimes: tuple[Lifetime, ...]
    takes: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    hoisted: HoistedPart | None = None

    def recording(self) -> Recording:
        """Return the live ranges and offsets in the scratch memory, for a picture."""
        moments = max((each.end for each in self.lifetimes), default=1)
        return Recording("captured", self.plan.nbytes, moments, list(self.lifetimes))

    def with_states_used(
        self, results: Sequence[Location]
    ) -> tuple[Planned, list[Location], list[int]]:
        """Return the step without its hoisted part and without states that it does not use; its
        results; and the former numbers of its states."""
        used = {place for role, place, _ in (*self.arguments, *results) if role == "state"}
        numbers = {place: number for number, place in enumerate(sorted(used))}

        def renumbered(row: Sequence[Location]) -> list[Location]:
            return [
                each._replace(place=numbers[each.place]) if each.role == "state" else each
                for each in row
            ]

        step = replace(self, arguments=tuple(renumbered(self.arguments)), hoisted=None)
        return step, renumbered(results), list(numbers)

    @property
    def first_queue(self) -> StorageHandle | None:
        """The handle of the queue that the program begins by taking an element from."""
        if self.takes[:1] != (_AT_START,):
            return None
        [handle] = self.program.main.code[0].immediates
        return StorageHandle(handle)

    def note_line(self, error: Exception) -> None:
        """Note on an error of the program which line of Python the failing call is from."""
        function, pc = getattr(error, "function", None), getattr(error, "pc", None)
        line = self.lines.get((str(function), pc)) if isinstance(pc, int) else None
        if line is not None:
            layer = getattr(line, "layer", None)  # that of a saved step has none
            error.add_note(f"recorded at {line}" + (f", in {layer}" if layer else ""))

    def looped(self) -> Program:
        """Return the program in a loop, which ends when no element waits in its queue.

        Raises `ProgramError` unless the program takes one element, first of all.
        """
        if self.takes != (_AT_START,):
            raise no_loop(len(self.takes))
        code = self.program.main.code
        _, nresults, _ = code[2].immediates
        operands, body = code[:2], _moved(code[3:-1], 1)
        start = [*operands, Instruction(Opcode.cfunc, (1, nresults + 1, {"wait": False}))]
        end = len(start) + 1 + len(body) + 1
        leave, again = Instruction(Opcode.jump_if_false, (end,)), Instruction(Opcode.jump, (0,))
        after = [Instruction(Opcode.pop, (nresults,)), Instruction(Opcode.halt)]
        return Program.straight([*start, leave, *body, again, *after])


class HoistedPart(NamedTuple):
    """The hoisted part of a step: a program that computes states of other states. Its outputs, of
    these `types`, are the step's states behind those that it reads."""

    planned: Planned
    types: tuple[TensorType, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its outputs in an arena."""
        return sum(rounded(type.nbytes) for type in self.types)


def no_loop(takes: int) -> ProgramError:
    """Return the error for a loop over a step that takes that many elements."""
    return ProgramError(
        f"a loop is over one queue, taken from at the start; this takes {takes} times"
    )


def _moved(code: Sequence[Instruction], by: int) -> list[Instruction]:
    """Return the instructions moved by that many places; jumps follow."""
    return [each.jumping(lambda pc: pc + by) for each in code]


def _reshaped(type: TensorType) -> list[Instruction]:
    """Return the code that reshapes the tensor on top."""
    name = Instruction(Opcode.push_str, ("reshape",))
    return [name, Instruction(Opcode.cfunc, (1, 1, {"shape": type.shape}))]


on_planned: Final[list[Callable[[Planned], None]]] = []
"""Functions called with each step that is planned, such as one that collects them for a picture."""


def compile_flow(
    flow: Flow,
    *,
    fuse: bool = True,
    recompute: bool = True,
    policy: FusionPolicy = REFERENCE,
    hoist: Hoist | None = None,
) -> Planned:
    """Compile the step to a program with its plan.

    With `fuse` calls may run as chains that suit a machine's `policy`, with `recompute` cheap ones
    may run again. Of the allowed programs the one with the smallest plan is chosen, so neither
    option makes a plan larger. With `hoist` values that depend on states alone are computed by a
    separate program, the hoisted part.
    """
    options = _Options(fuse, recompute, policy)
    flow = without_moves(Flow(without_dead_calls(flow), flow.results))
    if policy.halves:
        flow = Flow(in_halves(flow), flow.results)
    split = None if hoist is None else split_flow(flow, hoist, panels=policy.panels)
    if split is None:
        planned = _compiled(flow, options)
    else:
        part = HoistedPart(_compiled(split.hoisted, options), split.types)
        planned = _compiled(split.rest, options)
        plan = planned.plan._replace(ahead=part.nbytes)
        planned = replace(planned, plan=plan, hoisted=part)
    for observer in on_planned.copy():
        observer(planned)
    return planned


def _compiled(flow: Flow, options: _Options) -> Planned:
    level = _planned(flow, options)
    written = _Written()
    stacked = any(call.name == residuals.PUSH for call in with_blocks(flow.calls))
    if stacked:
        written.host_call(residuals.BEGIN)
    written.level(level, 0)
    if stacked:
        written.host_call(residuals.END)
    return written.planned(level.plan)


class _Options(NamedTuple):
    """How a step may be changed: see `compile_flow`."""

    fuse: bool
    recompute: bool
    policy: FusionPolicy


class _Level(NamedTuple):
    """Calls in the order in which they run, and where what they make lies, as which type. `inside`
    has what runs in a call with blocks."""

    schedule: Schedule
    plan: Plan
    places: Mapping[Placed, int]
    types: Mapping[Placed, TensorType]
    result: Use | None
    inside: Mapping[Call, _Inside]


class _Inside(NamedTuple):
    """The blocks of a call. Their memory is the value `workspace`, if they need any."""

    levels: tuple[_Level, ...]
    outer: Mapping[int, Value]
    workspace: Value | None


def _planned(flow: Flow, options: _Options, result: Use | None = None) -> _Level:
    """A plan for the calls, and for all that runs inside them."""
    if options.policy.transposes:
        flow = Flow(without_transposes(flow), flow.results)
    inside: dict[Call, _Inside] = {}
    calls: list[Call] = []
    for call in flow.calls:
        if call.blocks:
            blocks, outer = taken(call)
            levels = tuple([_planned(block.flow, options, block.result) for block in blocks])
            nbytes = max(level.plan.nbytes for level in levels) if call.callee is None else 0
            workspace = Value(nbytes) if nbytes else None
            if workspace is not None:
                call = replace(call, outs=[*call.outs, Use(workspace, TensorType(u8, (nbytes,)))])
            inside[call] = _Inside(levels, outer, workspace)
        calls.append(call)
    schedule, found = _smallest(_schedules(Flow(calls, flow.results), options))
    offsets = dict(zip(schedule.roots, found.offsets, strict=True))
    places = {each: offsets[root] for each, root in schedule.root.items()}
    types: dict[Placed, TensorType] = {
        use.value: use.type for run in schedule.runs for use in run.outs
    }
    return _Level(schedule, found, places, types, result, inside)


_BYTE: Final = TensorType(u8)


class _Written:
    """A program as it is written, level by level: code, and what its numbers stand for."""

    def __init__(self) -> None:
        self.code: list[Instruction] = []
        self.lines: dict[int, str] = {}  # by pc
        self.inner_lines: dict[tuple[str, int], str] = {}  # those of functions
        self.takes: list[int] = []
        self.lifetimes: list[Lifetime] = []
        self.moments: list[int] = []  # the pc of each one's call
        self.numbers: dict[Location, int] = {}  # of arguments, in the order they are met
        self._elements: dict[int, TensorType] = {}  # what queues have left on the stack, by slot
        self._outer: dict[int, tuple[Role, int]] = {}  # where it is, by index
        self._names: dict[Procedure, str] = {}
        self._functions: list[Function] = []

    def level(self, level: _Level, base: int) -> None:
        """Write the calls of a level, whose memory begins at byte `base`."""
        before = len(self._elements)
        begins: list[int] = []
        for run in level.schedule.runs:
            begins.append(len(self.moments))
            first = run.unit.calls[0]
            inside = level.inside.get(first)
            if first.pushes:
                self._call_user(first, level, base)
            elif first.callee is not None:
                self._call_function(first, inside, level, base)
            elif inside is None:
                self._call(run, level, base)
            else:
                self._control(run, inside, level, base)
            if inside is None or first.callee is not None or len(self.moments) == begins[-1]:
                self.moments.append(len(self.code) - 1)
        begins.append(len(self.moments))
        took = len(self._elements) - before
        if took:
            self.code.append(Instruction(Opcode.pop, (took,)))
            for _ in range(took):
                self._elements.popitem()
        if level.result is not None:
            self.push(level.result, level, base)
        self.lifetimes += _lifetimes(level, base, begins)

    def host_call(self, name: str) -> None:
        """Write a call of a function without parameters and results."""
        self.code.append(Instruction(Opcode.push_str, (name,)))
        self.code.append(Instruction(Opcode.cfunc, (0, 0)))

    def planned(self, plan: Plan) -> Planned:
        """The program with its plan, whose arguments are in the order of their roles."""
        arguments = sorted(self.numbers, key=lambda each: (ROLES.index(each.role), each.place))
        number = {self.numbers[each]: i for i, each in enumerate(arguments)}

        loads = {old: Instruction(Opcode.load_arg, (new,)) for old, new in number.items()}

        def renumbered(code: Iterable[Instruction]) -> list[Instruction]:
            return [
                loads[each.immediates[0]] if each.opcode is Opcode.load_arg else each
                for each in code
            ]

        functions = [
            function._replace(code=tuple(renumbered(function.code))) for function in self._functions
        ]
        main = Function("main", 0, STAR, (*renumbered(self.code), Instruction(Opcode.halt)))
        program = Program([main, *functions])
        scratch = [i for i, each in enumerate(arguments) if each.role == "scratch"]
        leave_out(program, scratch)  # which nobody else sees
        lifetimes = tuple(sorted(self.lifetimes, key=lambda each: each.start))
        lines = {("main", pc): line for pc, line in self.lines.items()} | self.inner_lines
        takes, moments = tuple(self.takes), tuple(self.moments)
        return Planned(program, tuple(arguments), plan, lines, lifetimes, takes, moments)

    def _location(self, use: Use, level: _Level, base: int) -> Location:
        each, home = placed(use.value), use.value.home
        if each is not None:
            return Location("scratch", base + level.places[each], use.type)
        assert home is not None  # or it would be placed
        if home.role == "outer":
            return Location(*self._outer[home.index], use.type)
        return home.seen_as(use.type)

    def push(self, use: Use, level: _Level, base: int) -> None:
        """Write what pushes the tensor."""
        self._load(self._location(use, level, base))

    def _load(self, each: Location) -> None:
        if each.role != "element":
            number = self.numbers.setdefault(each, len(self.numbers))
            self.code.append(Instruction(Opcode.load_arg, (number,)))
            return
        self.code.append(Instruction(Opcode.get, (each.place,)))
        if each.type is not self._elements[each.place]:
            self.code += _reshaped(each.type)

    def _call(self, run: Run, level: _Level, base: int) -> None:
        """Write the call of a host function."""
        row: Sequence[Use] = (*run.outs, *run.ins)
        [first, *others] = run.unit.calls
        name, attributes = first.name, first.attributes
        if others:
            name, attributes = "fused", chain_of(run).attributes()
        nparams, nresults = len(row), 0
        if first.queue is not None:
            places = [self._location(use, level, base) for use in row]
            self._elements.update((each.place, each.type) for each in places)
            nparams, nresults, row = 1, len(row), ()
            self.code.append(Instruction(Opcode.push_int, (first.queue,)))
        for use in row:
            self.push(use, level, base)
        self.code.append(Instruction(Opcode.push_str, (name,)))
        line = next((call.line for call in run.unit.calls if call.line), None)
        if line is not None:
            self.lines[len(self.code)] = line
        if first.queue is not None:
            self.takes.append(len(self.code))
        rest = (attributes,) if attributes else ()
        self.code.append(Instruction(Opcode.cfunc, (nparams, nresults, *rest)))

    def _control(self, run: Run, inside: _Inside, level: _Level, base: int) -> None:
        """Write a branch or a loop."""
        [call] = run.unit.calls
        self._place_outer(inside, level, base)
        within = base
        if inside.workspace is not None:
            within += level.places[inside.workspace]
        first, second = inside.levels
        start = len(self.code)
        if call.name == "while":
            self.level(first, within)
        else:
            self.push(call.ins[0], level, base)
        leave = self._jump(Opcode.jump_if_false)
        self.level(second if call.name == "while" else first, within)
        back = self._jump(Opcode.jump)
        self._land(leave)
        if call.name == "while":
            self.code[back] = Instruction(Opcode.jump, (start,))
        else:
            self.level(second, within)
            self._land(back)

    def _place_outer(self, inside: _Inside, level: _Level, base: int) -> None:
        """Note where that lies which is outer to the blocks of a call."""
        for index, value in inside.outer.items():
            role, place, _ = self._location(Use(value, _BYTE), level, base)
            self._outer[index] = role, place

    def _call_function(self, call: Call, inside: _Inside | None, level: _Level, base: int) -> None:
        """Write the call of a function of the program and, if it comes from outside, all functions
        that it reaches."""
        assert call.callee is not None
        if inside is not None:
            self._place_outer(inside, level, base)
            for procedure in call.procedures:
                self._names[procedure] = self._name(procedure.name)
            for procedure, body in zip(call.procedures, inside.levels, strict=True):
                self._functions.append(self._function(procedure, body))
        for use in call.passed:
            self.push(use, level, base)
        self.code.append(Instruction(Opcode.call, (self._names[call.callee],)))

    def _call_user(self, call: Call, level: _Level, base: int) -> None:
        """Write the call of a user's function, as a function of the program that copies results."""
        name = self._name(call.name)
        self._names[Procedure(name, Block())] = name
        nouts, nins = len(call.outs), len(call.ins)
        code = [Instruction(Opcode.get, (i - nins,)) for i in range(nins)]
        code.append(Instruction(Opcode.push_str, (call.name,)))
        rest = (call.attributes,) if call.attributes else ()
        if call.line is not None:
            self.inner_lines[name, len(code)] = call.line
        code.append(Instruction(Opcode.cfunc, (nins, nouts, *rest)))
        for i in range(nouts):
            code.append(Instruction(Opcode.get, (i - nins - nouts,)))
            code.append(Instruction(Opcode.get, (i,)))
            code.append(Instruction(Opcode.push_str, (f"copy{OUT}",)))
            if call.line is not None:
                self.inner_lines[name, len(code)] = call.line
            code.append(Instruction(Opcode.cfunc, (2, 0)))
        code.append(Instruction(Opcode.return_, (0,)))
        self._functions.append(Function(name, nouts + nins, 0, tuple(code)))
        for use in (*call.outs, *call.ins):
            self.push(use, level, base)
        self.code.append(Instruction(Opcode.call, (name,)))

    def _name(self, wanted: str) -> str:
        """A name for a function that no other has."""
        plain = re.sub(r"\W+", "_", wanted).strip("_") or "function"
        taken = {"main", *self._names.values()}
        names = (f"{plain}_{n}" if n else plain for n in itertools.count())
        return next(name for name in names if name not in taken)

    def _function(self, procedure: Procedure, body: _Level) -> Function:
        """The code of a function."""
        inner = _Frame(self, procedure)
        inner.level(body, 0)
        name, code = self._names[procedure], inner.whole()
        ahead = len(code) - 1 - len(inner.code)
        self.inner_lines.update(((name, pc + ahead), line) for pc, line in inner.lines.items())
        self.inner_lines.update(inner.inner_lines)
        return Function(name, len(procedure.params), 0, tuple(code))

    def _jump(self, opcode: Opcode) -> int:
        """Write a jump to a place that is not known yet. Returns where it is."""
        self.code.append(Instruction(opcode, (0,)))
        return len(self.code) - 1

    def _land(self, jump: int) -> None:
        """Make that jump come here."""
        self.code[jump] = self.code[jump]._replace(immediates=(len(self.code),))


class _Frame(_Written):
    """The code of a function as it is written. What lies in the scratch memory elsewhere, is a
    tensor of the frame here: each slot has one, which all values of its type at one place of the
    plan lie in."""

    def __init__(self, around: _Written, procedure: Procedure) -> None:
        super().__init__()
        self.numbers = around.numbers
        self._outer = dict(around._outer)
        self._names = around._names
        self._functions = around._functions
        self._slots: dict[tuple[int, TensorType], int] = {}
        nparams = len(procedure.params)
        self._params = {
            home.index: (i - nparams, home.type) for i, home in enumerate(procedure.params)
        }

        self._framed: dict[int, tuple[int, TensorType]] = {}  # what is outer to blocks in here

    def push(self, use: Use, level: _Level, base: int) -> None:
        home, each = use.value.home, placed(use.value)
        index = home.index if home is not None and home.role == "outer" else None
        if index is not None and index in self._params:
            slot, type = self._params[index]
        elif each is not None:
            slot, type = self._slot(self._own(each, level, base))
        elif index is not None and index in self._framed:
            slot, type = self._slot(self._framed[index])
        else:
            super().push(use, level, base)
            return
        self.code.append(Instruction(Opcode.get, (slot,)))
        if use.type is not type:
            self.code += _reshaped(use.type)

    def _place_outer(self, inside: _Inside, level: _Level, base: int) -> None:
        for index, value in inside.outer.items():
            each = placed(value)
            assert each is not None  # all else has its place already
            self._framed[index] = self._own(each, level, base)

    def _slot(self, place: tuple[int, TensorType]) -> tuple[int, TensorType]:
        return self._slots.setdefault(place, len(self._slots)), place[1]

    def _own(self, each: Placed, level: _Level, base: int) -> tuple[int, TensorType]:
        """The place of what a level has placed, and its type."""
        type = each.type if isinstance(each, Home) else level.types[each]
        return base + level.places[each], type

    def whole(self) -> list[Instruction]:
        """The code with what makes the frame, and leaves it."""
        frame: list[Instruction] = []
        for _, type in self._slots:
            attributes = {"shape": type.shape, "dtype": type.dtype.name}
            frame.append(Instruction(Opcode.push_str, ("zeros",)))
            frame.append(Instruction(Opcode.cfunc, (0, 1, attributes)))
        return [*frame, *_moved(self.code, len(frame)), Instruction(Opcode.return_, (0,))]


def _lifetimes(level: _Level, base: int, begins: Sequence[int]) -> list[Lifetime]:
    """How long each value and scratch home of a level is in its place, and which call made it. The
    level's runs begin at the moments `begins`, and it ends at the last of these."""
    schedule = level.schedule
    maker: dict[Value, Call] = {}
    first: dict[Placed, Use] = {}
    for run in schedule.runs:
        maker.update((use.value, call) for call in run.unit.calls for use in call.outs)
        for use in (*run.outs, *run.ins):
            each = placed(use.value)
            if each is not None:
                first.setdefault(each, use)
    for inside in level.inside.values():  # it shows what is in there itself
        if inside.workspace is not None:
            del first[inside.workspace]
    return [
        Lifetime(
            use.type,
            base + level.places[each],
            rounded(schedule.size[each]),
            begins[schedule.start[each]],
            begins[schedule.end[each]],
            maker[use.value].name.removesuffix(OUT),
            maker[use.value].line,
        )
        for each, use in first.items()
    ]


def _schedules(flow: Flow, options: _Options) -> list[Schedule]:
    """The ways to run the step, the fastest first. The last is the step as it was recorded: its
    calls one by one, each once."""
    fuse, recompute, policy = options
    calls, wanted = flow.calls, flow.wanted()
    units = Units()

    def one_by_one(calls: Sequence[Call]) -> Schedule:
        return _ordered([units[call] for call in calls], wanted)

    def in_order(chains: Sequence[Unit], most: int) -> Schedule:
        found = _ordered(chains, wanted, enough=most)
        if not policy.passes:
            return found
        # what has moved to its operand, as the update of a parameter has, joins what makes that
        again = joined([run.unit for run in found.runs], found.most_alive, policy, units)
        return Schedule(again, wanted) if len(again) < len(chains) else found

    def in_chains(plain: Schedule, calls: Sequence[Call]) -> list[Schedule]:
        most = plain.most_alive
        found = []
        sloped = with_slopes(calls) if policy.passes else calls
        if sloped != calls:
            found = [in_order(fused(sloped, most, policy, units), most)]
            if found[0].most_alive <= most:
                return found
        return [*found, *as_they_are(plain, calls)]

    def as_they_are(plain: Schedule, calls: Sequence[Call]) -> list[Schedule]:
        most = plain.most_alive
        found = [in_order(fused(calls, most, policy, units), most)]
        if found[0].most_alive > most:  # chains that were made in an order may keep it instead
            calls = [call for run in plain.runs for call in run.unit.calls]
            found.append(Schedule(fused(calls, most, policy, units), wanted))
        return found

    plain = one_by_one(calls)
    chained = in_chains(plain, calls) if fuse else []
    if recompute:
        calls = without_dead_calls(Flow(recomputed(calls), flow.results), inside=False)
        if any(call.again for call in calls):
            again = one_by_one(calls)
            if again.most_alive < plain.most_alive:
                chained += in_chains(again, calls) if fuse else []
                return [*chained, again, plain]
    return [*chained, plain]


def _ordered(units: Sequence[Unit], wanted: set[Value], enough: int = 0) -> Schedule:
    """The units in the better of two orders: earlier where it frees or, if that needs more than
    `enough` bytes, as they are."""
    earlier = earlier_where_it_frees(units, wanted)
    best = Schedule(earlier, wanted)
    if best.most_alive > enough and not all(map(is_, earlier, units)):
        best = min(best, best.reordered(units), key=lambda each: each.most_alive)
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
