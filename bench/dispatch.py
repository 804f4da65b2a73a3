"""Cost of one eager op: `a + b` on f32[4,4], with and without its gradient.

`add` is one eager `a + b`. For mlvm there are also the kernel alone as Python calls it
(`kernel_us`), and a launch of the program of one addition (`launch_us`), which eager calls of a
native VM avoid. `add_taped` is an add while a tape records it. `add_backward` is a chain of adds to
a tensor that needs a gradient, then a sum and the gradient, divided by the length of the chain.
`add_captured` is one add of a chain of 1000 adds, which mlvm has captured and launches as one
program. The others run the chain eagerly. A round ends when its results are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.harness import Contender, Round, Suite, microseconds

CHAIN = 100
CAPTURED = 1000


def prepare_numpy(quick: bool) -> Mapping[str, Round]:
    a, b = operands()
    return {
        "add": add_round(a, b, quick),
        "add_captured": captured_round(lambda: chain(a, b, CAPTURED), quick),
    }


def prepare_torch(quick: bool) -> Mapping[str, Round]:
    import torch

    a, b = map(torch.from_numpy, operands())
    leaf = a.clone().requires_grad_()
    return {
        "add": add_round(a, b, quick),
        "add_backward": backward_round(
            lambda: torch.autograd.grad(chain(leaf, b).sum(), leaf), quick
        ),
        "add_captured": captured_round(lambda: chain(a, b, CAPTURED), quick),
    }


def prepare_jax(quick: bool) -> Mapping[str, Round]:
    import jax

    a, b = map(jax.numpy.asarray, operands())
    gradient = jax.grad(lambda x: chain(x, b).sum())
    return {
        "add": add_round(a, b, quick, wait=jax.block_until_ready),
        "add_backward": backward_round(lambda: jax.block_until_ready(gradient(a)), quick),
        "add_captured": captured_round(lambda: jax.block_until_ready(chain(a, b, CAPTURED)), quick),
    }


def prepare_mlvm(quick: bool) -> Mapping[str, Round]:
    import mlvm.eager as ml
    from mlvm.core.program.program import Program
    from mlvm.core.types import TensorType

    x, y = operands()
    a, b = ml.asarray(x), ml.asarray(y)
    gradient = ml.grad(lambda x: ml.sum(chain(x, b)))
    captured = ml.capture(lambda x, b: chain(x, b, CAPTURED))
    eager_round = add_round(a, b, quick)

    vm = ml.VM()
    program = Program.of_op("add.out", 3, {}, 0)
    handles = tuple(vm.alloc_tensor(TensorType.of(x)) for _ in range(3))
    arrays = [vm.borrow(handle) for handle in handles]
    kernel = kernel_of_add(arrays)

    def run_kernel(times: int) -> None:
        for _ in range(times):
            kernel()

    def launch(times: int) -> None:
        for _ in range(times):
            vm.launch(program, handles)

    def split_round() -> dict[str, float]:
        whole = eager_round()["us_per_op"]
        times = adds(quick)
        machine = microseconds(lambda: launch(times)) / times
        bare = microseconds(lambda: run_kernel(times)) / times
        return {
            "us_per_op": whole,
            "kernel_us": bare,
            "launch_us": machine,
        }

    def taped_round() -> dict[str, float]:
        elapsed = 0.0

        def timed(x: Any) -> Any:
            nonlocal elapsed
            start = time.perf_counter()
            end_of_chain = chain(x, b)
            elapsed += time.perf_counter() - start
            return ml.sum(end_of_chain)

        for _ in range(chains(quick)):
            ml.grad(timed)(a)
        return {"us_per_op": elapsed * 1e6 / (chains(quick) * CHAIN)}

    return {
        "add": split_round,
        "add_taped": taped_round,
        "add_backward": backward_round(lambda: gradient(a), quick),
        "add_captured": captured_round(lambda: captured(a, b), quick),
    }


def kernel_of_add(arrays: Sequence[Any]) -> Callable[[], object]:
    """Return the kernel that a VM runs, called on these arrays: that in C, or else numpy's."""
    from mlvm.core.op import OPS
    from mlvm.core.types import TensorType
    from mlvm.machines.native import extension
    from mlvm.machines.native.planner import PLANNERS

    types = [TensorType.of(x) for x in arrays]
    call = PLANNERS["add"](types, {}) if extension.EXTENSION is not None else None
    if call is None:
        return partial(OPS["add"].kernel, *arrays)
    return partial(call.run, extension.pool(1, pinned=False), *arrays)


def operands() -> tuple[Any, Any]:
    """Return two arrays of type f32[4,4]."""
    x, y = np.random.default_rng(0).standard_normal((2, 4, 4), dtype=np.float32)
    return x, y


def adds(quick: bool) -> int:
    """Return the number of adds in a round."""
    return 200 if quick else 5000


def chains(quick: bool) -> int:
    """Return the number of chains in a round."""
    return 1 if quick else 10


def chain(x: Any, b: Any, length: int = CHAIN) -> Any:
    """Return x + b + b + ..., an add after the other."""
    for _ in range(length):
        x = x + b
    return x


def add_round(a: Any, b: Any, quick: bool, wait: Callable[[Any], object] | None = None) -> Round:
    """Time repeated `a + b`, including the wait for the last result."""

    def work() -> None:
        for _ in range(adds(quick)):
            c = a + b
        if wait is not None:
            wait(c)

    return lambda: {"us_per_op": microseconds(work) / adds(quick)}


def backward_round(gradient: Callable[[], object], quick: bool) -> Round:
    """Time the gradient of a chain, for each op of the chain."""

    def work() -> None:
        for _ in range(chains(quick)):
            gradient()

    return lambda: {"us_per_op": microseconds(work) / (chains(quick) * CHAIN)}


def captured_round(run: Callable[[], object], quick: bool) -> Round:
    """Time a chain of `CAPTURED` adds, for each of them."""
    run()  # the first run may prepare later ones

    def work() -> None:
        for _ in range(chains(quick)):
            run()

    return lambda: {"us_per_op": microseconds(work) / (chains(quick) * CAPTURED)}


SUITE = Suite(
    module="bench.dispatch",
    contenders=(
        Contender("numpy", "numpy", prepare_numpy),
        Contender("mlvm", "mlvm", prepare_mlvm),
        Contender("torch", "torch", prepare_torch),
        Contender("jax", "jax", prepare_jax),
    ),
    units={"us_per_op": "us", "kernel_us": "us", "launch_us": "us"},
    targets={
        ("add", "us_per_op", "mlvm", "torch"): 1.0,
        ("add_backward", "us_per_op", "mlvm", "torch"): 1.3,
    },
    limits={("add_captured", "us_per_op", "mlvm"): 0.05},
)
