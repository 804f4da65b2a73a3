"""MNIST (LeCun, Cortes, Burges), or any data set of ten classes in the same file format.

The four files may be compressed: train-images-idx3-ubyte, train-labels-idx1-ubyte,
t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. An IDX file consists of a magic number with the
number of dimensions in the last byte, the dimensions as big-endian u32, and the elements as u8.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from models.data.augment import Distort
from models.data.dataset import Bytes, DataError, DataSet, LabelledImages
from models.data.files import Source, reading

HOMEPAGE = "http://yann.lecun.com/exdb/mnist/"
NUM_CLASSES = 10


def load(folder: Path) -> DataSet:
    """Return the data set in the folder. Raises `DataError` for a missing or corrupt file."""
    train, test = _load_part(folder, "train"), _load_part(folder, "t10k")
    if train.image_shape != test.image_shape:
        raise DataError(
            f"{folder}: training and test images must have the same size, got "
            f"{train.image_shape[:2]} and {test.image_shape[:2]}; get both from {HOMEPAGE}"
        )
    augment = Distort(turn=0.2, shear=0.2, scale=0.15, shift=2)
    return DataSet("mnist", train, test, train.image_shape, NUM_CLASSES, augment)


def _load_part(folder: Path, part: str) -> LabelledImages:
    with reading(_find(folder, f"{part}-images-idx3-ubyte"), HOMEPAGE) as source:
        images = _idx(source, ndim=3)
    with reading(_find(folder, f"{part}-labels-idx1-ubyte"), HOMEPAGE) as source:
        return LabelledImages(images[..., None], _idx(source, ndim=1), NUM_CLASSES)


def _find(folder: Path, name: str) -> Path:
    """Return the path of the file, or the compressed file if only that exists."""
    plain, compressed = folder / name, folder / f"{name}.gz"
    return compressed if compressed.exists() and not plain.exists() else plain


def _idx(source: Source, ndim: int) -> Bytes:
    """Read the u8 array of an IDX file with `ndim` dimensions. Raises `DataError`."""
    magic, size = bytes([0, 0, 8, ndim]), 4 + 4 * ndim
    header = source.stream.read(size)
    if header[:4] != magic or len(header) < size:
        raise DataError(f"it starts with {header[:4].hex()}, expected {magic.hex()}")
    shape = [int.from_bytes(header[at : at + 4], "big") for at in range(4, size, 4)]
    count = math.prod(shape)
    if count > source.most:
        raise DataError(f"the header announces {count} bytes, the limit is {source.most}")
    content = source.stream.read(count + 1)  # read to the end, where gzip checks the CRC
    if len(content) != count:
        least = "at least " if len(content) > count else ""
        raise DataError(f"{least}{len(content)} bytes follow the header, expected {count}")
    return np.frombuffer(content, np.uint8).reshape(shape)
