"""The data sets are read right, and what is wrong with a file is said in one typed error."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import mlvm.eager as ml
from models.data import DataError, Dataset, load
from models.data.batches import (
    NO_LABEL,
    distorted,
    draw,
    evaluation_batches,
    training_batches,
)
from models.data.dataset import BLACK, Distortion

Array = NDArray[np.float64]


def assert_well_formed(dataset: Dataset) -> None:
    for images, labels in (
        (dataset.train_images, dataset.train_labels),
        (dataset.test_images, dataset.test_labels),
    ):
        assert images.dtype == np.float32
        assert labels.dtype == np.int64
        assert images.shape == (len(labels), *dataset.image_shape)
        assert -1 <= images.min() < images.max() <= 1
        assert 0 <= labels.min() <= labels.max() < dataset.num_classes


# --- digits --------------------------------------------------------------------------


def test_digits() -> None:
    digits = load("digits")
    assert_well_formed(digits)
    assert digits.image_shape == (8, 8, 1)
    assert len(digits.train_labels) == 1437
    assert len(digits.test_labels) == 360
    assert (digits.train_images.min(), digits.train_images.max()) == (-1, 1)


def test_the_seed_decides_which_digits_are_held_out() -> None:
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert np.array_equal(one.test_images, same.test_images)
    assert not np.array_equal(one.test_images, other.test_images)
    inks = [
        np.sort(np.concatenate([d.train_images, d.test_images]).sum((1, 2, 3)))
        for d in (one, other)
    ]
    assert np.array_equal(inks[0], inks[1])


# --- MNIST ---------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist(mnist: Path, compressed: bool) -> None:
    pixels = np.frombuffer((mnist / "t10k-images-idx3-ubyte").read_bytes()[16:], np.uint8)
    if compressed:
        for file in list(mnist.iterdir()):
            Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
    dataset = load(f"mnist:{mnist}")
    assert_well_formed(dataset)
    assert dataset.image_shape == (4, 8, 1)
    assert list(dataset.train_labels) == [0, 1, 2, 3, 4]
    assert list(dataset.test_labels) == [0, 1, 2]
    expected = pixels.reshape(3, 4, 8, 1) / 127.5 - 1
    assert np.allclose(dataset.test_images, expected, atol=1e-6)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def test_mnist_missing(mnist: Path) -> None:
    (mnist / LABELS).unlink()
    with pytest.raises(DataError, match=rf"there is no .*{LABELS}; get it from http://yann"):
        load(f"mnist:{mnist}")
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        load(f"mnist:{mnist / 'nowhere'}")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (IMAGES, b"", "starts with , not with 00000803"),
        (IMAGES, bytes([0, 0, 8, 1, 0, 0, 0, 5]), "starts with 00000801, not with 00000803"),
        (IMAGES, bytes([0, 0, 8, 3, 0, 0]), "starts with 00000803"),
        (LABELS, b"<html>not found</html>", "starts with 3c68746d, not with 00000801"),
        (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 5, 1, 2, 3]), "3 bytes follow its header, not 5"),
        (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2, 3]), "3 bytes follow its header, not 2"),
        (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 10]), "label 10 at position 1 is not 0 .. 9"),
        (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2]), "5 images, but .* 2 labels"),
        (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 0]), "it is empty"),
    ],
)
def test_mnist_corrupt(mnist: Path, file: str, content: bytes, reason: str) -> None:
    (mnist / file).write_bytes(content)
    with pytest.raises(DataError, match=rf"idx.-ubyte is corrupt: .*{reason}.*; get it anew from"):
        load(f"mnist:{mnist}")


@pytest.mark.parametrize("damage", ["truncated", "no gzip", "flipped"])
def test_mnist_with_a_damaged_compressed_file(mnist: Path, damage: str) -> None:
    content = gzip.compress((mnist / IMAGES).read_bytes())
    (mnist / IMAGES).unlink()
    damaged = {
        "truncated": content[: len(content) // 2],
        "no gzip": b"hello",
        "flipped": content[:20] + bytes([content[20] ^ 0xFF]) + content[21:],
    }
    (mnist / f"{IMAGES}.gz").write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"idx3-ubyte.gz is corrupt: it cannot be read"):
        load(f"mnist:{mnist}")


def test_mnist_with_parts_of_different_sizes(mnist: Path) -> None:
    content = bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 5]) + bytes(75)
    (mnist / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=r"\(4, 8\).*\(5, 5\)"):
        load(f"mnist:{mnist}")


def test_a_folder_in_place_of_a_file(mnist: Path) -> None:
    (mnist / LABELS).unlink()
    (mnist / LABELS).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        load(f"mnist:{mnist}")


# --- CIFAR-10 ------------------------------------------------------------------------


def test_cifar10(cifar10: Path) -> None:
    record = np.frombuffer((cifar10 / "data_batch_1.bin").read_bytes(), np.uint8)[1:3073]
    dataset = load(f"cifar10:{cifar10}")
    assert_well_formed(dataset)
    assert dataset.image_shape == (32, 32, 3)
    assert list(dataset.train_labels) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert list(dataset.test_labels) == [5, 5]
    red, green, blue = record.reshape(3, 32, 32) / 127.5 - 1
    expected = np.stack([red, green, blue], axis=-1)
    assert np.allclose(dataset.train_images[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(3072), "3072 bytes are no multiple of 3073"),
        (bytes(3073) + bytes([10]) + bytes(3072), "label 10 at position 1 is not 0 .. 9"),
        (b"", "it is empty"),
    ],
)
def test_cifar10_corrupt(cifar10: Path, content: bytes, reason: str) -> None:
    (cifar10 / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_3.bin is corrupt: .*{reason}.*toronto"):
        load(f"cifar10:{cifar10}")


def test_cifar10_missing(cifar10: Path) -> None:
    shutil.rmtree(cifar10)
    with pytest.raises(DataError, match=r"there is no .*data_batch_1.bin; get it from .*toronto"):
        load(f"cifar10:{cifar10}")


# --- names, batches ------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["", "imagenet", "imagenet:/x", "mnist", "mnist:", "digits:/x"])
def test_an_unknown_data_set_is_refused(spec: str) -> None:
    with pytest.raises(DataError, match="there are digits, mnist:DIR, cifar10:DIR"):
        load(spec)
    assert issubclass(DataError, ml.errors.MlvmError)


def test_an_epoch_has_each_image_once() -> None:
    dataset = Dataset(
        "numbers",
        np.arange(10, dtype=np.float32).reshape(10, 1, 1, 1),
        np.arange(10),
        np.zeros((1, 1, 1, 1), np.float32),
        np.zeros(1, np.int64),
        num_classes=10,
        distortion=Distortion(),
    )
    seen = []
    for images, labels in training_batches(dataset, 3, np.random.default_rng(0)):
        assert np.array_equal(images.ravel(), labels)
        assert images.shape == (3, 1, 1, 1)
        seen += list(labels)
    assert len(seen) == len(set(seen)) == 9
    assert seen != sorted(seen)


def test_training_images_are_changed_as_the_generator_says() -> None:
    digits = load("digits")
    first, same, other = (
        next(training_batches(digits, 8, np.random.default_rng(seed))) for seed in (0, 0, 1)
    )
    assert np.array_equal(first[0], same[0])
    assert not np.array_equal(first[0], other[0])
    order = np.random.default_rng(0).permutation(1437)[:8]
    assert np.array_equal(first[1], digits.train_labels[order])
    change = np.abs(first[0] - digits.train_images[order])
    assert 0.05 < change.mean() < 0.5
    assert first[0].dtype == np.float32
    assert first[0].min() < -1.1  # black, and noise
    assert np.array_equal(digits.train_images, load("digits").train_images)


def test_the_last_test_batch_is_filled_up() -> None:
    digits = load("digits")
    batches = list(evaluation_batches(digits, 100))
    assert [images.shape for images, _ in batches] == [(100, 8, 8, 1)] * 4
    labels = np.concatenate([labels for _, labels in batches])
    assert np.array_equal(labels[:360], digits.test_labels)
    assert set(labels[360:]) == {NO_LABEL}


UNCHANGED = np.eye(2)


@pytest.mark.parametrize(
    ("matrix", "shift", "expected"),
    [
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
    ],
)
def test_a_distortion_looks_each_pixel_up(
    matrix: Array, shift: tuple[float, float], expected: list[list[float]]
) -> None:
    image = np.full((3, 3), BLACK, np.float32)
    image[1, :2] = 0.5, 1
    images = np.stack([image, -image], axis=-1)[None].repeat(2, 0)
    images[1] = 0
    result = distorted(images, np.array([matrix, UNCHANGED]), np.array([shift, (0, 0)]))
    assert result.dtype == np.float32
    assert np.allclose(result[0, :, :, 0], expected)
    assert (result[1] == 0).all()


def test_distortions_are_drawn_within_their_limits() -> None:
    random = np.random.default_rng(0)
    matrices, shifts = draw(Distortion(shift=2), 1000, random)
    assert (matrices == UNCHANGED).all()
    assert (np.abs(shifts).max(0) > 1.9).all()
    assert np.abs(shifts).max() <= 2
    matrices, shifts = draw(Distortion(turn=0.3), 1000, random)
    assert np.allclose(matrices @ matrices.swapaxes(1, 2), UNCHANGED)
    assert 0.29 < np.abs(np.arcsin(matrices[:, 0, 1])).max() <= 0.3
    matrices, shifts = draw(Distortion(scale=0.1), 1000, random)
    assert 0.09 < np.abs(np.log(matrices[:, [0, 1], [0, 1]])).max() <= 0.1
    assert (matrices[:, [0, 1], [1, 0]] == 0).all()
    matrices, shifts = draw(Distortion(shear=0.2), 1000, random)
    assert 0.19 < np.abs(matrices[:, 1, 0]).max() <= 0.2
    assert (shifts == 0).all()
