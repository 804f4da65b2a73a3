"""Reports of an arena's tensors as tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlvm.arena.arena import Arena
from mlvm.arena.planner import Plan
from mlvm.arena.recording import Recording
from mlvm.core.tables import table
from mlvm.core.types import TensorType
from mlvm.show import html


def report(arena: Arena, *, holders: int = 8) -> str:
    """Return a table of an arena's sizes and the `holders` largest tensors.

    For a recorded arena, a second table lists the tensors at the moment when most bytes were in
    use.

    Tensors of the same type made on the same line share a row. Lines are known in arenas of fixed
    capacity, and while an arena is recorded.
    """
    live = arena.holders()
    rows = [
        ("arena", arena.name),
        ("on", arena.vm.name),
        ("used", f"{arena.used:,}"),
        ("high water", f"{arena.high_water:,}"),
        ("capacity", f"{arena.capacity:,}" + ("" if not arena.grows else " (grows)")),
        ("tensors", f"{len(live):,}"),
    ]
    lines = _rows(rows)
    if live:
        lines += ["", *_largest([(x.type, "", x.line or "", x.nbytes) for x in live], holders)]
    if arena.recording is not None and arena.recording.lifetimes:
        lines += ["", *_recorded(arena.recording, holders)]
    return "\n".join(lines)


def report_of(recording: Recording) -> str:
    """Return a table of a recording. The arena may no longer exist."""
    rows = [
        ("arena", recording.arena),
        ("on", recording.vm),
        ("high water", f"{recording.high_water:,}"),
        ("capacity", f"{recording.capacity:,}"),
        ("tensors", f"{len(recording.lifetimes) + recording.forgotten:,}"),
    ]
    if recording.arenas > 1:
        rows.insert(1, ("arenas", f"{recording.arenas:,}, of that name"))
    return "\n".join([*_rows(rows), "", *_recorded(recording, holders=8)])


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:10}  {value}" for name, value in rows]


def _recorded(recording: Recording, holders: int) -> list[str]:
    """Return the moment when most bytes were in use, and a table of the tensors at that moment."""
    recording = recording.so_far()
    moment, alive = recording.at_peak()
    most = max(recording.used())
    lines = [f"recorded: at most {most:,} bytes in use, at moment {moment:,}"]
    if recording.forgotten:
        lines = [
            f"recorded: at most {max(most, recording.high_before):,} bytes in use",
            forgotten_of(recording, f", at moment {moment:,}"),
        ]
    then = [(x.type, " ".join(filter(None, [x.op, x.path])), x.line, x.nbytes) for x in alive]
    return [*lines, *_largest(then, holders)]


def forgotten_of(recording: Recording, when: str = "") -> str:
    """Describe the forgotten tensors of a recording."""
    return (
        f"{recording.forgotten:,} tensors that ended by moment {recording.first:,} are forgotten; "
        f"since then at most {max(recording.used()):,} bytes in use{when}"
    )


def _largest(tensors: Sequence[tuple[TensorType, str, str, int]], most: int) -> list[str]:
    """Return a table of the tensors by bytes, with a row per type, op and line."""
    groups: dict[tuple[TensorType, str, str], list[int]] = {}
    for type, op, line, nbytes in tensors:
        groups.setdefault((type, op, line), []).append(nbytes)
    largest = sorted(groups.items(), key=lambda group: sum(group[1]), reverse=True)
    cells = [
        [f"{sum(sizes):,}", f"{len(sizes):,}", str(type), op, short(line)]
        for (type, op, line), sizes in largest[:most]
    ]
    rest = [nbytes for _, sizes in largest[most:] for nbytes in sizes]
    if rest:
        cells.append([f"{sum(rest):,}", f"{len(rest):,}", "others", "", ""])
    cells.insert(0, ["bytes", "tensors", "type", "op", "made at"])
    shown = [i for i in range(5) if any(row[i] for row in cells[1:])]
    return table([[row[i] for i in shown] for row in cells], right=2)


def short(line: str) -> str:
    """Return a line with the path relative to the current directory, if the file is below it."""
    return line.removeprefix(f"{Path.cwd()}{os.sep}")


def plan_table(plan: Plan, *others: tuple[str, str]) -> str:
    """Return the sizes of a plan as an HTML table, below other rows of bytes and meanings."""
    rows = [
        (f"{plan.nbytes:,}", f"captured, in a plan of {len(plan.offsets):,} blocks"),
        (f"{plan.lower_bound:,}", "lower bound of the plan"),
        (f"{plan.unfused or plan.lower_bound:,}", "unfused"),
        (f"{plan.hoisted_nbytes:,}", "hoisted values"),
    ]
    return html.table(("bytes", ""), (*others, *rows), right=1)


Arena.report = report
Plan._repr_html_ = plan_table  # type: ignore[attr-defined]
