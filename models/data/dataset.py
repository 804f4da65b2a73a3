"""Interface of the data sets: labelled samples for training and for tests.

Every data set returns images as f32[B,H,W,C] with values from `BLACK` to `WHITE`, and symbols of
texts and trees as i64[B, ...] with values 0 .. num_symbols - 1. Labels are i64[B], or i64[B,T] with
a label for each of T symbols. A label is 0 .. num_classes - 1 or `NO_LABEL`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml

Array: TypeAlias = NDArray[Any]
Images: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]

Kind: TypeAlias = Literal["images", "text", "masked text", "sequences", "trees"]
"""Kind of samples, which determines the models that support a data set."""

BLACK, WHITE = -1.0, 1.0  # the values of a channel
NO_LABEL = -1  # label of a sample or symbol that the loss ignores


class DataError(ml.errors.MlvmError, ValueError):
    """Error for an unknown data set, or for a missing or corrupt file of a data set."""


class Examples(Protocol):
    """Samples and labels by index: an `ml.Dataset` of two arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Indices, /) -> tuple[Array, Labels]: ...


@dataclass(frozen=True)
class DataSet:
    """Labelled samples of the same shape.

    `shape`: shape of a sample; (H, W, C) for images.
    `augment`: random transform of training samples that preserves the labels, or None.
    `num_symbols`: number of different symbols, if samples consist of symbols.
    `classes`: names of the classes, or None.
    """

    name: str
    train: Examples
    test: Examples
    shape: tuple[int, ...]
    num_classes: int
    augment: ml.Transform | None = None
    kind: Kind = "images"
    num_symbols: int = 0
    classes: tuple[str, ...] | None = None


class Column(Protocol):
    """Interface of an array, in memory or in a file, for `LabelledImages`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, indices: Any, /) -> NDArray[Any]: ...


class LabelledImages:
    """Images and labels in two arrays of the same length, or in files of arrays.

    u8 images [N,H,W,C] with values 0 .. white are scaled when they are read. f32 images stay
    unchanged. Labels [N] are integers.

    Raises `DataError` for other arrays, for empty arrays, and for labels out of range. A reader of
    a file adds the file name.
    """

    def __init__(
        self, images: Column, labels: Column, num_classes: int, *, white: int = 255
    ) -> None:
        if len(images.shape) != 4 or images.dtype not in (np.uint8, np.float32):
            raise DataError(f"images must be u8 or f32[N,H,W,C], got {images.dtype} {images.shape}")
        if 0 in images.shape[1:]:
            raise DataError(f"images must have at least one pixel, got the shape {images.shape}")
        if len(labels.shape) != 1 or labels.dtype.kind not in "iu":
            raise DataError(f"labels must be integers [N], got {labels.dtype} {labels.shape}")
        self._images = images
        self._labels: Labels = np.asarray(labels[:]).astype(np.int64)
        self._white = white
        require_labels(self._labels, num_classes)
        if images.shape[0] != labels.shape[0]:
            raise DataError(f"expected {images.shape[0]} labels, got {labels.shape[0]}")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self._images.shape
        return height, width, channels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, indices: Indices) -> tuple[Images, Labels]:
        images = self._images[indices]
        if images.dtype == np.uint8:
            images = scaled(images, self._white)
        return images, self._labels[indices]


def scaled(images: Bytes, white: int = 255) -> Images:
    """Scale brightness 0 .. white to f32 from `BLACK` to `WHITE`."""
    result: Images = np.multiply(images, np.float32((WHITE - BLACK) / white), dtype=np.float32)
    result += np.float32(BLACK)
    return result


def require_labels(labels: NDArray[Any], num_classes: int) -> None:
    """Raise `DataError` for an empty array and for labels that are not 0 .. num_classes - 1."""
    if not labels.size:
        raise DataError("it is empty")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise DataError(
            f"labels must be 0 .. {num_classes - 1}, got {labels[position]} at position {position}"
        )
