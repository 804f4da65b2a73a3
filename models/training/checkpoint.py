"""Checkpoints: a training's tensors and texts in one file, in the format of `ml.save`.

The texts have a CRC-32 of the tensors' bytes, so that damage is noticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager.files import safetensors

TRAINING: Final = "mlvm.training"
PIPELINE: Final = "mlvm.pipeline"
"""Keys of a training's texts: its options, and the position of its pipeline."""
_CHECKSUM: Final = "mlvm.crc32"


class CheckpointError(ml.errors.MlvmError, ValueError):
    """A file that is no checkpoint, is damaged, or is of another training."""


class Checkpoint(NamedTuple):
    """Contents of a file: tensors by name, and texts by name."""

    tensors: dict[str, NDArray[Any]]
    metadata: dict[str, str]


def save(file: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write the file atomically: a reader sees the old file or the new file.

    Raises `OSError`, and then removes the new file; `CheckpointError` for a dtype that the format
    does not have.
    """
    try:
        types = {name: safetensors.type_of(array) for name, array in tensors.items()}
        checksum = 0
        for name in safetensors.order(types):
            checksum = zlib.crc32(safetensors.packed(tensors[name]), checksum)
        texts = {**metadata, _CHECKSUM: str(checksum)}
        safetensors.write(file, types, tensors.__getitem__, texts)
    except (ml.errors.WeightsError, ml.errors.DTypeError) as error:
        raise CheckpointError(str(error)) from None


def load(file: Path) -> Checkpoint:
    """Read a file. Raises `OSError`, and `CheckpointError` for a damaged file."""
    try:
        opened = safetensors.WeightsFile(file)
        metadata = dict(opened.metadata)
        if metadata.pop(_CHECKSUM, None) not in (None, str(zlib.crc32(opened.data))):
            raise CheckpointError("its data is not what was written")
        return Checkpoint({name: opened.read(name) for name in opened.entries}, metadata)
    except (CheckpointError, ml.errors.WeightsError) as error:
        raise CheckpointError(f"{file} is no checkpoint, or damaged: {error}") from None
