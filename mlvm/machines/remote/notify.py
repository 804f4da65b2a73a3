"""What systemd and a service tell each other: a socket that was opened, and how the service does.

Both protocols are environment variables: sd_listen_fds(3) and sd_notify(3).
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Final

from mlvm.core.errors import AddressError

LISTEN: Final = "systemd"
"""The address of a socket that systemd has opened."""

_FIRST: Final = 3  # the number of the first descriptor that is handed over


def inherited_socket() -> socket.socket:
    """The socket that systemd has opened for this process. Raises `AddressError` if it is not one
    alone, or does not listen."""
    count = os.environ.pop("LISTEN_FDS", "0")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or count != "1":
        raise AddressError("--listen systemd takes one socket of a .socket unit (LISTEN_FDS=1)")
    try:
        sock = socket.socket(fileno=_FIRST)
    except OSError as error:
        raise AddressError(f"what systemd has handed over is no socket: {error}") from None
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise AddressError("the socket of systemd does not listen: Accept=no and ListenStream=")
    os.set_inheritable(_FIRST, False)
    sock.setblocking(True)
    return sock


def notify(*facts: str) -> None:
    """Tell systemd, if it wants to know: "READY=1", "RELOADING=1", "STOPPING=1", "STATUS=..."."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    said = [*facts, f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        sock.send("\n".join(said).encode())
