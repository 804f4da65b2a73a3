"""Training steps within memory budgets, beside PyTorch with and without checkpoints per block.

`step_ms` is the time of a step, the least of several, and `relative_time` that time over the step
without a budget, both in one process, in turn. `planned_bytes` is the plan with hoisted values.
`peak_over_import_bytes` is how much the peak of the process has grown since its imports: by
weights, momentum, gradients, images and all else.

Each round is a new process, `python -m bench.budget CONTENDER CASE`, which prints its metrics as
JSON: the peak of a process never goes down.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench.harness import Contender, Suite
from bench.memory import Metrics, peak, preparing
from bench.sizes import CASES, MixerSize, Size

SHARES: Final = (0.75, 0.5, 0.35)
"""Budgets, as shares of the plan without one."""

STEPS: Final = 5


def mlvm(size: Size, share: float = 1.0) -> Metrics:
    import mlvm.eager as ml
    from bench.mlvm_training import Training

    imported = peak()
    training = Training(size)
    with training.batch:
        whole = ml.measure(training.train_step, training.images, training.labels).plan
    nbytes = whole.nbytes + whole.ahead
    step = ml.capture(training.train_step, memory=int(share * nbytes))

    def run(step: Callable[..., Any]) -> float:
        with training.batch:
            return float(step(training.images, training.labels))

    run(step)
    best = least_ms(partial(run, step))
    peak_bytes = peak() - imported
    run(training.captured)
    times = [
        (least_ms(partial(run, step), 1), least_ms(partial(run, training.captured), 1))
        for _ in range(STEPS)
    ]
    ours, without = (min(column) for column in zip(*times, strict=True))
    return {
        "step_ms": best,
        "relative_time": ours / without,
        "planned_bytes": step.plan.nbytes + step.plan.ahead,
        "peak_over_import_bytes": peak_bytes,
    }


def torch(size: Size, *, checkpoint: bool = False) -> Metrics:
    import torch._dynamo  # noqa: F401 - the first optimizer would import it
    from torch.utils.checkpoint import checkpoint as checkpointed

    from bench.torch_training import MixerBlock, model_of, training

    imported = peak()
    model = model_of(size)
    if checkpoint:
        for block in model.modules():
            if isinstance(block, MixerBlock):
                block.forward = partial(checkpointed, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    step = training(size, model)
    step()
    return {"step_ms": least_ms(step), "peak_over_import_bytes": peak() - imported}


def least_ms(step: Callable[[], object], times: int = STEPS) -> float:
    """Return the least time of a step, in milliseconds."""
    best = float("inf")
    for _ in range(times):
        begun = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begun)
    return 1e3 * best


MEASURES: Final[dict[str, Callable[[Size], Metrics]]] = {
    "mlvm": mlvm,
    **{f"mlvm-{share}": partial(mlvm, share=share) for share in SHARES},
    "torch-eager": torch,
    "torch-checkpoint": partial(torch, checkpoint=True),
}
_PACKAGES: Final = {name: name.partition("-")[0] for name in MEASURES}

SUITE = Suite(
    module="bench.budget",
    contenders=tuple(
        Contender(name, package, preparing(name, "bench.budget"))
        for name, package in _PACKAGES.items()
    ),
    units={
        "step_ms": "ms",
        "relative_time": "ratio",
        "planned_bytes": "bytes",
        "peak_over_import_bytes": "bytes",
    },
    ours=("mlvm", *[f"mlvm-{share}" for share in SHARES]),
    limits={
        (case, "relative_time", f"mlvm-{share}"): limit
        for case, size in CASES.items()
        if isinstance(size, MixerSize)
        for share, limit in ((0.5, 1.35), (0.35, 1.7))
    },
    rounds=3,
    quick_rounds=1,
    warm_up_rounds=0,
)

if __name__ == "__main__":
    name, case = sys.argv[1:]
    print(json.dumps(MEASURES[name](CASES[case])))
