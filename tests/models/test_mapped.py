"""Arrays in files are read where they are asked for, and damage is one typed error."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import DataError, load
from models.data.mapped import open_npy, open_npz
from tests.brief import cases, refuses
from tests.fuzz.mutations import assert_well_refused, parts_of_npy

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
    refuses(DataError, "cannot be mapped", pickle.loads, pickled)


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
        (content[:6] + b"\x09\0" + content[8:10] + b"\0\0" + content[10:], "corrupt"),
    ]:
        file.write_bytes(damaged)
        refuses(DataError, reason, open_npy, file)
    np.save(file, np.array([None, "x"], object), allow_pickle=True)
    refuses(DataError, "contains Python objects", open_npy, file)
    np.save(file, np.float32(1))
    refuses(DataError, "a single number", open_npy, file)
    for opener in (open_npy, open_npz):
        refuses(DataError, "nowhere cannot be read: No such file", opener, tmp_path / "nowhere")


def test_damaged_archives(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=X)
    refuses(DataError, r"x\.npy is compressed and .* np\.savez", open_npz, file)
    np.savez(file, x=X)
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    refuses(DataError, r"x\.npz is corrupt", open_npz, file)
    file.write_bytes(b"XX" + content[2:])
    refuses(DataError, "not where the directory states", open_npz, file)
    at = struct.pack("<4s", b"PK\1\2")
    offset = content.index(at) + 42  # of the member's place, in the archive's directory
    file.write_bytes(content[:offset] + b"\xff\xff\xff\x7f" + content[offset + 4 :])
    refuses(DataError, r"corrupt|cannot", open_npz, file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refuses(DataError, "corrupt", open_npz, file)


def test_headers_that_numpy_cannot_parse(tmp_path: Path) -> None:
    """numpy's parser raises a TokenError, a SyntaxError, a TypeError or whatever else for these."""
    file = tmp_path / "x.npy"
    for header in (b"{'descr': '<f4', 'fortran_order': F", b"{", b"\xff", b"{[]: 1}", b"[" * 500):
        file.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
        refuses(DataError, r"x\.npy is corrupt: .", open_npy, file)
    for shape in ("(-1,)", "(2**62,)", f"({10**30},)", "(0, 9223372036854775808)", "(True,)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
        file.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
        refuses(DataError, r"x\.npy (is corrupt|cannot be mapped): .", open_npy, file)


def member(name: str = "x.npy", *, mode: int = 0o644, flags: int = 0, version: int = 20) -> bytes:
    """A zip archive of one array under that name, with a mode of Unix, flags and version."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        array = io.BytesIO()
        np.save(array, X)
        archive.writestr(info, array.getvalue())
    content = bytearray(stream.getvalue())
    at = content.index(b"PK\1\2")
    content[at + 6], content[at + 8] = version, flags
    return bytes(content)


@cases(
    "content, reason",
    (member("../x.npy"), r"\.\./x\.npy leads out of the archive"),
    (member("/etc/x.npy"), r"/etc/x\.npy leads out of the archive"),
    (member(mode=0o120777), r"x\.npy leads out of the archive"),
    (member(flags=1), r"x\.npy is encrypted"),
    (member(version=99), "is corrupt: zip file version"),
)
def test_members_that_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    refuses(DataError, reason, open_npz, tmp_path / "x.npz")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path):
        for opener in (open_npy, open_npz):
            refuses(DataError, "cannot be read: it is not a regular file", opener, file)


def test_mutations_of_npy(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, X)
    parts = parts_of_npy(file.read_bytes())
    assert_well_refused(parts, lambda _: open_npy(file)[:], DataError, file=file)


def test_mutations_of_npz(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    write(file)
    content = file.read_bytes()
    directory = content.index(b"PK\1\2")
    parts = [(content, bytes), (content[directory:], lambda end: content[:directory] + end)]
    read = lambda _: load(f"npz:{file}").train[np.array([0])]  # noqa: E731
    assert_well_refused(parts, read, DataError, file=file)


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
    assert (data.name, data.shape, data.num_classes) == ("npz", (8, 4, 3), 4)
    images, labels = data.train[np.array([4, 8])]
    assert images.shape == (2, 8, 4, 3)
    assert -1 <= images.min() < images.max() <= 1
    assert labels.tolist() == [1, 2]
    images, _ = pickle.loads(pickle.dumps(data.train))[np.array([4, 8])]
    assert np.array_equal(images, data.train[np.array([4, 8])][0])


@cases(
    "changes, reason",
    ({"test_labels": None}, "lacks the array test_labels"),
    ({"test_images": np.zeros((4, 8, 8, 3), np.uint8)}, r"\(8, 4, 3\) and \(8, 8, 3\)"),
    ({"train_images": np.zeros((9, 8, 4, 3))}, "train: images must be u8 or f32"),
    ({"test_labels": np.array([0, -1, 0, 0])}, "test: labels must be 0 .. 2, got -1 at position 1"),
)
def test_what_is_no_npz_data_set(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write(tmp_path / "own.npz", **changes)
    refuses(DataError, reason, load, f"npz:{tmp_path / 'own.npz'}")
