"""Verification of a recording: its files, its digests, and steps that are computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from mlvm.core.errors import EncodingError, MlvmError
from mlvm.eager.runs.replay import Mismatch, Replay
from mlvm.eager.runs.run import DATA, Run


class Verified(NamedTuple):
    """Outcome of a verification.

    Attributes:
        steps: the steps that were computed again.
        mismatches: the differences from the recording.
        skipped: the reason why a step could not be computed, by step.
        problems: missing or damaged files.
        unchecked: the number of steps without a program, which no replay computes.
    """

    steps: list[int]
    mismatches: list[Mismatch]
    skipped: dict[int, str]
    problems: list[str]
    unchecked: int = 0

    @property
    def is_accepted(self) -> bool:
        """True if the recording is complete and all selected steps have the recorded bits."""
        return not (self.mismatches or self.skipped or self.problems)


def verify(replay: Replay, *, steps: int = 3, seed: int = 0) -> Verified:
    """Check all files of a recording, and compute steps again that the seed selects.

    A recording is accepted only if it was closed, so that no step is missing at its end.
    """
    run = replay.run
    problems = _problems(run)
    if not run.is_closed:
        problems.append("the recording was not closed: steps may be missing at its end")
    checked = [step.number for step in run.steps if step.table.file]
    chosen = sorted(random.Random(seed).sample(checked, min(steps, len(checked))))
    verified = Verified([], [], {}, problems, len(run.steps) - len(checked))
    for number in chosen:
        try:
            verified.mismatches.extend(replay.replay(number))
            verified.steps.append(number)
        except MlvmError as error:
            verified.skipped[number] = str(error)
    return verified


def _problems(run: Run) -> list[str]:
    """Return the damaged files among the files that the log names."""
    problems: list[str] = []

    def check(work: Callable[..., object], *args: object) -> None:
        try:
            work(*args)
        except (MlvmError, OSError) as error:
            problems.append(str(error))

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
            raise EncodingError(f"{run.folder / DATA}: byte {end}: expected a content")
        end = place + length
    size = (run.folder / DATA).stat().st_size
    if size < end or (run.is_closed and size != end):
        raise EncodingError(f"{run.folder / DATA}: expected {end} bytes, got {size}")
