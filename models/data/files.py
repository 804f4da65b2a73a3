"""Readers of data set files; an unusable file raises a `DataError` that names the file."""

from __future__ import annotations

import errno
import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import NamedTuple

from models.data.dataset import DataError

MOST_UNPACKED = 1 << 30
"""Maximum unpacked size of a compressed file in bytes; users unpack larger files themselves."""

_MOST_DEFLATED = 1032  # the largest compression ratio of gzip


def opened(file: Path) -> BufferedReader:
    """Open a file for reading.

    Raises `OSError`, also for a pipe or a device, which may be endless.
    """
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except ValueError as error:  # not a valid file name
        raise OSError(errno.EINVAL, str(error), str(file)) from None
    if not regular:
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return file.open("rb")


@contextmanager
def parsing(file: Path) -> Iterator[BufferedReader]:
    """Open a file for a parser of a different library.

    If the file cannot be read, or the parser raises any error inside the block, raise a `DataError`
    that names the file. A `DataError` from inside the block is not changed.
    """
    try:
        with opened(file) as stream:
            yield stream
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # these parsers do not document which errors they raise
        raise DataError(f"{file} is corrupt: {error or type(error).__name__}") from None


class Source(NamedTuple):
    """Unpacked bytes of a file, with a limit on the number of bytes."""

    stream: BufferedIOBase
    most: int


@contextmanager
def reading(file: Path, homepage: str) -> Iterator[Source]:
    """Open a file for reading; a file with the suffix .gz is decompressed on the fly.

    If the file cannot be read, or the block raises `DataError`, raise a `DataError` that names the
    source of the file.
    """
    try:
        with opened(file) as stream:
            size = file.stat().st_size
            if file.suffix != ".gz":
                yield Source(stream, size)
                return
            with gzip.open(stream) as unpacked:
                yield Source(unpacked, min(_MOST_DEFLATED * size, MOST_UNPACKED))
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; get it from {homepage}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = f"it cannot be read ({error})"
    except DataError as error:
        reason = str(error)
    else:
        return
    raise DataError(f"{file} is corrupt: {reason}; get it again from {homepage}")
