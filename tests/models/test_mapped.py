"""Arrays in files are read where they are asked for, and damage is one typed error."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import DataError, load
from models.data.mapped import open_npy, open_npz

X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)


def resident() -> int:
    """The bytes of memory that this process has, files that it maps included."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(tmp_path: Path, order: Any) -> None:
    np.save(tmp_path / "x.npy", np.asarray(X, order=order))
    mapped = open_npy(tmp_path / "x.npy")
    assert (mapped.shape, len(mapped)) == ((10, 2, 3), 10)
    assert mapped.dtype == np.float32
    assert np.array_equal(mapped[:], X)
    got = mapped[np.array([7, 0, 7])]
    assert np.array_equal(got, X[[7, 0, 7]])
    got[:] = 0  # a copy, and its own
    assert np.array_equal(mapped[:], X)


def test_npz_members_of_any_name_and_type(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"x": X, "äöü": np.arange(3), "flags": np.array([True, False])}
    np.savez(tmp_path / "all.npz", **arrays)
    mapped = open_npz(tmp_path / "all.npz")
    assert mapped.keys() == arrays.keys()
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        assert np.array_equal(mapped[name][:], array)


def test_a_pickled_array_is_the_name_of_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = open_npy(tmp_path / "x.npy")
    pickled = pickle.dumps(mapped)
    assert len(pickled) < 500
    assert np.array_equal(pickle.loads(pickled)[:], X)
    (tmp_path / "x.npy").unlink()
    with pytest.raises(DataError, match="cannot be mapped"):
        pickle.loads(pickled)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_file_larger_than_what_is_asked_for_is_not_read(tmp_path: Path) -> None:
    nbytes = 1 << 30
    with (tmp_path / "huge.npy").open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (nbytes // 1024, 1024)}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.truncate(stream.tell() + nbytes)  # a hole, which takes no room on the disk
    before = resident()
    mapped = open_npy(tmp_path / "huge.npy")
    for start in range(0, nbytes // 1024, 100_000):
        assert not mapped[np.arange(start, start + 32)].any()
    assert resident() - before < 1 << 26


def test_damage(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, X)
    content = file.read_bytes()
    for damaged, reason in [
        (b"", "corrupt"),
        (b"hello, world, this is no array", "corrupt"),
        (content[:60], "corrupt"),
        (content[:-4], "cannot be mapped"),
        (content[:6] + b"\x09\x09" + content[8:], "corrupt"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=reason):
            open_npy(file)
    np.save(file, np.array([None, "x"], object), allow_pickle=True)
    with pytest.raises(DataError, match="holds Python objects"):
        open_npy(file)
    np.save(file, np.float32(1))
    with pytest.raises(DataError, match="a single number"):
        open_npy(file)
    for opener in (open_npy, open_npz):
        with pytest.raises(DataError, match="nowhere cannot be read: No such file"):
            opener(tmp_path / "nowhere")


def test_damaged_archives(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=X)
    with pytest.raises(DataError, match=r"x\.npy is compressed, .* np\.savez"):
        open_npz(file)
    np.savez(file, x=X)
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"x\.npz is corrupt"):
        open_npz(file)
    file.write_bytes(b"XX" + content[2:])
    with pytest.raises(DataError, match="not where the archive says"):
        open_npz(file)
    at = struct.pack("<4s", b"PK\1\2")
    offset = content.index(at) + 42  # of the member's place, in the archive's directory
    file.write_bytes(content[:offset] + b"\xff\xff\xff\x7f" + content[offset + 4 :])
    with pytest.raises(DataError, match=r"corrupt|cannot"):
        open_npz(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match="corrupt"):
        open_npz(file)


# --- data sets of one's own in an .npz -----------------------------------------------


def write(file: Path, **changes: Any) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "train_images": random.integers(0, 256, (9, 8, 4, 3), np.uint8),
        "train_labels": np.arange(9) % 3,
        "test_images": random.integers(0, 256, (4, 8, 4, 3), np.uint8),
        "test_labels": np.array([0, 3, 1, 1]),
    }
    np.savez(file, **{k: v for k, v in (arrays | changes).items() if v is not None})


def test_npz_data_set(tmp_path: Path) -> None:
    write(tmp_path / "own.npz")
    data = load(f"npz:{tmp_path / 'own.npz'}")
    assert (data.name, data.image_shape, data.num_classes) == ("npz", (8, 4, 3), 4)
    images, labels = data.train[np.array([4, 8])]
    assert images.shape == (2, 8, 4, 3)
    assert -1 <= images.min() < images.max() <= 1
    assert labels.tolist() == [1, 2]
    images, _ = pickle.loads(pickle.dumps(data.train))[np.array([4, 8])]
    assert np.array_equal(images, data.train[np.array([4, 8])][0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_labels": None}, "has no array test_labels"),
        (
            {"test_images": np.zeros((4, 8, 8, 3), np.uint8)},
            r"\(8, 4, 3\), test images \(8, 8, 3\)",
        ),
        ({"train_images": np.zeros((9, 8, 4, 3))}, "train: images are u8 or f32"),
        ({"test_labels": np.array([0, -1, 0, 0])}, "test: label -1 at position 1"),
    ],
)
def test_what_is_no_npz_data_set(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write(tmp_path / "own.npz", **changes)
    with pytest.raises(DataError, match=reason):
        load(f"npz:{tmp_path / 'own.npz'}")
