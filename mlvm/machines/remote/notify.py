"""Protocols of systemd: sockets that it opens for a service, and the state of the service.

Both protocols use environment variables: sd_listen_fds(3) and sd_notify(3).
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Final

from mlvm.core.errors import AddressError

LISTEN: Final = "systemd"
"""Address of a socket that systemd has opened."""

_FIRST: Final = 3  # the first descriptor that systemd passes


def inherited_socket() -> socket.socket:
    """Return the socket that systemd has opened for this process.

    Raises `AddressError` unless systemd has passed exactly one listening socket.
    """
    count = os.environ.pop("LISTEN_FDS", "0")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or count != "1":
        raise AddressError(
            "--listen systemd: expected one socket for this process (LISTEN_FDS=1), "
            f"got LISTEN_FDS={count}; start the server with a .socket unit"
        )
    try:
        sock = socket.socket(fileno=_FIRST)
    except OSError as error:
        raise AddressError(
            f"LISTEN_FDS=1: descriptor {_FIRST} is not a socket: {error}; "
            "start the server by systemd"
        ) from None
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise AddressError("the socket of systemd does not listen: set Accept=no and ListenStream=")
    os.set_inheritable(_FIRST, False)
    sock.setblocking(True)
    return sock


def notify(*facts: str) -> None:
    """Send states such as "READY=1", "STOPPING=1" or "STATUS=..." to systemd, if it listens."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    lines = [*facts, f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        sock.send("\n".join(lines).encode())
