"""MNIST (LeCun, Cortes, Burges), or any data set of ten classes in its files' format.

The four files may be compressed: train-images-idx3-ubyte, train-labels-idx1-ubyte,
t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. An IDX file is a magic number, of which the last
byte counts the dimensions, the dimensions as big-endian u32, and the elements as u8.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from models.data.dataset import (
    Bytes,
    DataError,
    Dataset,
    Distortion,
    Images,
    Labels,
    corrupt,
    read_bytes,
    require_labels,
    scaled,
)

HOMEPAGE = "http://yann.lecun.com/exdb/mnist/"
NUM_CLASSES = 10


def load(folder: Path) -> Dataset:
    """The data set in that folder. Raises `DataError` for a missing or corrupt file."""
    train_images, train_labels = _load_part(folder, "train")
    test_images, test_labels = _load_part(folder, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{folder}: the training images are {train_images.shape[1:3]} pixels in size, the "
            f"test images {test_images.shape[1:3]}; get both from {HOMEPAGE}"
        )
    distortion = Distortion(turn=0.2, shear=0.2, scale=0.15, shift=2)
    return Dataset(
        "mnist", train_images, train_labels, test_images, test_labels, NUM_CLASSES, distortion
    )


def _load_part(folder: Path, part: str) -> tuple[Images, Labels]:
    images_file = _find(folder, f"{part}-images-idx3-ubyte")
    labels_file = _find(folder, f"{part}-labels-idx1-ubyte")
    images = _read_idx(images_file, ndim=3)
    labels = _read_idx(labels_file, ndim=1)
    require_labels(labels, NUM_CLASSES, labels_file, HOMEPAGE)
    if len(images) != len(labels):
        reason = f"it has {len(images)} images, but {labels_file.name} {len(labels)} labels"
        raise corrupt(images_file, reason, HOMEPAGE)
    return scaled(images[..., None], white=255), labels.astype(np.int64)


def _find(folder: Path, name: str) -> Path:
    """The file of that name, or else the compressed one if there is one."""
    plain, compressed = folder / name, folder / f"{name}.gz"
    return compressed if compressed.exists() and not plain.exists() else plain


def _read_idx(file: Path, ndim: int) -> Bytes:
    """The array in an IDX file of u8 with that many dimensions."""
    content = read_bytes(file, HOMEPAGE, _decompressed if file.suffix == ".gz" else Path.read_bytes)
    magic, header = bytes([0, 0, 8, ndim]), 4 + 4 * ndim
    if content[:4].tobytes() != magic or content.size < header:
        reason = f"it starts with {content[:4].tobytes().hex()}, not with {magic.hex()}"
        raise corrupt(file, reason, HOMEPAGE)
    shape = tuple(map(int, content[4:header].view(">u4")))
    if content.size - header != math.prod(shape):
        reason = f"{content.size - header} bytes follow its header, not {math.prod(shape)}"
        raise corrupt(file, reason, HOMEPAGE)
    return content[header:].reshape(shape)


def _decompressed(file: Path) -> bytes:
    try:
        with gzip.open(file) as stream:
            return stream.read()
    except zlib.error as error:
        raise OSError(error) from None
