"""Values at the peak of a step: those in memory when the plan needs most bytes."""

from __future__ import annotations

from mlvm.arena.placement import rounded
from mlvm.arena.planner import PeakValue
from mlvm.core.dynamic_sizes import Length
from mlvm.core.machine.callee import OUT
from mlvm.core.types import TensorType
from mlvm.step.blocks import with_blocks
from mlvm.step.budget import repeats, seconds
from mlvm.step.flow import Call, Value
from mlvm.step.hoist import SplitFlow
from mlvm.step.schedule import Placed, Run, Schedule, placed


def at_peak(schedule: Schedule) -> tuple[PeakValue, ...]:
    """Return the values in memory at the peak, the largest first.

    The peak is the first time with the maximum number of live bytes.
    """
    change = [0] * (len(schedule.runs) + 1)
    for each in schedule.start:
        change[schedule.start[each]] += schedule.size[each]
        change[schedule.end[each]] -= schedule.size[each]
    peak, most, total = 0, 0, 0
    for moment, step in enumerate(change):
        total += step
        if total > most:
            peak, most = moment, total
    producers: dict[Placed, tuple[Run, Call, TensorType]] = {}
    last: dict[Placed, str] = {}
    for run in schedule.runs:
        for call in run.unit.calls:
            for use in (*call.outs, *call.ins):
                place = placed(use.value)
                if place is not None:
                    producers.setdefault(place, (run, call, use.type))
                    last[place] = call.line or last.get(place, "")
    alive = [x for x in schedule.start if schedule.start[x] <= peak < schedule.end[x]]
    values = []
    for each in sorted(alive, key=lambda x: -schedule.size[x]):
        if not schedule.size[each]:
            continue
        run, call, of = producers[each]
        waits = isinstance(each, Value) and each not in schedule.runs[peak].places
        again = seconds(run.unit, run) if repeats(run.unit) and waits else None
        values.append(
            PeakValue(
                _text(of),
                schedule.size[each],
                call.name.removesuffix(OUT),
                str(call.line or ""),
                str(last[each]),
                again,
            )
        )
    return tuple(values)


def hoisted_values(split: SplitFlow, states: int) -> tuple[PeakValue, ...]:
    """Return the hoisted values of a step, which are the states after the first `states`.

    A hoisted value is always in memory. It is not recomputed, so it has no time for that.
    """
    last = {
        use.value.home.index: str(call.line or "")
        for call in with_blocks(split.rest.calls)
        for use in call.ins
        if use.value.home is not None and use.value.home.role == "state"
    }
    values = []
    for call in split.hoisted.calls:
        for use in call.outs:
            home = use.value.home
            if home is not None and home.role == "output":
                op = f"{call.name.removesuffix(OUT)} (hoisted)"
                line, last_line = str(call.line or ""), last.get(states + home.index, "")
                nbytes = rounded(use.type.nbytes)
                values.append(PeakValue(_text(use.type), nbytes, op, line, last_line, None))
    return tuple(values)


def _text(of: TensorType) -> str:
    """Return a type as text, with ? for dynamic sizes."""
    shape = ["?" if issubclass(type(n), Length) else str(n) for n in of.shape]
    return f"{of.dtype.name}[{','.join(shape)}]"


def peak_text(values: tuple[PeakValue, ...]) -> str:
    """Return a sentence that names the three largest values at the peak."""
    parts = [
        f"{x.type} of {x.op}, {x.nbytes:,} bytes" + (f", at {x.line}" if x.line else "")
        for x in values[:3]
    ]
    return f"Largest at its peak: {'; '.join(parts)}"
