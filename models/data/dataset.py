"""What the data sets have in common: samples with labels, those to train on and those to test on.

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
"""What the samples of a data set are, and so which models it is for."""

BLACK, WHITE = -1.0, 1.0  # the values of a channel
NO_LABEL = -1  # of a sample, or a symbol of one, that counts for nothing


class DataError(ml.errors.MlvmError, ValueError):
    """A data set is unknown, or one of its files is missing or corrupt."""


class Examples(Protocol):
    """Samples and their labels by number: a `ml.Dataset` of two arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Indices, /) -> tuple[Array, Labels]: ...


@dataclass(frozen=True)
class DataSet:
    """Labelled samples of one `shape`: (H, W, C) of images. Those that are made of symbols have
    `num_symbols` different ones. `augment` changes training samples at random, as far as they
    still show the same thing; None leaves them as they are. `classes` are the classes' names, where
    the data set has them."""

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
    """What `LabelledImages` needs of an array, which may lie in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, indices: Any, /) -> NDArray[Any]: ...


class LabelledImages:
    """Images and their labels in two arrays of one length, or in files of arrays.

    Images [N,H,W,C] of u8 with values 0 .. white are scaled as they are asked for; those of
    f32 are taken as they are. Labels [N] are integers.

    Raises `DataError` for arrays of other kinds, for none, and for labels out of range; whoever
    reads a file adds its name.
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
    """Brightness 0 .. white as f32 from `BLACK` to `WHITE`."""
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
