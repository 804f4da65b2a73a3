"""Anonymous memory that processes share.

It is freed when the last process that uses it exits, for any reason. On Linux it is a
memory file (memfd_create(2)), on other POSIX systems a temporary file that is unlinked immediately,
on Windows a mapping of the paging file.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile

from mlvm.core.sizes import physical_memory

Source = int | str
"""Identifier of shared memory: a file descriptor, on Windows a tag."""


def new_source(nbytes: int) -> Source:
    """Create shared memory of `nbytes` zero bytes; only the returned value identifies it.

    Raises `MemoryError` if the machine has too little memory, and `OSError`.
    """
    if sys.platform == "win32":
        return f"mlvm-{secrets.token_hex(16)}"
    if sys.platform == "linux":
        descriptor = os.memfd_create("mlvm", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if nbytes > physical_memory():
            raise MemoryError  # reserve the memory now: otherwise an access would fail later
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
