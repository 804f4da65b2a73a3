"""A recorded step as data flow: calls, and the values they make of each other.

Recorded calls write over memory, again and again. Here each write makes a new `Value`, so that
what a call needs is told by the values it reads (static single assignment: Cytron et al., ACM
TOPLAS 13, 1991). A value that has a `Home` has its place in memory: it is an argument, a
parameter, a result. The others lie where the plan puts them, for as long as somebody reads them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlvm.core.op import Attributes, Op
from mlvm.core.types import TensorType

Role = Literal["input", "output", "state", "scratch", "element", "outer"]


class Location(NamedTuple):
    """A tensor of a planned step, seen as `type`: the `input`, `output` or `state` of number
    `place`, the `element` of a queue in stack slot `place`, or the `scratch` at byte `place`."""

    role: Role
    place: int
    type: TensorType


@dataclass(eq=False, slots=True, weakref_slot=True)
class Home:
    """Memory that several values lie in: an `input` or `output` of the step, its `state`, `scratch`
    that a function changes in place, or an `element` of a queue. Which tensor of its role it is,
    the caller knows by `index`. It is of `type`, but may be seen as others. Inside a block, what
    lies outside of it is `outer` (see `mlvm.step.blocks`)."""

    role: Role
    index: int
    type: TensorType

    def seen_as(self, type: TensorType) -> Location:
        """Where it is, once its index is final."""
        return Location(self.role, self.index, type)


@dataclass(eq=False, slots=True)
class Value:
    """What one call has written. `home`: where it has to lie, None if that is open."""

    nbytes: int
    home: Home | None = None


class Use(NamedTuple):
    """A value, and the type it is seen as."""

    value: Value
    type: TensorType


class Turns(NamedTuple):
    """How a `while` counts its turns: `length`, each with its number `i`, backwards if `reverse`. A
    turn has a row of each of `xs` as `rows`, and what it has `made` is a row of the stack in that
    home. The stacks have `total` rows."""

    i: Use
    length: Use | int
    total: int | None
    reverse: bool
    xs: Sequence[Use]
    rows: Sequence[Value]
    made: Sequence[tuple[Home, Use]]


@dataclass(eq=False, slots=True)
class Call:
    """A call of a host function that writes `outs` and reads `ins`.

    `op` is None for a function that may do anything with its operands: it keeps its place among
    the calls, `outs` has a new value for each operand, in their order, and `ins` those before. If
    it is `orderly`, it only writes `outs` and only reads `ins`, as ops do. If it `guards`, what
    comes later and is seen from outside is not updated before it has run.
    `line` is the line of Python that made the call. An `again` is one that computes anew what was
    there before, and is to run no earlier than where it stands. A call with a `queue`, whose
    handle that is, takes the next element from it: its `outs`. One with `blocks` is control flow:
    `cond` runs one of two, by what it reads first; `while` runs the second for as long as the first
    has a true result. It reads what its blocks read from outside, and makes what they leave there.
    One that counts its `turns` can be read as a scan.
    One that `pushes` gets its `ins` alone and leaves results on the stack, as users' functions do.
    One that is `sized` has types or attributes that depend on lengths of the launch.
    One with a `callee` is a `call` of a function, which gets the operands `passed`; a call from
    outside has `procedures`, all that it reaches, and their blocks.
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
    guards: bool = False
    callee: Procedure | None = None
    passed: Sequence[Use] = ()
    procedures: Sequence[Procedure] = ()
    turns: Turns | None = None
    pushes: bool = False
    sized: bool = False

    @property
    def fixed(self) -> bool:
        """Whether it has to keep its place among others of its kind."""
        if self.blocks:
            return any(call.fixed for block in self.blocks for call in block.calls)
        return self.op is None


@dataclass(eq=False)
class Block:
    """Calls inside a call. They read values from outside too, and what they leave lies in homes
    from outside; `homes` are those of the block itself. `result` is what a test has found."""

    calls: list[Call] = field(default_factory=list)
    homes: set[Home] = field(default_factory=set)
    result: Use | None = None

    @property
    def flow(self) -> Flow:
        """The calls, and the value that they find."""
        return Flow(self.calls, [] if self.result is None else [self.result.value])


@dataclass(eq=False)
class Procedure:
    """A function of the program. Its `params` are `outer` homes of its block: its results, for
    which the caller has memory, and then its arguments. It may have a `rule` for its derivatives,
    in a trace of the eager language."""

    name: str
    block: Block
    params: list[Home] = field(default_factory=list)
    rule: object = None


def _homes_of(values: set[Value]) -> set[Home]:
    return {home for value in values if (home := value.home) is not None}


def _guards(call: Call) -> bool:
    return call.guards or (
        bool(call.blocks) and any(_guards(each) for block in call.blocks for each in block.calls)
    )


class Unit:
    """Calls that run as one: one alone, or a chain that is fused.

    makes, reads: the values that it writes, and those from before that it reads.
    writes_to, reads_from: the homes of these.
    fixed: whether it has to keep its place among others of its kind.
    guards: whether it may raise, with nothing updated that is updated later.
    updates: whether it writes to what is seen from outside.
    movable: whether it may run earlier though that frees nothing.
    """

    __slots__ = (
        "calls",
        "fixed",
        "guards",
        "makes",
        "movable",
        "reads",
        "reads_from",
        "updates",
        "writes_to",
    )

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.makes = {value for call in calls for value, _ in call.outs}
        self.reads = {value for call in calls for value, _ in call.ins} - self.makes
        self.writes_to = _homes_of(self.makes)
        self.reads_from = _homes_of(self.reads)
        self.fixed = any(call.fixed for call in calls)
        self.guards = any(_guards(call) for call in calls)
        self.updates = any(home.role not in ("scratch", "element") for home in self.writes_to)
        self.movable = not any(call.op is None or call.again for call in calls)

    def joined(self, later: Unit) -> Unit:
        """Return one unit of these calls, and then the other's."""
        unit = object.__new__(Unit)
        unit.calls = [*self.calls, *later.calls]
        unit.makes = self.makes | later.makes
        unit.reads = (self.reads | later.reads) - unit.makes
        unit.writes_to = self.writes_to | later.writes_to
        unit.reads_from = _homes_of(unit.reads)
        unit.fixed = self.fixed or later.fixed
        unit.guards = self.guards or later.guards
        unit.updates = self.updates or later.updates
        unit.movable = self.movable and later.movable
        return unit

    def must_precede(self, later: Unit) -> bool:
        """Whether a unit that comes later needs this one to have run, or to have read."""
        return (
            not self.makes.isdisjoint(later.reads)
            or not later.writes_to.isdisjoint(self.reads_from)
            or not later.writes_to.isdisjoint(self.writes_to)
            or (self.fixed and later.fixed)
            or (later.updates and self.guards)
        )

    def operands(self, kept: Container[object]) -> tuple[list[Use], list[Use]]:
        """What its function writes and what it reads, in the order of its parameters. Of what a
        chain makes, it writes the values in `kept`, and of those in one home the last."""
        if len(self.calls) == 1:
            [call] = self.calls
            if call.op is None and not call.blocks and not call.orderly:
                return [], call.outs
            return call.outs, call.ins
        made = [use for call in self.calls for use in call.outs]
        last = {use.value.home: use.value for use in made if use.value.home is not None}
        outs = [
            use
            for use in made
            if use.value in kept and (use.value.home is None or last[use.value.home] is use.value)
        ]
        read = [use for call in self.calls for use in call.ins if use.value not in self.makes]
        return outs, list(dict.fromkeys(read))


class Units(dict[Call, Unit]):
    """A unit for each call alone, made once for all schedules of the same calls."""

    def __missing__(self, call: Call) -> Unit:
        unit = self[call] = Unit([call])
        return unit


@dataclass
class Flow:
    """The calls of a step, in order, and the values that it returns."""

    calls: list[Call]
    results: list[Value]

    def wanted(self) -> set[Value]:
        """What has to be there at the end: the results, and the last value of each home."""
        last = {
            use.value.home: use.value
            for call in self.calls
            for use in call.outs
            if use.value.home is not None and use.value.home.role not in ("scratch", "element")
        }
        return {*self.results, *last.values()}
