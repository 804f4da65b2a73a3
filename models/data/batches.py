"""Test samples in batches of one size: what is alike in every step needs no new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.data.dataset import NO_LABEL, Array, Examples, Labels


def evaluation_batches(examples: Examples, batch_size: int) -> Iterator[tuple[Array, Labels]]:
    """The samples in order. The last batch is filled up with zeros labelled `NO_LABEL`."""
    for start in range(0, len(examples), batch_size):
        samples, labels = examples[np.arange(start, min(start + batch_size, len(examples)))]
        missing = batch_size - len(labels)
        if missing:
            samples = _lengthened(samples, missing, 0)
            labels = _lengthened(labels, missing, NO_LABEL)
        yield samples, labels


def _lengthened(rows: Array, missing: int, value: int) -> Array:
    """The rows, and so many more, full of the value."""
    return np.pad(rows, ((0, missing), *[(0, 0)] * (rows.ndim - 1)), constant_values=value)
