"""Compilation of a step to one program, with a plan of the scratch memory.

In: a recorded flow, and options. Out: a `Planned`: a program that gets all tensors as arguments,
    and a description of each argument.
Passes: dead code, moves, repeated ops, hoisting, transposes, fusion and recomputation, order, plan;
    then code generation, level by level. A level consists of the calls of the step or a block in
    it. Passes do not change any bit of a result. The schedule with the smallest plan is chosen, and
    within a budget the fastest by the estimate.
Callers: `capture`, `measure` and `ml.onnx`. No lock is held: a flow belongs to one trace.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Final, NamedTuple

from mlvm.arena.placement import rounded
from mlvm.arena.planner import PeakValue, Plan, plan
from mlvm.arena.recording import Lifetime, Recording
from mlvm.arena.writes import leave_out
from mlvm.core.errors import BudgetError, OpError, PositionError, ProgramError
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.decode import argument_of
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.program.program import STAR, Function, Instruction, Program
from mlvm.core.protocol import StorageHandle
from mlvm.core.sizes import MAX_SIZE
from mlvm.core.types import TensorType, u8
from mlvm.machines import residuals
from mlvm.machines.lane_link import host_call
from mlvm.step.batch_rules import in_lane
from mlvm.step.blocks import outline_blocks, with_blocks, without_dead_calls, without_moves
from mlvm.step.budget import Candidate, candidates, present, total_seconds
from mlvm.step.flow import (
    Block,
    Call,
    Flow,
    Home,
    Location,
    Procedure,
    Role,
    Unit,
    UnitTable,
    Use,
    Value,
)
from mlvm.step.fused_windows import with_windows
from mlvm.step.fusion import REFERENCE, FusionPolicy, chain_of, fused, joined, with_slopes
from mlvm.step.half_inputs import in_halves
from mlvm.step.hoist import Hoist, split_flow
from mlvm.step.order import earlier_where_it_frees
from mlvm.step.parts import in_parts
from mlvm.step.peak import at_peak, hoisted_values, peak_text
from mlvm.step.raising import updates_last, with_raising
from mlvm.step.recompute import recomputed
from mlvm.step.repeats import without_repeats
from mlvm.step.schedule import Placed, Run, Schedule, placed
from mlvm.step.transposes import without_transposes

ROLES: Final[tuple[Role, ...]] = ("input", "output", "state", "scratch")
"""Order of a planned program's arguments, by role."""

_MINOR: Final = 256
"""Hoisted values of fewer bytes than this fraction of the plan are not computed in the step."""

_SLACK: Final = 1.125
"""Limit of a simulated run relative to the budget: plans may reuse more memory than simulated."""

NAMED: Final = "named"
"""Name of a call that only names its operand; without an operand, it removes the name.

The code pushes the operand and the number of the name, and pops both. A debugger reads them there.
"""

_AT_START: Final = 2
"""pc of a queue's call at the start, after the queue's handle and the function's name."""


@dataclass(frozen=True)
class Planned:
    """Program with a plan.

    `arguments`: the tensors to launch it on, in order.
    `plan`: plan of the scratch memory, `plan.nbytes` bytes.
    `lines`: lines of Python by function and pc.
    `lifetimes`: live ranges in scratch memory; each unit advances the time by one.
    `takes`: the pcs of calls that read an element of a queue.
    `moments`: the pc in main of the call at each time.
    `hoisted`: the part that computes the last states from the other states, after a change of
        these.
    `curve`: bytes and seconds of other programs of the step (`curve_of`), for observers only.
    """

    program: Program
    arguments: tuple[Location, ...]
    plan: Plan
    lines: dict[tuple[str, int], str]
    lifetimes: tuple[Lifetime, ...]
    takes: tuple[int, ...] = ()
    moments: tuple[int, ...] = ()
    hoisted: HoistedPart | None = None
    curve: Callable[[], list[tuple[int, float]]] | None = field(default=None, compare=False)

    def recording(self) -> Recording:
        """Return the live ranges and offsets in the scratch memory, for a plot."""
        moments = max((each.end for each in self.lifetimes), default=1)
        return Recording("captured", self.plan.nbytes, moments, list(self.lifetimes))

    def with_states_used(
        self, results: Sequence[Location]
    ) -> tuple[Planned, list[Location], list[int]]:
        """Return the step without the hoisted part and without unused states.

        Also return the results, and the former numbers of the states.
        """
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
        """The handle of the queue from which the program reads an element before anything else."""
        if self.takes[:1] != (_AT_START,):
            return None
        [handle] = self.program.main.code[0].immediates
        return StorageHandle(handle)

    def note_line(self, error: Exception) -> None:
        """Add the failing call's line of Python to an error as a note, and name the operation."""
        function, pc = getattr(error, "function", None), getattr(error, "pc", None)
        line = self.lines.get((str(function), pc)) if isinstance(pc, int) else None
        if line is not None:
            call = getattr(line, "call", None)
            if call is not None and isinstance(error, OpError):
                error.op, error.operands = call  # the op that raised the error
                if isinstance(error, PositionError) and (naxes := getattr(line, "naxes", 0)):
                    in_lane(error, (), naxes)
            reword = getattr(line, "reword", None)
            if reword is not None and isinstance(error, PositionError):
                reword(error)
            layer = getattr(line, "layer", None)  # lines of a saved step have no layer
            error.add_note(f"recorded at {line}" + (f", in {layer}" if layer else ""))

    def looped(self) -> Program:
        """Return the program in a loop, which stops when the queue is empty.

        Raises `ProgramError` unless the program reads exactly one element, before anything else.
        """
        if self.takes != (_AT_START,):
            raise no_loop(len(self.takes))
        code = self.program.main.code
        _, nresults, _ = code[2].immediates
        operands, body = code[:2], _moved(code[3:-1], 1)
        start = [*operands, Instruction.of("cfunc", 1, nresults + 1, {"wait": False})]
        end = len(start) + 1 + len(body) + 1
        leave, again = Instruction.of("jump_if_false", end), Instruction.of("jump", 0)
        after = [Instruction.of("pop", nresults), Instruction.of("halt")]
        return Program.straight([*start, leave, *body, again, *after])


class HoistedPart(NamedTuple):
    """Hoisted part of a step: a program that computes states from other states.

    The outputs, with these `types`, are states of the step and follow the states that the part
    reads. `values` describe them.
    """

    planned: Planned
    types: tuple[TensorType, ...]
    values: tuple[PeakValue, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the outputs in an arena, in bytes."""
        return sum(rounded(type.nbytes) for type in self.types)


def no_loop(takes: int) -> ProgramError:
    """Return the error for a loop over a step that reads that many elements."""
    return ProgramError(
        f"a loop is over one queue, taken from at the start; this takes {takes} times"
    )


def _moved(code: Sequence[Instruction], by: int) -> list[Instruction]:
    """Return the instructions with jump targets shifted by that number."""
    return [each.jumping(lambda pc: pc + by) for each in code]


def _reshaped(type: TensorType) -> list[Instruction]:
    """Return the code that reshapes the tensor on top."""
    return host_call("reshape", 1, 1, {"shape": type.shape})


on_planned: Final[list[Callable[[Planned], None]]] = []
"""Functions called with each planned step, for example to collect them for a plot."""


def compile_flow(
    flow: Flow,
    *,
    fuse: bool = True,
    recompute: bool = True,
    policy: FusionPolicy = REFERENCE,
    hoist: Hoist | None = None,
    budget: int | None = None,
    effort: int = 1,
    reserved: int = 0,
) -> Planned:
    """Compile the step to a program with a plan.

    `fuse`: allow chains that suit the machine's `policy`.
    `recompute`: allow cheap calls to run again. Among the allowed programs the one with the
        smallest plan is chosen, so neither option makes a plan larger.
    `hoist`: compute values that depend only on states by a separate program, the hoisted part.
    `budget`: limit in bytes of the plan, including hoisted values. Values are recomputed instead of
        saved, and hoisted values are computed in the step. The fastest program by the estimate of
        `mlvm.step.budget` is chosen.
    `effort`: limit of the planner's search for smaller plans.
    `reserved`: bytes of the budget that values of a different program need.

    Raises `BudgetError` if no program is found that fits, and within a budget for a step that saves
    residuals on a stack of the VM.
    """
    options = _Options(fuse, recompute, policy, effort)
    prepared = _prepared(flow, options)
    best = _variant(prepared, hoist, options)
    if budget is not None:
        _require_bounded(best.level)
        budget -= reserved
        faster = _first_within(_of_schedules(best, budget), budget, effort)
        best = faster or _within(_variants(best, prepared, hoist, options), budget, effort)
    best = best._replace(level=best.level._replace(others=()))  # frees their units
    planned = best.planned()
    for observer in on_planned.copy():
        curve = partial(curve_of, flow, policy=policy, hoist=hoist)
        observer(replace(planned, curve=curve))
    return planned


def curve_of(
    flow: Flow, *, policy: FusionPolicy = REFERENCE, hoist: Hoist | None = None
) -> list[tuple[int, float]]:
    """Return (bytes, estimated seconds) of programs of the step, the largest first.

    A program is omitted if a different program needs fewer bytes and less time.
    """
    options = _Options(fuse=True, recompute=True, policy=policy, effort=1)
    flow = _prepared(flow, options)
    variants = _variants(_variant(flow, hoist, options), flow, hoist, options)
    points: list[tuple[int, float]] = []
    for offer in _offers(variants, math.inf):
        below = points[-1][0] if points else MAX_SIZE
        variant = offer.within(below - 1, options.effort)
        if variant is not None:
            points.append((variant.nbytes, offer.seconds))
    return points


def as_recorded(flow: Flow) -> Planned:
    """Compile the calls of the step in the recorded order, each exactly once.

    No call is omitted, fused or moved. A debugger runs such a program.
    """
    options = _Options(fuse=False, recompute=False, policy=REFERENCE, effort=1, ordered=False)
    return _written(_planned(flow, options))


class _Variant(NamedTuple):
    """Step with a plan and a hoisted part."""

    level: _Level
    hoisted: HoistedPart | None

    @property
    def nbytes(self) -> int:
        """Bytes of the hoisted values and the scratch memory of the larger program."""
        return self.nbytes_with(self.level.plan.nbytes)

    def nbytes_with(self, nbytes: int) -> int:
        """Return the total bytes if the step needs that much scratch memory."""
        hoisted = self.hoisted
        if hoisted is None:
            return nbytes
        return max(nbytes, hoisted.planned.plan.nbytes) + hoisted.nbytes

    def simulated_limit(self, budget: float) -> float:
        """Return the limit in bytes of simulated runs of the step within a budget."""
        return _SLACK * (budget - (0 if self.hoisted is None else self.hoisted.nbytes))

    def planned(self) -> Planned:
        planned = _written(self.level)
        if self.hoisted is None:
            return planned
        plan = planned.plan._replace(hoisted_nbytes=self.hoisted.nbytes, peak=self.peak)
        return replace(planned, plan=plan, hoisted=self.hoisted)

    @property
    def peak(self) -> tuple[PeakValue, ...]:
        """The values in memory at the peak, including hoisted values, the largest first."""
        values = at_peak(self.level.schedule)
        if self.hoisted is None:
            return values
        return tuple(sorted((*values, *self.hoisted.values), key=lambda each: -each.nbytes))


def _prepared(flow: Flow, options: _Options) -> Flow:
    """Return the flow after the passes that precede hoisting."""
    flow = without_moves(with_raising(Flow(without_dead_calls(flow), flow.results)))
    flow = updates_last(without_repeats(flow))
    if options.policy.native:
        flow = Flow(in_halves(flow), flow.results)
    return flow


def _variant(flow: Flow, hoist: Hoist | None, options: _Options) -> _Variant:
    """Plan the step and the hoisted part."""
    split = None
    if hoist is not None:
        split = split_flow(flow, hoist, panels=options.policy.native)
    if hoist is None or split is None:
        return _Variant(_planned(flow, options), None)
    written = _written(_planned(split.hoisted, options))
    part = HoistedPart(written, split.types, hoisted_values(split, hoist.states))
    return _Variant(_planned(split.rest, options), part)


def _variants(
    variant: _Variant, flow: Flow, hoist: Hoist | None, options: _Options
) -> list[_Variant]:
    """Return the variant, and variants that may need less memory.

    If the variant has a hoisted part that matters, the others have none. The last variant runs
    layers in parts of the batch.
    """
    variants = [variant]
    if variant.hoisted is not None and (
        variant.hoisted.nbytes >= variant.level.plan.nbytes // _MINOR
    ):
        hoist = None
        variants.append(_variant(flow, None, options))
    parts = in_parts(flow) if options.policy.native else None
    if parts is not None:
        variants.append(_variant(parts, hoist, options))
    return variants


class _Offer(NamedTuple):
    """Program of the step that is not planned yet, with the estimated seconds.

    candidate: alternative schedule for the variant, or None.
    """

    seconds: float
    variant: _Variant
    candidate: Candidate | Schedule | None

    def within(self, budget: int, effort: int) -> _Variant | None:
        """Return the planned program, or None if it exceeds the budget.

        A program whose simulated run exceeds the limit for its own size is never returned.
        Otherwise whether it is chosen would depend on the limit of `candidates`.
        """
        variant, candidate = self.variant, self.candidate
        if candidate is not None:
            schedule = candidate if isinstance(candidate, Schedule) else candidate.schedule()
            if variant.nbytes_with(schedule.most_alive) > budget:
                return None
            level, hoisted = variant
            own_plan = plan(schedule.blocks, effort=effort)._replace(unfused=level.plan.unfused)
            variant = _Variant(_placed_level(level, schedule, own_plan), hoisted)
            limit = variant.simulated_limit(variant.nbytes)
            if isinstance(candidate, Candidate) and candidate.nbytes > limit:
                return None
        return variant if variant.nbytes <= budget else None


def _of_schedules(variant: _Variant, budget: float) -> list[_Offer]:
    """Return the programs of the schedules that may fit, the fastest first."""
    chosen, others, *_ = variant.level
    fitting = [each for each in others if variant.nbytes_with(each.most_alive) <= budget]
    offers = [_Offer(total_seconds(each), variant, each) for each in fitting]
    offers.append(_Offer(total_seconds(chosen), variant, None))
    return sorted(offers, key=lambda each: each.seconds)


def _offers(variants: Sequence[_Variant], budget: float) -> list[_Offer]:
    """Return programs of the step that need less and less memory, the fastest first.

    Programs whose simulated runs need much more than the budget are omitted, because they do not
    fit.
    """
    offers = []
    for variant in variants:
        schedule, live_out = variant.level.schedule, variant.level.live_out
        offers += _of_schedules(variant, budget)
        others = candidates(schedule, live_out, variant.simulated_limit(budget))
        offers += [_Offer(each.seconds, variant, each) for each in others]
    return sorted(offers, key=lambda each: each.seconds)


def _first_within(offers: Iterable[_Offer], budget: int, effort: int) -> _Variant | None:
    """Return the first program within the budget."""
    variants = (offer.within(budget, effort) for offer in offers)
    return next((variant for variant in variants if variant is not None), None)


def _within(variants: Sequence[_Variant], budget: int, effort: int) -> _Variant:
    """Return the fastest program within the budget. Raises `BudgetError` if there is none."""
    variant = _first_within(_offers(variants, budget), budget, effort)
    if variant is not None:
        return variant
    smallest = variants[0]
    for offer in reversed(_offers(variants, math.inf)):  # the slowest programs need least memory
        smallest = offer.within(smallest.nbytes - 1, effort) or smallest
    raise BudgetError(
        f"capture: expected a plan of at most {budget:,} bytes (memory=), got {smallest.nbytes:,} "
        f"for the smallest plan: use memory={smallest.nbytes} or a smaller batch. "
        f"{peak_text(smallest.peak)}",
        smallest.nbytes,
    )


def _pushes(level: _Level) -> list[Call]:
    """Return the calls that save residuals on a stack of the VM."""
    calls = [call for run in level.schedule.runs for call in run.unit.calls]
    return [call for call in with_blocks(calls) if call.name == residuals.PUSH]


def _require_bounded(level: _Level) -> None:
    """Raise `BudgetError` if the step saves residuals on a stack, whose size is unknown."""
    for call in _pushes(level):
        nbytes = sum(present(use.type).nbytes for use in call.ins)
        raise BudgetError(
            f"capture: expected a step of known size (memory=), got residuals of {nbytes:,} bytes "
            f"for each of an unknown number of iterations or calls"
            + (f" at {call.line}" if call.line else "")
            + ": pass the number of iterations as an int, or omit memory="
        )


def _written(level: _Level) -> Planned:
    """Generate the code of the step."""
    writer = _ProgramWriter()
    stacked = bool(_pushes(level))
    if stacked:
        writer.code += host_call(residuals.BEGIN, 0, 0, NO_ATTRIBUTES)
    writer.level(level, 0)
    if stacked:
        writer.code += host_call(residuals.END, 0, 0, NO_ATTRIBUTES)
    return writer.planned(level.plan._replace(peak=at_peak(level.schedule)))


class _Options(NamedTuple):
    """Options of a compilation: see `compile_flow`. Unless `ordered`, calls may be reordered."""

    fuse: bool
    recompute: bool
    policy: FusionPolicy
    effort: int
    ordered: bool = True


class _Level(NamedTuple):
    """Planned calls of a step or block.

    `schedule`: the calls in order of execution.
    `others`: other schedules, which need at least as much memory.
    `plan`: memory plan.
    `places`: offsets in bytes.
    `types`: the type of each placed value.
    `result`: the condition that the block computes.
    `inside`: the blocks of the calls.
    `live_out`: the values that are live at the end.
    """

    schedule: Schedule
    others: Sequence[Schedule]
    plan: Plan
    places: Mapping[Placed, int]
    types: Mapping[Placed, TensorType]
    result: Use | None
    inside: Mapping[Call, _Inside]
    live_out: set[Value]


class _Inside(NamedTuple):
    """Planned blocks of a call.

    levels: the blocks.
    outer: the outer values that the blocks use, by the index of a home.
    workspace: the value that provides memory for the blocks, if they need any.
    """

    levels: tuple[_Level, ...]
    outer: Mapping[int, Value]
    workspace: Value | None


def _planned(flow: Flow, options: _Options, result: Use | None = None) -> _Level:
    """Plan the calls, and the blocks inside them."""
    if options.policy.native:
        flow = Flow(without_transposes(flow), flow.results)
    inside: dict[Call, _Inside] = {}
    calls: list[Call] = []
    for call in flow.calls:
        if call.blocks:
            blocks, outer = outline_blocks(call)
            levels = tuple([_planned(block.flow, options, block.result) for block in blocks])
            nbytes = max(level.plan.nbytes for level in levels) if call.callee is None else 0
            workspace = Value(nbytes) if nbytes else None
            if workspace is not None:
                call = replace(call, outs=[*call.outs, Use(workspace, TensorType(u8, (nbytes,)))])
            inside[call] = _Inside(levels, outer, workspace)
        calls.append(call)
    flow = Flow(calls, flow.results)
    live_out = flow.live_out()
    schedules = _schedules(flow, live_out, options)
    schedule, smallest = _smallest(schedules, options.effort)
    others = [each for each in schedules if each is not schedule]
    level = _Level(schedule, others, smallest, {}, {}, result, inside, live_out)
    return _placed_level(level, schedule, smallest)


def _placed_level(level: _Level, schedule: Schedule, plan: Plan) -> _Level:
    """Return a level with that schedule and plan."""
    offsets = dict(zip(schedule.roots, plan.offsets, strict=True))
    places = {each: offsets[root] for each, root in schedule.root.items()}
    types: dict[Placed, TensorType] = {
        use.value: use.type for run in schedule.runs for use in run.outs
    }
    return level._replace(schedule=schedule, plan=plan, places=places, types=types)


_BYTE: Final = TensorType(u8)


class _ProgramWriter:
    """Code generator, level by level.

    `code`: code of main or a function.
    `lines`: lines of Python by pc.
    `inner_lines`: lines of Python by function and pc, for functions.
    `takes`: the pcs of calls that read an element of a queue.
    `lifetimes`: live ranges of values in scratch memory.
    `moments`: the pc of the call at each time.
    `numbers`: provisional numbers of arguments.
    """

    def __init__(self) -> None:
        self.code: list[Instruction] = []
        self.lines: dict[int, str] = {}
        self.inner_lines: dict[tuple[str, int], str] = {}
        self.takes: list[int] = []
        self.lifetimes: list[Lifetime] = []
        self.moments: list[int] = []
        self.numbers: dict[Location, int] = {}
        self._elements: dict[int, TensorType] = {}  # types of queue elements, by stack slot
        self._loads: dict[Use, Instruction] = {}
        self._outer: dict[int, tuple[Role, int]] = {}  # locations of outer homes, by index
        self._names: dict[Procedure, str] = {}
        self._functions: list[Function] = []

    def level(self, level: _Level, base: int) -> None:
        """Generate code for the step or one block, with scratch memory from offset `base`."""
        before = len(self._elements)
        begins: list[int] = []
        for run in level.schedule.runs:
            begins.append(len(self.moments))
            first = run.unit.calls[0]
            if first.name == NAMED:
                for use in run.ins:
                    self.push(use, level, base)
                self.code.append(Instruction.of("push_int", first.attributes["number"]))
                self.code.append(Instruction.of("pop", 1 + len(run.ins)))
                continue
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
            self.code.append(Instruction.of("pop", took))
            for _ in range(took):
                self._elements.popitem()
        if level.result is not None:
            self.push(level.result, level, base)
        self.lifetimes += _lifetimes(level, base, begins)

    def planned(self, plan: Plan) -> Planned:
        """Return the program with a plan and with arguments ordered by role."""
        arguments = sorted(self.numbers, key=lambda each: (ROLES.index(each.role), each.place))
        number = {self.numbers[each]: i for i, each in enumerate(arguments)}

        loads = {old: Instruction.of("load_arg", new) for old, new in number.items()}

        def renumbered(code: Iterable[Instruction]) -> list[Instruction]:
            return [each if (old := argument_of(each)) is None else loads[old] for each in code]

        functions = [
            function._replace(code=tuple(renumbered(function.code))) for function in self._functions
        ]
        main = Function("main", 0, STAR, (*renumbered(self.code), Instruction.of("halt")))
        program = Program([main, *functions])
        scratch = [i for i, each in enumerate(arguments) if each.role == "scratch"]
        leave_out(program, scratch)  # no other program reads the scratch memory
        lifetimes = tuple(sorted(self.lifetimes, key=lambda each: each.start))
        lines = {("main", pc): line for pc, line in self.lines.items()} | self.inner_lines
        takes, moments = tuple(self.takes), tuple(self.moments)
        return Planned(program, tuple(arguments), plan, lines, lifetimes, takes, moments)

    def _location(self, use: Use, level: _Level, base: int) -> Location:
        each, home = placed(use.value), use.value.home
        if each is not None:
            return Location("scratch", base + level.places[each], use.type)
        assert home is not None  # otherwise the plan places it
        if home.role == "outer":
            return Location(*self._outer[home.index], use.type)
        return home.location(use.type)

    def push(self, use: Use, level: _Level, base: int) -> None:
        """Generate code that pushes the tensor."""
        if use in self._loads:
            self.code.append(self._loads[use])
            return
        each = self._location(use, level, base)
        if each.role != "element":
            number = self.numbers.setdefault(each, len(self.numbers))
            self.code.append(Instruction.of("load_arg", number))
            if use.value.home is None:  # a planned value has only this location
                self._loads[use] = self.code[-1]
            return
        self.code.append(Instruction.of("get", each.place))
        if each.type is not self._elements[each.place]:
            self.code += _reshaped(each.type)

    def _call(self, run: Run, level: _Level, base: int) -> None:
        """Generate the call of a host function."""
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
            self.code.append(Instruction.of("push_int", first.queue))
        for use in row:
            self.push(use, level, base)
        self.code += host_call(name, nparams, nresults, attributes)
        line = next((call.line for call in run.unit.calls if call.line), None)
        if line is not None:
            self.lines[len(self.code) - 1] = line
        if first.queue is not None:
            self.takes.append(len(self.code) - 1)

    def _control(self, run: Run, inside: _Inside, level: _Level, base: int) -> None:
        """Generate a branch or a loop."""
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
        leave = self._jump("jump_if_false")
        if call.line is not None:
            self.lines[leave] = call.line
        self.level(second if call.name == "while" else first, within)
        back = self._jump("jump")
        self._land(leave)
        if call.name == "while":
            self.code[back] = Instruction.of("jump", start)
        else:
            self.level(second, within)
            self._land(back)

    def _place_outer(self, inside: _Inside, level: _Level, base: int) -> None:
        """Record the locations of values that are outer to the blocks of a call."""
        for index, value in inside.outer.items():
            role, place, _ = self._location(Use(value, _BYTE), level, base)
            self._outer[index] = role, place

    def _call_function(self, call: Call, inside: _Inside | None, level: _Level, base: int) -> None:
        """Generate the call of a function of the program.

        A call from outside also generates all functions that it reaches.
        """
        assert call.callee is not None
        if inside is not None:
            self._place_outer(inside, level, base)
            for procedure in call.procedures:
                self._names[procedure] = self._name(procedure.name)
            for procedure, body in zip(call.procedures, inside.levels, strict=True):
                self._functions.append(self._function(procedure, body))
        self._emit_call(self._names[call.callee], call.passed, call.line, level, base)

    def _emit_call(
        self, name: str, operands: Iterable[Use], line: str | None, level: _Level, base: int
    ) -> None:
        """Generate the call of a function with these operands."""
        for use in operands:
            self.push(use, level, base)
        self.code.append(Instruction.of("call", name))
        if line is not None:
            self.lines[len(self.code) - 1] = line

    def _call_user(self, call: Call, level: _Level, base: int) -> None:
        """Generate the call of a user's function, as a program function that copies results."""
        name = self._name(call.name)
        self._names[Procedure(name, Block())] = name
        nouts, nins = len(call.outs), len(call.ins)
        code = [Instruction.of("get", i - nins) for i in range(nins)]
        code += host_call(call.name, nins, nouts, call.attributes)
        at_calls = [len(code) - 1]
        for i in range(nouts):
            code += [Instruction.of("get", at) for at in (i - nins - nouts, i)]
            code += host_call(f"copy{OUT}", 2, 0, NO_ATTRIBUTES)
            at_calls.append(len(code) - 1)
        code.append(Instruction.of("return", 0))
        if call.line is not None:
            self.inner_lines.update(((name, pc), call.line) for pc in at_calls)
        self._functions.append(Function(name, nouts + nins, 0, tuple(code)))
        self._emit_call(name, (*call.outs, *call.ins), call.line, level, base)

    def _name(self, proposal: str) -> str:
        """Return an unused name for a function, based on the proposal."""
        plain = re.sub(r"\W+", "_", proposal).strip("_") or "function"
        in_use = {"main", *self._names.values()}
        names = (f"{plain}_{n}" if n else plain for n in itertools.count())
        return next(name for name in names if name not in in_use)

    def _function(self, procedure: Procedure, body: _Level) -> Function:
        """Return the function with the generated code."""
        inner = _FrameWriter(self, procedure)
        inner.level(body, 0)
        name, code = self._names[procedure], inner.whole()
        shift = len(code) - 1 - len(inner.code)
        self.inner_lines.update(((name, pc + shift), line) for pc, line in inner.lines.items())
        self.inner_lines.update(inner.inner_lines)
        return Function(name, len(procedure.params), 0, tuple(code))

    def _jump(self, opcode: str) -> int:
        """Generate a jump and return the pc; `_land` sets the target later."""
        self.code.append(Instruction.of(opcode, 0))
        return len(self.code) - 1

    def _land(self, jump: int) -> None:
        """Set the target of a jump to the current pc."""
        self.code[jump] = self.code[jump]._replace(immediates=(len(self.code),))


class _FrameWriter(_ProgramWriter):
    """Code generator of a function.

    Values of scratch memory are tensors of the frame: all values with the same type and offset in
    the plan share one tensor in one slot.
    """

    def __init__(self, around: _ProgramWriter, procedure: Procedure) -> None:
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

        self._framed: dict[int, tuple[int, TensorType]] = {}  # values from outside of the blocks

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
        self.code.append(Instruction.of("get", slot))
        if use.type is not type:
            self.code += _reshaped(use.type)

    def _place_outer(self, inside: _Inside, level: _Level, base: int) -> None:
        for index, value in inside.outer.items():
            each = placed(value)
            assert each is not None  # other values already have a location
            self._framed[index] = self._own(each, level, base)

    def _slot(self, place: tuple[int, TensorType]) -> tuple[int, TensorType]:
        return self._slots.setdefault(place, len(self._slots)), place[1]

    def _own(self, each: Placed, level: _Level, base: int) -> tuple[int, TensorType]:
        """Return the location and the type of a level's value or home."""
        type = each.type if isinstance(each, Home) else level.types[each]
        return base + level.places[each], type

    def whole(self) -> list[Instruction]:
        """Return the code, preceded by the frame's tensors and followed by a return."""
        frame: list[Instruction] = []
        for _, type in self._slots:
            frame += host_call("zeros", 0, 1, {"shape": type.shape, "dtype": type.dtype.name})
        return [*frame, *_moved(self.code, len(frame)), Instruction.of("return", 0)]


def _lifetimes(level: _Level, base: int, begins: Sequence[int]) -> list[Lifetime]:
    """Return the live range of each value and scratch home of a level, with the call that sets it.

    The level's runs begin at the times `begins`; the last time is the end of the level.
    """
    schedule = level.schedule
    producers: dict[Value, Call] = {}
    first: dict[Placed, Use] = {}
    for run in schedule.runs:
        producers.update((use.value, call) for call in run.unit.calls for use in call.outs)
        for use in (*run.outs, *run.ins):
            each = placed(use.value)
            if each is not None:
                first.setdefault(each, use)
    for inside in level.inside.values():  # the levels of the call show these values
        if inside.workspace is not None:
            del first[inside.workspace]
    return [
        Lifetime(
            use.type,
            base + level.places[each],
            rounded(schedule.size[each]),
            begins[schedule.start[each]],
            begins[schedule.end[each]],
            producers[use.value].name.removesuffix(OUT),
            producers[use.value].line,
        )
        for each, use in first.items()
    ]


def _schedules(flow: Flow, live_out: set[Value], options: _Options) -> list[Schedule]:
    """Return schedules of the step, the fastest first.

    The last is the step as it was recorded: each call once, unfused.
    """
    fuse, recompute, policy, *_ = options
    calls, units = flow.calls, UnitTable()
    if not options.ordered:
        return [Schedule([units[call] for call in calls], live_out)]

    def one_by_one(calls: Sequence[Call]) -> Schedule:
        return _ordered([units[call] for call in calls], live_out)

    def in_order(chains: Sequence[Unit], most: int, policy: FusionPolicy = policy) -> Schedule:
        schedule = _ordered(chains, live_out, enough=most)
        if not policy.native:
            return schedule
        # A unit that was moved to an operand, such as the update of a parameter, joins the
        # producer.
        again = joined([run.unit for run in schedule.runs], schedule.most_alive, policy, units)
        return Schedule(again, live_out) if len(again) < len(chains) else schedule

    def in_chains(plain: Schedule, calls: Sequence[Call]) -> list[Schedule]:
        most, schedules = plain.most_alive, list[Schedule]()
        sloped = with_slopes(calls) if policy.native else calls
        # Collectives have a fixed order. With them slices stay; otherwise products would move.
        has_order = any(call.fixed for call in calls)
        windowed = with_windows(sloped, live_out) if policy.native and not has_order else sloped
        if windowed is not sloped:
            chains = fused(windowed, most, policy.of_formulas, units)
            schedules.append(in_order(chains, most, policy.of_formulas))
        for row in [calls] if sloped == calls else [sloped, calls]:
            chains = fused(row, most, policy, units)
            if policy.is_cut(chains):
                longer = fused(row, most, policy.of_formulas, units)
                schedules.append(in_order(longer, most, policy.of_formulas))
            schedules.append(in_order(chains, most))
            if schedules[-1].most_alive <= most:
                return schedules
        # Merging the units of the unfused order may need less memory.
        calls = [call for run in plain.runs for call in run.unit.calls]
        return [*schedules, Schedule(fused(calls, most, policy, units), live_out)]

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


def _ordered(units: Sequence[Unit], live_out: set[Value], enough: int = 0) -> Schedule:
    """Return the units in the better of two orders.

    They run earlier if that frees memory; if this needs more than `enough` bytes, the original
    order is compared.
    """
    earlier = earlier_where_it_frees(units, live_out)
    best = Schedule(earlier, live_out)
    if best.most_alive > enough and not all(map(is_, earlier, units)):
        best = min(best, Schedule(units, live_out, best), key=lambda each: each.most_alive)
    return best


def _smallest(schedules: Sequence[Schedule], effort: int) -> tuple[Schedule, Plan]:
    """Return the first schedule with the smallest plan, and that plan.

    The plan is not improved if the other schedules need as much memory.
    """
    best: tuple[float, int, Plan] | None = None
    needs = [each.most_alive for each in schedules]
    order = sorted(range(len(needs)), key=needs.__getitem__)
    for i, enough in zip(order, [*sorted(needs)[1:], 2 * max(needs)], strict=True):
        if best is None or (needs[i], i) < best[:2]:
            planned = plan(schedules[i].blocks, enough=enough, effort=effort)
            best = min(best or (math.inf, i, planned), (planned.nbytes, i, planned))
    assert best is not None  # there is at least one schedule
    _, i, smallest = best
    return schedules[i], smallest._replace(unfused=schedules[-1].most_alive)
