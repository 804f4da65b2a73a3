"""A Mixer for handwritten digits, as two steps in C: one that trains it, and one that classifies.

    python examples/embedded/digits.py DIR          # writes train.mlvm, classify.mlvm, and batches
    python -m mlvm build DIR/train.mlvm -o DIR/train
    make -C DIR/train
    cd DIR && train/step --weights train/weights.bin --steps 200 --out . images.npy labels.npy

The losses in DIR/0.npy are those of Python, to the bit, on the same instruction set; with
`--expected` this program trains as well, and writes what Python's were.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from models.data import digits
from models.mlp_mixer import MlpMixer

BATCH = 32
STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--expected", action="store_true", help="train in Python, too")
    options = parser.parse_args()
    folder: Path = options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))

    data = digits.load()
    order = np.random.default_rng(0).permutation(len(data.train))[: 40 * BATCH]
    images, labels = data.train[order]
    images, labels = images.astype(np.float32), labels.astype(np.int64)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)

    model = MlpMixer((8, 8, 1), 10, patch_size=2, hidden_dim=32, num_blocks=2, tokens_mlp_dim=16,
                     channels_mlp_dim=64, key=ml.random.key(0))  # fmt: skip
    optimizer = ml.optim.AdamW(model, 3e-3)

    def loss_of(model: MlpMixer, images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        return ml.softmax_cross_entropy(model(images), labels, reduction="mean")

    @ml.capture
    def train(images: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(gradients)
        return loss

    @ml.capture
    def classify(image: ml.Tensor) -> ml.Tensor:
        return ml.softmax(model(image), axis=-1)

    def batch(number: int) -> tuple[ml.Tensor, ml.Tensor]:
        at = number * BATCH % len(labels)
        return ml.asarray(images[at : at + BATCH]), ml.asarray(labels[at : at + BATCH])

    train(*batch(0))  # the call that records the step; the saved one goes on behind it
    train.save(folder / "train.mlvm")
    classify(ml.asarray(images[:1]))
    classify.save(folder / "classify.mlvm")
    if options.expected:
        losses = [train(*batch(i)).numpy() for i in range(STEPS)]
        np.save(folder / "expected.npy", np.array(losses))
        train.save(folder / "trained.mlvm")


main()
