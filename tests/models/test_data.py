"""The data sets are read right, and what is wrong with a file is said in one typed error."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from models.data import DataError, DataSet, load
from models.data.batches import evaluation_batches
from models.data.dataset import NO_LABEL, Examples, Images, LabelledImages, Labels
from tests.brief import cases, refuses, traced_memory
from tests.fuzz.mutations import assert_well_refused


def everything(examples: Examples) -> tuple[Images, Labels]:
    return examples[np.arange(len(examples))]


def assert_well_formed(dataset: DataSet) -> None:
    for examples in (dataset.train, dataset.test):
        images, labels = everything(examples)
        assert images.dtype == np.float32
        assert labels.dtype == np.int64
        assert images.shape == (len(labels), *dataset.shape)
        assert -1 <= images.min() < images.max() <= 1
        assert 0 <= labels.min() <= labels.max() < dataset.num_classes


# --- digits --------------------------------------------------------------------------


def test_digits() -> None:
    digits = load("digits")
    assert_well_formed(digits)
    assert digits.shape == (8, 8, 1)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    images, _ = everything(digits.train)
    assert (images.min(), images.max()) == (-1, 1)


def test_the_seed_decides_which_digits_are_held_out() -> None:
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    tests = [everything(each.test)[0] for each in (one, same, other)]
    assert np.array_equal(tests[0], tests[1])
    assert not np.array_equal(tests[0], tests[2])
    inks = [
        np.sort(np.concatenate([everything(each)[0] for each in (d.train, d.test)]).sum((1, 2, 3)))
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
    assert dataset.shape == (4, 8, 1)
    assert list(everything(dataset.train)[1]) == [0, 1, 2, 3, 4]
    images, labels = everything(dataset.test)
    assert list(labels) == [0, 1, 2]
    expected = pixels.reshape(3, 4, 8, 1) / 127.5 - 1
    assert np.allclose(images, expected, atol=1e-6)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@cases(
    "file, content, reason",
    (IMAGES, b"", "starts with , expected 00000803"),
    (IMAGES, bytes([0, 0, 8, 1, 0, 0, 0, 5]), "starts with 00000801, expected 00000803"),
    (IMAGES, bytes([0, 0, 8, 3, 0, 0]), "starts with 00000803"),
    (LABELS, b"<html>not found</html>", "starts with 3c68746d, expected 00000801"),
    (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 5, 1, 2, 3]), "3 bytes follow the header, expected 5"),
    (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2, 3]), "3 bytes follow the header, expected 2"),
    (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 10]), "must be 0 .. 9, got 10 at position 1"),
    (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2]), "expected 5 labels, got 2"),
    (LABELS, bytes([0, 0, 8, 1, 0, 0, 0, 0]), "it is empty"),
)
def test_mnist_corrupt(mnist: Path, file: str, content: bytes, reason: str) -> None:
    (mnist / file).write_bytes(content)
    with pytest.raises(DataError, match=rf"idx.-ubyte is corrupt: .*{reason}.*; get it again from"):
        load(f"mnist:{mnist}")


GZIP = f"{IMAGES}.gz"
ZIPPED = gzip.compress(bytes([0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 8, *range(160)]))
UNREADABLE = "idx3-ubyte.gz is corrupt: it cannot be read"


@cases(
    "file, put, content, reason",
    (IMAGES, GZIP, ZIPPED[: len(ZIPPED) // 2], UNREADABLE),
    (IMAGES, GZIP, b"hello", UNREADABLE),
    (IMAGES, GZIP, ZIPPED[:-6] + bytes([ZIPPED[-6] ^ 0xFF]) + ZIPPED[-5:], UNREADABLE),
    (LABELS, LABELS, None, rf"{LABELS} does not exist; get it from http://yann"),
    (LABELS, LABELS, Path.mkdir, "cannot be read"),
    (LABELS, LABELS, os.mkfifo, r"cannot be read .* it is not a regular file"),
    (
        "t10k-images-idx3-ubyte",
        "t10k-images-idx3-ubyte",
        bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 5]) + bytes(75),
        r"\(4, 8\).*\(5, 5\)",
    ),
    ids=["truncated", "no gzip", "flipped", "missing", "a folder", "a pipe", "another size"],
)
def test_mnist_with_another_file_or_none(
    mnist: Path, file: str, put: str, content: Any, reason: str
) -> None:
    (mnist / file).unlink()
    if callable(content):
        content(mnist / put)
    elif content is not None:
        (mnist / put).write_bytes(content)
    refuses(DataError, reason, load, f"mnist:{mnist}")
    refuses(DataError, r"nowhere/.* does not exist", load, f"mnist:{mnist / 'nowhere'}")


@cases(
    "count, reason",
    (3, "at least 4 bytes follow the header, expected 3"),
    (1 << 20, "at least 1048577 bytes follow the header, expected 1048576"),
    (2**32 - 1, "the header announces 4294967295 bytes, the limit is [0-9]+;"),
)
def test_no_more_is_unpacked_than_the_header_announces(
    mnist: Path, count: int, reason: str
) -> None:
    nbytes = 1 << 24
    (mnist / LABELS).unlink()
    bomb = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + bytes(nbytes)
    (mnist / f"{LABELS}.gz").write_bytes(gzip.compress(bomb))
    with traced_memory() as peak:
        refuses(DataError, reason, load, f"mnist:{mnist}")
        assert peak() < nbytes / 4


@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_mutations_of_mnist(mnist: Path, name: str) -> None:
    content = (mnist / name).read_bytes()
    (mnist / name).unlink()
    parts: Any = [(gzip.compress(content), bytes), (content, gzip.compress)]
    read = lambda _: everything(load(f"mnist:{mnist}").train)  # noqa: E731
    assert_well_refused(parts, read, DataError, file=mnist / f"{name}.gz")


# --- CIFAR-10 ------------------------------------------------------------------------


def test_cifar10(cifar10: Path) -> None:
    record = np.frombuffer((cifar10 / "data_batch_1.bin").read_bytes(), np.uint8)[1:3073]
    dataset = load(f"cifar10:{cifar10}")
    assert_well_formed(dataset)
    assert dataset.shape == (32, 32, 3)
    images, labels = everything(dataset.train)
    assert list(labels) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert list(everything(dataset.test)[1]) == [5, 5]
    red, green, blue = record.reshape(3, 32, 32) / 127.5 - 1
    expected = np.stack([red, green, blue], axis=-1)
    assert np.allclose(images[0], expected, atol=1e-6)


@cases(
    "content, reason",
    (bytes(3072), "multiple of 3073 bytes.*got 3072"),
    (bytes(3073) + bytes([10]) + bytes(3072), "must be 0 .. 9, got 10 at position 1"),
    (b"", "it is empty"),
)
def test_cifar10_corrupt(cifar10: Path, content: bytes, reason: str) -> None:
    (cifar10 / "data_batch_3.bin").write_bytes(content)
    message = rf"data_batch_3.bin is corrupt: .*{reason}.*toronto"
    refuses(DataError, message, load, f"cifar10:{cifar10}")
    message = r"data_batch_1.bin does not exist; get it from .*toronto"
    refuses(DataError, message, load, f"cifar10:{cifar10 / 'nowhere'}")


def test_mutations_of_cifar10(cifar10: Path) -> None:
    file = cifar10 / "test_batch.bin"
    read = lambda _: everything(load(f"cifar10:{cifar10}").test)  # noqa: E731
    assert_well_refused([(file.read_bytes(), bytes)], read, DataError, file=file)


# --- names, batches ------------------------------------------------------------------


@cases("spec", "", "imagenet", "imagenet:/x", "mnist", "mnist:", "digits:/x", "npz")
def test_an_unknown_data_set_is_refused(spec: str) -> None:
    refuses(DataError, r"expected one of digits, text, .*, mnist:DIR, cifar10:DIR, ", load, spec)
    assert issubclass(DataError, ml.errors.MlvmError)


def test_the_last_test_batch_is_filled_up() -> None:
    digits = load("digits").test
    batches = list(evaluation_batches(digits, 100))
    assert [images.shape for images, _ in batches] == [(100, 8, 8, 1)] * 4
    labels = np.concatenate([labels for _, labels in batches])
    assert np.array_equal(labels[:360], everything(digits)[1])
    assert set(labels[360:]) == {NO_LABEL}


# --- arrays --------------------------------------------------------------------------

IMAGE = np.zeros((2, 3, 3, 1), np.uint8)
LABEL = np.array([0, 1])


def test_images_are_scaled_as_they_are_asked_for() -> None:
    images = np.arange(18, dtype=np.uint8).reshape(IMAGE.shape)
    examples = LabelledImages(images, np.array([1, 0], np.uint8), 2, white=17)
    got, labels = examples[np.array([1, 0, 1])]
    assert got.dtype == np.float32
    assert np.allclose(got, images[[1, 0, 1]] * (2 / 17) - 1, atol=1e-6)
    assert labels.tolist() == [0, 1, 0]
    assert labels.dtype == np.int64
    floats = LabelledImages(images.astype(np.float32), LABEL, 2)
    assert np.array_equal(floats[np.array([1])][0][0], images[1])
