"""Checkpoint files are safetensors, are read back to the bit, and no damage goes unnoticed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import mlvm.eager as ml
from models.training.checkpoint import CheckpointError, load, save
from tests.brief import Patch, refuses

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"]
SMALL = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
TENSORS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays.arrays(dtype, SMALL)),
    max_size=5,
)
METADATA = st.dictionaries(
    st.text(max_size=8).filter(lambda k: k != "mlvm.crc32"), st.text(max_size=9)
)
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


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {})
    with pytest.raises(CheckpointError, match="z: the format has no c128"):
        save(file, {"z": np.zeros(1, np.complex128)}, {})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refuses(OSError, "No space left", save, file, {}, {})
    assert load(file).tensors.keys() == EXAMPLE.keys()
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    refuses(FileNotFoundError, "", save, tmp_path / "nowhere" / "x", EXAMPLE, {})
    refuses(FileNotFoundError, "", load, tmp_path / "nowhere")


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {"who": "me"})
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        refuses(CheckpointError, r"x\.safetensors is no checkpoint, or damaged", load, file)
    data = 8 + int.from_bytes(content[:8], "little")
    for at in range(data, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        refuses(CheckpointError, "its data is not what was written", load, file)
    assert issubclass(CheckpointError, ml.errors.MlvmError)


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuses(OSError, r"it is no regular file: .*pipe", load, tmp_path / "pipe")
