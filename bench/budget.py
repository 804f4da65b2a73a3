"""Training steps within memory budgets, beside PyTorch and JAX with checkpoints.

`step_ms` is the time of a step, the least of several, and `relative_time` that time over the step
without a budget, both in one process, in turn. `planned_bytes` is the plan with hoisted values.
`peak_over_import_bytes` is how much the peak of the process has grown since its imports: by
weights, momentum, gradients, images and all else. `peak_over_allowed` is that peak over the sum of
the plan's budget and the weights, momentum and batch.

Contenders: `mlvm-0.5` has half of the plan without a budget. `torch-checkpoint` has a checkpoint
for each block, `torch-0.5` an `activation_memory_budget` of 0.5 for `torch.compile`, `jax-POLICY` a
`jax.checkpoint` for each block. Compilers use much memory, so the peak of PyTorch and JAX is the
most that later steps add to what lasts between steps, and weights, momentum and batch.

After each of these, mlvm trains with the fastest program within the same peak, `mlvm_within_ms`.
`mlvm_relative_time` and `mlvm_relative_peak` are what it needs over what the peer needs.

Each round is a new process, `python -m bench.budget CONTENDER CASE`, which prints its metrics as
JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness import ROOT, Contender, Prepare, Round, Suite, say
from bench.memory import Metrics, peak, status_bytes
from bench.sizes import CASES, TEXTS, Size, batch_of

SHARES: Final = (0.75, 0.5, 0.35)
"""Budgets, as shares of the plan without one."""

POLICIES: Final = ("nothing_saveable", "dots_saveable")
"""Names in `jax.checkpoint_policies`."""

STEPS: Final = 5
_TRIES: Final = 3
"""Budgets that are tried for a peak."""
_WIDER: Final = 1.02
"""The largest accepted `peak_over_allowed`."""

LARGE: Final[dict[str, Size]] = {
    name: {**CASES, **TEXTS}[name]._replace(batch=batch)
    for name, batch in {
        "cifar": 256, "s16": 32, "convnet": 512, "transformer": 128, "bert": 128
    }.items()
}  # fmt: skip
"""Cases whose tensors need much more memory than what does not depend on the batch: the program,
the objects of its trace, and the working memory of kernels."""

ALL: Final[dict[str, Size]] = {"tiny": CASES["tiny"], **LARGE}


def mlvm(size: Size, share: float = 1.0, limit: int | None = None) -> Metrics:
    """Measure with a share of the plan as the budget; with a `limit`, with what that peak of the
    process leaves."""
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
    if limit is not None:
        budget = limit - (status_bytes("VmRSS") - imported)
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
    metrics = {
        "step_ms": best,
        "planned_bytes": step.plan.nbytes + step.plan.hoisted_nbytes,
        "peak_over_import_bytes": peak_bytes,
    }
    if limit is not None:
        return metrics
    allowed = budget + training.weights.high_water + training.batch.high_water
    run(training.captured)
    times = [
        (least_ms(partial(run, step), 1), least_ms(partial(run, training.captured), 1))
        for _ in range(STEPS)
    ]
    ours, without = (min(column) for column in zip(*times, strict=True))
    return {**metrics, "relative_time": ours / without, "peak_over_allowed": peak_bytes / allowed}


def torch(size: Size, *, checkpoint: bool = False, share: float | None = None) -> Metrics:
    import torch._functorch.config
    from torch.utils.checkpoint import checkpoint as checkpointed

    from bench.torch_dynamic import Block
    from bench.torch_training import MixerBlock, model_of, training

    model = model_of(size)
    if checkpoint:
        for block in model.modules():
            if isinstance(block, MixerBlock | Block):
                block.forward = partial(checkpointed, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    if share is not None:
        torch._functorch.config.activation_memory_budget = share
    weights = sum(x.nbytes for x in model.parameters())
    return _of_peer(training(size, model, compiled=share is not None), size, weights)


def jax(size: Size, policy: str | None = None) -> Metrics:
    from bench.dynamic_sizes import weights_of
    from bench.jax_training import training
    from bench.mlvm_training import model_of, parameters_of
    from bench.sizes import MixerSize, TextSize

    assert isinstance(size, MixerSize | TextSize)
    if isinstance(size, TextSize):
        parameters = weights_of(size.as_transformer)
    else:
        parameters = parameters_of(model_of(size))
    weights = sum(x.nbytes for x in parameters.values())
    return _of_peer(training(size, parameters, policy=policy), size, weights)


def _of_peer(step: Callable[[], float], size: Size, weights: int) -> Metrics:
    """Return the metrics of a step, whose first call may compile it."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lasting = 2 * weights + sum(x.nbytes for x in batch_of(size))
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again: see proc(5)
    best = least_ms(step)
    return {"step_ms": best, "peak_over_import_bytes": peak() - before + lasting}


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
OURS: Final = ("mlvm", *[f"mlvm-{share}" for share in SHARES])


def _cases(name: str) -> list[str]:
    """Return the cases of a contender."""
    if name.startswith("jax") or name == "torch-checkpoint":
        return [case for case in LARGE if case != "convnet"]  # it has no blocks
    return list(LARGE)


def _in_process(*arguments: object) -> Metrics:
    command = [sys.executable, "-m", "bench.budget", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    metrics: Metrics = json.loads(done.stdout)
    return metrics


def _round(name: str, case: str) -> Metrics:
    """Measure a contender; after a peer, mlvm within the measured peak of the peer."""
    metrics = _in_process(name, case)
    if name in OURS:
        return metrics
    most = limit = metrics["peak_over_import_bytes"]
    for _ in range(_TRIES):
        within = _in_process("mlvm", case, int(limit))
        excess = within["peak_over_import_bytes"] - most
        if excess <= 0:
            break
        limit -= excess
    return {
        **metrics,
        "mlvm_within_ms": within["step_ms"],
        "mlvm_relative_time": within["step_ms"] / metrics["step_ms"],
        "mlvm_relative_peak": within["peak_over_import_bytes"] / most,
    }


def _preparing(name: str) -> Prepare:
    """Return a `prepare` of the contender's cases, with `quick` of the smallest alone."""

    def prepare(quick: bool) -> Mapping[str, Round]:
        if name in [f"torch-{share}" for share in SHARES]:
            from bench.torch_training import compiles

            if not compiles():
                say(f"budget: torch.compile finds no compiler that works, {name} is skipped")
                return {}
        cases = ["tiny"] if quick else _cases(name)
        return {case: partial(_round, name, case) for case in cases}

    return prepare


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
        "mlvm_within_ms": "ms",
        "mlvm_relative_time": "ratio",
        "mlvm_relative_peak": "ratio",
    },
    ours=OURS,
    limits={
        **{
            (case, "relative_time", f"mlvm-{share}"): limit
            for case in LARGE
            for share, limit in ((0.5, 1.35), (0.35, 1.7))
        },
        **{(case, "peak_over_allowed", name): _WIDER for case in LARGE for name in OURS},
        **{
            (case, f"mlvm_relative_{metric}", name): 1.0
            for name in MEASURES
            if name not in OURS
            for case in _cases(name)
            for metric in ("time", "peak")
        },
    },
    rounds=1,
    quick_rounds=1,
    warm_up_rounds=0,
    timeout=600.0,
)

if __name__ == "__main__":
    name, case, *limits = sys.argv[1:]
    measure = partial(mlvm, limit=int(limits[0])) if limits else MEASURES[name]
    print(json.dumps(measure(ALL[case])))
