"""Memory that several processes share.

It has no name and is freed when its last process exits, for any reason. On Linux it is a
memory file (memfd_create(2)), on other POSIX systems a temporary file that is unlinked at once, on
Windows a mapping of the paging file.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile

Source = int | str
"""Identifier of shared memory: a file descriptor, on Windows a tag."""


def new_source(nbytes: int) -> Source:
    """Create shared memory of `nbytes` zero bytes. Only the returned value leads to it.

    Raises `MemoryError` for more than the machine has, and `OSError`.
    """
    if sys.platform == "win32":
        return f"mlvm-{secrets.token_hex(16)}"
    if sys.platform == "linux":
        descriptor = os.memfd_create("mlvm", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError  # otherwise the system would fail when the bytes are used
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
