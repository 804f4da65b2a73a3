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

from models.data.augment import Distort
from models.data.dataset import (
    Bytes,
    DataError,
    DataSet,
    LabelledImages,
    blaming,
    corrupt,
    read_bytes,
)

HOMEPAGE = "http://yann.lecun.com/exdb/mnist/"
NUM_CLASSES = 10


def load(folder: Path) -> DataSet:
    """The data set in that folder. Raises `DataError` for a missing or corrupt file."""
    train, test = _load_part(folder, "train"), _load_part(folder, "t10k")
    if train.image_shape != test.image_shape:
        raise DataError(
            f"{folder}: the training images are {train.image_shape[:2]} pixels in size, the "
            f"test images {test.image_shape[:2]}; get both from {HOMEPAGE}"
        )
    augment = Distort(turn=0.2, shear=0.2, scale=0.15, shift=2)
    return DataSet("mnist", train, test, train.image_shape, NUM_CLASSES, augment)


def _load_part(folder: Path, part: str) -> LabelledImages:
    images = _read_idx(_find(folder, f"{part}-images-idx3-ubyte"), ndim=3)
    labels_file = _find(folder, f"{part}-labels-idx1-ubyte")
    labels = _read_idx(labels_file, ndim=1)
    with blaming(labels_file, HOMEPAGE):
        return LabelledImages(images[..., None], labels, NUM_CLASSES)


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
