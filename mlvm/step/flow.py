"""A recorded step as data flow: calls, and the values that they read and write.

Recorded calls write to the same memory repeatedly. Here each write has a new `Value`, so that a
call depends only on the values that it reads (static single assignment: Cytron et al., ACM TOPLAS
13, 1991). A value with a `Home` has a fixed location: an argument, a parameter, a result. The plan
allocates the other values for the live range only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from mlvm.core.op import Attributes, Op
from mlvm.core.types import Shape, TensorType

VISIBLE: Final = frozenset({"input", "state", "outer"})
"""Roles of memory that the caller can observe, also after an error."""

Role = Literal["input", "output", "state", "scratch", "element", "outer"]


class Location(NamedTuple):
    """Location of a tensor of a planned step.

    role: `input`, `output` or `state`; `element` of a queue; `scratch` memory.
    place: number in that role; for an element the stack slot; for scratch memory the offset in
        bytes.
    type: the type of the use.
    """

    role: Role
    place: int
    type: TensorType


@dataclass(eq=False, slots=True, weakref_slot=True)
class Home:
    """Memory of successive values.

    `role`: an `input`, `output` or `state` of the step, an `element` of a queue, `scratch` that a
        function updates in place, or `outer`, memory from outside of a block.
    `index`: the number of the tensor among those with the same role.
    `type`: type of the tensor; uses may have other types of the same size.
    `shared`: whether procedures update it, although their calls do not name it.
    """

    role: Role
    index: int
    type: TensorType
    shared: bool = False

    def location(self, type: TensorType) -> Location:
        """Return the location with that type, once the index is final."""
        return Location(self.role, self.index, type)


@dataclass(eq=False, slots=True)
class Value:
    """Value that one call writes. `home` is its location, or None if the plan allocates it."""

    nbytes: int
    home: Home | None = None


class Use(NamedTuple):
    """Use of a value with a type."""

    value: Value
    type: TensorType


def is_one_element(shape: Shape) -> bool:
    """Return whether tensors of the shape have one element for all lengths."""
    return all(type(n) is int and n == 1 for n in shape)


def readers_of(calls: Iterable[Call]) -> dict[Value, list[Call]]:
    """Return the calls that read each value, in order."""
    readers: dict[Value, list[Call]] = {}
    for call in calls:
        for value in {use.value for use in call.ins}:
            readers.setdefault(value, []).append(call)
    return readers


class LoopInfo(NamedTuple):
    """Description of a `while` that is a scan.

    `i`: the number of the iteration.
    `length`: the trip count.
    `total`: the rows of the stacked results; None if unknown.
    `reverse`: whether the numbers decrease.
    `xs`: the tensors of which an iteration reads one row.
    `rows`: these rows.
    `ys`: the stacked results, each with the row that an iteration adds.
    """

    i: Use
    length: Use | int
    total: int | None
    reverse: bool
    xs: Sequence[Use]
    rows: Sequence[Value]
    ys: Sequence[tuple[Home, Use]]


@dataclass(eq=False, slots=True)
class Call:
    """Call of a host function, or control flow.

    `name`: name of the function; `cond`, `while` and `call` for control flow.
    `op`: None for a function that may read and write all operands. Such calls are not reordered;
        `outs` has a new value for each operand, in order, and `ins` the previous values.
    `attributes`: attributes of the function.
    `outs`, `ins`: the values that the call writes and reads.
    `line`: the line of Python that made the call.
    `again`: whether it recomputes an earlier value; such a call does not move forward.
    `queue`: the handle of the queue from which it reads an element into `outs`.
    `blocks`: blocks of control flow. `cond` runs one of two, chosen by the first operand; `while`
        runs the second while the result of the first is true.
    `orderly`: whether it only writes `outs` and only reads `ins`, as ops do, though `op` is None.
    `may_raise`: whether later updates that are visible outside must wait for it.
    `callee`: the function of the program that a `call` runs.
    `passed`: the operands of that call, in the order of the parameters.
    `procedures`: for a call from outside, all functions that it reaches.
    `loop`: description of a `while` that is a scan.
    `pushes`: whether it gets only `ins` and pushes the results, as users' functions do.
    `sized`: whether types or attributes depend on sizes of the launch.
    `window`: whether it is a slice with a single reader that can read it in place
    (`mlvm.step.fused_windows`).
    """

    name: str
    op: Op | None
    attributes: Attributes
    outs: list[Use]
    ins: list[Use]
    line: str | None = None
    again: bool = False
    queue: int | None = None
    blocks: tuple[Block, ...] = ()
    orderly: bool = False
    may_raise: bool = False
    callee: Procedure | None = None
    passed: Sequence[Use] = ()
    procedures: Sequence[Procedure] = ()
    loop: LoopInfo | None = None
    pushes: bool = False
    sized: bool = False
    window: bool = False

    @property
    def fixed(self) -> bool:
        """True if the call must not be reordered relative to calls of the same kind."""
        if self.blocks:
            return any(call.fixed for block in self.blocks for call in block.calls)
        return self.op is None


@dataclass(eq=False)
class Block:
    """Calls inside a call. They may read values and write to homes from outside.

    homes: the homes of the block itself.
    result: the condition that a test computes.
    """

    calls: list[Call] = field(default_factory=list)
    homes: set[Home] = field(default_factory=set)
    result: Use | None = None

    @property
    def flow(self) -> Flow:
        """Return the calls and the condition that they compute."""
        return Flow(self.calls, [] if self.result is None else [self.result.value])


@dataclass(eq=False)
class Procedure:
    """Function of the program.

    params: `outer` homes of the block: the results, which the caller allocates, and then the
        arguments.
    rule: derivative rule, in a trace of the eager language.
    """

    name: str
    block: Block
    params: list[Home] = field(default_factory=list)
    rule: object = None


_NO_HOMES: Final = frozenset[Home]()
"""Shared by most units, because each empty set needs 216 bytes."""


def _homes_of(values: set[Value]) -> Set[Home]:
    return {home for value in values if (home := value.home) is not None} or _NO_HOMES


def _may_raise(call: Call) -> bool:
    return call.may_raise or (
        bool(call.blocks) and any(_may_raise(each) for block in call.blocks for each in block.calls)
    )


class Unit:
    """Scheduling unit: one call, or a fused chain of calls.

    `makes`, `reads`: the values that the unit writes, and the earlier values that it reads.
    `writes_to`, `reads_from`: the homes of these.
    `fixed`: whether it must not be reordered relative to units of the same kind.
    `may_raise`: whether later updates must wait for it.
    `updates`: whether the writes are visible outside.
    `movable`: whether it may run earlier even if that frees no memory.
    `run`: a weak reference to the latest `mlvm.step.schedule.Run`, if any.
    `touched`: the planned values and homes that it uses, once they are known.
    """

    __slots__ = (
        "calls",
        "fixed",
        "makes",
        "may_raise",
        "movable",
        "reads",
        "reads_from",
        "run",
        "touched",
        "updates",
        "writes_to",
    )

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.run: Any = None
        self.touched: Any = None
        self.makes = {value for call in calls for value, _ in call.outs}
        self.reads = {value for call in calls for value, _ in call.ins} - self.makes
        self.writes_to = _homes_of(self.makes)
        self.reads_from = _homes_of(self.reads)
        self.fixed = any(call.fixed for call in calls) or any(h.shared for h in self.writes_to)
        self.may_raise = any(_may_raise(call) for call in calls)
        self.updates = any(home.role in VISIBLE for home in self.writes_to)
        self.movable = not any(call.op is None or call.again for call in calls)

    def joined(self, later: Unit) -> Unit:
        """Return one unit of these calls, followed by the later unit's calls."""
        unit = object.__new__(Unit)
        unit.calls = [*self.calls, *later.calls]
        unit.run = unit.touched = None
        unit.makes = self.makes | later.makes
        unit.reads = (self.reads | later.reads) - unit.makes
        unit.writes_to = self.writes_to | later.writes_to or _NO_HOMES
        unit.reads_from = _homes_of(unit.reads)
        unit.fixed = self.fixed or later.fixed
        unit.may_raise = self.may_raise or later.may_raise
        unit.updates = self.updates or later.updates
        unit.movable = self.movable and later.movable
        return unit

    def extend(self, unit: Unit) -> None:
        """Add what a unit reads and writes, for `must_precede`; the calls are not changed."""
        self.makes |= unit.makes
        self.reads |= unit.reads
        self.writes_to |= unit.writes_to
        self.reads_from |= unit.reads_from
        self.fixed |= unit.fixed
        self.may_raise |= unit.may_raise
        self.updates |= unit.updates

    def must_precede(self, later: Unit) -> bool:
        """Return whether a later unit depends on this one."""
        return (
            not self.makes.isdisjoint(later.reads)
            or not later.writes_to.isdisjoint(self.reads_from)
            or not later.writes_to.isdisjoint(self.writes_to)
            or (self.fixed and later.fixed)
            or (self.may_raise and (later.updates or later.may_raise))
        )

    def operands(self, stored: Container[object]) -> tuple[list[Use], list[Use]]:
        """Return the uses that the function writes and reads, in parameter order.

        A chain writes only values in `stored`, and only the last value of each home.
        """
        if len(self.calls) == 1:
            [call] = self.calls
            if call.op is None and not call.blocks and not call.orderly:
                return [], call.outs
            return call.outs, call.ins
        uses = [use for call in self.calls for use in call.outs]
        last = {use.value.home: use.value for use in uses if use.value.home is not None}
        outs = [
            use
            for use in uses
            if use.value in stored and (use.value.home is None or last[use.value.home] is use.value)
        ]
        read = [use for call in self.calls for use in call.ins if use.value not in self.makes]
        return outs, list(dict.fromkeys(read))


class UnitTable(dict[Call, Unit]):
    """Units of single calls, shared by all schedules of the same calls.

    domains: the shapes over which calls iterate, by fusion policy
    """

    def __init__(self) -> None:
        super().__init__()
        self.domains: dict[Any, Any] = {}

    def __missing__(self, call: Call) -> Unit:
        unit = self[call] = Unit([call])
        return unit


@dataclass
class Flow:
    """Calls of a step, in order, and the values that it returns."""

    calls: list[Call]
    results: list[Value]

    def live_out(self) -> set[Value]:
        """Return the values that are live at the end: results, and the last value of each home."""
        last = {
            use.value.home: use.value
            for call in self.calls
            for use in call.outs
            if use.value.home is not None and use.value.home.role not in ("scratch", "element")
        }
        return {*self.results, *last.values()}
