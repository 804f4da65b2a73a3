"""Members that are actors of Ray share each batch: data parallelism on the hosts of a cluster.

Moritz et al., Ray: A Distributed Framework for Emerging AI Applications, arXiv 1712.05889. Each
actor has its own VM, on the host that Ray chooses. Their gradients meet by TCP, and with
the same number of members the bits are those of threads.

    pip install "mlvm[ray]"
    python examples/ray_actors.py
"""

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


def make_step(vm):
    """Return a model and its step, made in each actor."""
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        model = nn.Linear(8, 1, key=ml.random.key(0))
        optimizer = ml.optim.AdamW(model, 3e-2)

    @ml.parallel.value_and_grad  # in here, since a script's functions go to actors by value
    def loss_and_gradients(model, x, y):
        return ml.mean(ml.square(model(x) - y))

    def step(x, y):
        with batch:
            loss, gradients = loss_and_gradients(model, ml.asarray(x), ml.asarray(y))
            optimizer.update(gradients)
            return float(loss)

    return step


def losses(group, steps):
    """Return the loss before each step of training by the members of the group."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8), np.float32)
    y = x @ rng.standard_normal((8, 1), np.float32)
    step = ml.parallel.data_parallel(make_step, group)
    return [step(x, y) for _ in range(steps)]


def main(steps=40, actors="ray:2", threads="threads:2"):
    """Train on actors and on threads, and return the losses of both."""
    results = []
    for name in (actors, threads):
        with ml.parallel.group(name, timeout=60) as group:
            results.append(losses(group, steps))
    there, here = results
    print(f"loss {there[0]:.3f} before the first step, {there[-1]:.3f} before the last")
    print("the bits of threads" if there == here else "other bits than those of threads")
    return there, here


if __name__ == "__main__":
    main()
