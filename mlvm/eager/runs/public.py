"""Runs as data: record the steps of a run; compare, replay, verify and debug them.

    with ml.runs.record("runs/today"):          # around a training loop
        for images, labels in batches:
            step(images, labels)

    run = ml.runs.open("runs/today")
    run.losses, run.at(7).inputs
    print(ml.runs.diff(ml.runs.open("runs/before"), run))

docs/runs.md describes the commands `python -m mlvm diff | replay | verify`.
"""

from mlvm.eager.runs.diff import Difference, diff
from mlvm.eager.runs.record import record, step
from mlvm.eager.runs.replay import Moment, Replay
from mlvm.eager.runs.replay import open_run as open
from mlvm.eager.runs.run import Run
from mlvm.eager.runs.verify import Verified, verify

__all__ = [
    "Difference",
    "Moment",
    "Replay",
    "Run",
    "Verified",
    "diff",
    "open",
    "record",
    "step",
    "verify",
]
