"""Checkpoints: the tensors and texts of a training in one file, in the format of `ml.save`.

The texts contain a CRC-32 of the tensor data, which detects damage.
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
"""Keys of the texts: the options of a training, and the position of the pipeline."""
_CHECKSUM: Final = "mlvm.crc32"


class CheckpointError(ml.errors.MlvmError, ValueError):
    """Error for a file that is not a checkpoint, is damaged, or belongs to a different training."""


class Checkpoint(NamedTuple):
    """Contents of a checkpoint file: tensors and texts by name."""

    tensors: dict[str, NDArray[Any]]
    metadata: dict[str, str]


def save(file: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write the file atomically: a reader sees the old file or the new file.

    Raises `OSError` and removes the new file if writing fails; `CheckpointError` for a dtype that
    the format does not support.
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
            raise CheckpointError("the CRC-32 of the tensor data does not match")
        return Checkpoint({name: opened.read(name) for name in opened.entries}, metadata)
    except (CheckpointError, ml.errors.WeightsError) as error:
        raise CheckpointError(f"{file} is not a checkpoint, or is damaged: {error}") from None
