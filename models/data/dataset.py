"""Interface of the data sets: labelled samples for training and for tests.

Images leave every data set as f32[B,H,W,C] with values from `BLACK` to `WHITE`, symbols of texts
and trees as i64[B, ...] with values 0 .. num_symbols - 1. Labels are i64[B], or i64[B,T] where
each of T symbols has one, with values 0 .. num_classes - 1, or `NO_LABEL`.
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
"""Kind of the samples, which decides the models that a data set is for."""

BLACK, WHITE = -1.0, 1.0  # the values of a channel
NO_LABEL = -1  # label of a sample or symbol that the loss ignores


class DataError(ml.errors.MlvmError, ValueError):
    """A data set is unknown, or one of its files is missing or corrupt."""


class Examples(Protocol):
    """Samples and their labels by number: a `ml.Dataset` of two arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Indices, /) -> tuple[Array, Labels]: ...


@dataclass(frozen=True)
class DataSet:
    """Labelled samples of the same shape.

    `shape`: shape of a sample; (H, W, C) of images.
    `augment`: random changes of training samples that keep their labels valid, or None.
    `num_symbols`: number of different symbols, of samples made of symbols.
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
    """Images and their labels in two arrays of one length, or in files of arrays.

    Images [N,H,W,C] of u8 with values 0 .. white are scaled when they are read; those of f32 stay
    unchanged. Labels [N] are integers.

    Raises `DataError` for arrays of other kinds, for empty ones, and for labels out of range; a
    reader of a file adds its name.
    """

    def __init__(
        self, images: Column, labels: Column, num_classes: int, *, white: int = 255
    ) -> None:
        if len(images.shape) != 4 or images.dtype not in (np.uint8, np.float32):
            raise DataError(f"images are u8 or f32 [N,H,W,C], not {images.dtype} {images.shape}")
        if 0 in images.shape[1:]:
            raise DataError(f"images have a pixel or more, not the shape {images.shape}")
        if len(labels.shape) != 1 or labels.dtype.kind not in "iu":
            raise DataError(f"labels are integers [N], not {labels.dtype} {labels.shape}")
        self._images = images
        self._labels: Labels = np.asarray(labels[:]).astype(np.int64)
        self._white = white
        require_labels(self._labels, num_classes)
        if images.shape[0] != labels.shape[0]:
            raise DataError(f"there are {images.shape[0]} images, but {labels.shape[0]} labels")

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
    """Raise `DataError` if there is no label, or one that is not 0 .. num_classes - 1."""
    if not labels.size:
        raise DataError("it is empty")
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise DataError(
            f"label {labels[position]} at position {position} is not 0 .. {num_classes - 1}"
        )
