"""Digest of the C sources, which `setup.py` compiles into the extension.

`extension.py` compares it with the sources of a checkout. `setup.py` runs this file, so it does
not import mlvm.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

_SUFFIXES = (".c", ".h", ".def")


def sources_digest(folder: str | os.PathLike[str]) -> int:
    """Return a digest of the names and sizes of the C files in a folder.

    It needs 0.2 ms. Reading the contents at each import would need several milliseconds.
    """
    return zlib.crc32("\n".join(sorted(_files(folder))).encode())


def _files(folder: str | os.PathLike[str]) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(entry.path)
        elif entry.name.endswith(_SUFFIXES) and entry.is_file():  # no editor's dangling link
            yield f"{entry.name} {entry.stat().st_size}"
