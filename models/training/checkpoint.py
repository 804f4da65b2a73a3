"""A training's tensors and texts in one file, as `ml.save` writes it.

A CRC-32 of the bytes of the tensors is among the texts, so that damage is noticed.
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
"""The texts of a training: its options, and how far its batches have come."""
_CHECKSUM: Final = "mlvm.crc32"


class CheckpointError(ml.errors.MlvmError, ValueError):
    """A file that is no checkpoint, is damaged, or is of another training."""


class Checkpoint(NamedTuple):
    """What a file holds: tensors by name, and texts by name."""

    tensors: dict[str, NDArray[Any]]
    metadata: dict[str, str]


def save(file: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write the file, in one step: a reader finds the old one or the new one, whatever happens.

    Raises `OSError`, and leaves nothing behind then; `CheckpointError` for a dtype that the
    format does not have.
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
    """What the file holds. Raises `OSError`, and `CheckpointError` for a file that is damaged."""
    try:
        opened = safetensors.WeightsFile(file)
        metadata = dict(opened.metadata)
        if metadata.pop(_CHECKSUM, None) not in (None, str(zlib.crc32(opened.data))):
            raise CheckpointError("its data is not what was written")
        return Checkpoint({name: opened.read(name) for name in opened.entries}, metadata)
    except (CheckpointError, ml.errors.WeightsError) as error:
        raise CheckpointError(f"{file} is no checkpoint, or damaged: {error}") from None
