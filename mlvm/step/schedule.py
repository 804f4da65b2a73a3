"""Schedules: units in the order in which they run, and live ranges.

Each unit advances the time by one. A plan allocates values without a home, and scratch homes with
all values in them (`Placed`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import TypeAlias

from mlvm.arena.planner import Block, lower_bound
from mlvm.core.locks import cached_property
from mlvm.core.machine.fused import WRITES_WINDOW, is_apart
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.step.flow import Call, Home, Unit, Use, Value

Placed: TypeAlias = Value | Home


def placed(value: Value) -> Placed | None:
    """Return what the plan allocates for the value; None if the value's home is not planned."""
    if value.home is None:
        return value
    return value.home if value.home.role == "scratch" else None


class Run:
    """Unit with the uses that the function writes and reads.

    places: the bytes of each planned value and home among these, by first use.
    hosts: for each value that may reuse an operand's memory, the operands.
    """

    __slots__ = ("__weakref__", "hosts", "ins", "outs", "places", "unit")

    def __init__(self, unit: Unit, outs: Sequence[Use], ins: Sequence[Use]) -> None:
        self.unit, self.outs, self.ins = unit, outs, ins
        self.places = places = dict[Placed, int]()
        for uses in (outs, ins):
            for value, _ in uses:
                home = value.home
                if home is None:
                    places[value] = value.nbytes
                elif home.role == "scratch":
                    places[home] = max(value.nbytes, places.get(home, 0))
        self.hosts = _hosts(unit, outs, ins)


def _run_of(unit: Unit, stored: Container[object]) -> Run:
    """Return the run of a unit; the run of a single call does not depend on `stored`."""
    run: Run | None = unit.run and unit.run()
    if run is None or len(unit.calls) > 1:
        run = Run(unit, *unit.operands(stored))
        unit.run = weakref.ref(run)  # not a cycle: a rejected schedule is freed immediately
    return run


class Schedule:
    """Units in an order, with live ranges.

    `runs`: the units with the operands.
    `start`, `end`: live ranges, as times `start` .. `end - 1`.
    `size`: bytes.
    `root`: the first value with the same memory. A value may reuse the memory of an operand that is
    not read after the unit that computes the value.
    `roots`: these, each once.
    `blocks`: the blocks that a plan must place, one for each root.
    `most_alive`: the maximum of live bytes.
    """

    def __init__(
        self, units: Sequence[Unit], live_out: Iterable[Value], same: Schedule | None = None
    ) -> None:
        """Schedule units. `same` is a schedule of the same units in a different order."""
        if same is None:
            stored = set(live_out).union(*[unit.reads for unit in units])
            self._run_of = {unit: _run_of(unit, stored) for unit in units}
        else:
            self._run_of = same._run_of
        self.runs = [self._run_of[unit] for unit in units]
        self.start, self.end = start, end = dict[Placed, int](), dict[Placed, int]()
        self.root: dict[Placed, Placed] = {}
        self.size = size = dict[Placed, int]()
        for moment, run in enumerate(self.runs):
            for each, nbytes in run.places.items():
                if each not in start:
                    start[each] = moment
                    size[each] = nbytes
                elif nbytes > size[each]:
                    size[each] = nbytes
                end[each] = moment + 1
        host: dict[Placed, Value] = {}
        for moment, run in enumerate(self.runs, 1):
            if run.hosts:
                ended = {each for each in run.places if end[each] == moment}
                host.update(in_place(run, ended).items())
        until: dict[Placed, int] = {}
        for each in start:  # a host precedes the value that reuses its memory
            root = self.root[each] = self.root[host[each]] if each in host else each
            until[root] = max(until.get(root, 0), end[each])
        for successor, operand in host.items():
            end[operand] = start[successor]
        self.roots = list(until)
        self.blocks = [Block(size[root], start[root], last) for root, last in until.items()]

    @cached_property
    def most_alive(self) -> int:
        """Maximum of live bytes."""
        return lower_bound(self.blocks)


def in_place(run: Run, ended: Container[Placed]) -> dict[Value, Value]:
    """Return the values that reuse the memory of an operand, as value -> operand.

    The operand's live range has `ended` with the unit, and no call of the unit reads it after the
    value is written. The call that writes the value may read the operand if the op may overwrite
    it.
    """
    hosts: dict[Value, Value] = {}
    for out, operands in run.hosts:
        for value in operands:
            if value in ended and value not in hosts.values():
                hosts[out] = value
                break
    return hosts


def _hosts(unit: Unit, outs: Sequence[Use], ins: Sequence[Use]) -> list[tuple[Value, list[Value]]]:
    """Return the hosts of a run, for the largest results first."""
    calls = unit.calls
    if len(calls) == 1 and (calls[0].op is None or not calls[0].op.in_place):
        return []
    own = [use for use in outs if use.value.home is None]
    sizes = {use.value.nbytes for use in own}
    free = [use for use in ins if use.value.home is None and use.value.nbytes in sizes]
    if not free:
        return []
    needed: dict[Value, float] = {}  # last call before which the value must be intact
    types: dict[Value, set[TensorType]] = {}
    writer: dict[Value, int] = {}
    slices = {call.outs[0].value: call for call in calls if call.window}
    windows: dict[
        Value, list[tuple[Attributes, int]]
    ] = {}  # candidates by value, each with the entry in `needed`
    for i, call in enumerate(calls):
        assert call.op is not None
        for j, (value, type) in enumerate(call.ins):
            if value in slices:
                moment = i + (j >= call.op.in_place)
                read = slices[value]
                windows.setdefault(read.ins[0].value, []).append((read.attributes, moment))
            elif call.window:
                types.setdefault(value, set()).add(type)
                needed.setdefault(value, 0)
                continue
            needed[value] = max(needed.get(value, 0), i + (j >= call.op.in_place))
            types.setdefault(value, set()).add(type)
        writer[call.outs[0].value] = i
        if call.op.heads:  # later rows of a matrix product read all operands
            needed.update((value, math.inf) for value, _ in call.ins)
    hosts = []
    for out in sorted(own, key=lambda use: -use.value.nbytes):
        operands = [
            use.value
            for use in free
            if use.value.nbytes == out.value.nbytes
            and use.type.shape == out.type.shape
            and needed[use.value] <= writer[out.value]
            and len(types[use.value]) == 1
            and _is_free(use.value, windows.get(use.value, ()), calls, writer[out.value])
        ]
        if operands:
            hosts.append((out.value, operands))
    return hosts


def _is_free(
    value: Value, windows: Sequence[tuple[Attributes, int]], calls: Sequence[Call], at: int
) -> bool:
    """Return whether call `at` of a chain may overwrite a value of which windows are read.

    It must write a window of the value. Each window that is read must be disjoint from it, or equal
    to it if no later call reads it.
    """
    if not windows:
        return True
    writer = calls[at]
    if writer.op is None or writer.op.name != WRITES_WINDOW or writer.ins[0].value is not value:
        return False
    for attributes, moment in windows:
        is_disjoint = is_apart(attributes, writer.attributes)
        if is_disjoint is False or (is_disjoint is None and moment > at):
            return False
    return True
