"""`python -m mlvm memory`: the arenas of a script, or the memory plan of a program.

A script is run, and all arenas are recorded. A program is run on the arguments to measure the
lifetimes of intermediates, which the planner then places in as few bytes as possible.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from mlvm.arena.placement import rounded
from mlvm.arena.planner import Block, PeakTable, PeakValue, Plan, plan
from mlvm.arena.recording import Lifetime, Recording, merged_if_many
from mlvm.core.machine.callee import Value
from mlvm.core.op import Attributes
from mlvm.core.program.program import Program
from mlvm.core.tables import table
from mlvm.core.types import Array, TensorType, root
from mlvm.core.vm import VM
from mlvm.machines.files import write_file
from mlvm.show.page import MOST_ALIKE
from mlvm.show.picture import MOST_RECTANGLES, front, timeline
from mlvm.show.record import record_all
from mlvm.show.report import report_of
from mlvm.show.script import run_script

_LARGEST: Final = 8  # number of listed intermediates


def show_script(file: Path, out: Path, arguments: Sequence[str] = ()) -> bool:
    """Run a Python script, and report and plot each arena that had tensors.

    Returns whether there was one. The plots are written to `out` as NAME.ARENA.svg. A script that
    fails is shown up to the error.

    Raises `ScriptFailed` if the script fails, and `OSError`.
    """
    recordings: list[Recording] = []
    try:
        with record_all(most=MOST_RECTANGLES // 2) as recordings:
            run_script(file, arguments)
    finally:
        nonempty = [each for each in recordings if each.lifetimes]
        _show_arenas(merged_if_many(nonempty, MOST_ALIKE), file, out)
    return bool(nonempty)


def show_step(
    step: str, plan: Plan, recording: Recording, points: Sequence[tuple[int, float]], budget: int
) -> bool:
    """Print the peak of a captured step, and the fastest program within the budget.

    Returns whether a program fits. Draw the plan as STEP.svg, and the programs as STEP.curve.svg;
    `points` are bytes and seconds of the programs. Raises `OSError`.
    """
    name = Path(step).name
    print(f"{name}: {plan}")
    fitting = [each for each in points if each[0] <= budget]
    show_peak(plan, budget, remedy="; a smaller plan fits" if fitting else "")
    write_file(f"{step}.svg", timeline(recording, title=f"Memory plan of {name}"))
    write_file(f"{step}.curve.svg", front(points, plan.nbytes + plan.hoisted_nbytes))
    smallest = f"the smallest plan found has {points[-1][0]:,} bytes"
    smallest = smallest if fitting else f"no plan fits; {smallest}"
    if fitting:
        nbytes, seconds = fitting[0]
        times = seconds / points[0][1]
        smallest = f"{nbytes:,} bytes, {times:.2f} times the estimated time; {smallest}"
    print(f"\ncapture(memory={budget}): {smallest}")
    print(f"pictures  {step}.svg {step}.curve.svg\n")
    return bool(fitting)


def show_peak(
    memory_plan: Plan, budget: int, recording: Recording | None = None, remedy: str = ""
) -> bool:
    """Print and return whether a plan fits the budget, and print the largest values at the peak.

    They come from the recording if the plan has none. `remedy` follows if the plan does not fit.
    """
    nbytes = memory_plan.nbytes + memory_plan.hoisted_nbytes
    text = f"the plan fits the budget of {budget:,} bytes"
    if nbytes > budget:
        text = (
            f"the plan exceeds the budget of {budget:,} bytes by {nbytes - budget:,} bytes{remedy}"
        )
    print(text)
    peak = memory_plan.peak
    if recording is not None and not peak:
        _, alive = recording.at_peak()
        alive.sort(key=lambda each: each.nbytes, reverse=True)
        peak = tuple([PeakValue(str(x.type), x.nbytes, x.op, x.line, "", None) for x in alive])
    if peak:
        print("", PeakTable(peak[:_LARGEST]), sep="\n")
    return nbytes <= budget


def _show_arenas(recordings: Sequence[Recording], file: Path, out: Path) -> None:
    names: dict[str, int] = {}
    for each in recordings:
        name = re.sub(r"[^\w.-]+", "_", each.arena)
        names[name] = number = names.get(name, 0) + 1
        path = out / f"{file.stem}.{name}{f'-{number}' if number > 1 else ''}.svg"
        title = f"Arena {each.arena} of {file.name}"
        write_file(path, timeline(each, title=title))
        print(f"{report_of(each)}\n\npicture  {path}\n")


# --- programs ------------------------------------------------------------------------


class Intermediates:
    """Instrument that records the arrays of a program and the lifetimes, counted in calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.lifetimes: list[Lifetime] = []
        self._alive: dict[int, tuple[Lifetime, weakref.ref[Array]]] = {}
        self._inputs: dict[int, weakref.ref[Array]] = {}

    def before(
        self, name: str, params: Sequence[Value], attributes: Attributes
    ) -> Sequence[Value] | None:
        for array in params:
            if isinstance(array, np.ndarray) and id(root(array)) not in self._alive:
                self._note_input(root(array))
        return None

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        for array in results:
            if isinstance(array, np.ndarray):
                memory = root(array)
                if id(memory) not in self._alive and id(memory) not in self._inputs:
                    nbytes = rounded(array.nbytes)
                    self._begin(
                        Lifetime(TensorType.of(array), 0, nbytes, self.calls, 0, name), memory
                    )
        self.calls += 1

    def finish(self) -> list[Lifetime]:
        """Return the lifetimes; those still open end with the last call."""
        for lifetime, _ in self._alive.values():
            lifetime.end = self.calls
        self._alive.clear()
        return self.lifetimes

    def _note_input(self, memory: Array) -> None:
        """Note memory of an argument or a constant."""
        key = id(memory)
        self._inputs[key] = weakref.ref(memory, lambda _: self._inputs.pop(key, None))

    def _begin(self, lifetime: Lifetime, memory: Array) -> None:
        key = id(memory)
        self.lifetimes.append(lifetime)
        self._alive[key] = lifetime, weakref.ref(memory, lambda _: self._end(key))

    def _end(self, key: int) -> None:
        entry = self._alive.pop(key, None)
        if entry is not None:
            entry[0].end = max(self.calls, entry[0].start + 1)


def plan_of(program: Program, arguments: Sequence[Array]) -> tuple[Plan, Recording]:
    """Run the program on the arguments, and plan the memory of the intermediates.

    The recording has the plan's offsets; moments are the program's calls. Raises the errors of
    a launch.
    """
    vm, intermediates = VM(), Intermediates()
    handles = [vm.alloc_tensor(TensorType.of(array)) for array in arguments]
    for handle, array in zip(handles, arguments, strict=True):
        vm.write(handle, array)
    with vm.instrumented(intermediates):
        vm.launch(program, handles)
    lifetimes = intermediates.finish()
    memory_plan = plan([Block(each.nbytes, each.start, each.end) for each in lifetimes])
    for lifetime, offset in zip(lifetimes, memory_plan.offsets, strict=True):
        lifetime.offset = offset
    return memory_plan, Recording(
        "plan", memory_plan.nbytes, max(intermediates.calls, 1), lifetimes
    )


def show_plan(memory_plan: Plan, recording: Recording, file: Path, out: Path) -> None:
    """Print a plan and the largest tensors, and draw the plan to `out` as NAME.plan.svg.
    Raises `OSError`."""
    alone = sum(each.nbytes for each in recording.lifetimes)
    print(f"{len(recording.lifetimes):,} intermediates, {alone:,} bytes side by side")
    print(f"planned: {memory_plan}")
    largest = sorted(recording.lifetimes, key=lambda each: each.nbytes, reverse=True)[:_LARGEST]
    cells = [("bytes", "offset", "calls", "type", "op")]
    cells += [
        (f"{x.nbytes:,}", f"{x.offset:,}", f"{x.start} to {x.end - 1}", str(x.type), x.op)
        for x in largest
    ]
    if largest:
        print("", *table(cells, right=2), sep="\n")
    path = out / f"{file.stem}.plan.svg"
    write_file(path, timeline(recording, title=f"Memory plan of {file.name}"))
    print(f"\npicture  {path}")
