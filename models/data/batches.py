"""Batches of a data set, all of one size: what is alike in every step needs no new memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from models.data.dataset import BLACK, Dataset, Distortion, Images, Labels

Doubles = NDArray[np.float64]

NO_LABEL = -1


def training_batches(
    dataset: Dataset, batch_size: int, random: np.random.Generator
) -> Iterator[tuple[Images, Labels]]:
    """The training images in a random order, each distorted at random as the data set says.

    What is left over after the last whole batch is dropped.
    """
    order = random.permutation(len(dataset.train_labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        matrices, shifts = draw(dataset.distortion, batch_size, random)
        images = distorted(dataset.train_images[chosen], matrices, shifts)
        if dataset.distortion.noise:
            noise = random.standard_normal(images.shape, np.float32)
            images += np.float32(dataset.distortion.noise) * noise
        yield images, dataset.train_labels[chosen]


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[tuple[Images, Labels]]:
    """The test images in order. The last batch is filled up with images labelled `NO_LABEL`."""
    for start in range(0, len(dataset.test_labels), batch_size):
        images = dataset.test_images[start : start + batch_size]
        labels = dataset.test_labels[start : start + batch_size]
        missing = batch_size - len(labels)
        if missing:
            images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
            labels = np.pad(labels, (0, missing), constant_values=NO_LABEL)
        yield images, labels


def draw(distortion: Distortion, n: int, random: np.random.Generator) -> tuple[Doubles, Doubles]:
    """n random distortions for `distorted`, evenly distributed: matrices and shifts."""
    turn, shear, down, right = random.uniform(-1, 1, (4, n)) * np.array(
        [[distortion.turn], [distortion.shear], [distortion.shift], [distortion.shift]]
    )
    height, width = np.exp(random.uniform(-distortion.scale, distortion.scale, (2, n)))
    matrices = np.array(
        [
            [np.cos(turn) * height, np.sin(turn) * width],
            [shear - np.sin(turn) * height, np.cos(turn) * width],
        ]
    )
    return matrices.transpose(2, 0, 1), np.stack([down, right], axis=1)


def distorted(images: Images, matrices: Doubles, shifts: Doubles) -> Images:
    """Image n with, at each pixel p, what was at `matrices[n] @ p + shifts[n]`.

    p is (row, column) from the image's middle, matrices f64[N,2,2], shifts f64[N,2]. Between
    pixels the four around are interpolated; outside of the image there is black.
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
        found: Images = framed[image, row, column]  # [N, H * W, C]
        return found

    upper = around(0, 0) + share[:, 1] * (around(0, 1) - around(0, 0))
    lower = around(1, 0) + share[:, 1] * (around(1, 1) - around(1, 0))
    return (upper + share[:, 0] * (lower - upper)).reshape(images.shape)
