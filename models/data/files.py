"""Data sets' files, opened alike: what is wrong with one is a `DataError` that names it."""

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
"""Bytes that a compressed file may unpack to; a larger one is for its user to unpack."""

_MOST_DEFLATED = 1032  # times smaller is the best that gzip's compression can do


def opened(file: Path) -> BufferedReader:
    """Open a file for reading.

    Raises `OSError`, also for a pipe or a device, which may have no end.
    """
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error), str(file)) from None
    if not regular:
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return file.open("rb")


@contextmanager
def parsing(file: Path) -> Iterator[BufferedReader]:
    """Open a file for a parser of a different library.

    Raises `DataError`, which names the file, for a file that cannot be read, and for any error of
    the parser inside; a `DataError` from inside passes unchanged.
    """
    try:
        with opened(file) as stream:
            yield stream
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # such parsers say of no list that it has all they raise
        raise DataError(f"{file} is corrupt: {error or type(error).__name__}") from None


class Source(NamedTuple):
    """Unpacked bytes of a file, and a bound on their number."""

    stream: BufferedIOBase
    most: int


@contextmanager
def reading(file: Path, homepage: str) -> Iterator[Source]:
    """Open a file for reading; a file with the suffix .gz is decompressed on the fly.

    Raises `DataError`, which says where to get the file, for a file that cannot be read, and for a
    `DataError` inside.
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
        raise DataError(f"there is no {file}; get it from {homepage}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = f"it cannot be read ({error})"
    except DataError as error:
        reason = str(error)
    else:
        return
    raise DataError(f"{file} is corrupt: {reason}; get it again from {homepage}")
