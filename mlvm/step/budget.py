"""Memory budgets: schedules of a step that recompute values instead of keeping them.

In: a schedule of units. Out: `Candidate`s, other schedules of the same step with estimates of their
time; the compiler chooses the fastest candidate whose plan fits. Each candidate comes from a
simulated run of the step with a target of bytes. If the next unit does not fit, the value is
evicted whose recomputation costs least per byte and time that it frees. It is recomputed before its
next use. This is dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616),
but the next use is known, as in Belady's algorithm. The targets are fixed fractions of the memory
that the step needs. They do not depend on the budget, so a larger budget admits all candidates of a
smaller one, and is never slower by the estimate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mlvm.core.lengths import Length
from mlvm.core.types import TensorType
from mlvm.step.flow import Call, Unit, Use, Value
from mlvm.step.schedule import Run, Schedule

FLOPS: Final = 4e10
"""Estimated floating-point operations per second: a matrix product on one core with AVX2."""

BANDWIDTH: Final = 8e9
"""Estimated bytes per second that an op reads and writes."""

LAUNCH: Final = 5e-7
"""Estimated seconds for a kernel call of any size."""

TARGETS: Final = 32
"""Number of targets, as fractions of the step's memory; long steps have fewer."""

_UNITS: Final = 50_000
"""Limit of the units in all simulated runs: steps of more than 1,562 units have 8 to 31 targets."""

_CONSIDERED: Final = 24
"""Number of values that are compared for an eviction: those with the most bytes times time."""

_DEEPEST: Final = 200
"""Maximum depth of recomputation: values that are recomputed for each other, for a single use."""

_SLOWEST: Final = 4.0
"""Candidates slower than this factor of the step's estimate are discarded."""


class Candidate(NamedTuple):
    """Schedule of the step, and its estimated time in seconds."""

    seconds: float
    schedule: Schedule


def seconds(unit: Unit, run: Run) -> float:
    """Estimate the time of a unit in seconds.

    It is the maximum of the time for its operations and for the bytes that it moves. Blocks count
    once.
    """
    flops = sum(map(_flops, unit.calls))
    nbytes = sum({use.value: use.value.nbytes for use in (*run.outs, *run.ins)}.values())
    return LAUNCH + max(flops / FLOPS, nbytes / BANDWIDTH)


def _flops(call: Call) -> int:
    if call.op is None:
        return sum(_flops(inner) for block in call.blocks for inner in block.calls)
    operands = [present(use.type) for use in call.ins]
    attributes = {name: present(value) for name, value in call.attributes.items()}
    return call.op.flops(operands, present(call.outs[0].type), attributes)


def present(value: Any) -> Any:
    """Return a value with current numbers in place of dynamic lengths, without a guard."""
    if isinstance(value, TensorType):
        return TensorType(value.dtype, present(value.shape))
    if isinstance(value, tuple):
        return tuple(map(present, value))
    return value.present if issubclass(type(value), Length) else value


def candidates(schedule: Schedule, live_out: set[Value]) -> list[Candidate]:
    """Return the schedule and others that need less memory, the fastest first."""
    base = _Step(schedule, live_out)
    schedules = [Candidate(base.seconds, schedule)]
    least, most = base.least(), schedule.most_alive
    before: list[Unit] | None = None
    count = max(8, min(TARGETS, _UNITS // (len(schedule.runs) or 1)))
    for i in range(1, count + 1):
        target = most - (most - least) * i // count
        rows = _Paper(base, target).rows()
        if rows is None:
            continue
        rows = _without_dead(rows, live_out)
        units = [unit for unit, _ in rows]
        if units != before:
            time = sum(cost for _, cost in rows)
            schedules.append(Candidate(time, Schedule(units, live_out)))
        before = units
    return sorted(schedules, key=lambda each: each.seconds)


def _without_dead(rows: list[tuple[Unit, float]], live_out: set[Value]) -> list[tuple[Unit, float]]:
    """Return the units except those whose values are never read because they were evicted."""
    read = set(live_out)
    live_rows: list[tuple[Unit, float]] = []
    for unit, cost in reversed(rows):
        if not repeats(unit) or not unit.makes.isdisjoint(read):
            read |= unit.reads
            live_rows.append((unit, cost))
    return live_rows[::-1]


class _Step:
    """Schedule with the data that simulated runs need.

    `reads`: the planned values that each unit reads, in the order of its operands.
    `uses`: the times at which each value is read; a value that is live out is read at the end.
    `producer`: the time at which each value is computed.
    `home_nbytes`: bytes of planned homes, by time.
    """

    def __init__(self, schedule: Schedule, live_out: set[Value]) -> None:
        self.runs = schedule.runs
        end = len(self.runs)
        self.costs = [seconds(run.unit, run) for run in self.runs]
        self.seconds = sum(self.costs)
        self.uses: dict[Value, list[int]] = {}
        self.producer: dict[Value, int] = {}
        self._written: dict[Any, list[int]] = {}
        self.home_nbytes = [0] * end
        self.reads: list[list[Value]] = []
        for moment, run in enumerate(self.runs):
            operands = dict.fromkeys(use.value for call in run.unit.calls for use in call.ins)
            reads = [value for value in operands if value in run.unit.reads]
            self.reads.append([value for value in reads if value.home is None])
            for value in reads:
                self.uses.setdefault(value, []).append(moment)
            for value in run.unit.makes:
                self.producer[value] = moment
                if value.home is not None:
                    self._written.setdefault(value.home, []).append(moment)
        for value in live_out:
            self.uses.setdefault(value, []).append(end)
        for each in schedule.start:
            if not isinstance(each, Value):
                for moment in range(schedule.start[each], schedule.end[each]):
                    self.home_nbytes[moment] += schedule.size[each]
        self.repeats = [repeats(run.unit) for run in self.runs]
        self.stays = set(live_out)
        """Values that are not evicted; blocks of control flow name values from outside."""
        for run in self.runs:
            if any(call.blocks or call.callee is not None for call in run.unit.calls):
                self.stays |= run.unit.reads

    def outputs(self, moment: int) -> list[Value]:
        """Return the planned values that a unit computes."""
        return [use.value for use in self.runs[moment].outs if use.value.home is None]

    def next_use(self, value: Value, moment: int) -> int | None:
        """Return the first use after that time."""
        uses = self.uses.get(value, ())
        i = bisect_left(uses, moment + 1)
        return uses[i] if i < len(uses) else None

    def can_repeat(self, producer: int, moment: int) -> bool:
        """Return whether a unit may run again at that time, with the same operands in homes."""
        return self.repeats[producer] and all(
            not any(self.producer.get(value, -1) < at < moment for at in self._written[value.home])
            for value in self.runs[producer].unit.reads
            if value.home in self._written
        )

    def least(self) -> int:
        """Return the maximum number of bytes that one unit reads and writes."""
        needed = [
            homes + sum({v: v.nbytes for v in _placed(run)}.values())
            for run, homes in zip(self.runs, self.home_nbytes, strict=True)
        ]
        return max(needed, default=0)


def _placed(run: Run) -> Iterator[Value]:
    for use in (*run.outs, *run.ins):
        if use.value.home is None:
            yield use.value


def repeats(unit: Unit) -> bool:
    """Return whether a unit may run again.

    It may if it only writes planned values, and reads no element of a queue.
    """
    return all(
        call.op is not None
        and call.queue is None
        and not (call.blocks or call.pushes)
        and all(use.value.home is None for use in call.outs)
        for call in unit.calls
    )


class _Paper:
    """Simulated run of a step with a target of bytes.

    live: bytes of the values in memory.
    named: the latest copy of each value that was recomputed.
    rows: the units so far, with their estimates in seconds; `seconds` is the sum of the estimates
        of repeated units.
    """

    def __init__(self, step: _Step, target: int) -> None:
        self._step = step
        self._target = target
        self._live: dict[Value, int] = {}
        self._used = 0
        self._named: dict[Value, Value] = {}
        self._rows: list[tuple[Unit, float]] = []
        self._seconds = 0.0

    def rows(self) -> list[tuple[Unit, float]] | None:
        """Return the units in the order of the run, with their estimates.

        Return None if the target is too small.
        """
        step = self._step
        for moment, run in enumerate(step.runs):
            reads = step.reads[moment]
            locked = set(reads)
            for value in reads:
                if value not in self._live and not self._compute(value, moment, locked, 0):
                    return None
            outputs = step.outputs(moment)
            fresh = sum(value.nbytes for value in outputs) - self._reused(run, moment)
            if not self._make_room(fresh, moment, locked):
                return None
            self._rows.append((self._renamed(run.unit, again=False), step.costs[moment]))
            for value in outputs:
                self._add(value)
            for value in (*reads, *outputs):
                if step.next_use(value, moment) is None:
                    self._remove(value)
        return self._rows

    def _reused(self, run: Run, moment: int) -> int:
        """Return the bytes of results that reuse the memory of operands without later uses."""
        nbytes = 0
        for out, operands in run.hosts:
            if any(self._step.next_use(value, moment) is None for value in operands):
                nbytes += out.nbytes
        return nbytes

    def _add(self, value: Value) -> None:
        if value not in self._live:
            self._live[value] = value.nbytes
            self._used += value.nbytes

    def _remove(self, value: Value) -> None:
        self._used -= self._live.pop(value, 0)

    def _make_room(self, nbytes: int, moment: int, locked: set[Value]) -> bool:
        """Evict values until `nbytes` are free; return whether that is possible."""
        while self._used + self._step.home_nbytes[moment] + nbytes > self._target:
            value = self._cheapest(moment, locked)
            if value is None:
                return False
            self._remove(value)
        return True

    def _cheapest(self, moment: int, locked: set[Value]) -> Value | None:
        """Return the value whose eviction costs least relative to what it frees."""
        step = self._step
        evictable: list[tuple[int, int, Value]] = []
        for value, nbytes in self._live.items():
            if value in locked or not nbytes or value in step.stays:
                continue
            again = step.next_use(value, moment)
            if again is not None and step.repeats[step.producer[value]]:
                evictable.append((nbytes * (again - moment), again, value))
        evictable.sort(key=lambda each: -each[0])
        best: tuple[float, Value] | None = None
        costs: dict[Value, float] = {}
        for occupied, again, value in evictable[:_CONSIDERED]:
            ratio = self._cost(value, again, costs, 0) / occupied
            if ratio < math.inf and (best is None or ratio < best[0]):
                best = ratio, value
        return None if best is None else best[1]

    def _cost(self, value: Value, moment: int, costs: dict[Value, float], depth: int) -> float:
        """Estimate the seconds to recompute a value, and the values that it needs, at that time."""
        if value in costs:
            return costs[value]
        costs[value] = math.inf  # in case it needs itself
        step = self._step
        producer = step.producer.get(value)
        if producer is None or depth > _DEEPEST or not step.can_repeat(producer, moment):
            return math.inf
        cost = step.costs[producer]
        for operand in step.reads[producer]:
            if operand not in self._live or step.next_use(operand, moment - 1) is None:
                cost += self._cost(operand, moment, costs, depth + 1)
            if cost == math.inf:
                return cost
        costs[value] = cost
        return cost

    def _compute(self, value: Value, moment: int, locked: set[Value], depth: int) -> bool:
        """Recompute a value, and first the values it needs; return whether that is possible."""
        step = self._step
        producer = step.producer.get(value)
        if producer is None or depth > _DEEPEST or not step.can_repeat(producer, moment):
            return False
        cost = step.costs[producer]
        self._seconds += cost
        if self._seconds > _SLOWEST * step.seconds:
            return False
        needed = step.reads[producer]
        mine = locked | set(needed)
        for operand in needed:
            if operand not in self._live and not self._compute(operand, moment, mine, depth + 1):
                return False
        if not self._make_room(value.nbytes, moment, mine):
            return False
        twin = self._renamed(step.runs[producer].unit, again=True, result=value)
        self._rows.append((twin, cost))
        self._add(value)
        for operand in needed:
            if operand not in locked and step.next_use(operand, moment - 1) is None:
                self._remove(operand)
        return True

    def _renamed(self, unit: Unit, *, again: bool, result: Value | None = None) -> Unit:
        """Return the unit with current operands.

        If it runs again, it has new results, and `result` then refers to the new one.
        """
        named = self._named
        if not again and unit.reads.isdisjoint(named):
            return unit
        renamed = dict[Value, Value]()
        if again:
            renamed = {value: Value(value.nbytes) for value in unit.makes}
        inner = {**named, **renamed}
        calls = [
            replace(
                call,
                outs=[Use(renamed.get(use.value, use.value), use.type) for use in call.outs],
                ins=[Use(inner.get(use.value, use.value), use.type) for use in call.ins],
                again=again or call.again,
                may_raise=call.may_raise and not again,
            )
            for call in unit.calls
        ]
        if result is not None:
            named[result] = renamed[result]
        return Unit(calls)
