"""LoRA: a transformer that reads digits learns rotated digits, by 3 % of its weights.

Hu et al., Low-Rank Adaptation of Large Language Models, arXiv 2106.09685. The model is frozen, and
beside the queries and values of its attention stand two thin matrices that learn. They alone are
saved; added to the kernels they cost nothing.

    python examples/lora.py
"""

import tempfile
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn


class Reader(nn.Module):
    """Images f[batch, 8, 8] -> logits f[batch, 10]: a row of an image is a word."""

    def __init__(self, width=64, num_layers=2):
        self.stem = nn.Linear(8, width)
        self.rows = ml.random.normal((8, width)) * 0.02
        self.layers = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, pre_norm=True)
            for _ in range(num_layers)
        ]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def __call__(self, images):
        x = self.stem(images) + self.rows
        for layer in self.layers:
            x = layer(x)
        return self.head(ml.mean(self.norm(x), axis=1))


class LoRA(nn.Module):
    """A linear map, and beside it another of low rank, which is 0 at first."""

    def __init__(self, linear, rank=4, scale=2.0):
        inputs, outputs = linear.kernel.shape
        self.linear, self.scale = linear, scale
        self.down = ml.random.normal((inputs, rank)) / inputs**0.5
        self.up = ml.zeros((rank, outputs))

    def __call__(self, x):
        return self.linear(x) + self.scale * (x @ self.down @ self.up)

    def merged(self):
        """Return the linear map that both are together."""
        self.linear.kernel += self.scale * (self.down @ self.up)
        return self.linear


def replace(model, by):
    """Put `by(projection)` for each projection to queries and values."""
    for layer in model.layers:
        layer.attention.query = by(layer.attention.query)
        layer.attention.value = by(layer.attention.value)


def loss_of(model, images, labels):
    return ml.softmax_cross_entropy(model(images), labels, reduction="mean")


def train(model, images, labels, steps, rate):
    optimizer = ml.optim.AdamW(model, ml.optim.cosine(rate, total_steps=steps))

    @ml.capture
    def train_step(images, labels):
        loss, gradients = ml.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(gradients)
        return loss

    batches = ml.Pipeline((images, labels), 64, shuffle=True, drop_last=True)
    for _ in range(steps):
        train_step(*batches.get())


def main(steps=400):
    ml.random.seed(0)
    with np.load(Path(__file__).parents[1] / "models" / "data" / "digits.npz") as file:
        images, labels = file["images"] / 16, file["labels"]
    rotated = np.rot90(images, axes=(1, 2))
    train_rows, test_rows = slice(0, 1437), slice(1437, None)

    def accuracy(images):
        right = ml.argmax(model(images[test_rows]), axis=1) == labels[test_rows]
        return float(ml.mean(right))

    model = Reader()
    train(model, images[train_rows], labels[train_rows], steps, 3e-3)
    before = accuracy(images), accuracy(rotated)
    print(f"trained: {before[0]:.0%} of digits right, {before[1]:.0%} of those that lie")
    parameters = model.num_parameters()
    replace(model.freeze(), LoRA)
    train(model, rotated[train_rows], labels[train_rows], steps, 2e-2)
    after = accuracy(rotated)
    adapted = f"{model.num_parameters():,} numbers beside {parameters:,}"
    print(f"adapted by {adapted}: {after:.0%} of those that lie")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rotated.safetensors"
        ml.save(file, model, where=lambda path, x: path.endswith(("/down", "/up")))
        print(f"{len(ml.load(file))} tensors saved, {file.stat().st_size:,} bytes")
    logits = model(rotated[test_rows])
    replace(model, LoRA.merged)
    difference = float(ml.max(ml.abs(model(rotated[test_rows]) - logits)))
    print(f"merged, the logits differ by {difference:.0e}")
    return before, after, difference


if __name__ == "__main__":
    main()
