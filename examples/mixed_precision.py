"""The same training in f32, bf16 and f16: weights stay f32, what is computed with is a half.

Micikevicius et al., Mixed Precision Training, arXiv 1710.03740: `model.astype` is a copy through
which gradients flow back to the f32 weights. bf16 has the range of f32. In f16 small gradients
would be 0, so the loss is multiplied by a factor, and an update that overflows is left out. Halves
save the memory of large activations; on a processor they take more time (docs/dtypes.md).

    python examples/mixed_precision.py
"""

from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


def train(dtype, images, labels, steps):
    """Return the model, its losses, and how many updates were left out."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, key=ml.random.key(0)),
        ml.relu,
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10, key=ml.random.key(1)),
    )
    optimizer = ml.optim.AdamW(model, 3e-3)
    scale = ml.optim.LossScale(2.0**24)  # too large: the first updates will show it

    def loss_of(model, images, labels):
        logits = model.astype(dtype)(ml.astype(images, dtype))
        logits = ml.astype(logits, ml.float32)  # the loss itself is of f32
        return scale.scale(ml.softmax_cross_entropy(logits, labels, reduction="mean"))

    @ml.capture
    def train_step(images, labels):
        scaled = ml.value_and_grad(loss_of)(model, images, labels)
        loss, gradients = scale.unscale(scaled)
        scale.update(optimizer, gradients)
        return loss

    losses = []
    with ml.Pipeline((images, labels), 64, shuffle=True, drop_last=True) as batches:
        for _ in range(steps):
            losses.append(float(train_step(*batches.get())))
    return model, losses, steps - int(optimizer.count)


def main(steps=150):
    with np.load(Path(__file__).parents[1] / "models" / "data" / "digits.npz") as file:
        images, labels = file["images"][..., None] / 16, file["labels"]
    results = {}
    for dtype in (ml.float32, ml.bfloat16, ml.float16):
        model, losses, skipped = train(dtype, images[:1437], labels[:1437], steps)
        guesses = ml.argmax(model(images[1437:]), axis=1)
        accuracy = float(ml.mean(guesses == labels[1437:]))
        print(
            f"{dtype}: loss {losses[0]:.2f} -> {np.mean(losses[-10:]):.2f}, "
            f"{accuracy:.0%} right, {skipped} updates left out"
        )
        results[str(dtype)] = losses, accuracy, skipped, model
    return results


if __name__ == "__main__":
    main()
