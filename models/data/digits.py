"""UCI's handwritten digits: 1797 images of 8 x 8, shipped here; README.md has the attribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.dataset import Dataset, Distortion, scaled

FILE = Path(__file__).parent / "digits.npz"
HELD_OUT = 360


def load(seed: int = 0) -> Dataset:
    """The digits shuffled with that seed; the last 360 are the test set."""
    with np.load(FILE) as file:
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(file["labels"]))
        images = scaled(file["images"][order, :, :, None], white=16)
        labels = file["labels"][order].astype(np.int64)
    return Dataset(
        "digits",
        images[:-HELD_OUT],
        labels[:-HELD_OUT],
        images[-HELD_OUT:],
        labels[-HELD_OUT:],
        10,
        Distortion(turn=0.2, shear=0.2, scale=0.15, shift=0.5, noise=0.2),
    )
