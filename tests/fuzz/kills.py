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
from collections.abc import Callable
from functools import partial
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


def record(folder: Path, report: Callable[[], object]) -> None:
    """Record steps of two functions, with inputs to store and state written between steps."""
    ml.random.seed(0)
    w = {"w": ml.ones((30, 20)), "b": ml.zeros(20)}
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

    with ml.runs.record(folder, every=7):
        for i in range(STEPS // 2):
            step(ml.full((9, 30), float(i)))
            report()
            evaluate(ml.ones((9, 30)), 2.0 * i)
            report()
            w["b"][0] = 0.5


def killed(folder: Path, rng: random.Random) -> int:
    """Record in a child process and kill it; return the number of steps that have returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            with ml.use(ml.VM("recording")):
                record(folder, lambda: os.write(writer, b"."))
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        reported = len(stream.read(rng.randrange(KILLED_WITHIN)))
        time.sleep(rng.random() * LONGEST_DELAY)
        os.kill(child, signal.SIGKILL)
        reported += len(stream.read())
    os.waitpid(child, 0)
    return reported


def attempt(folder: Path, whole: Run, seed: int, number: int) -> str:
    """Kill a recording and check it; return its outcome. Raises `Wrong`."""
    copy = folder / "killed"
    shutil.rmtree(copy, ignore_errors=True)
    reported = killed(copy, random.Random(f"{seed} {number}"))
    if not reported and not (copy / "log").exists():
        return "killed before there was a log"
    run = open_run(copy)
    count = len(run.steps)
    if not reported <= count <= reported + 1:
        raise Wrong(f"{reported} steps have returned, {count} are recorded")
    difference = diff(whole, run)
    if difference is not None:
        raise Wrong(f"the {count} recorded steps differ: {difference}")
    if count and (mismatches := Replay(run).replay(count - 1)):
        raise Wrong(f"the replay of step {count - 1} differs: {mismatches}")
    return "a whole last step" if count > reported else "all steps that have returned"


def fuzz(programs: int, seed: int, first: int) -> tuple[Outcomes, str | None]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder / "whole", lambda: None)
        whole = open_run(folder / "whole")
        return outcomes_of(range(first, first + programs), partial(attempt, folder, whole, seed))
