"""Tensors and text in one file, as safetensors (github.com/huggingface/safetensors) defines it.

The length of the header as a little-endian u64; the header, JSON that gives each tensor's dtype,
shape and place, and texts under `__metadata__`; the bytes of the tensors, row-major and little-
endian, one after the other. A CRC-32 of those bytes is among the texts, so that damage is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from models.data.files import opened

_NAMES: Final = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "UI" for size in (1, 2, 4, 8)},
    "F32": "<f4",
    "F64": "<f8",
}
_DTYPES: Final = {np.dtype(code): name for name, code in _NAMES.items()}
_MOST_HEADER: Final = 100_000_000  # bytes, as the format has it
_ALIGNMENT: Final = 8  # of the first tensor's byte, as the format asks
_CHECKSUM: Final = "crc32"
_METADATA: Final = "__metadata__"


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
    parts, header, end = [], {}, 0
    checksum = 0
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if array.dtype.newbyteorder("<") not in _DTYPES:
            raise CheckpointError(f"{name}: the format has no {array.dtype}")
        part = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(part)],
        }
        end += len(part)
        checksum = zlib.crc32(part, checksum)
        parts.append(part)
    texts = {**metadata, _CHECKSUM: str(checksum)}
    head = json.dumps({_METADATA: texts, **header}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    _replace(file, [len(head).to_bytes(8, "little"), head, *parts])


def _replace(file: Path, parts: list[bytes]) -> None:
    """Write the parts to another file first, and give it the name when they are on the disk."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def load(file: Path) -> Checkpoint:
    """What the file holds. Raises `OSError`, and `CheckpointError` for a file that is damaged."""
    with opened(file) as stream:
        content = stream.read()
    try:
        return _parsed(content)
    except CheckpointError as error:
        raise CheckpointError(f"{file} is no checkpoint, or damaged: {error}") from None


def _parsed(content: bytes) -> Checkpoint:
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or start > len(content):
        raise CheckpointError(f"its {len(content)} bytes end within the header")
    if start > _MOST_HEADER:
        raise CheckpointError(f"its header has more than {_MOST_HEADER} bytes")
    try:
        header = json.loads(content[8:start])
    except (ValueError, RecursionError):
        raise CheckpointError("its header is no JSON") from None
    metadata = header.pop(_METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise CheckpointError("its header is no object with texts as metadata")
    places = {name: _place(name, entry) for name, entry in header.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        if place.start != end:
            raise CheckpointError(f"{name} begins at byte {place.start} of the data, not at {end}")
        end = place.stop
    data = memoryview(content)[start:]
    if len(data) != end:
        raise CheckpointError(f"it has {len(data)} bytes of data, not {end}")
    if metadata.pop(_CHECKSUM, None) not in (None, str(zlib.crc32(data))):
        raise CheckpointError("its data is not what was written")
    tensors = {
        name: np.ndarray(place.shape, place.dtype, data, place.start)
        for name, place in places.items()
    }
    return Checkpoint(tensors, metadata)


class _Place(NamedTuple):
    """A tensor's type, and where its bytes begin and end in the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def _place(name: str, entry: Any) -> _Place:
    try:
        dtype, shape = np.dtype(_NAMES[entry["dtype"]]), tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{name} has no dtype, shape and place") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise CheckpointError(f"{name} has a shape or place that are no numbers")
    try:
        nbytes = ml.TensorType(dtype.newbyteorder("="), shape).nbytes
    except ml.errors.ShapeError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if stop - start != nbytes:
        raise CheckpointError(f"{name} has {stop - start} bytes for its shape {shape}")
    return _Place(dtype, shape, start, stop)
