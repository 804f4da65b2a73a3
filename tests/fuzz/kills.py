"""Processes that are killed while they record.

    python -m tests.fuzz kills --programs 2000 --seed 0

Each program is a copy of this process that records steps and reports each step that has returned.
It is killed at a random moment, sometimes before the first step. The recording must open, contain
all reported steps and at most one more, and be equal to the start of a complete recording. A replay
must compute its last step.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.eager.runs.diff import diff
from mlvm.eager.runs.replay import Replay, open_run
from mlvm.eager.runs.run import Run
from tests.fuzz.command import Outcomes, Wrong, outcomes_of

PROGRAMS: Final = 2000

STEPS: Final = 60
KILLED_WITHIN: Final = 40
LONGEST_DELAY: Final = 0.004  # seconds: a few steps


Steps = Callable[[], Iterator[object]]


def steps(count: int, rows: int, shape: tuple[int, int]) -> Steps:
    """Return a function that runs that many steps of two captured functions, of a matrix of that
    shape and inputs of so many rows. State is written between them."""
    w = {"w": ml.ones(shape), "b": ml.zeros(shape[1])}
    optimizer = ml.optim.Adam(w, 0.1)

    @ml.capture
    def step(x: Tensor) -> Tensor:
        x = x + ml.random.uniform(x.shape)
        loss, grads = ml.value_and_grad(lambda w: ml.mean((x @ w["w"] + w["b"]) ** 2))(w)
        optimizer.update(grads)
        return loss

    @ml.capture
    def evaluate(x: Tensor, factor: float) -> Tensor:
        return ml.sum(x @ w["w"]) * factor

    def run() -> Iterator[object]:
        for i in range(count // 2):
            yield step(ml.full((rows, shape[0]), float(i)))
            yield evaluate(ml.ones((rows, shape[0])), 2.0 * i)
            w["b"][0] = 0.5

    return run


def recorded(run: Steps, folder: Path, report: int | None = None) -> int:
    """Record in a copy of this process, which writes a byte after each step; return its pid."""
    child = os.fork()
    if not child:
        try:
            with ml.runs.record(folder, every=7):
                for _ in run():
                    if report is not None:
                        os.write(report, b".")
        finally:
            os._exit(0)
    return child


def killed(run: Steps, folder: Path, rng: random.Random) -> int:
    """Record in a child process and kill it; return the number of steps that have returned."""
    reader, writer = os.pipe()
    child = recorded(run, folder, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        reported = len(stream.read(rng.randrange(KILLED_WITHIN)))
        time.sleep(rng.random() * LONGEST_DELAY)
        os.kill(child, signal.SIGKILL)
        reported += len(stream.read())
    os.waitpid(child, 0)
    return reported


def attempt(run: Steps, folder: Path, whole: Run, seed: int, number: int) -> str:
    """Kill a recording and check it; return its outcome. Raises `Wrong`."""
    copy = folder / "killed"
    shutil.rmtree(copy, ignore_errors=True)
    reported = killed(run, copy, random.Random(f"{seed} {number}"))
    if not reported and not (copy / "log").exists():
        return "killed before there was a log"
    cut = open_run(copy)
    count = len(cut.steps)
    if not reported <= count <= reported + 1:
        raise Wrong(f"{reported} steps have returned, {count} are recorded")
    difference = diff(whole, cut)
    if difference is not None and (count or difference.cause != "length"):
        raise Wrong(f"the {count} recorded steps differ: {difference}")
    if count and (mismatches := Replay(cut).replay(count - 1)):
        raise Wrong(f"the replay of step {count - 1} differs: {mismatches}")
    return "a whole last step" if count > reported else "all steps that have returned"


def fuzz(programs: int, seed: int, first: int) -> tuple[Outcomes, str | None]:
    with tempfile.TemporaryDirectory() as name, ml.use(ml.VM("recording")):  # of one thread
        folder, run = Path(name), steps(STEPS, 9, (30, 20))
        for _ in islice(run(), 2):  # in which both are traced
            pass
        os.waitpid(recorded(run, folder / "whole"), 0)
        whole = open_run(folder / "whole")
        check = partial(attempt, run, folder, whole, seed)
        return outcomes_of(range(first, first + programs), check)
