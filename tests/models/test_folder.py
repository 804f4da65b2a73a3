"""Folders of images: read by Pillow, or one typed error."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from models.data import DataError, load
from models.data.folder import ImageFolder, pixels
from models.training.train import train
from tests.brief import Patch, refuses
from tests.fuzz.mutations import assert_well_refused

Image = pytest.importorskip("PIL.Image")


def test_images_are_labelled_by_their_folder(images: Path) -> None:
    data = load(f"images:{images}")
    assert (data.shape, data.num_classes) == ((64, 64, 3), 2)
    assert (len(data.train), len(data.test)) == (12, 4)
    pair, labels = data.train[np.array([0, 11])]
    assert pair.shape == (2, 64, 64, 3)
    assert pair.dtype == np.float32
    assert labels.tolist() == [0, 1]
    assert np.array_equal(pair[0, 30, 30], [-1, -1, 1])
    assert np.array_equal(pair[1, 30, 30], [1, -1, -1])


def test_an_image_covers_the_size_and_is_cut_about_the_middle(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    stripes = np.zeros((4, 12, 3), np.uint8)
    stripes[:, 4:8] = 255  # the middle third, a square, is white
    Image.fromarray(stripes).save(tmp_path / "c" / "wide.png")
    images, _ = ImageFolder(tmp_path, ["c"], shape=(4, 4, 3))[np.array([0])]
    assert (images == 1).all()


GREY = np.array([[0, 32768], [40000, 65535]], np.uint16)
IN_8_BITS = [[0, 128], [156, 255]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_scaled(tmp_path: Path, kind: str, channels: int) -> None:
    file = tmp_path / "x"
    Image.fromarray(GREY).save(file, kind)
    assert pixels(file, (2, 2, channels))[..., -1].tolist() == IN_8_BITS


def test_a_grey_value_of_16_bits_may_stand_for_what_is_transparent(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "x", "PNG", transparency=0)
    assert pixels(tmp_path / "x", (2, 2, 1))[..., 0].tolist() == [[255, 128], [156, 255]]


def test_a_tiff_of_12_bits_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x"
    Image.fromarray(GREY[:1]).save(file, "TIFF")
    content = bytearray(file.read_bytes())
    entry = content.index(struct.pack("<HHIHH", 258, 3, 1, 16, 0))
    content[entry + 8] = 12
    content[-4:-1] = 0x80, 0x0F, 0xFF  # two values of 12 bits, 0x800 and 0xfff
    file.write_bytes(content)
    assert pixels(file, (1, 2, 1)).ravel().tolist() == [128, 255]


@pytest.mark.parametrize("array", [np.ones((2, 2), np.float32), np.ones((2, 2), np.int32)])
def test_numbers_of_which_none_is_known_to_be_white(tmp_path: Path, array: Any) -> None:
    Image.fromarray(array).save(tmp_path / "x", "TIFF")
    with pytest.raises(DataError, match="does not define which number is white"):
        pixels(tmp_path / "x", (2, 2, 3))


def test_images_are_turned_as_their_exif_data_say(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # its top is at the right
    Image.fromarray(np.array([[0, 255]], np.uint8)).save(tmp_path / "x", "PNG", exif=exif)
    assert pixels(tmp_path / "x", (2, 1, 1)).ravel().tolist() == [0, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_white(tmp_path: Path, mode: str) -> None:
    black = np.array([[[9, 9, 9, 0], [0, 0, 0, 255]]], np.uint8)
    image = Image.fromarray(black)
    image = image.quantize() if mode == "P" else image.convert(mode)
    image.save(tmp_path / "x", "PNG", **({"transparency": (9, 9, 9)} if mode == "RGB" else {}))
    assert pixels(tmp_path / "x", (1, 2, 3)).tolist() == [[[255] * 3, [0] * 3]]


def test_no_other_program_reads_an_image(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n")
    with pytest.raises(DataError, match=rf"^{file} cannot be read: expected an image in one of"):
        pixels(file, (4, 4, 3))


def test_training_on_a_folder(images: Path) -> None:
    result = train(model="mlp", data=f"images:{images}", epochs=3, batch_size=4, workers=2)
    assert result["test_accuracy"] == 1


def test_faults(images: Path, tmp_path: Path) -> None:
    data = load(f"images:{images}")
    (images / "train" / "blue" / "0.png").write_bytes(b"no picture")
    refuses(DataError, r"0\.png cannot be read", lambda: data.train[np.array([0])])
    (images / "train" / "blue" / "0.png").unlink()
    refuses(DataError, r"0\.png cannot be read", lambda: data.train[np.array([0])])
    os.mkfifo(images / "train" / "blue" / "0.png")
    refuses(DataError, r"0\.png cannot be read: it is not a reg", lambda: data.train[np.array([0])])
    (images / "test" / "green").mkdir()
    refuses(DataError, "train lacks the classes green", load, f"images:{images}")
    with pytest.raises(DataError, match=r"listed: No such file.*; expected DIR/train/CLASS/FILE"):
        load(f"images:{images / 'nowhere'}")
    for part in ("train", "test"):
        (images / "empty" / part / "class").mkdir(parents=True)
    refuses(DataError, "no images in", load, f"images:{images / 'empty'}")


def test_an_image_of_too_many_pixels(images: Path) -> None:
    data = load(f"images:{images}")
    for side in (9_000, 10_000, 20_000):  # beyond our limit, Pillow's warning and Pillow's own
        (images / "train" / "blue" / "0.png").write_bytes(f"P6 {side} {side} 255\n".encode())
        with pytest.raises(DataError, match=r"0\.png (cannot be read|is corrupt): .*pixels"):
            data.train[np.array([0])]


def test_a_few_bytes_that_tell_of_millions_of_pixels(tmp_path: Path) -> None:
    file = tmp_path / "0.png"
    Image.new("L", (2200, 2200)).save(file)
    assert file.stat().st_size < 1 << 15
    with pytest.raises(
        DataError, match="2200 x 2200 pixels; expected 1 to 4194304, the limit for a"
    ):
        pixels(file, (4, 4, 3))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "ICO", "TGA"])
def test_mutations(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c").mkdir()
    file = tmp_path / "c" / "x.png"  # Pillow looks at the bytes
    Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)).save(file, kind)
    data = ImageFolder(tmp_path, ["c"], shape=(4, 4, 3))
    parts = [(file.read_bytes(), bytes)]
    assert_well_refused(parts, lambda _: data[np.array([0])], DataError, file=file)


def test_without_pillow(images: Path, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    refuses(ml.errors.MissingExtraError, r'pip install "mlvm\[images\]"', load, f"images:{images}")
