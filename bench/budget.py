"""Training steps within memory budgets, beside PyTorch and JAX with checkpoints.

`step_ms` is the time of a step, the least of several, and `relative_time` that time over the step
without a budget, both in one process, in turn. `planned_bytes` is the plan with hoisted values.
`peak_over_import_bytes` is how much the peak of the process has grown since its imports: by
weights, momentum, gradients, images and all else. `peak_over_allowed` is that peak over the sum of
the plan's budget and the weights, momentum and batch.

Contenders: `mlvm-0.5` has half of the plan without a budget. `torch-checkpoint` has a checkpoint
for each block, `torch-0.5` an `activation_memory_budget` of 0.5 for `torch.compile`, `jax-POLICY` a
`jax.checkpoint` for each block. Those of PyTorch and JAX train the Mixers, `torch-0.5` the ConvNet,
too. Compilers use much memory: where a step is compiled, the peak is that of later steps.

Each round is a new process, `python -m bench.budget CONTENDER CASE`, which prints its metrics as
JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness import ROOT, Contender, Prepare, Round, Suite, say
from bench.memory import Metrics, peak
from bench.sizes import CASES, MIXERS, TEXTS, Size

SHARES: Final = (0.75, 0.5, 0.35)
"""Budgets, as shares of the plan without one."""

POLICIES: Final = ("nothing_saveable", "dots_saveable")
"""Names in `jax.checkpoint_policies`."""

STEPS: Final = 5
_WIDER: Final = 1.02
"""The largest accepted `peak_over_allowed`."""

_LARGE: Final = ("cifar", "s16")
"""Cases whose tensors need much more memory than the objects of Python that a trace creates."""

ALL: Final[dict[str, Size]] = {**CASES, **TEXTS}


def mlvm(size: Size, share: float = 1.0) -> Metrics:
    import mlvm.eager as ml
    from bench.mlvm_training import Training

    warm_up = Training(CASES["tiny"])  # what is imported late
    with warm_up.batch:
        ml.measure(warm_up.train_step, warm_up.images, warm_up.labels, memory="3 MiB")
    warm_up.replay()
    imported = peak()
    training = Training(size)
    with training.batch:
        whole = ml.measure(training.train_step, training.images, training.labels).plan
    budget = int(share * (whole.nbytes + whole.hoisted_nbytes))
    step = ml.capture(training.train_step, memory=budget)

    def run(step: Callable[..., Any]) -> float:
        with training.batch:
            return float(step(training.images, training.labels))

    try:
        run(step)
    except ml.errors.BudgetError as error:
        say(f"budget: no program of {size} has {budget:,} bytes; the smallest is measured")
        budget = error.smallest
        step = ml.capture(training.train_step, memory=budget)
        run(step)
    best = least_ms(partial(run, step))
    peak_bytes = peak() - imported
    allowed = budget + training.weights.high_water + training.batch.high_water
    run(training.captured)
    times = [
        (least_ms(partial(run, step), 1), least_ms(partial(run, training.captured), 1))
        for _ in range(STEPS)
    ]
    ours, without = (min(column) for column in zip(*times, strict=True))
    return {
        "step_ms": best,
        "relative_time": ours / without,
        "planned_bytes": step.plan.nbytes + step.plan.hoisted_nbytes,
        "peak_over_import_bytes": peak_bytes,
        "peak_over_allowed": peak_bytes / allowed,
    }


def torch(size: Size, *, checkpoint: bool = False, share: float | None = None) -> Metrics:
    import torch._dynamo
    import torch._functorch.config
    from torch.utils.checkpoint import checkpoint as checkpointed

    from bench.torch_training import MixerBlock, model_of, training

    imported = peak()
    model = model_of(size)
    if checkpoint:
        for block in model.modules():
            if isinstance(block, MixerBlock):
                block.forward = partial(checkpointed, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    if share is not None:
        torch._functorch.config.activation_memory_budget = share
    return _measured(training(size, model, compiled=share is not None), imported)


def jax(size: Size, policy: str | None = None) -> Metrics:
    from bench.jax_training import training
    from bench.mlvm_training import model_of, parameters_of
    from bench.sizes import MixerSize

    assert isinstance(size, MixerSize)
    parameters = parameters_of(model_of(size))
    imported = peak()
    return _measured(training(size, parameters, policy=policy), imported)


def _measured(step: Callable[[], float], imported: int) -> Metrics:
    """Return the metrics of a step, whose first call may compile it."""
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again: see proc(5)
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
    **{f"torch-{share}": partial(torch, share=share) for share in SHARES},
    "jax": jax,
    **{f"jax-{policy}": partial(jax, policy=policy) for policy in POLICIES},
}


def _cases(name: str) -> list[str]:
    """Return the cases of a contender."""
    package, _, option = name.partition("-")
    if package == "mlvm":
        return list(ALL)
    return list(MIXERS if package == "jax" or option == "checkpoint" else CASES)


def _preparing(name: str) -> Prepare:
    """Return a `prepare` of the contender's cases, with `quick` of the smallest alone."""

    def measure(case: str) -> Metrics:
        command = [sys.executable, "-m", "bench.budget", name, case]
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
        )
        metrics: Metrics = json.loads(done.stdout)
        return metrics

    def prepare(quick: bool) -> Mapping[str, Round]:
        if name in [f"torch-{share}" for share in SHARES]:
            from bench.torch_training import compiles

            if not compiles():
                say(f"budget: torch.compile finds no compiler that works, {name} is skipped")
                return {}
        return {case: partial(measure, case) for case in (["tiny"] if quick else _cases(name))}

    return prepare


OURS: Final = ("mlvm", *[f"mlvm-{share}" for share in SHARES])

SUITE = Suite(
    module="bench.budget",
    contenders=tuple(
        Contender(name, name.partition("-")[0], _preparing(name)) for name in MEASURES
    ),
    units={
        "step_ms": "ms",
        "relative_time": "ratio",
        "planned_bytes": "bytes",
        "peak_over_import_bytes": "bytes",
        "peak_over_allowed": "ratio",
    },
    ours=OURS,
    limits={
        **{
            (case, "relative_time", f"mlvm-{share}"): limit
            for case in ALL
            for share, limit in ((0.5, 1.35), (0.35, 1.7))
        },
        **{(case, "peak_over_allowed", name): _WIDER for case in _LARGE for name in OURS},
    },
    rounds=3,
    quick_rounds=1,
    warm_up_rounds=0,
    timeout=600.0,
)

if __name__ == "__main__":
    name, case = sys.argv[1:]
    print(json.dumps(MEASURES[name](ALL[case])))
