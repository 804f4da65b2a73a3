"""Data sets of a few images, in the files of the large ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A folder in MNIST's format: 5 training and 3 test images of 4 x 8 pixels."""
    random = np.random.default_rng(0)
    for part, n in (("train", 5), ("t10k", 3)):
        images = bytes([0, 0, 8, 3, 0, 0, 0, n, 0, 0, 0, 4, 0, 0, 0, 8]) + random.bytes(32 * n)
        labels = bytes([0, 0, 8, 1, 0, 0, 0, n, *range(n)])
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return tmp_path


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """A folder in CIFAR-10's format: two images in each of the six files, labelled by file."""
    random = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for label, name in enumerate(names):
        images = [bytes([label]) + random.bytes(3072) for _ in range(2)]
        (tmp_path / f"{name}.bin").write_bytes(b"".join(images))
    return tmp_path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of two classes, told apart by colour, in pictures of several sizes and formats."""
    new = pytest.importorskip("PIL.Image").new
    for part, n in (("train", 6), ("test", 2)):
        for name in ("blue", "red/more"):
            (tmp_path / part / name).mkdir(parents=True)
        for i in range(n):
            new("RGB", (20, 10 + i), (0, 0, 255)).save(tmp_path / part / "blue" / f"{i}.png")
            new("RGB", (70 + i, 80), (255, 0, 0)).save(tmp_path / part / "red/more" / f"{i}.bmp")
        (tmp_path / part / "red" / "notes.txt").write_text("no picture")
    return tmp_path
