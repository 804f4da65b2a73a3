"""Memory budgets: schedules of a step that recompute values instead of keeping them.

In: a schedule of units. Out: `Candidate`s, other schedules of the same step with estimated run
times; the compiler chooses the fastest candidate whose plan fits. Each candidate comes from a
simulated run of the step with a target of bytes. If the next unit does not fit, the value is
evicted whose recomputation costs least per byte and time that it frees. It is recomputed before the
next use. This is dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616),
but the next use is known, as in Belady's algorithm. The targets are fixed fractions of the memory
that the step needs. They do not depend on the budget: a larger budget admits all candidates of a
smaller budget, so the estimated time is never longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from mlvm.core.dynamic_sizes import Length
from mlvm.core.types import TensorType
from mlvm.step.blocks import renewed
from mlvm.step.flow import Call, Unit, Value
from mlvm.step.schedule import Run, Schedule, in_place

FLOPS: Final = 4e10
"""Estimated floating-point operations per second: a matrix product on one core with AVX2."""

BANDWIDTH: Final = 8e9
"""Estimated bytes per second that an op reads and writes."""

LAUNCH: Final = 5e-7
"""Estimated seconds for a kernel call of any size."""


class SearchEffort(NamedTuple):
    """Effort of the search for schedules within a budget.

    Attributes:
        targets: the number of targets, as fractions of the step's memory; long steps have fewer.

        halvings: the number of targets between the smallest that suffices and the next smaller.

        units: the limit of units in all simulated runs, from which the number of targets follows.

        considered: the number of values that are compared for an eviction, with the most bytes.

        depth: the maximum number of values that are recomputed for each other, for a single use.

        slowest: candidates slower than this factor of the step's estimate are discarded.
    """

    targets: int = 32
    halvings: int = 4
    units: int = 50_000
    considered: int = 24
    depth: int = 200
    slowest: float = 4.0


EFFORT: Final = SearchEffort()


class Row(NamedTuple):
    """Unit of a simulated run: the number of the unit, and the value that it computes again.

    `again` is None when the unit runs for the first time.
    """

    moment: int
    again: Value | None


class Candidate(NamedTuple):
    """Schedule of the step, with the estimated seconds and a lower bound of the simulated bytes.

    It is built from rows on demand, because many schedules need much memory.
    """

    seconds: float
    nbytes: int
    step: _Step
    rows: Sequence[Row]

    def schedule(self) -> Schedule:
        """Build the schedule."""
        named: dict[Value, Value] = {}
        units: list[Unit] = []
        for moment, again in self.rows:
            unit = self.step.runs[moment].unit
            if again is not None or not unit.reads.isdisjoint(named):
                renamed: dict[Value, Value] = {}
                if again is not None:
                    renamed = {value: Value(value.nbytes) for value in unit.makes}
                calls = renewed(unit.calls, {**named, **renamed})
                if again is not None:
                    calls = [replace(call, again=True, may_raise=False) for call in calls]
                    named[again] = renamed[again]
                unit = Unit(calls)
            units.append(unit)
        return Schedule(units, self.step.live_out)


def seconds(unit: Unit, run: Run) -> float:
    """Estimate the time of a unit in seconds.

    It is the maximum of the time for arithmetic and the time for moving bytes. Blocks count
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
    """Return a value with current numbers in place of dynamic sizes, without a guard."""
    if isinstance(value, TensorType):
        return TensorType(value.dtype, present(value.shape)) if value.is_open else value
    if isinstance(value, tuple):
        return tuple(map(present, value))
    return value.present if issubclass(type(value), Length) else value


def candidates(schedule: Schedule, live_out: set[Value], limit: float) -> list[Candidate]:
    """Return other schedules of the step, which need less memory, the fastest first.

    Schedules whose simulated runs need more than `limit` bytes are omitted. This saves time.
    """
    step = _Step(schedule, live_out)
    candidates: dict[tuple[Row, ...], Candidate] = {}

    def suffices(target: int, lower: int) -> bool:
        """Add the candidate of a target; return False if there is none.

        The simulated run needs more than `lower` bytes."""
        run = _SimulatedRun(step, target)
        if not run.finish():
            return False
        rows = tuple(step.without_dead(run.rows))
        time = sum([step.costs[row.moment] for row in rows])
        candidates[rows] = Candidate(time, lower, step, rows)
        return True

    least, most = step.least(), schedule.most_alive
    count = max(8, min(EFFORT.targets, EFFORT.units // (len(schedule.runs) or 1)))
    targets = [most - (most - least) * i // count for i in range(1, count + 2)]
    enough, too_few = most, 0
    for target, lower in pairwise(targets):
        # A run that needs no more than the next target has the same rows as the next run.
        if lower > limit:
            enough = target
        elif suffices(target, lower):
            enough, too_few = target, 0
        else:
            too_few = too_few or target
    for _ in range(EFFORT.halvings if 0 < too_few <= limit else 0):
        target = (enough + too_few) // 2
        if suffices(target, too_few):
            enough = target
        else:
            too_few = target
    return sorted(candidates.values(), key=lambda each: each.seconds)


def total_seconds(schedule: Schedule) -> float:
    """Estimate the time of a schedule in seconds."""
    return sum(seconds(run.unit, run) for run in schedule.runs)


class _Step:
    """Schedule with the data that simulated runs need.

    `reads`: the planned values that each unit reads, in operand order.
    `outputs`: the planned values that each unit computes.
    `fresh`: bytes of these that do not reuse the memory of operands.
    `uses`: the times at which each value is read; a value that is live out is read at the end.
    `producer`: the time at which each value is computed.
    `first`, `again`: the rows of units that run for the first time, and of values that are
        computed again. All simulated runs share them.
    `home_nbytes`: bytes of planned homes, by time.
    `repeatable_until`: the last time at which each unit may run again, or -1. Later, operands in
        homes are overwritten.
    """

    def __init__(self, schedule: Schedule, live_out: set[Value]) -> None:
        self.runs, self.live_out = schedule.runs, live_out
        end = len(self.runs)
        self.costs = [seconds(run.unit, run) for run in self.runs]
        self.seconds = sum(self.costs)
        self.uses: dict[Value, list[int]] = {}
        self.producer: dict[Value, int] = {}
        written: dict[Any, list[int]] = {}
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
                    written.setdefault(value.home, []).append(moment)
        for value in live_out:
            self.uses.setdefault(value, []).append(end)
        for each in schedule.start:
            if not isinstance(each, Value):
                for moment in range(schedule.start[each], schedule.end[each]):
                    self.home_nbytes[moment] += schedule.size[each]
        self.first = [Row(moment, None) for moment in range(end)]
        self.again = {value: Row(moment, value) for value, moment in self.producer.items()}
        self.outputs = [
            [use.value for use in run.outs if use.value.home is None] for run in self.runs
        ]

        self.fresh = [self._fresh(moment) for moment in range(end)]

        def until(unit: Unit) -> int:
            """Return the time of the first write to a home after the value that the unit reads."""
            later = [end]
            for value in unit.reads:
                times = written.get(value.home, ())
                i = bisect_right(times, self.producer.get(value, -1))
                later += times[i : i + 1]
            return min(later)

        self.repeatable_until = [until(run.unit) if repeats(run.unit) else -1 for run in self.runs]
        self.stays = set(live_out)
        """Values that are not evicted; blocks of control flow name values from outside."""
        for run in self.runs:
            if any(call.blocks or call.callee is not None for call in run.unit.calls):
                self.stays |= run.unit.reads

    def next_use(self, value: Value, moment: int) -> int | None:
        """Return the first use after that time."""
        uses = self.uses.get(value, ())
        i = bisect_left(uses, moment + 1)
        return uses[i] if i < len(uses) else None

    def is_last_use(self, value: Value, moment: int) -> bool:
        """Return whether no unit after that time reads the value."""
        uses = self.uses.get(value)
        return uses is None or uses[-1] <= moment

    def may_evict(self, value: Value, again: int) -> bool:
        """Return whether a value may be evicted until its use at the time `again`.

        The result of a call that may raise stays until the first use. Otherwise the call would only
        run at that time, and updates and calls that must follow it would precede it.
        """
        producer = self.producer[value]
        is_read = again > self.uses[value][0]
        return again <= self.repeatable_until[producer] and (
            is_read or not self.runs[producer].unit.may_raise
        )

    def without_dead(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows except those that compute values which are evicted and never read."""
        latest: dict[Value, int] = {}
        sources: list[list[int]] = []
        for i, (moment, again) in enumerate(rows):
            sources.append([latest[value] for value in self.reads[moment]])
            latest.update(dict.fromkeys(self.outputs[moment] if again is None else [again], i))
        is_read = [False] * len(rows)
        for value in self.live_out & latest.keys():
            is_read[latest[value]] = True
        alive: list[Row] = []
        for i in range(len(rows) - 1, -1, -1):
            if is_read[i] or self.repeatable_until[rows[i].moment] < 0:
                alive.append(rows[i])
                for source in sources[i]:
                    is_read[source] = True
        return alive[::-1]

    def least(self) -> int:
        """Return the maximum number of bytes that one unit needs."""
        needed = [
            homes + fresh + sum([value.nbytes for value in reads])
            for homes, fresh, reads in zip(self.home_nbytes, self.fresh, self.reads, strict=True)
        ]
        return max(needed, default=0)

    def _fresh(self, moment: int) -> int:
        """Return the bytes of results that do not reuse the memory of operands."""
        run = self.runs[moment]
        ended = [value for value in self.reads[moment] if self.is_last_use(value, moment)]
        reused = in_place(run, ended)
        return sum([value.nbytes for value in self.outputs[moment] if value not in reused])


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


class _SimulatedRun:
    """Simulated run of a step with a target of bytes.

    `rows`: the units so far.
    `live`: bytes of each value in memory; `used` is the sum.
    `seconds`: the sum of the estimates of repeated units.
    """

    def __init__(self, step: _Step, target: int) -> None:
        self._step = step
        self._target = target
        self._live: dict[Value, int] = {}
        self._used = 0
        self.rows: list[Row] = []
        self._seconds = 0.0

    def finish(self) -> bool:
        """Run all units; return whether the target suffices."""
        step = self._step
        for moment, reads in enumerate(step.reads):
            locked = set(reads)
            for value in reads:
                if value not in self._live and not self._compute(value, moment, locked, 0):
                    return False
            outputs = step.outputs[moment]
            if not self._make_room(step.fresh[moment], moment, locked):
                return False
            self.rows.append(step.first[moment])
            for value in outputs:
                self._add(value)
            for value in (*reads, *outputs):
                if step.is_last_use(value, moment):
                    self._remove(value)
        return True

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
        """Return the value with the lowest eviction cost per freed byte."""
        step = self._step
        evictable: list[tuple[int, int, Value]] = []
        for value, nbytes in self._live.items():
            if value in locked or not nbytes or value in step.stays:
                continue
            again = step.next_use(value, moment)
            if again is not None and step.may_evict(value, again):
                evictable.append((nbytes * (again - moment), again, value))
        evictable.sort(key=lambda each: -each[0])
        best: tuple[float, Value] | None = None
        costs: dict[Value, float] = {}
        for occupied, again, value in evictable[: EFFORT.considered]:
            ratio = self._cost(value, again, costs, 0) / occupied
            if ratio < math.inf and (best is None or ratio < best[0]):
                best = ratio, value
        return None if best is None else best[1]

    def _cost(self, value: Value, moment: int, costs: dict[Value, float], depth: int) -> float:
        """Estimate the seconds to recompute a value, and the values that it needs, at that time."""
        if value in costs:
            return costs[value]
        costs[value] = math.inf  # if the value depends on itself, it cannot be recomputed
        step, producer = self._step, self._producer_of(value, moment, depth)
        if producer is None:
            return math.inf
        cost = step.costs[producer]
        for operand in step.reads[producer]:
            if operand not in self._live or step.is_last_use(operand, moment - 1):
                cost += self._cost(operand, moment, costs, depth + 1)
            if cost == math.inf:
                return cost
        costs[value] = cost
        return cost

    def _producer_of(self, value: Value, moment: int, depth: int) -> int | None:
        """Return the unit that can compute a value again at that time, or None."""
        producer = self._step.producer.get(value)
        if producer is None or depth > EFFORT.depth:
            return None
        return producer if moment <= self._step.repeatable_until[producer] else None

    def _compute(self, value: Value, moment: int, locked: set[Value], depth: int) -> bool:
        """Recompute a value, and first the values it needs; return whether that is possible."""
        step, producer = self._step, self._producer_of(value, moment, depth)
        if producer is None:
            return False
        cost = step.costs[producer]
        self._seconds += cost
        if self._seconds > EFFORT.slowest * step.seconds:
            return False
        needed = step.reads[producer]
        mine = locked | set(needed)
        for operand in needed:
            if operand not in self._live and not self._compute(operand, moment, mine, depth + 1):
                return False
        if not self._make_room(value.nbytes, moment, mine):
            return False
        self.rows.append(step.again[value])
        self._add(value)
        for operand in needed:
            if operand not in locked and step.is_last_use(operand, moment - 1):
                self._remove(operand)
        return True
