"""Images of one's own in folders: DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, say.

The folders below `train` are the classes, in alphabetical order. Pillow reads the files, all
formats that it knows; a file is read each time it is asked for, so the images may be many more
than memory can hold.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

import mlvm.eager as ml
from models.data.augment import Chain, Crop, Flip
from models.data.dataset import Bytes, DataError, DataSet, Images, Indices, Labels, scaled
from models.data.files import parsing

SIZE = (64, 64)
MOST_PIXELS = 1 << 26  # of an image, before it is scaled


class ImageFolder:
    """The images below a folder, each labelled with the number of the class it lies in.

    They are RGB, f32[B,*size,3]: scaled so that they cover the size, and cut about the middle.
    Raises `DataError` for a folder that holds none and for a file that is no image,
    `MissingExtra` without Pillow.
    """

    def __init__(self, folder: Path, classes: list[str], size: tuple[int, int] = SIZE) -> None:
        self.size = size
        suffixes = set(pillow_image().registered_extensions())
        found = [
            (file, label)
            for label, name in enumerate(classes)
            for file in sorted((folder / name).rglob("*"))
            if file.suffix.lower() in suffixes
        ]
        if not found:
            raise DataError(f"there are no images in {folder}/CLASS")
        self.files = [file for file, _ in found]
        self._labels: Labels = np.array([label for _, label in found], np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: Indices) -> tuple[Images, Labels]:
        images = np.stack([pixels(self.files[index], self.size) for index in indices])
        return scaled(images), self._labels[indices]


def load(folder: Path, size: tuple[int, int] = SIZE) -> DataSet:
    """The images below `folder/train` and `folder/test`, in that size.

    Raises `DataError` for missing folders, classes without images included.
    """
    classes = [each.name for each in _sorted(folder / "train") if each.is_dir()]
    unknown = [each.name for each in _sorted(folder / "test") if each.name not in classes]
    if unknown:
        raise DataError(f"{folder}/test has classes that train has not: {', '.join(unknown)}")
    train, test = (ImageFolder(folder / part, classes, size) for part in ("train", "test"))
    augment = Chain(Crop(padding=size[0] // 8), Flip())
    shape = (*size, 3)
    return DataSet("images", train, test, shape, len(classes), augment, classes=tuple(classes))


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}") from None


def pixels(file: Path, size: tuple[int, int], channels: int = 3) -> Bytes:
    """The image as u8[*size,channels], of 3 channels or of 1: scaled so that it covers the size,
    and cut about the middle. Raises `DataError` for a file that is no image, `MissingExtra` without
    Pillow."""
    height, width = size
    pillow = pillow_image()
    with parsing(file) as stream, pillow.open(io.BytesIO(stream.read())) as image:
        if not 0 < image.width * image.height <= MOST_PIXELS:
            raise DataError(
                f"{file} cannot be read: {image.width} x {image.height} pixels are not 1 to "
                f"{MOST_PIXELS}"
            )
        plain = image.convert("RGB" if channels == 3 else "L")
        factor = max(height / plain.height, width / plain.width)
        down, right = (plain.height - height / factor) / 2, (plain.width - width / factor) / 2
        box = (right, down, plain.width - right, plain.height - down)
        resized = plain.resize((width, height), pillow.Resampling.BILINEAR, box=box)
        return np.asarray(resized).reshape(height, width, channels)


def pillow_image() -> Any:
    """`PIL.Image`. Raises `MissingExtra` without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise ml.errors.MissingExtra(
            'Pillow is not installed: pip install "mlvm[images]"'
        ) from None
    return Image
