"""Arrays in `.npy` and `.npz` files that may be larger than memory: only indexed parts are read.

numpy maps only `.npy` files. An `.npz` file is a zip archive of `.npy` files. This module also maps
the members of an archive if they are stored without compression, by `np.savez` and not
`np.savez_compressed`.
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

_MOST_HEADER = 1 << 16  # maximum size of a `.npy` header; numpy writes a few hundred bytes
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, lengths of name and extra


class MappedArray:
    """Array in a file, starting at byte `offset`; `x[indices]` reads a copy.

    A pickle contains only the file name, so a process that unpickles it maps the file again. Raises
    `DataError` for a file that is missing or too short, also during unpickling.
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
    encrypted, or outside of the archive's root folder.
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
            f"{file}: {member.filename} is compressed and cannot be mapped; "
            f"write the file with np.savez"
        )
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\3\4":
        raise DataError(f"{file} is corrupt: {member.filename} is not where the directory states")
    _, name_length, extra = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + name_length + extra
    return _described(file, stream, start, member.file_size)


def _described(file: Path, stream: IO[bytes], start: int, size: int) -> MappedArray:
    """Map the array of the `.npy` file in bytes `start` to `start + size` of the stream."""
    stream.seek(start)
    head = io.BytesIO(stream.read(min(size, _MOST_HEADER)))
    version = format.read_magic(head)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise DataError(f"{file} is corrupt: expected version 1.0, 2.0 or 3.0, got {version}")
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    shape, fortran, dtype = read(head)
    if dtype.hasobject:
        raise DataError(f"{file} contains Python objects; expected numbers")
    if not shape:
        raise DataError(f"{file} contains a single number; expected an array of samples")
    if min(shape) < 0 or dtype.itemsize * math.prod(shape) > size - head.tell():
        room = size - head.tell()
        raise DataError(f"{file} cannot be mapped: {dtype} {shape} exceeds {room} bytes")
    return MappedArray(file, dtype, shape, start + head.tell(), "F" if fortran else "C")
