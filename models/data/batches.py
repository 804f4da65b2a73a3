"""Test samples in batches of the same size, so that no step needs new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.data.dataset import NO_LABEL, Array, Examples, Labels


def evaluation_batches(examples: Examples, batch_size: int) -> Iterator[tuple[Array, Labels]]:
    """Yield the samples in order.

    The last batch is padded with copies of the last sample, labelled `NO_LABEL`. It is not padded
    with zeros, because zeros may not be a valid sample: a traversal of a tree of zeros would not
    terminate.
    """
    for start in range(0, len(examples), batch_size):
        samples, labels = examples[np.arange(start, min(start + batch_size, len(examples)))]
        missing = batch_size - len(labels)
        if missing:
            samples = np.concatenate([samples, np.repeat(samples[-1:], missing, axis=0)])
            none = np.full((missing, *labels.shape[1:]), NO_LABEL, labels.dtype)
            labels = np.concatenate([labels, none])
        yield samples, labels
