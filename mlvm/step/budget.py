"""Memory budgets: schedules of a step that compute values again instead of keeping them.

In: a schedule of units. Out: `Candidate`s, other schedules of the same step with estimates of their
time; the compiler takes the fastest whose plan fits.
Each candidate comes from a run of the step on paper under a target of bytes. Where the next unit
does not fit, a value is evicted whose recomputation costs least for each byte and moment that it
frees, and it is computed again before its next use: dynamic tensor rematerialization (Kirisame et
al., ICLR 2021, arXiv 2006.09616), with the next use known, as in Belady's algorithm.
The targets are fixed shares of what the step needs. They do not depend on the budget, so a larger
budget admits all candidates of a smaller one and is never slower by the estimate.
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
"""Floating-point operations per second of the estimate: a matrix product on one core with AVX2."""

BANDWIDTH: Final = 8e9
"""Bytes per second that an op of the estimate reads and writes."""

LAUNCH: Final = 5e-7
"""Seconds of the estimate for a call of a kernel, whatever its size."""

TARGETS: Final = 32
"""How many shares of the step's memory are tried."""

_CONSIDERED: Final = 24
"""Values that are compared for each eviction: those that occupy most bytes for the longest."""

_SLOWEST: Final = 4.0
"""A candidate that takes more times the estimate of the step is given up."""


class Candidate(NamedTuple):
    """A schedule of the step, and the estimate of its time in seconds."""

    seconds: float
    schedule: Schedule


def seconds(unit: Unit, run: Run) -> float:
    """Estimate the time of a unit: the larger of its operations and the bytes that it moves. Blocks
    count once."""
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
    """Return a value with the present numbers in place of open lengths, which are not read."""
    if isinstance(value, TensorType):
        return TensorType(value.dtype, present(value.shape))
    if isinstance(value, tuple):
        return tuple(map(present, value))
    return value.present if issubclass(type(value), Length) else value


def candidates(schedule: Schedule, live_out: set[Value]) -> list[Candidate]:
    """Return the schedule and others that need less memory, the fastest first."""
    base = _Step(schedule, live_out)
    found = [Candidate(base.seconds, schedule)]
    least, most = base.least(), schedule.most_alive
    before: list[Unit] | None = None
    for i in range(1, TARGETS + 1):
        target = most - (most - least) * i // TARGETS
        paper = _Paper(base, target)
        units = paper.units()
        if units is None:
            continue
        units = _without_dead(units, live_out)
        if units != before:
            found.append(Candidate(base.seconds + paper.seconds, Schedule(units, live_out)))
        before = units
    return sorted(found, key=lambda each: each.seconds)


class _Step:
    """A schedule, with what every run on paper asks of it.

    reads: the values that each unit reads, in the order of its calls.
    uses: the moments at which each value is read; the end, for one that is live out.
    producer: the moment at which each value is made.
    kept: bytes of homes that the plan places, by moment.
    """

    def __init__(self, schedule: Schedule, live_out: set[Value]) -> None:
        self.runs = schedule.runs
        end = len(self.runs)
        self.costs = [seconds(run.unit, run) for run in self.runs]
        self.reads = [_reads(run.unit) for run in self.runs]
        self.seconds = sum(self.costs)
        self.uses: dict[Value, list[int]] = {}
        self.producer: dict[Value, int] = {}
        self._written: dict[Any, list[int]] = {}
        self.kept = [0] * end
        for moment, run in enumerate(self.runs):
            for value in run.unit.reads:
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
                    self.kept[moment] += schedule.size[each]
        self.repeats = [repeats(run.unit) for run in self.runs]
        self.stays = set(live_out)
        """Values that are not evicted; blocks of control flow name values from outside."""
        for run in self.runs:
            if any(call.blocks or call.callee is not None for call in run.unit.calls):
                self.stays |= run.unit.reads

    def made(self, moment: int) -> list[Value]:
        """Return the values that a unit makes and the plan places."""
        return [use.value for use in self.runs[moment].outs if use.value.home is None]

    def next_use(self, value: Value, moment: int) -> int | None:
        """Return the first use after the moment."""
        uses = self.uses.get(value, ())
        i = bisect_left(uses, moment + 1)
        return uses[i] if i < len(uses) else None

    def is_kept_until(self, value: Value, moment: int) -> bool:
        """Return whether the home of a value still has it at the moment."""
        since = self.producer.get(value, -1)
        return not any(since < at < moment for at in self._written.get(value.home, ()))

    def least(self) -> int:
        """Return the most bytes that a single unit reads and writes."""
        needed = [
            kept + sum({v: v.nbytes for v in _placed(run)}.values())
            for run, kept in zip(self.runs, self.kept, strict=True)
        ]
        return max(needed, default=0)


def _reads(unit: Unit) -> list[Value]:
    """Return what a unit reads, in an order that no hash decides: it decides what runs first."""
    uses = [use.value for call in unit.calls for use in call.ins]
    return list(dict.fromkeys(value for value in uses if value in unit.reads))


def _placed(run: Run) -> Iterator[Value]:
    for use in (*run.outs, *run.ins):
        if use.value.home is None:
            yield use.value


def repeats(unit: Unit) -> bool:
    """Return whether a unit may run again: it writes values of the plan alone, and draws nothing
    from outside."""
    return all(
        call.op is not None
        and call.queue is None
        and not (call.blocks or call.pushes or call.may_raise)
        and all(use.value.home is None for use in call.outs)
        for call in unit.calls
    )


def _without_dead(units: list[Unit], live_out: set[Value]) -> list[Unit]:
    """Return the units without those whose values are evicted before they are read."""
    needed, kept = set(live_out), list[Unit]()
    for unit in reversed(units):
        if not repeats(unit) or not unit.makes.isdisjoint(needed):
            needed |= unit.reads
            kept.append(unit)
    return kept[::-1]


class _Paper:
    """A run of a step on paper, under a target of bytes.

    live: bytes of the values in memory.
    named: the value that stands for each one that was computed again.
    seconds: estimate of what runs again.
    """

    def __init__(self, step: _Step, target: int) -> None:
        self._step = step
        self._target = target
        self._live: dict[Value, int] = {}
        self._used = 0
        self._named: dict[Value, Value] = {}
        self._out: list[Unit] = []
        self.seconds = 0.0

    def units(self) -> list[Unit] | None:
        """Return the units in the order of the run; None if the target is too small."""
        step = self._step
        for moment, run in enumerate(step.runs):
            reads = [value for value in step.reads[moment] if value.home is None]
            locked = set(reads)
            for value in reads:
                if value not in self._live and not self._compute(value, moment, locked):
                    return None
            made = step.made(moment)
            fresh = sum(value.nbytes for value in made) - self._reused(run, moment)
            if not self._make_room(fresh, moment, locked):
                return None
            self._out.append(self._renamed(run.unit, again=False))
            for value in made:
                self._add(value)
            for value in (*reads, *made):
                if step.next_use(value, moment) is None:
                    self._remove(value)
        return self._out

    def _reused(self, run: Run, moment: int) -> int:
        """Return the bytes of results that take the place of operands that end here."""
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
        """Evict values until so many bytes are free. Return whether they are."""
        while self._used + self._step.kept[moment] + nbytes > self._target:
            value = self._cheapest(moment, locked)
            if value is None:
                return False
            self._remove(value)
        return True

    def _cheapest(self, moment: int, locked: set[Value]) -> Value | None:
        """Return the value whose eviction costs least for what it frees."""
        step = self._step
        found: list[tuple[int, int, Value]] = []
        for value, nbytes in self._live.items():
            if value in locked or not nbytes or value in step.stays:
                continue
            again = step.next_use(value, moment)
            if again is not None and step.repeats[step.producer[value]]:
                found.append((nbytes * (again - moment), again, value))
        found.sort(key=lambda each: -each[0])
        best: tuple[float, Value] | None = None
        costs: dict[Value, float] = {}
        for occupied, again, value in found[:_CONSIDERED]:
            ratio = self._cost(value, again, costs) / occupied
            if ratio < math.inf and (best is None or ratio < best[0]):
                best = ratio, value
        return None if best is None else best[1]

    def _cost(self, value: Value, moment: int, known: dict[Value, float]) -> float:
        """Estimate the seconds to compute a value, and what it needs, at the moment."""
        if value in known:
            return known[value]
        known[value] = math.inf  # should it need itself
        step = self._step
        producer = step.producer.get(value)
        if producer is None or not step.repeats[producer]:
            return math.inf
        cost = step.costs[producer]
        for operand in step.reads[producer]:
            if operand.home is not None:
                if not step.is_kept_until(operand, moment):
                    return math.inf
            elif operand not in self._live or (step.next_use(operand, moment - 1) is None):
                cost += self._cost(operand, moment, known)
            if cost == math.inf:
                return cost
        known[value] = cost
        return cost

    def _compute(self, value: Value, moment: int, locked: set[Value]) -> bool:
        """Compute a value again, and before it what it needs. Return whether that is possible."""
        step = self._step
        producer = step.producer.get(value)
        if producer is None or not step.repeats[producer]:
            return False
        self.seconds += step.costs[producer]
        if self.seconds > _SLOWEST * step.seconds:
            return False
        run = step.runs[producer]
        reads = step.reads[producer]
        needed = [operand for operand in reads if operand.home is None]
        if any(x.home is not None and not step.is_kept_until(x, moment) for x in reads):
            return False
        mine = locked | set(needed)
        for operand in needed:
            if operand not in self._live and not self._compute(operand, moment, mine):
                return False
        if not self._make_room(value.nbytes, moment, mine):
            return False
        twin = self._renamed(run.unit, again=True, wanted=value)
        self._out.append(twin)
        self._add(value)
        for operand in needed:
            if operand not in locked and step.next_use(operand, moment - 1) is None:
                self._remove(operand)
        return True

    def _renamed(self, unit: Unit, *, again: bool, wanted: Value | None = None) -> Unit:
        """Return the unit on the values that stand for its operands now. Computed again, it makes
        new values, of which `wanted` is named anew."""
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
            )
            for call in unit.calls
        ]
        if wanted is not None:
            named[wanted] = renamed[wanted]
        return Unit(calls)
