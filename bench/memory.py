"""The bytes that a training step needs, at the sizes of `bench.sizes`, beside PyTorch.

`planned_bytes` is a step's scratch if tensors are placed with knowledge of when each is needed.
`lower_bound_bytes` is the most that is alive at once, `planned_over_lower_bound` the ratio of the
two. `high_water_bytes` is the most that a step has in use: in the arena that it works in and, if
it is captured, in its scratch. `bytes_after_warmup` is what the VM has taken since the first
steps. `peak_over_import_bytes` is how much the peak of the process has grown since its imports: by
weights, momentum, gradients, images and all else.

Each round is a new process, `python -m bench.memory CONTENDER CASE`, which prints its metrics as
JSON: the peak of a process never goes down.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.harness import ROOT, Contender, Prepare, Round, Suite
from bench.sizes import CASES, MIXERS, Size

if TYPE_CHECKING:  # a contender imports its own library only
    from mlvm.arena.planner import Plan
    from mlvm.core.vm import VM

Metrics = dict[str, float]

WARM_UP: Final = 3
STEPS: Final = 5
OURS: Final = ("mlvm-eager", "mlvm-replay")


def mlvm_eager(size: Size) -> Metrics:
    import mlvm.eager as ml
    from bench.mlvm_training import Training
    from mlvm.arena.planner import Block, plan

    imported = peak()
    training = Training(size)
    used = train(training.eager, training.vm, imported)
    with ml.record(training.batch) as recording:
        training.eager()
    blocks = [Block(each.nbytes, each.start, each.end) for each in recording.lifetimes]
    return {**sizes_of(plan(blocks)), "high_water_bytes": training.batch.high_water, **used}


def mlvm_replay(size: Size) -> Metrics:
    from bench.mlvm_training import Training

    imported = peak()
    training = Training(size)
    used = train(training.replay, training.vm, imported)
    plan = training.captured.plan
    return {
        **sizes_of(plan),
        "high_water_bytes": plan.nbytes + training.batch.high_water,
        **used,
    }


def train(step: Callable[[], object], vm: VM, imported: int) -> Metrics:
    """Return the metrics of steps on the VM. `imported` is the peak of the process after its
    imports."""
    repeat(step, WARM_UP)
    consumed = vm.consumed_size_in_mib()
    repeat(step, STEPS)
    return {
        "bytes_after_warmup": (vm.consumed_size_in_mib() - consumed) * 2**20,
        "peak_over_import_bytes": peak() - imported,
    }


def sizes_of(plan: Plan) -> Metrics:
    return {
        "planned_bytes": plan.nbytes,
        "lower_bound_bytes": plan.lower_bound,
        "planned_over_lower_bound": plan.nbytes / plan.lower_bound,
    }


def torch_eager(size: Size) -> Metrics:
    import torch._dynamo  # noqa: F401 - the first optimizer would import it

    from bench.torch_training import model_of, training

    imported = peak()
    repeat(training(size, model_of(size)), WARM_UP + STEPS)
    return {"peak_over_import_bytes": peak() - imported}


def repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def peak() -> int:
    """Return the most bytes of memory that this process has had, on Linux. The peak of `getrusage`
    would count the parent's memory at the fork."""
    return status_bytes("VmHWM")


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status, which is in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def preparing(contender: str, module: str = "bench.memory") -> Prepare:
    """Return a `prepare` of all cases, with `quick` of the smallest alone. Each round is a process
    of the module."""

    def measure(case: str) -> Metrics:
        done = subprocess.run(
            [sys.executable, "-m", module, contender, case],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
        )
        metrics: Metrics = json.loads(done.stdout)
        return metrics

    def prepare(quick: bool) -> Mapping[str, Round]:
        return {case: partial(measure, case) for case in (["tiny"] if quick else CASES)}

    return prepare


MEASURES: Final[dict[str, Callable[[Size], Metrics]]] = {
    "mlvm-eager": mlvm_eager,
    "mlvm-replay": mlvm_replay,
    "torch-eager": torch_eager,
}

SUITE = Suite(
    module="bench.memory",
    contenders=(
        Contender("mlvm-eager", "mlvm", preparing("mlvm-eager")),
        Contender("mlvm-replay", "mlvm", preparing("mlvm-replay")),
        Contender("torch-eager", "torch", preparing("torch-eager")),
    ),
    units={
        "planned_bytes": "bytes",
        "lower_bound_bytes": "bytes",
        "planned_over_lower_bound": "ratio",
        "high_water_bytes": "bytes",
        "bytes_after_warmup": "bytes",
        "peak_over_import_bytes": "bytes",
    },
    ours=OURS,
    targets={
        (case, "peak_over_import_bytes", "mlvm-replay", "torch-eager"): 1 / 0.75 for case in MIXERS
    },
    limits={
        (case, metric, ours): limit
        for case in CASES
        for ours in OURS
        for metric, limit in (("planned_over_lower_bound", 1.05), ("bytes_after_warmup", 0))
    },
    rounds=3,
    quick_rounds=1,
    warm_up_rounds=0,
)

if __name__ == "__main__":
    name, case = sys.argv[1:]
    print(json.dumps(MEASURES[name](CASES[case])))
