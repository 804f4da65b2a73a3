"""UCI's handwritten digits: 1797 images of 8 x 8 (attribution: README.md in this folder)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.augment import Distort
from models.data.dataset import DataSet, LabelledImages

FILE = Path(__file__).parent / "digits.npz"
HELD_OUT = 360
NUM_CLASSES = 10


def load(seed: int = 0) -> DataSet:
    """Return the digits, shuffled with the seed; the last 360 are the test set."""
    with np.load(FILE) as file:
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(file["labels"]))
        images, labels = file["images"][order, :, :, None], file["labels"][order]
    train = LabelledImages(images[:-HELD_OUT], labels[:-HELD_OUT], NUM_CLASSES, white=16)
    test = LabelledImages(images[-HELD_OUT:], labels[-HELD_OUT:], NUM_CLASSES, white=16)
    augment = Distort(turn=0.2, shear=0.2, scale=0.15, shift=0.5, noise=0.2)
    return DataSet("digits", train, test, train.image_shape, NUM_CLASSES, augment)
