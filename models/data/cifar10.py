"""CIFAR-10 (Krizhevsky, 2009), the binary version: data_batch_1.bin to _5.bin, test_batch.bin.

An image has 3073 bytes: the label, then the red, green and blue planes of 32 x 32 bytes in
row-major order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.augment import Chain, Crop, Flip
from models.data.dataset import Bytes, DataError, DataSet, LabelledImages, require_labels
from models.data.files import reading

HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html (CIFAR-10 binary version)"
NUM_CLASSES = 10
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
_SIDE, _CHANNELS = 32, 3
_RECORD = 1 + _SIDE * _SIDE * _CHANNELS


def load(folder: Path) -> DataSet:
    """Return the data set in the folder. Raises `DataError` for a missing or corrupt file."""
    train = _images(np.concatenate([_records(folder / name) for name in TRAIN_FILES]))
    test = _images(_records(folder / TEST_FILE))
    augment = Chain(Crop(padding=4), Flip())
    return DataSet("cifar10", train, test, train.image_shape, NUM_CLASSES, augment)


def _records(file: Path) -> Bytes:
    """Return the images of a file, each with a label: u8[N,3073]."""
    with reading(file, HOMEPAGE) as source:
        content = np.frombuffer(source.stream.read(), np.uint8)
        if content.size % _RECORD:
            raise DataError(
                f"expected a multiple of {_RECORD} bytes (label and image), got {content.size}"
            )
        records = content.reshape(-1, _RECORD)
        require_labels(records[:, 0], NUM_CLASSES)
    return records


def _images(records: Bytes) -> LabelledImages:
    planes = records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return LabelledImages(images, records[:, 0], NUM_CLASSES)
