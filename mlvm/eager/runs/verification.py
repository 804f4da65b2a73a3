"""Verification of a recording: files, digests, and steps that are computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from mlvm.core.errors import ArgumentError, EncodingError, MlvmError, UnknownFunctionError, brief
from mlvm.core.program.encoding import damaged
from mlvm.eager.runs.execution import silent_vm
from mlvm.eager.runs.replay import Mismatch, Replay, replay_of
from mlvm.eager.runs.run import DATA, Run
from mlvm.machines.terminal import one_line


class Verified(NamedTuple):
    """Outcome of a verification.

    Attributes:
        steps: the steps that were computed again.
        mismatches: the differences from the recording.
        skipped: the reason why a step could not be computed, by step: the inputs were not stored,
            or this machine does not have a function that the step calls.
        problems: missing or damaged files.
        unchecked: the number of steps that have no program, which no replay computes.
        is_closed: whether the recording was closed, so that no step is missing at the end.
    """

    steps: list[int]
    mismatches: list[Mismatch]
    skipped: dict[int, str]
    problems: list[str]
    unchecked: int = 0
    is_closed: bool = True

    @property
    def is_accepted(self) -> bool:
        """True if the recording is complete and all selected steps have the recorded bits."""
        return self.outcome == "matches"

    @property
    def outcome(self) -> str:
        """The outcome as text: `matches`, `does not match` or `is incomplete`.

        It does not match if a file is damaged or bits differ. It is incomplete if all bits are
        equal, but the recording was not closed, has no steps, or a selected step was not
        computed."""
        if self.mismatches or self.problems:
            return "does not match"
        return "matches" if self.is_closed and not self.skipped else "is incomplete"


def verify(replay: Replay | Run, *, steps: int = 3, seed: int = 0) -> Verified:
    """Check all files of a recording, and compute steps again that the seed selects.

    A recording is accepted only if it was closed, so that no step is missing at the end, and if all
    selected steps were computed.

    Raises `ArgumentError` for an invalid argument, and `MachineError` if no VM can be created.
    """
    replay = replay_of(replay, "verify")
    for name, value in (("steps", steps), ("seed", seed)):
        if type(value) is not int or (name == "steps" and value < 0):
            limit = " of 0 or more" if name == "steps" else ""
            raise ArgumentError(f"verify: expected {name} as an int{limit}, got {brief(value)}")
    run = replay.run
    problems = _problems(run)
    checked = [step.number for step in run.steps if step.table.file]
    chosen = sorted(random.Random(seed).sample(checked, min(steps, len(checked))))
    verified = Verified([], [], {}, problems, len(run.steps) - len(checked), run.is_closed)
    if steps and not checked:
        eager = "no step has a program, because all ran eagerly"
        verified.skipped[0] = eager if run.steps else "the recording has no steps"
    if chosen:
        silent_vm()  # its error is not a mismatch
    for number in chosen:
        try:
            verified.mismatches.extend(replay.replay(number))
            verified.steps.append(number)
        except (ArgumentError, UnknownFunctionError) as error:
            verified.skipped[number] = str(error)
        except (EncodingError, OSError) as error:
            if one_line(error) not in problems:
                problems.append(one_line(error))
        except MlvmError as error:
            verified.mismatches.append(Mismatch(number, str(error)))
    return verified


def _problems(run: Run) -> list[str]:
    """Return the damaged files among the files that the log names."""
    problems: list[str] = []

    def check(work: Callable[..., object], *args: object) -> None:
        try:
            work(*args)
        except (MlvmError, OSError) as error:
            if one_line(error) not in problems:
                problems.append(one_line(error))

    for checkpoint in run.checkpoints:
        check(run.contents, checkpoint)
    for table in run.tables:
        if table.file:
            check(run.program, table)
        for file in table.sources:
            check(run.source, file)
    places = {
        (each.place, each.length)
        for step in run.steps
        for each in (*step.stored_cells, *step.stored_inputs)
    }
    check(_check_data, run, places)
    for step in run.steps:
        for each in step.stored_inputs:
            check(run.input, step, each)
    return problems


def _check_data(run: Run, places: set[tuple[int, int]]) -> None:
    """Raise `EncodingError` unless the contents fill the data file without gaps."""
    end = 0
    for place, length in sorted(places):
        if place != end:
            raise damaged(f"{run.folder / DATA}: expected stored bytes at {end}, got {place}")
        end = place + length
    size = (run.folder / DATA).stat().st_size
    if size < end or (run.is_closed and size != end):
        raise damaged(f"{run.folder / DATA}: expected {end} bytes, got {size}")
