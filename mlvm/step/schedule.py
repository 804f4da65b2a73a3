"""Schedules: units in the order in which they run, and live ranges.

A moment is the run of one unit. A plan places values without a home, and scratch homes with all
values that lie in them (`Placed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

from mlvm.arena.planner import Block, lower_bound
from mlvm.core.machine.fused import HEADS
from mlvm.core.types import TensorType
from mlvm.step.flow import Call, Home, Unit, Use, Value

Placed: TypeAlias = Value | Home


def placed(value: Value) -> Placed | None:
    """Return what the plan places for the value; None if its home is not the plan's."""
    if value.home is None:
        return value
    return value.home if value.home.role == "scratch" else None


class Run(NamedTuple):
    """A unit, and the uses that its function writes and reads."""

    unit: Unit
    outs: Sequence[Use]
    ins: Sequence[Use]


class Schedule:
    """UnitTable in an order, with live ranges.

    runs: the units with their operands.
    start, end: live ranges, as moments `start` .. `end - 1`.
    size: bytes.
    root: the first value in a place. A value may take the place of an operand whose live range ends
        with the unit that computes it.
    roots: these, each once.
    blocks: the blocks that a plan has to place, one for each root.
    most_alive: the largest total of bytes alive at once.
    """

    def __init__(
        self, units: Sequence[Unit], live_out: Iterable[Value], same: Schedule | None = None
    ) -> None:
        """Schedule units. `same` is a schedule of the same units in another order."""
        if same is None:
            stored = set(live_out).union(*[unit.reads for unit in units])
            self._run_of = {unit: Run(unit, *unit.operands(stored)) for unit in units}
        else:
            self._run_of = same._run_of
        self.runs = [self._run_of[unit] for unit in units]
        self.start, self.end = start, end = dict[Placed, int](), dict[Placed, int]()
        self.root: dict[Placed, Placed] = {}
        self.size = size = dict[Placed, int]()
        for moment, (_, outs, ins) in enumerate(self.runs):
            for uses in (outs, ins):
                for value, _ in uses:
                    home = value.home
                    each: Placed = value
                    if home is not None:
                        if home.role != "scratch":
                            continue
                        each = home
                    if each not in start:
                        start[each] = moment
                        size[each] = value.nbytes
                    elif home is not None and value.nbytes > size[each]:
                        size[each] = value.nbytes
                    end[each] = moment + 1
        host: dict[Placed, Value] = {}
        for moment, run in enumerate(self.runs, 1):
            first = run.unit.calls[0]
            if len(run.unit.calls) > 1 or (first.op is not None and first.op.in_place):
                host.update(in_place(run, partial(_ends, end, moment)).items())
        until: dict[Placed, int] = {}
        for each in start:  # a host comes before the value that takes its place
            root = self.root[each] = self.root[host[each]] if each in host else each
            until[root] = max(until.get(root, 0), end[each])
        for successor, operand in host.items():
            end[operand] = start[successor]
        self.roots = list(until)
        self.blocks = [Block(size[root], start[root], last) for root, last in until.items()]

    def reordered(self, units: Sequence[Unit]) -> Schedule:
        """Return a schedule of the same units in another order."""
        return Schedule(units, (), self)

    @cached_property
    def most_alive(self) -> int:
        """The largest total of bytes alive at once."""
        return lower_bound(self.blocks)


def _ends(end: Mapping[Placed, int], moment: int, value: Value) -> bool:
    return end[value] == moment


def _in_place_alone(call: Call, ends: Callable[[Value], bool]) -> dict[Value, Value]:
    """Return `in_place` of a unit of one call: an op may overwrite some of its operands."""
    if call.op is None or not call.op.in_place:
        return {}
    [(out, type)], ins = call.outs, call.ins
    for value, used_as in ins[: call.op.in_place] if out.home is None else ():
        if (
            value.home is None
            and value.nbytes == out.nbytes
            and used_as.shape == type.shape
            and ends(value)
            and all(x is not value for x, _ in ins[call.op.in_place :])
            and all(as_type == used_as for x, as_type in ins if x is value)
        ):
            return {out: value}
    return {}


def in_place(run: Run, ends: Callable[[Value], bool]) -> dict[Value, Value]:
    """Return the values that take the place of an operand, as value -> operand. The operand `ends`
    with the unit, and no call of the unit reads it after the value is written. The call that
    writes the value may read the operand if its op may overwrite it."""
    first, *others = run.unit.calls
    if not others:
        return _in_place_alone(first, ends)
    outs = [use for use in run.outs if use.value.home is None]
    sizes = {use.value.nbytes for use in outs}
    free = [
        use
        for use in run.ins
        if use.value.home is None and use.value.nbytes in sizes and ends(use.value)
    ]
    if not free:
        return {}
    if first.op is not None and first.op.name in HEADS:
        # Later rows of a product need all of its operands.
        whole = {use.value for use in first.ins}
        free = [use for use in free if use.value not in whole]
    writer: dict[Value, int] = {}
    reader: dict[Value, int] = {}
    types: dict[Value, set[TensorType]] = {}
    for i, call in enumerate(run.unit.calls):
        for use in call.ins:
            reader[use.value] = i
            types.setdefault(use.value, set()).add(use.type)
        writer.update((use.value, i) for use in call.outs)
    hosts: dict[Value, Value] = {}
    for out in sorted(outs, key=lambda use: -use.value.nbytes):
        at = writer[out.value]
        op = run.unit.calls[at].op
        latest = at if op is not None and op.in_place else at - 1
        for i, use in enumerate(free):
            if (
                use.value.nbytes == out.value.nbytes
                and use.type.shape == out.type.shape
                and reader[use.value] <= latest
                and len(types[use.value]) == 1
            ):
                hosts[out.value] = free.pop(i).value
                break
    return hosts
