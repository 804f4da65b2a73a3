"""Gradients of four small batches make one update; and a training that stops goes on exactly.

All that changes is in one file: the model, the optimizer, the global keys that Dropout draws from,
and the place in the data. What goes on from it has the weights of a training that never stopped, to
the last bit.

    python examples/accumulate_and_resume.py
"""

import tempfile
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


class Training:
    """A model, what trains it, and where it is; `ml.save` and `ml.load` take `parts`."""

    def __init__(self, steps):
        with np.load(Path(__file__).parents[1] / "models" / "data" / "digits.npz") as file:
            images, labels = file["images"].reshape(-1, 64) / 16, file["labels"]
        ml.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 64),
            ml.gelu,
            nn.Dropout(0.2),
            nn.Linear(64, 10, kernel_init=nn.init.zeros),
        )
        schedule = ml.optim.cosine(3e-3, total_steps=steps // 4, warmup_steps=2)
        self.optimizer = ml.optim.MultiSteps(ml.optim.AdamW(self.model, schedule), every=4)
        self.batches = ml.Pipeline((images, labels), 32, shuffle=True, drop_last=True)
        self.losses = []

    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "keys": ml.random,
            "batches": self.batches,
            "losses": self.losses,
        }

    def run(self, steps):
        @ml.capture
        def train_step(images, labels):
            def loss_of(model):
                return ml.softmax_cross_entropy(model(images), labels, reduction="mean")

            loss, gradients = ml.value_and_grad(loss_of)(self.model)
            self.optimizer.update(gradients)  # changes weights every fourth time
            return loss

        for _ in range(steps):
            self.losses.append(float(train_step(*self.batches.get())))

    def save(self, file):
        ml.save(file, self.parts())

    def load(self, file):
        parts = self.parts()
        ml.load(file, into=parts)  # tensors and data in place
        self.losses = parts["losses"]


def main(steps=400, stop=150):
    whole = Training(steps)
    whole.run(steps)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.safetensors"
        first = Training(steps)
        first.run(stop)  # within an epoch, and between two updates
        first.save(file)
        again = Training(steps)
        again.load(file)
    again.run(steps - stop)

    print(f"loss {whole.losses[0]:.2f} -> {np.mean(whole.losses[-20:]):.2f} in {steps} steps")
    pairs = zip(whole.model.state().values(), again.model.state().values(), strict=True)
    same = all(bool(ml.all(x == y)) for x, y in pairs)
    print(f"stopped after {stop} and gone on: the same weights to the bit, {same}")
    print(f"the same losses, {whole.losses == again.losses}")
    return whole, again


if __name__ == "__main__":
    main()
