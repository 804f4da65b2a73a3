"""Each change of an image is the one its numbers say, and no other image has a part in it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mlvm.eager as ml
from models.data import DataError, load
from models.data.augment import Chain, Crop, Distort, Flip, Mixup, Normalise, looked_up
from models.data.dataset import BLACK, Images
from tests.brief import cases, refuses

Array = NDArray[np.float64]


def random(n: int, seed: int = 0) -> ml.SampleRandom:
    return ml.SampleRandom(seed, 0, np.arange(n))


def some(n: int = 50, size: tuple[int, int] = (5, 4)) -> Images:
    return np.random.default_rng(0).random((n, *size, 2), np.float32)


def changed(transform: ml.Transform, images: Images, seed: int = 0) -> Any:
    labels = np.arange(len(images)) % 10
    result = transform((images, labels), random(len(images), seed))
    assert len(result) == 2
    assert result[0].dtype == np.float32
    return result[0]


TRANSFORMS = [
    Flip(),
    Crop(2),
    Normalise([0.5, 0.25], [2, 4]),
    Distort(turn=0.2, shear=0.2, scale=0.1, shift=1, noise=0.1),
    Chain(Crop(1), Flip(), Distort(noise=0.1)),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: type(t).__name__)
def test_an_image_is_changed_alike_in_any_company(transform: ml.Transform) -> None:
    images = some()
    before = images.copy()
    whole = changed(transform, images)
    assert np.array_equal(images, before)
    assert not np.array_equal(whole, images)
    alone = transform((images[7:8], np.array([7])), ml.SampleRandom(0, 0, np.array([7])))
    assert np.array_equal(alone[0][0], whole[7])
    assert np.array_equal(changed(pickle.loads(pickle.dumps(transform)), images), whole)


def test_flip() -> None:
    images = some(400)
    flipped = changed(Flip(), images)
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, images, strict=True)]
    same = [np.array_equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 150 < sum(mirrored) < 250
    assert np.array_equal(changed(Flip(0), images), images)
    assert np.array_equal(changed(Flip(1), images), images[:, :, ::-1])


def test_crop() -> None:
    images = some(300)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=BLACK)
    places = set()
    for n, crop in enumerate(changed(Crop(2), images)):
        matches = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(crop, padded[n, i : i + 5, j : j + 4])
        ]
        assert len(matches) == 1
        places.update(matches)
    assert len(places) == 25
    assert np.array_equal(changed(Crop(0), images), images)
    refuses(DataError, "padding", Crop, -1)


def test_normalise() -> None:
    images = some()
    result = changed(Normalise([0.5, 0.25], [2, 4]), images)
    assert np.allclose(result[..., 0], (images[..., 0] - 0.5) / 2)
    assert np.allclose(result[..., 1], (images[..., 1] - 0.25) / 4)
    for std in ([1.0, 0.0], [1.0, float("nan")]):
        refuses(DataError, "standard deviation", Normalise, [0, 0], std)


def test_mixup() -> None:
    images, labels = some(200), np.arange(200) % 10
    mixed, soft = Mixup(0.5, 10)((images, labels), random(200))
    assert mixed.dtype == soft.dtype == np.float32
    assert soft.shape == (200, 10)
    assert np.allclose(soft.sum(1), 1, atol=1e-6)
    share = soft[np.arange(200), labels]
    assert share.min() < 0.1 < 0.9 < share.max()
    expected = share[:, None, None, None] * images
    expected += (1 - share)[:, None, None, None] * np.roll(images, -1, 0)
    assert np.allclose(mixed, expected, atol=1e-6)
    for alpha in (0, -1, 2, float("nan")):
        refuses(DataError, "alpha", Mixup, alpha, 10)


def test_training_images_are_changed_a_little() -> None:
    digits = load("digits")
    assert digits.augment is not None
    indices = np.arange(100)
    before = digits.train[indices]
    images, labels = digits.augment(before, ml.SampleRandom(0, 0, indices))
    assert np.array_equal(labels, before[1])
    assert 0.05 < np.abs(images - before[0]).mean() < 0.5
    assert images.min() < -1.1  # black, and noise
    again, _ = digits.augment(before, ml.SampleRandom(0, 1, indices))
    assert not np.array_equal(images, again)


UNCHANGED = np.eye(2)


@cases(
    "matrix, shift, expected",
    (UNCHANGED, (0, 0), [[-1, -1, -1], [0.5, 1, -1], [-1, -1, -1]]),
    (UNCHANGED, (-1, 0), [[-1, -1, -1], [-1, -1, -1], [0.5, 1, -1]]),
    (UNCHANGED, (0, -1), [[-1, -1, -1], [-1, 0.5, 1], [-1, -1, -1]]),
    (UNCHANGED, (0, 0.25), [[-1, -1, -1], [0.625, 0.5, -1], [-1, -1, -1]]),
    (UNCHANGED, (0.5, 0), [[-0.25, 0, -1], [-0.25, 0, -1], [-1, -1, -1]]),
    (UNCHANGED, (0, 40), [[-1] * 3] * 3),
    (UNCHANGED, (-3.5, 0), [[-1] * 3] * 3),
    ([[0, 1], [-1, 0]], (0, 0), [[-1, -1, -1], [-1, 1, -1], [-1, 0.5, -1]]),
    ([[-1, 0], [0, -1]], (0, 0), [[-1, -1, -1], [-1, 1, 0.5], [-1, -1, -1]]),
    ([[1, 0], [0, 2]], (0, 0), [[-1, -1, -1], [-1, 1, -1], [-1, -1, -1]]),
)
def test_a_distortion_looks_each_pixel_up(
    matrix: Array, shift: tuple[float, float], expected: list[list[float]]
) -> None:
    image = np.full((3, 3), BLACK, np.float32)
    image[1, :2] = 0.5, 1
    images = np.stack([image, -image], axis=-1)[None].repeat(2, 0)
    images[1] = 0
    result = looked_up(images, np.array([matrix, UNCHANGED]), np.array([shift, (0, 0)]))
    assert result.dtype == np.float32
    assert np.allclose(result[0, :, :, 0], expected)
    assert (result[1] == 0).all()


def test_distortions_are_drawn_within_their_limits() -> None:
    matrices, shifts = Distort(shift=2).draw(random(1000))
    assert (matrices == UNCHANGED).all()
    assert (np.abs(shifts).max(0) > 1.9).all()
    assert np.abs(shifts).max() <= 2
    matrices, shifts = Distort(turn=0.3).draw(random(1000))
    assert np.allclose(matrices @ matrices.swapaxes(1, 2), UNCHANGED)
    assert 0.29 < np.abs(np.arcsin(matrices[:, 0, 1])).max() <= 0.3
    matrices, shifts = Distort(scale=0.1).draw(random(1000))
    assert 0.09 < np.abs(np.log(matrices[:, [0, 1], [0, 1]])).max() <= 0.1
    assert (matrices[:, [0, 1], [1, 0]] == 0).all()
    matrices, shifts = Distort(shear=0.2).draw(random(1000))
    assert 0.19 < np.abs(matrices[:, 1, 0]).max() <= 0.2
    assert (shifts == 0).all()
