"""Test samples in batches of the same size, so that no step needs new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.data.dataset import NO_LABEL, Array, Examples, Labels


def evaluation_batches(examples: Examples, batch_size: int) -> Iterator[tuple[Array, Labels]]:
    """Yield the samples in order.

    The last batch is filled up with its last sample, labelled `NO_LABEL`: zeros need not be a
    sample, as a tree of zeros would never end.
    """
    for start in range(0, len(examples), batch_size):
        samples, labels = examples[np.arange(start, min(start + batch_size, len(examples)))]
        missing = batch_size - len(labels)
        if missing:
            samples = np.concatenate([samples, np.repeat(samples[-1:], missing, axis=0)])
            none = np.full((missing, *labels.shape[1:]), NO_LABEL, labels.dtype)
            labels = np.concatenate([labels, none])
        yield samples, labels
