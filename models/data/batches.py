"""Batches of a data set, all of one size: what is alike in every step needs no new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from models.data.dataset import BLACK, Dataset, Images, Labels

NO_LABEL = -1


def training_batches(
    dataset: Dataset, batch_size: int, random: np.random.Generator
) -> Iterator[tuple[Images, Labels]]:
    """The training images in a random order, each moved and blurred by noise as the data set
    says. What is left over after the last whole batch is dropped."""
    order = random.permutation(len(dataset.train_labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        images = dataset.train_images[chosen]
        if dataset.max_shift:
            by = random.uniform(-dataset.max_shift, dataset.max_shift, (batch_size, 2))
            images = shifted(images, by)
        if dataset.noise:
            images += np.float32(dataset.noise) * random.standard_normal(images.shape, np.float32)
        yield images, dataset.train_labels[chosen]


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[tuple[Images, Labels]]:
    """The test images in order. The last batch is filled up with images labelled `NO_LABEL`."""
    for start in range(0, len(dataset.test_labels), batch_size):
        images = dataset.test_images[start : start + batch_size]
        labels = dataset.test_labels[start : start + batch_size]
        missing = batch_size - len(labels)
        if missing:
            images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
            labels = np.pad(labels, (0, missing), constant_values=NO_LABEL)
        yield images, labels


def shifted(images: Images, by: NDArray[np.float64]) -> Images:
    """Each image moved by[n] = (down, right) pixels, interpolated linearly; black moves in."""
    for axis in (1, 2):
        whole = np.floor(by[:, axis - 1]).astype(np.int64)
        share = (by[:, axis - 1] - whole).astype(np.float32)[:, None, None, None]
        images = (
            _rolled(images, whole, axis) * (1 - share) + _rolled(images, whole + 1, axis) * share
        )
    return images


def _rolled(images: Images, by: NDArray[np.int64], axis: int) -> Images:
    """Image n moved by[n] whole pixels along the axis."""
    length = images.shape[axis]
    source = np.arange(length) - by[:, None]  # [N, length]
    inside = (source >= 0) & (source < length)
    shape = [len(images), 1, 1, 1]
    shape[axis] = length
    taken = np.take_along_axis(images, np.clip(source, 0, length - 1).reshape(shape), axis)
    return np.where(inside.reshape(shape), taken, np.float32(BLACK))
