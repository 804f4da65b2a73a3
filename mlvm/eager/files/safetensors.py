"""Safetensors files: written atomically, read by memory map.

A file starts with the header length as a little-endian u64. The header is JSON in UTF-8,
with each tensor's dtype, shape and offsets, and metadata under `__metadata__`. The bytes of the
tensors follow, row-major and little-endian, without gaps
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import ShapeError, WeightsError, brief
from mlvm.core.ops.half import widened
from mlvm.core.types import Array, DType, TensorType, f32
from mlvm.machines.files import format_of, mode_of, replacing

METADATA: Final = "__metadata__"
_MOST_HEADER: Final = 100_000_000  # limit of the format, in bytes
_ALIGNMENT: Final = 8  # alignment of the first tensor, which the format requires

_WORDS: Final = "bool u8 i8 f8_e5m2 f8_e4m3 i16 u16 f16 bf16 i32 u32 f32 c64 f64 i64 u64"
"""In the format's order."""
_DTYPES: Final = {name.upper(): DType.named(name.replace("_", "")) for name in _WORDS.split()}
NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
"""Names of the dtypes that the format supports."""


def damaged(reason: str) -> WeightsError:
    """Return the error for a file that was changed or cut."""
    return WeightsError(f"{reason}; the file is damaged: save or download it again")


class WeightsEntry(NamedTuple):
    """A tensor's dtype as stored in the file, the shape, and the start and end offsets."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class WeightsFile:
    """The tensors of a file by name, in the order of the header, and the metadata.

    The file is mapped into memory: only the header is read before a tensor is requested. The mapped
    file does not change while it is read; `write` replaces the file.

    Raises `OSError` if it cannot be read, or is not a file; `WeightsError`, without the name of the
    file, if it is not a safetensors file, or is damaged.
    """

    def __init__(self, file: Path) -> None:
        mode_of(file)  # raises OSError for a pipe or a device, which may be endless
        with file.open("rb") as stream:
            number = stream.fileno()
            size = os.fstat(number).st_size
            content: Any = mmap.mmap(number, size, access=mmap.ACCESS_READ) if size else b""
        other = format_of(content[:4096])
        if other and content[8:9] != b"{":
            raise WeightsError(other)
        start = 8 + int.from_bytes(content[:8], "little")
        if content and 0 not in content[:8]:
            raise WeightsError("it is neither a safetensors file nor a GGUF file; check the path")
        if size < 8 or start > size:
            raise damaged(f"the file ends after {size} bytes, inside the header")
        if start > _MOST_HEADER:
            raise damaged(f"expected a header of at most {_MOST_HEADER} bytes, got {start - 8}")
        header = _parsed(content[8:start])
        metadata = header.pop(METADATA, None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
            raise damaged(f"expected metadata from str to str, got {brief(metadata)}")
        self.data: Final = memoryview(content)[start:]
        self.metadata: Final[dict[str, str]] = metadata
        self.entries: Final = {name: _entry(name, entry) for name, entry in header.items()}
        _require_no_gaps(self.entries, len(self.data))

    def read(self, name: str, keep_halves: bool = False) -> Array:
        """Return a tensor as a read-only array over the bytes of the file.

        f16 and bf16 are converted to f32 unless `keep_halves`. Raises `WeightsError` if the dtype
        is unknown, or a bool is neither False nor True."""
        entry = self.entries[name]
        dtype = self._dtype(name)
        stored = dtype.numpy.newbyteorder("<")
        array: Array = np.ndarray(entry.shape, stored, self.data, entry.start)
        if entry.dtype == "BOOL" and (array.view(np.uint8) > 1).any():
            raise damaged(f"{name}: expected bools as 0 or 1, got a different byte")
        return widened(array) if dtype.is_half and not keep_halves else array

    def _dtype(self, name: str) -> DType:
        dtype = self.entries[name].dtype
        if dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise WeightsError(
                f"{name}: expected one of the dtypes {supported}, got {dtype}; omit it with where="
            )
        return _DTYPES[dtype]


def write(
    file: Path,
    types: Mapping[str, TensorType],
    read: Callable[[str], Array],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors of these types, which are read one by one, and metadata.

    The write is atomic: readers find either the old file or the new one. The new file keeps the
    mode of the old one, and links are followed. Only a killed process leaves a temporary file,
    `.mlvm-` and 16 digits, in the same folder.

    Raises `OSError` if it fails, or the target is not a regular file; `WeightsError` if the format
    does not support a dtype, or names or metadata are not str.
    """
    header: dict[str, Any] = {METADATA: {**metadata}} if metadata else {}
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise WeightsError(f"metadata: expected a dict from str to str, got {name!r}: {text!r}")
    end, ordered = 0, order(types)
    for name in ordered:
        start, end = end, end + types[name].nbytes
        dtype, shape = NAMES[types[name].dtype], [*types[name].shape]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    try:
        head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise WeightsError(
            f"a name or text is not UTF-8: {error.object!r:.100}; rename it"
        ) from None
    head += b" " * (-len(head) % _ALIGNMENT)
    if len(head) + 8 > _MOST_HEADER:
        raise WeightsError(
            f"expected a header of at most {_MOST_HEADER} bytes, got {len(head)}; save fewer "
            "tensors"
        )
    with replacing(file) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for name in ordered:
            stream.write(packed(read(name)))


def order(types: Mapping[str, TensorType]) -> list[str]:
    """Return the names in the order of the file: the largest elements first, so all are aligned.

    This is the order of the format's library. Raises `WeightsError` as `write` does."""
    return sorted(types, key=lambda name: (-_place(name, types[name]), name))


def type_of(array: Array) -> TensorType:
    """Return the type of an array in either byte order.

    Raises `DTypeError` if no tensor type fits."""
    return TensorType(array.dtype.newbyteorder("="), array.shape)


def packed(array: Array) -> memoryview:
    """Return the bytes of an array in the file's order; a copy only if the layouts differ."""
    row_major = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return row_major.reshape(-1).view(np.uint8).data


def _place(name: str, type: TensorType) -> int:
    """Return the position of a dtype in the format's list.

    Raises `WeightsError` if it is not supported, or the name is not a valid tensor name."""
    if not isinstance(name, str) or name == METADATA:
        raise WeightsError(
            f"expected a name other than __metadata__, in valid Unicode, got {name!r}"
        )
    if type.dtype not in NAMES:
        raise WeightsError(
            f"{name}: the format does not support {type.dtype.name}; supported are "
            f"{', '.join([each.name for each in NAMES])}; convert with astype"
        )
    return [*_DTYPES].index(NAMES[type.dtype])


# --- the header ----------------------------------------------------------------------


def _parsed(head: bytes) -> dict[str, Any]:
    try:
        header = json.loads(head.decode("utf-8"), object_pairs_hook=_once_each)
    except WeightsError:
        raise
    except (ValueError, RecursionError):
        raise damaged(f"expected a header in JSON, got {brief(head)}") from None
    if not isinstance(header, dict):
        raise damaged(f"expected a JSON object as header, got {brief(header)}")
    return header


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise damaged(f"expected distinct names in the header, got {twice} twice")
    return unique


def _entry(name: str, entry: Any) -> WeightsEntry:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged(f"{name}: expected dtype, shape and offsets, got {brief(entry)}") from None
    if not isinstance(dtype, str):
        raise damaged(f"{name}: expected dtype, shape and offsets, got {brief(entry)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise damaged(
            f"{name}: expected a shape and offsets of integers >= 0, got "
            f"{brief((shape, start, stop))}"
        )
    file_dtype = _DTYPES.get(dtype)
    try:  # the dtype to read: the widest has the fewest elements
        size = TensorType(
            f32 if file_dtype and file_dtype.is_half else file_dtype or "u8", shape
        ).size
    except ShapeError as error:
        raise WeightsError(f"{name}: {error}") from None
    if file_dtype and stop - start != size * file_dtype.itemsize:
        raise damaged(f"{name}: expected the bytes of {dtype} of shape {shape}, got {stop - start}")
    return WeightsEntry(dtype, shape, start, stop)


def _require_no_gaps(entries: Mapping[str, WeightsEntry], size: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != end or entry.stop < end:
            raise damaged(
                f"{name}: expected an offset of {end} after the previous tensor, got bytes "
                f"{entry.start} to {entry.stop}"
            )
        end = entry.stop
    if size != end:
        raise damaged(f"expected {end} bytes of data, got {size}")
