"""Random augmentation of training images, for `ml.Pipeline(transform=...)`.

Each transform receives the arrays of a batch, with images f32[B,H,W,C] first, and random numbers
for each sample, and returns new arrays. The result for an image depends only on the random numbers
of this sample. `Mixup` also uses the next image of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from models.data.dataset import BLACK, DataError, Images

Arrays: TypeAlias = tuple[NDArray[Any], ...]
Doubles: TypeAlias = NDArray[np.float64]


class Chain:
    """Transforms applied in order."""

    def __init__(self, *transforms: ml.Transform) -> None:
        self.transforms = transforms

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        for transform in self.transforms:
            arrays = transform(arrays, random)
        return arrays


@dataclass(frozen=True)
class Flip:
    """Horizontal flip with a given probability."""

    probability: float = 0.5

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        images, *rest = arrays
        flipped = random.uniform() < self.probability
        images = np.where(flipped[:, None, None, None], images[:, :, ::-1], images)
        return (images, *rest)


@dataclass(frozen=True)
class Crop:
    """Random crop to the image size, after padding each side with `padding` black pixels.

    Raises `DataError` for a negative padding.
    """

    padding: int

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise DataError(f"padding must be a number of pixels >= 0, got {self.padding}")

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        images, *rest = arrays
        n, height, width, _ = images.shape
        border = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), border, border, (0, 0)), constant_values=BLACK)
        top, left = random.integers(0, 2 * self.padding + 1, (2,)).T
        rows = top[:, None] + np.arange(height)
        columns = left[:, None] + np.arange(width)
        cropped = padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return (cropped, *rest)


class Normalise:
    """(image - mean) / std, with a value for each channel. Raises `DataError` unless std > 0."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = np.array(mean, np.float32), np.array(std, np.float32)
        if not (self.std > 0).all():
            raise DataError(f"a standard deviation must be positive, got {std}")

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        images, *rest = arrays
        return ((images - self.mean) / self.std, *rest)


@dataclass(frozen=True)
class Mixup:
    """Mixup of each image with the next image of the batch (Zhang et al., arXiv 1710.09412).

    The image has the weight lambda, drawn from Beta(alpha, alpha), and the next image has the
    weight 1 - lambda. Labels are mixed in the same way and become f32[B,num_classes].

    Raises `DataError` unless 0 < alpha <= 1.
    """

    alpha: float
    num_classes: int

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise DataError(f"alpha must be above 0 and at most 1, got {self.alpha}")

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        images, labels = arrays
        share = random.beta(self.alpha, self.alpha).astype(np.float32)
        hot = np.eye(self.num_classes, dtype=np.float32)[labels]
        return _mixed(images, share[:, None, None, None]), _mixed(hot, share[:, None])


def _mixed(x: NDArray[np.float32], share: NDArray[np.float32]) -> NDArray[np.float32]:
    return share * x + (1 - share) * np.roll(x, -1, axis=0)


@dataclass(frozen=True)
class Distort:
    """Rotate, shear, scale and shift the image randomly, and add noise."""

    turn: float = 0  # radians
    shear: float = 0  # columns per row
    scale: float = 0  # logarithm of the factor, for height and width each
    shift: float = 0  # pixels, for each axis
    noise: float = 0  # standard deviation of the noise on each value

    def __call__(self, arrays: Arrays, random: ml.SampleRandom) -> Arrays:
        images, *rest = arrays
        images = looked_up(images, *self.draw(random))
        if self.noise:
            images += np.float32(self.noise) * random.normal(images.shape[1:])
        return (images, *rest)

    def draw(self, random: ml.SampleRandom) -> tuple[Doubles, Doubles]:
        """Return a distortion for each image: the matrices and shifts for `looked_up`."""
        turn, shear, down, right, high, wide = random.uniform(-1, 1, (6,)).T * np.array(
            [[self.turn], [self.shear], [self.shift], [self.shift], [self.scale], [self.scale]]
        )
        height, width = np.exp(high), np.exp(wide)
        matrices = np.array(
            [
                [np.cos(turn) * height, np.sin(turn) * width],
                [shear - np.sin(turn) * height, np.cos(turn) * width],
            ]
        )
        return matrices.transpose(2, 0, 1), np.stack([down, right], axis=1)


def looked_up(images: Images, matrices: Doubles, shifts: Doubles) -> Images:
    """Resample image n at `matrices[n] @ p + shifts[n]` for each pixel p.

    p is (row, column) relative to the image centre; matrices are f64[N,2,2], shifts f64[N,2]. The
    four nearest pixels are interpolated. Pixels outside of the image are black.
    """
    n, height, width, _ = images.shape
    size = np.array([[height], [width]])
    middle = (size - 1) / 2
    pixels = np.indices((height, width)).reshape(2, -1) - middle
    source = matrices @ pixels + shifts[:, :, None] + middle  # [N, 2, H * W]
    corner = np.floor(source).astype(np.int64)
    share = (source - corner).astype(np.float32)[..., None]
    framed = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=BLACK)
    image = np.arange(n)[:, None]

    def around(down: int, right: int) -> Images:
        neighbour = corner + np.array([[down], [right]])
        row, column = np.clip(neighbour, -1, size).swapaxes(0, 1) + 1
        pixel: Images = framed[image, row, column]  # [N, H * W, C]
        return pixel

    upper = around(0, 0) + share[:, 1] * (around(0, 1) - around(0, 0))
    lower = around(1, 0) + share[:, 1] * (around(1, 1) - around(1, 0))
    return (upper + share[:, 0] * (lower - upper)).reshape(images.shape)
