"""CIFAR-10 (Krizhevsky, 2009), the binary version: data_batch_1.bin to _5.bin, test_batch.bin.

An image is 3073 bytes: its label, then 32 x 32 of red, of green and of blue, row by row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.dataset import (
    Dataset,
    Distortion,
    Images,
    Labels,
    corrupt,
    read_bytes,
    require_labels,
    scaled,
)

HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html (CIFAR-10 binary version)"
NUM_CLASSES = 10
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
_SIDE, _CHANNELS = 32, 3
_RECORD = 1 + _SIDE * _SIDE * _CHANNELS


def load(folder: Path) -> Dataset:
    """The data set in that folder. Raises `DataError` for a missing or corrupt file."""
    parts = [_read(folder / name) for name in TRAIN_FILES]
    test_images, test_labels = _read(folder / TEST_FILE)
    return Dataset(
        "cifar10",
        np.concatenate([images for images, _ in parts]),
        np.concatenate([labels for _, labels in parts]),
        test_images,
        test_labels,
        NUM_CLASSES,
        Distortion(shift=4),
    )


def _read(file: Path) -> tuple[Images, Labels]:
    content = read_bytes(file, HOMEPAGE)
    if content.size % _RECORD:
        reason = f"its {content.size} bytes are no multiple of {_RECORD}, an image and its label"
        raise corrupt(file, reason, HOMEPAGE)
    records = content.reshape(-1, _RECORD)
    labels, planes = records[:, 0], records[:, 1:]
    require_labels(labels, NUM_CLASSES, file, HOMEPAGE)
    images = planes.reshape(-1, _CHANNELS, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(scaled(images, white=255)), labels.astype(np.int64)
