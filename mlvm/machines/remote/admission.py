"""Who may prove who they are: connections that have not, which take no place of a client's.

There are places for so many, of which one peer (a host, or a user at a unix socket) has a share at
most. Where there is none left, the oldest of that peer has to go if it has had its moment, which is
short for one that has said nothing; else the new one is refused, and told to come again. So
strangers of one peer keep no other out, and those that say nothing keep nobody out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from mlvm.machines.remote import address as addresses
from mlvm.machines.remote import handshake
from mlvm.machines.remote.log import Log

MOST_STRANGERS: Final = 96
MOST_OF_PEER: Final = 64
_MOMENT: Final = 0.25  # seconds that a stranger has, however many others come
_MOMENT_OF_SILENCE: Final = 0.05
_LINGERS: Final = 0.2  # seconds for a refused one to read why
_MOST_LINGERING: Final = 256
_LINES: Final = 20  # of the log a second


@dataclass
class _Stranger:
    peer: str
    since: float
    spoke: bool = False


class Admission:
    """The strangers of a server. Any thread uses it. Under TLS (not `plain`) nobody is told why.
    `sweep` ends those that have stayed longer than `seconds`."""

    def __init__(self, log: Log, *, plain: bool, seconds: float = math.inf) -> None:
        self._plain = plain
        self._seconds = seconds
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._lingering: deque[tuple[float, socket.socket]] = deque()
        self._log = log
        self._lines: deque[float] = deque(maxlen=_LINES)
        self._unlogged = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._strangers)

    def sockets(self) -> list[socket.socket]:
        with self._lock:
            return list(self._strangers)

    def enter(self, sock: socket.socket) -> bool:
        """Whether a connection that has come now has a place. One that has none is told, and is
        not the caller's any more."""
        now, peer = time.monotonic(), _peer_of(sock)
        with self._lock:
            of_peer = [each for each, it in self._strangers.items() if it.peer == peer]
            gone = None
            if len(of_peer) >= MOST_OF_PEER:
                gone = self._done_with(of_peer, now)
            elif len(self._strangers) >= MOST_STRANGERS:
                counts = Counter(it.peer for it in self._strangers.values())
                [(most, _)] = counts.most_common(1)
                gone = self._done_with(
                    [each for each, it in self._strangers.items() if it.peer == most], now
                )
            else:
                self._strangers[sock] = _Stranger(peer, now)
                return True
            if gone is not None:
                del self._strangers[gone]
                self._strangers[sock] = _Stranger(peer, now)
        if gone is not None:
            self._tell(gone)
            _shut(gone)
            return True
        self._tell(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self.note(peer, handshake.BUSY)
        self._lingering.append((now + _LINGERS, sock))
        return False

    def _done_with(self, among: list[socket.socket], now: float) -> socket.socket | None:
        """The one that has to go for another, if any has had its moment."""

        def waits(each: socket.socket) -> float:
            it = self._strangers[each]
            return it.since + (_MOMENT if it.spoke else _MOMENT_OF_SILENCE)

        oldest = min(among, key=waits, default=None)
        return oldest if oldest is not None and waits(oldest) < now else None

    def _tell(self, sock: socket.socket) -> None:
        """Send why, if it goes at once."""
        if self._plain:
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal(handshake.BUSY), getattr(socket, "MSG_DONTWAIT", 0))

    def spoke(self, sock: socket.socket) -> None:
        """It has begun to say who it is."""
        with self._lock:
            if sock in self._strangers:
                self._strangers[sock].spoke = True

    def becomes(self, sock: socket.socket, other: socket.socket) -> None:
        """The same connection, by another object."""
        with self._lock:
            stranger = self._strangers.pop(sock, None)
            self._strangers[other] = stranger or _Stranger("", time.monotonic())

    def leave(self, sock: socket.socket) -> None:
        """It is none any more. Idempotent."""
        with self._lock:
            self._strangers.pop(sock, None)

    def sweep(self, *, last: bool = False) -> bool:
        """Close those that have had the time to read why they are refused, or, at the `last`, all.
        Whether any are left."""
        present = time.monotonic()
        with self._lock:
            strangers = self._strangers.items()
            late = [each for each, it in strangers if present - it.since > self._seconds]
        for each in late:
            _shut(each)
        now = math.inf if last else present
        while self._lingering and (
            self._lingering[0][0] < now or len(self._lingering) > _MOST_LINGERING
        ):
            self._lingering.popleft()[1].close()
        return bool(self._lingering)

    def note(self, peer: str, reason: str) -> None:
        """Log that somebody was refused: so many lines a second, which tell of how many others."""
        now = time.monotonic()
        with self._lock:
            self.refused += 1
            if len(self._lines) == _LINES and now - self._lines[0] < 1.0:
                self._unlogged += 1
                return
            self._lines.append(now)
            others, self._unlogged = self._unlogged, 0
        more = {"others": others} if others else {}
        self._log.event("refused", peer=peer, reason=reason, **more)


def _shut(sock: socket.socket) -> None:
    """End a connection whose thread sees the end."""
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _peer_of(sock: socket.socket) -> str:
    """Host or user at the other end."""
    with contextlib.suppress(OSError, ValueError):
        if sock.family == socket.AF_UNIX:
            found = addresses.credentials(sock)
            return f"uid {found[1]}" if found else "unix"
        host = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
        if host.version == 6:  # whoever has one address of these has them all
            return str(ipaddress.ip_network((host, 64), strict=False))
        return str(host)
    return "unknown"
