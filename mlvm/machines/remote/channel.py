"""Messages and file descriptors between a server and client processes.

A message is a line of JSON. The operating system passes the sockets of a message (SCM_RIGHTS).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any, Final, NamedTuple

_ROOM: Final = 1 << 16
_CLOSED_BY_EXEC: Final[int] = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_PATIENCE: Final = struct.pack("@ll", 10, 0)
"""Send timeout (struct timeval): the other end reads a message within 10 seconds."""


class Message(NamedTuple):
    """Received message: a JSON object and sockets."""

    facts: dict[str, Any]
    sockets: list[socket.socket]


class Channel:
    """One end of a connection within this host. Any thread may send; one thread listens."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        self._sending = threading.Lock()
        self._data = b""
        self._sockets: list[socket.socket] = []

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Create two connected channels."""
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(one), Channel(two)

    def send(self, facts: dict[str, Any], *sockets: socket.socket) -> bool:
        """Send a message. Return False if the other end is closed."""
        data = json.dumps({**facts, "sockets": len(sockets)}).encode() + b"\n"
        with self._sending:
            try:
                descriptors = [each.fileno() for each in sockets]
                sent = socket.send_fds(self.socket, [data], descriptors) if sockets else 0
                self.socket.sendall(data[sent:])
            except OSError:
                self.end()
                return False
        return True

    def listen(self) -> Message | None:
        """Wait for the next message; None at the end of the channel."""
        while not self.has_message():
            if not self.receive():
                return None
        line, self._data = self._data.split(b"\n", 1)
        facts = json.loads(line)
        count = facts.pop("sockets")
        sockets, self._sockets = self._sockets[:count], self._sockets[count:]
        return Message(facts, sockets)

    def has_message(self) -> bool:
        """Return whether `listen` would return a message without waiting."""
        return b"\n" in self._data

    def receive(self) -> bool:
        """Wait for bytes. Return False at the end of the channel."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _ROOM, 8, _CLOSED_BY_EXEC)
        except OSError:
            return False
        self._sockets += [socket.socket(fileno=each) for each in descriptors]
        self._data += data
        return bool(data)

    def close(self) -> None:
        """Close the channel in both directions, which also ends the other listener. Idempotent."""
        self.end()
        self.abandon()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close this end in this process only; a different process may also hold it."""
        self.socket.close()
        for each in self._sockets:
            each.close()
