"""Cost of an eager op and of a training step of an MLP-Mixer on a device, beside PyTorch on a GPU.

`add` is one eager `a + b` on f32[4,4]; a round launches many, and waits for the last. The other
cases are sizes of `bench.sizes`; `step_ms` is the time of one step as in `bench.mixer`, which ends
with the loss on the host. PyTorch's products are in full f32, as mlvm's are. mlvm runs on the
device that MLVM_DEVICE names, opencl:0 unless it is set; `processor` is a captured step on the
processor, with two threads. Where a package or a device is missing, a contender says so and
measures nothing.

`launch` is the host's time to enqueue one kernel. For mlvm it is a captured step of size tiny by
its kernels, with all work for the call; for `pyopencl` one kernel, enqueued repeatedly.
`device_mib` is the peak of the device's memory, and `plan_mib` the part of a captured step's plan,
one buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.dispatch import operands
from bench.harness import Contender, Round, Suite, microseconds, say
from bench.mixer import Step, mlvm_replay, preparing
from bench.sizes import MIXERS, MixerSize
from mlvm.core.errors import MlvmError

DEVICE = os.environ.get("MLVM_DEVICE", "opencl:0")


def gpu_vm() -> Any:
    """Return a VM on the device. Raises an `MlvmError` that says why there is none."""
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

    current: list[Training] = []  # that of the size that is measured

    def step_of(size: MixerSize) -> Step:
        current[:] = [Training(size, gpu_vm())]
        return current[0].replay if captured else current[0].eager

    def of_size(timed: Round) -> Mapping[str, float]:
        times = timed()
        [training] = current
        memory: Any = training.vm.memory
        metrics = {**times, "device_mib": memory.peak / 2**20}
        return (
            {**metrics, "plan_mib": training.captured.plan.nbytes / 2**20} if captured else metrics
        )

    rounds: dict[str, Round] = {
        case: partial(of_size, timed) for case, timed in preparing(step_of)(quick).items()
    }
    if captured:
        rounds["launch"] = launches(Training(MIXERS["tiny"], vm))
    if not captured:
        arena = ml.Arena(vm, "add")
        with arena.allocating():
            a, b = map(ml.asarray, operands())

        def add() -> None:
            with arena.allocating():
                a + b

        rounds["add"] = added(add, vm.synchronize, quick)
    return rounds


def launches(training: Any) -> Round:
    """Time of one kernel of a step, till it is enqueued."""
    images, labels, counts = training.images, training.labels, training.vm.counts

    def round() -> Mapping[str, float]:
        training.replay()
        before, start = counts.launches, time.thread_time()
        with training.batch:
            training.captured(images, labels)
        elapsed = time.thread_time() - start
        training.vm.synchronize()
        return {"us_per_launch": 1e6 * elapsed / (counts.launches - before)}

    return round


def prepare_pyopencl(quick: bool) -> Mapping[str, Round]:
    """Time how long pyopencl takes to enqueue an empty kernel."""
    from mlvm.machines.gpu.opencl import opencl_module

    try:
        driver = gpu_vm().memory.driver
    except MlvmError as error:
        say(f"gpu: there is no device, skipped: {error}")
        return {}
    if not DEVICE.startswith("opencl"):
        return {}
    cl, queue, context = opencl_module(), driver._queue, driver._context
    kernel = cl.Kernel(cl.Program(context, "__kernel void nothing(void) {}").build(), "nothing")
    enqueue = partial(cl.enqueue_nd_range_kernel, queue, kernel, (64,), (64,))
    times = 100 if quick else 300

    def round() -> Mapping[str, float]:
        queue.finish()
        start = time.thread_time()
        for _ in range(times):
            enqueue()
        elapsed = time.thread_time() - start
        queue.finish()
        return {"us_per_launch": 1e6 * elapsed / times}

    return {"launch": round}


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
        Contender("processor", "mlvm", preparing(partial(mlvm_replay, threads=2))),
        Contender("pyopencl", "pyopencl", prepare_pyopencl),
        Contender("torch-eager", "torch", partial(prepare_torch, compiled=False)),
        Contender("torch-compile", "torch", partial(prepare_torch, compiled=True)),
    ),
    units={
        "us_per_op": "us",
        "us_per_launch": "us",
        "step_ms": "ms",
        "device_mib": "MiB",
        "plan_mib": "MiB",
    },
    ours=("mlvm-eager", "mlvm-replay"),
    limits={("launch", "us_per_launch", "mlvm-replay"): 5.0},
    rounds=11,
    timeout=600,
)
