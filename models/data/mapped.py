"""Arrays in `.npy` and `.npz` files that may be larger than memory: only indexed parts are read.

numpy maps only `.npy` files. An `.npz` is a zip archive of these. Its members can be mapped as
well if they are stored uncompressed, by `np.savez` and not `np.savez_compressed`.
"""

from __future__ import annotations

import io
import math
import os
import stat
import struct
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, TypeAlias

import numpy as np
from numpy.lib import format
from numpy.typing import NDArray

from models.data.dataset import DataError, Indices
from models.data.files import parsing

Order: TypeAlias = Literal["C", "F"]  # row-major, column-major

_MOST_HEADER = 1 << 16  # bytes of a `.npy` file's header; numpy writes a few hundred
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, lengths of name and extra


class MappedArray:
    """Array in a file, from byte `offset` on; `x[indices]` reads a copy.

    A pickle has the file's name, so another process maps the file, too. Raises `DataError` for a
    file that is missing or too short, also when it is unpickled.
    """

    def __init__(
        self, file: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, order: Order
    ) -> None:
        self._spec = (file, dtype, shape, offset, order)
        try:
            self._array = np.memmap(file, dtype, "r", offset, shape, order)
        except (OSError, ValueError, OverflowError) as error:
            raise DataError(f"{file} cannot be mapped: {error}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec[2]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._spec[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Indices | slice | int) -> NDArray[Any]:
        return np.array(self._array[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedArray, self._spec


def open_npy(file: Path) -> MappedArray:
    """Return the array of a `.npy` file.

    Raises `DataError` for a file that is missing or corrupt.
    """
    with parsing(file) as stream:
        return _described(file, stream, 0, os.fstat(stream.fileno()).st_size)


def open_npz(file: Path) -> dict[str, MappedArray]:
    """Return the arrays of an `.npz` file by name.

    Raises `DataError` for a file that is missing or corrupt, and for members that are compressed,
    encrypted, or no files in the archive's folder.
    """
    with parsing(file) as stream, zipfile.ZipFile(stream) as archive:
        return {
            member.filename.removesuffix(".npy"): _member(file, stream, member)
            for member in archive.infolist()
        }


def _member(file: Path, stream: IO[bytes], member: zipfile.ZipInfo) -> MappedArray:
    name = PurePosixPath(member.filename)
    if name.is_absolute() or ".." in name.parts or stat.S_ISLNK(member.external_attr >> 16):
        raise DataError(f"{file}: {member.filename} leads out of the archive")
    if member.flag_bits & 1:
        raise DataError(f"{file}: {member.filename} is encrypted")
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(
            f"{file}: {member.filename} is compressed, so no part of it can be read alone; "
            f"write the file with np.savez"
        )
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\3\4":
        raise DataError(f"{file} is corrupt: {member.filename} is not where the archive says")
    _, name_length, extra = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + name_length + extra
    return _described(file, stream, start, member.file_size)


def _described(file: Path, stream: IO[bytes], start: int, size: int) -> MappedArray:
    """Map the array of the `.npy` file in `size` bytes from byte `start` of the stream on."""
    stream.seek(start)
    head = io.BytesIO(stream.read(min(size, _MOST_HEADER)))
    version = format.read_magic(head)
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    shape, fortran, dtype = read(head)
    if dtype.hasobject:
        raise DataError(f"{file} holds Python objects, not numbers")
    if not shape:
        raise DataError(f"{file} holds a single number, not an array of samples")
    if min(shape) < 0 or dtype.itemsize * math.prod(shape) > size - head.tell():
        room = size - head.tell()
        raise DataError(f"{file} cannot be mapped: {room} bytes are no {dtype} {shape}")
    return MappedArray(file, dtype, shape, start + head.tell(), "F" if fortran else "C")
