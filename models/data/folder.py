"""Images in folders, for example DIR/train/CLASS/*.png and DIR/test/CLASS/*.png.

The folders below `train` are the classes, in alphabetical order. Pillow reads the files of the
`FORMATS`. A file is read each time it is requested, so the images need not fit into memory.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

import mlvm.eager as ml
from models.data.augment import Chain, Crop, Flip
from models.data.dataset import Bytes, DataError, DataSet, Images, Indices, Labels, scaled
from models.data.files import parsing

Shape: TypeAlias = tuple[int, int, int]

SHAPE: Final = (64, 64, 3)
"""Default (height, width, channels)."""
FORMATS: Final = [
    "AVIF",
    "BMP",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
]
"""Supported formats, by Pillow's names. Some other formats of Pillow run external programs."""
MOST_PIXELS = 1 << 26  # maximum pixels of an image before scaling
_FEW_PIXELS: Final = 1 << 22
_PIXELS_PER_BYTE: Final = 32  # maximum pixels per byte of the file; photographs have fewer
_BITS: Final = 258  # TIFF tag: bits per grey value


class ImageFolder:
    """Images below a folder, labelled with the number of the class folder.

    `pixels` converts them to f32[B,*shape]. Raises `DataError` for a folder without images, for a
    file that is not an image, and if the number of channels is not 1 or 3; `MissingExtraError`
    without Pillow.
    """

    def __init__(self, folder: Path, classes: list[str], shape: Shape = SHAPE) -> None:
        if shape[2] not in (1, 3):
            raise DataError(f"images of a folder must have 1 or 3 channels, got {shape[2]}")
        self.shape = shape
        extensions = pillow_image().registered_extensions()
        suffixes = {suffix for suffix, kind in extensions.items() if kind in FORMATS}
        files = [
            (file, label)
            for label, name in enumerate(classes)
            for file in sorted((folder / name).rglob("*"))
            if file.suffix.lower() in suffixes
        ]
        if not files:
            raise DataError(f"no images in {folder}/CLASS; supported are {', '.join(FORMATS)}")
        self.files = [file for file, _ in files]
        self._labels: Labels = np.array([label for _, label in files], np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: Indices) -> tuple[Images, Labels]:
        images = np.stack([pixels(self.files[index], self.shape) for index in indices])
        return scaled(images), self._labels[indices]


def load(folder: Path, shape: Shape = SHAPE) -> DataSet:
    """Load the images of `folder/train` and `folder/test`, converted to the shape.

    The shape is (height, width, channels).

    Raises `DataError` for missing folders and for classes without images.
    """
    classes = [each.name for each in _sorted(folder / "train") if each.is_dir()]
    unknown = [each.name for each in _sorted(folder / "test") if each.name not in classes]
    if unknown:
        raise DataError(f"{folder}/train lacks the classes {', '.join(unknown)} of test")
    train, test = (ImageFolder(folder / part, classes, shape) for part in ("train", "test"))
    augment = Chain(Crop(padding=shape[0] // 8), Flip())
    return DataSet("images", train, test, shape, len(classes), augment, classes=tuple(classes))


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be listed: {error.strerror}; expected DIR/train/CLASS/FILE and "
            f"DIR/test/CLASS/FILE"
        ) from None


def pixels(file: Path, shape: Shape) -> Bytes:
    """Read an image as u8[*shape] with 1 or 3 channels.

    The image is rotated by the EXIF data, drawn on white where it is transparent, scaled to cover
    the target size, and cropped around the centre. 16 bits become 8.

    Raises `DataError` for a file that is not an image, and for an image of floats, because their
    range is unknown; `MissingExtraError` without Pillow.
    """
    height, width, channels = shape
    pillow = pillow_image()
    pillow.init()
    formats = [kind for kind in FORMATS if kind in pillow.OPEN]  # Pillow may lack some
    with parsing(file) as stream:
        data = stream.read()
        try:
            image = pillow.open(io.BytesIO(data), formats=formats)
        except pillow.UnidentifiedImageError:
            raise DataError(
                f"{file} cannot be read: expected an image in one of {', '.join(formats)}"
            ) from None
        most = min(MOST_PIXELS, max(_FEW_PIXELS, _PIXELS_PER_BYTE * len(data)))
        if not 0 < image.width * image.height <= most:  # a small file may have millions of pixels
            raise DataError(
                f"{file} cannot be read: {image.width} x {image.height} pixels; expected 1 to "
                f"{most}, the limit for a file of {len(data)} bytes"
            )
        plain = _plain(file, image).convert("RGB" if channels == 3 else "L")
        factor = max(height / plain.height, width / plain.width)
        down, right = (plain.height - height / factor) / 2, (plain.width - width / factor) / 2
        box = (right, down, plain.width - right, plain.height - down)
        resized = plain.resize((width, height), pillow.Resampling.BILINEAR, box=box)
        return np.asarray(resized).reshape(height, width, channels)


def _plain(file: Path, image: Any) -> Any:
    """Return Pillow's image upright, with 8 bits per channel, on a white background."""
    from PIL import ImageOps

    pillow = pillow_image()
    bits = image.tag_v2.get(_BITS, (16,))[0] if image.format == "TIFF" else 16
    kind, image = image.format, ImageOps.exif_transpose(image)
    if image.mode in ("F", "I") and kind not in ("PNG", "PPM"):  # 16 bits in mode I
        raise DataError(
            f"{file} cannot be read: it does not define which number is white; save it with "
            f"8 or 16 bits"
        )
    if image.mode.startswith("I"):
        grey, transparent = np.asarray(image), image.info.get("transparency")
        white_16 = 2**bits - 1
        if transparent is not None:
            grey = np.where(grey == transparent, white_16, grey)
        image = pillow.fromarray(np.rint(grey * (255 / white_16)).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    white = pillow.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white


def pillow_image() -> Any:
    """`PIL.Image`. Raises `MissingExtraError` without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise ml.errors.MissingExtraError(
            'Pillow is not installed: pip install "mlvm[images]"'
        ) from None
    return Image
