"""Two processes share each batch: one model in both, and its gradients meet in the backward pass.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv
2006.15704. Each process has its rows of a batch and its own VM. All parts are of equal size,
so a step is that of one process with the whole batch, but for rounding.

    pip install "mlvm[processes]"
    python examples/two_processes.py
"""

from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


@ml.parallel.value_and_grad  # gradients are the mean of those of all members
def loss_and_gradients(model, images, labels):
    return ml.softmax_cross_entropy(model(images), labels, reduction="mean")


def make_step(vm):
    """Return a model and its step, made in each process. A function that goes there is a file's
    own."""
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        first = nn.Linear(64, 64, key=ml.random.key(0))  # the same key, so the same weights
        last = nn.Linear(64, 10, key=ml.random.key(1))
        model = nn.Sequential(first, ml.gelu, last)
        optimizer = ml.optim.AdamW(model, 3e-3)

    @ml.capture
    def train_step(images, labels):
        loss, gradients = loss_and_gradients(model, images, labels)
        optimizer.update(gradients)
        return loss

    def step(images, labels):
        with batch:  # what the step makes ends here
            loss = train_step(images, labels)
            ml.parallel.all_reduce(loss, "mean")
            return float(loss)

    return step


def train(group, steps):
    """Return the losses of training with the members of a group."""
    with np.load(Path(__file__).parents[1] / "models" / "data" / "digits.npz") as file:
        images, labels = (file["images"].reshape(-1, 64) / 16).astype(np.float32), file["labels"]
    rng = np.random.default_rng(0)
    losses = []
    with group:
        step = ml.parallel.data_parallel(make_step, group)
        for _ in range(steps):
            rows = rng.integers(0, len(images), 128)
            losses.append(step(images[rows], labels[rows]))
    return losses


def main(steps=100):
    one = train(ml.parallel.Group(1), steps)  # a member in this process
    two = train(ml.parallel.ProcessGroup(2), steps)
    print("step   one process   two processes")
    for i in range(0, steps, max(1, steps // 5)):
        print(f"{i:4}   {one[i]:11.5f}   {two[i]:13.5f}")
    return one, two


if __name__ == "__main__":  # the other processes import this file, and must not begin anew
    main()
