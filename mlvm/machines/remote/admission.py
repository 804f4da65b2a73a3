"""Admission of connections that are not yet authenticated ("strangers").

The number of strangers is limited, in total and per peer (a host, or a user at a unix socket). At a
limit, the server closes the oldest stranger of the peer with the most strangers, if this stranger
has had a minimum time. The minimum time is shorter until the first bytes arrive. Otherwise the
server refuses the new connection, and the client tries again. Therefore one peer cannot block other
peers, and silent connections cannot block new connections.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from mlvm.machines.remote import address as addresses
from mlvm.machines.remote import handshake
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.system import SYSTEM, System

_MOMENT: Final = 0.25  # minimum seconds for an unauthenticated connection
_MOMENT_OF_SILENCE: Final = 0.05
_LINGERS: Final = 0.2  # seconds for a refused client to read the reason
_LINES: Final = 20  # log lines per second


@dataclass
class _Stranger:
    peer: str
    since: float
    spoke: bool = False


class Admission:
    """Unauthenticated connections of a server; thread-safe.

    Under TLS (not `plain`) a rejection has no reason. `sweep` closes connections that are older
    than `seconds`.
    """

    def __init__(
        self, log: Log, *, plain: bool, seconds: float = math.inf, system: System = SYSTEM
    ) -> None:
        self._now = system.monotonic
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
        """Admit a new connection and return True, or refuse it and take it from the caller."""
        now, peer = self._now(), _peer_of(sock)
        with self._lock:
            counts = Counter(it.peer for it in self._strangers.values())
            crowd = peer if counts[peer] >= FIXED.strangers_of_peer else None
            if crowd is None and len(self._strangers) >= FIXED.strangers:
                [(crowd, _)] = counts.most_common(1)
            evicted = None if crowd is None else self._oldest_expired(crowd, now)
            is_admitted = crowd is None or evicted is not None
            if evicted is not None:
                del self._strangers[evicted]
            if is_admitted:
                self._strangers[sock] = _Stranger(peer, now)
        if evicted is not None:
            self._send_busy(evicted)
            addresses.shut(evicted)
        if is_admitted:
            return True
        self._send_busy(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self.note(peer, handshake.BUSY)
        self._lingering.append((now + _LINGERS, sock))
        return False

    def _oldest_expired(self, peer: str, now: float) -> socket.socket | None:
        """Return the stranger to drop for a new connection, or None if all are too recent.

        It belongs to the given peer.
        """
        ends = {
            sock: it.since + (_MOMENT if it.spoke else _MOMENT_OF_SILENCE)
            for sock, it in self._strangers.items()
            if it.peer == peer
        }
        oldest = min(ends, key=ends.__getitem__, default=None)
        return oldest if oldest is not None and ends[oldest] < now else None

    def _send_busy(self, sock: socket.socket) -> None:
        """Send the reason if this is possible without waiting."""
        if self._plain:
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal(handshake.BUSY), getattr(socket, "MSG_DONTWAIT", 0))

    def note_first_bytes(self, sock: socket.socket) -> None:
        """Note that the handshake of a stranger has begun."""
        with self._lock:
            if sock in self._strangers:
                self._strangers[sock].spoke = True

    def replace(self, sock: socket.socket, other: socket.socket) -> None:
        """Replace the socket object of a connection."""
        with self._lock:
            stranger = self._strangers.pop(sock, None)
            self._strangers[other] = stranger or _Stranger("", self._now())

    def leave(self, sock: socket.socket) -> None:
        """Forget a connection that is authenticated or closed. Idempotent."""
        with self._lock:
            self._strangers.pop(sock, None)

    def sweep(self, *, last: bool = False) -> bool:
        """Close refused connections that had time to read the reason; return whether any remain.

        At most `FIXED.refused` remain, the latest. The `last` call closes all connections.
        """
        present = self._now()
        with self._lock:
            strangers = self._strangers.items()
            late = [each for each, it in strangers if present - it.since > self._seconds]
        for each in late:
            addresses.shut(each)
        now = math.inf if last else present
        most, lingering = FIXED.refused, self._lingering
        while lingering and (lingering[0][0] < now or len(lingering) > most):
            lingering.popleft()[1].close()
        return bool(self._lingering)

    def note(self, peer: str, reason: str) -> None:
        """Log a refusal, at most `_LINES` per second; a line states the number of omitted lines."""
        now = self._now()
        with self._lock:
            self.refused += 1
            if len(self._lines) == _LINES and now - self._lines[0] < 1.0:
                self._unlogged += 1
                return
            self._lines.append(now)
            others, self._unlogged = self._unlogged, 0
        more = {"others": others} if others else {}
        self._log.event("refused", peer=peer, reason=reason, **more)


def _peer_of(sock: socket.socket) -> str:
    """Return the host or user of the peer."""
    with contextlib.suppress(OSError, ValueError):
        if sock.family == socket.AF_UNIX:
            peer = addresses.credentials(sock)
            return f"uid {peer[1]}" if peer else "unix"
        host = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
        if host.version == 6:  # a peer may own a whole /64 network
            return str(ipaddress.ip_network((host, 64), strict=False))
        return str(host)
    return "unknown"
