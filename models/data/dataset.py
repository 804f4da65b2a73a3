"""What a data set is, and the steps that reading each of them shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlvm.eager import errors

Images = NDArray[np.float32]
Labels = NDArray[np.int64]
Bytes = NDArray[np.uint8]

BLACK, WHITE = -1.0, 1.0  # the values of a channel


class DataError(errors.MlvmError, ValueError):
    """A data set is unknown, or one of its files is missing or corrupt."""


class Distortion(NamedTuple):
    """How much an image may be distorted, either way, and still show the same thing."""

    turn: float = 0  # radians
    shear: float = 0  # columns a row
    scale: float = 0  # logarithm of the factor, for height and width each
    shift: float = 0  # pixels, downwards and to the right each
    noise: float = 0  # standard deviation of normal noise on each value


@dataclass(frozen=True)
class Dataset:
    """Labelled images, those to train on and those to test on.

    Images are f32[N,H,W,C] with values from `BLACK` to `WHITE`, labels i64[N] with values
    0 .. num_classes - 1. Training images are to be distorted at random by up to `distortion`.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    num_classes: int
    distortion: Distortion

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self.train_images.shape
        return height, width, channels


def scaled(images: Bytes, white: int) -> Images:
    """Brightness 0 .. white as f32 from `BLACK` to `WHITE`."""
    result: Images = np.multiply(images, np.float32((WHITE - BLACK) / white), dtype=np.float32)
    result += np.float32(BLACK)
    return result


def read_bytes(file: Path, homepage: str, read: Callable[[Path], bytes] = Path.read_bytes) -> Bytes:
    """The whole file. Raises `DataError`, which says where to get it, if it cannot be read."""
    try:
        return np.frombuffer(read(file), np.uint8)
    except FileNotFoundError:
        raise DataError(f"there is no {file}; get it from {homepage}") from None
    except (OSError, EOFError) as error:
        raise corrupt(file, f"it cannot be read ({error})", homepage) from None


def require_labels(labels: Bytes, num_classes: int, file: Path, homepage: str) -> None:
    """Raise `DataError` if there is no label, or one that is not 0 .. num_classes - 1."""
    if not labels.size:
        raise corrupt(file, "it is empty", homepage)
    if labels.max() >= num_classes:
        position = int(np.argmax(labels >= num_classes))
        reason = f"label {labels[position]} at position {position} is not 0 .. {num_classes - 1}"
        raise corrupt(file, reason, homepage)


def corrupt(file: Path, reason: str, homepage: str) -> DataError:
    """The error for a file that is not what it should be."""
    return DataError(f"{file} is corrupt: {reason}; get it anew from {homepage}")
