"""Test images in batches of one size: what is alike in every step needs no new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.data.dataset import Examples, Images, Labels

NO_LABEL = -1


def evaluation_batches(examples: Examples, batch_size: int) -> Iterator[tuple[Images, Labels]]:
    """The images in order. The last batch is filled up with images labelled `NO_LABEL`."""
    for start in range(0, len(examples), batch_size):
        images, labels = examples[np.arange(start, min(start + batch_size, len(examples)))]
        missing = batch_size - len(labels)
        if missing:
            images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
            labels = np.pad(labels, (0, missing), constant_values=NO_LABEL)
        yield images, labels
