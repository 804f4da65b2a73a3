"""What one eager op and a training step of an MLP-Mixer cost on a device, beside PyTorch on a GPU.

`add` is one eager `a + b` on f32[4,4]; a round launches many, and waits for the last. The other
cases are sizes of `bench.sizes`; `step_ms` is the time of one step as in `bench.mixer`, which ends
with the loss on the host. PyTorch's products are in full f32, as mlvm's are. mlvm runs on the
device that MLVM_DEVICE names, opencl:0 unless it is set. Where a package or a device is missing, a
contender says so and measures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.dispatch import operands
from bench.harness import Contender, Round, Suite, microseconds, say
from bench.mixer import Step, preparing
from bench.sizes import MixerSize

DEVICE = os.environ.get("MLVM_DEVICE", "opencl:0")


def gpu_vm() -> Any:
    """A VM on the device. Raises an `MlvmError` that says why there is none."""
    import mlvm.eager as ml

    return ml.VM("bench", device=DEVICE)


def added(add: Callable[[], object], wait: Callable[[], object], quick: bool) -> Round:
    """Time of one `add`, of many in a row."""
    times = 100 if quick else 10_000

    def work() -> None:
        for _ in range(times):
            add()
        wait()

    return lambda: {"us_per_op": microseconds(work) / times}


def prepare_mlvm(quick: bool, *, captured: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml
    from bench.mlvm_training import Training

    try:
        vm = gpu_vm()
    except ml.errors.MlvmError as error:
        say(f"gpu: mlvm has no device, skipped: {error}")
        return {}

    def step_of(size: MixerSize) -> Step:
        training = Training(size, gpu_vm())
        return training.replay if captured else training.eager

    rounds = dict(preparing(step_of)(quick))
    if not captured:
        arena = ml.Arena(vm, "add")
        with arena.allocating():
            a, b = map(ml.asarray, operands())

        def add() -> None:
            with arena.allocating():
                a + b

        rounds["add"] = added(add, vm.synchronize, quick)
    return rounds


def prepare_torch(quick: bool, *, compiled: bool) -> Mapping[str, Round]:
    import torch

    from bench.torch_training import compiles, model_of, training

    if not torch.cuda.is_available():
        say("gpu: torch has no GPU, skipped")
        return {}
    if compiled and not compiles():
        say("gpu: torch.compile finds no compiler that works, skipped")
        return {}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rounds = dict(
        preparing(lambda size: training(size, model_of(size), compiled=compiled, device="cuda"))(
            quick
        )
    )
    if not compiled:
        a, b = (torch.from_numpy(x).to("cuda") for x in operands())
        rounds["add"] = added(lambda: a + b, torch.cuda.synchronize, quick)
    return rounds


SUITE = Suite(
    module="bench.gpu",
    contenders=(
        Contender("mlvm-eager", "mlvm", partial(prepare_mlvm, captured=False)),
        Contender("mlvm-replay", "mlvm", partial(prepare_mlvm, captured=True)),
        Contender("torch-eager", "torch", partial(prepare_torch, compiled=False)),
        Contender("torch-compile", "torch", partial(prepare_torch, compiled=True)),
    ),
    units={"us_per_op": "us", "step_ms": "ms"},
    ours=("mlvm-eager", "mlvm-replay"),
    rounds=11,
    timeout=600,
)
