"""Train a deep network in a process that may not allocate what its training step needs.

The limit is that of `ulimit -v`, which this program sets for itself: what the process has now, the
budget, and 64 MiB for the rest. Without `memory=` the step runs out of memory. Within the budget it
computes values again instead of saving them, and has the same losses (docs/budgets.md).

    python examples/memory_budget.py
"""

import resource
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn

BUDGET = 96 << 20
ROOM = 64 << 20  # for results, the compiled program, and Python


def address_space():
    """Return the bytes of addresses that this process has, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def train(layers, rows, steps, memory=None):
    """Return the losses of a few steps, and the bytes of the step's plan."""
    width = 256
    keys = ml.random.split(ml.random.key(0), layers)
    model = nn.Sequential(
        *[part for key in keys for part in (nn.Linear(width, width, key=key), ml.tanh)]
    )
    optimizer = ml.optim.SGD(model, 0.1)
    x = ml.asarray(np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32))

    def step(x):
        loss, gradients = ml.value_and_grad(lambda m: ml.mean(ml.square(m(x) - x)))(model)
        optimizer.update(gradients)
        return loss

    captured = ml.capture(step, memory=memory)
    losses = [float(captured(x)) for _ in range(steps)]
    return losses, captured.plan.nbytes + captured.plan.hoisted_nbytes


def main(layers=40, rows=8192, steps=3):
    """Return the losses within the budget, the plan's bytes, and whether all of them fit."""
    ml.measure(ml.tanh, ml.ones(3)).curve()  # imports and threads come before the limit
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + BUDGET + ROOM, before[1]))
    try:
        losses, nbytes = train(layers, rows, steps, memory=BUDGET)
        print(f"within {BUDGET:,} bytes: a plan of {nbytes:,}, losses {np.round(losses, 4)}")
        try:
            train(layers, rows, steps)
            fits = True
            print("without a budget: it fits, too")
        except (MemoryError, ml.errors.OutOfMemoryError) as error:
            fits = False
            print(f"without a budget: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return losses, nbytes, fits


if __name__ == "__main__":
    main()
