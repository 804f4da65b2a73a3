"""Checkpoint files are safetensors, are read back to the bit, and no damage goes unnoticed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import mlvm.eager as ml
from models.training.checkpoint import CheckpointError, load, save
from tests.mutations import assert_well_refused

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"]
SMALL = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
TENSORS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, SMALL)),
    max_size=5,
)
METADATA = st.dictionaries(st.text(max_size=8).filter(lambda k: k != "crc32"), st.text(max_size=9))
EXAMPLE = {"a/b": np.arange(6.0).reshape(2, 3), "k": np.array([1, 2], np.uint64)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TENSORS, METADATA)
def test_what_is_written_is_read_back(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str]
) -> None:
    file = tmp_path / "x.safetensors"
    save(file, tensors, metadata)
    read = load(file)
    assert read.metadata == metadata
    assert read.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        assert (read.tensors[name].dtype, read.tensors[name].shape) == (array.dtype, array.shape)
        assert read.tensors[name].tobytes() == array.tobytes()
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, {"x": np.array([[1, 2]], ">i2"), "y": np.array([0.5])}, {"who": "me"})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__")["who"] == "me"
    assert header == {
        "y": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        "x": {"dtype": "I16", "shape": [1, 2], "data_offsets": [8, 12]},
    }
    assert content[8 + length :] == np.array([0.5], "<f8").tobytes() + b"\1\0\2\0"


def test_the_format_is_that_of_its_own_library(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.numpy")
    save(tmp_path / "ours", EXAMPLE, {"who": "me"})
    theirs.save_file(EXAMPLE, tmp_path / "theirs", {"who": "them"})
    for read in (theirs.load_file(tmp_path / "ours"), load(tmp_path / "theirs").tensors):
        assert read.keys() == EXAMPLE.keys()
        assert all(np.array_equal(read[name], EXAMPLE[name]) for name in EXAMPLE)
    assert load(tmp_path / "theirs").metadata == {"who": "them"}


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {})
    with pytest.raises(CheckpointError, match="z: the format has no complex64"):
        save(file, {"z": np.zeros(1, np.complex64)}, {})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(file, {}, {})
    assert load(file).tensors.keys() == EXAMPLE.keys()
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "nowhere" / "x", EXAMPLE, {})
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {"who": "me"})
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"x\.safetensors is no checkpoint, or damaged"):
            load(file)
    data = 8 + int.from_bytes(content[:8], "little")
    for at in range(data, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match="its data is not what was written"):
            load(file)
    assert issubclass(CheckpointError, ml.errors.MlvmError)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_of_the_header_is_an_error_or_none(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {"who": "me"})
    content = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 49), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with suppress(CheckpointError):
        load(file)


def test_mutations(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, {**EXAMPLE, "none": np.zeros((0, 3), np.uint8)}, {"who": "me"})
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    def with_header(header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header + content[start:]

    def read(damaged: bytes) -> None:
        file.write_bytes(damaged)
        load(file)

    assert_well_refused([(content, bytes), (content[8:start], with_header)], read, CheckpointError)


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is no regular file: .*pipe"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("[]", "no object"),
        ("{", "no JSON"),
        ('{"__metadata__": {"a": 1}}', "no object with texts"),
        ('{"x": 3}', "x has no dtype, shape and place"),
        ('{"x": {"dtype": "F8", "shape": [], "data_offsets": [0, 4]}}', "x has no dtype"),
        ('{"x": {"dtype": "F32", "shape": [], "data_offsets": [0]}}', "x has no dtype"),
        ('{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "no numbers"),
        ('{"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', "no numbers"),
        ('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "4 bytes for its shape"),
        (
            '{"x": {"dtype": "F32", "shape": [0, 9223372036854775808], "data_offsets": [0, 0]}}',
            "x: f32 of shape .* is larger than",
        ),
        (
            '{"x": {"dtype": "U8", "shape": [' + "1, " * 69 + '1], "data_offsets": [0, 1]}}',
            "x: a tensor has at most 64 dimensions, not 70",
        ),
        ('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "begins at byte 4"),
        ('{"x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}', "8 bytes of data, not 9"),
        ('{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', "8 bytes of data, not 4"),
        (
            '{"x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
            ' "y": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}',
            "y begins at byte 4 of the data, not at 8",
        ),
    ],
)
def test_impossible_headers(tmp_path: Path, header: str, reason: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(CheckpointError, match=reason):
        load(file)
