"""Checkpoint files are safetensors, are read back to the bit, and no damage goes unnoticed; the
format itself is tested in `tests/eager/files`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import mlvm.eager as ml
from models.training.checkpoint import CheckpointError, load, save
from tests.brief import refuses
from tests.trees import bits

EXAMPLE = {"a/b": np.arange(6.0).reshape(2, 3), "k": np.array([1, 2], np.uint64)}


def test_what_is_written_is_read_back_or_the_old_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {"who": "me"})
    refuses(
        CheckpointError,
        "z: the format does not support c128",
        save,
        file,
        {"z": np.zeros(1, "c16")},
        {},
    )
    read, plain = load(file), ml.load(file)
    assert read.metadata == {"who": "me"}
    assert plain.metadata.keys() == {"who", "mlvm.crc32"}
    assert read.tensors.keys() == plain.keys() == EXAMPLE.keys()
    for name, x in EXAMPLE.items():
        assert bits(read.tensors[name]) == bits(plain[name]) == bits(x)
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, EXAMPLE, {"who": "me"})
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        refuses(CheckpointError, r"x\.safetensors is not a checkpoint, or is damaged", load, file)
    data = 8 + int.from_bytes(content[:8], "little")
    for at in range(data, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        refuses(CheckpointError, "CRC-32 of the tensor data does not match", load, file)
    assert issubclass(CheckpointError, ml.errors.MlvmError)
