"""A client's stream that outlives its connection: `ml.connect(..., retry=)`.

Messages are numbered by their order. What the server may not have received is kept. When the
connection is lost another one takes its place: the server says how many messages have come, the
others are sent again, and it repeats its last answer. So each message is done once, whatever was
lost, and nobody above notices.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import MSG_PEEK, SHUT_RDWR, socket
from typing import Any, Final, NamedTuple, Protocol

from mlvm.core.errors import AccessRefused, ConnectionLost, MlvmError
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind
from mlvm.machines.remote.address import kept as kept_open
from mlvm.machines.remote.stream import Buffer, Incoming, Received, Sending, Stream
from mlvm.machines.remote.watchdog import has_hung_up

GOODBYE: Final = HEADER.pack(MAGIC, VERSION, Kind.goodbye.value, 0)
"""What ends a lease at once. A connection that ends without it may come again."""

_MOST_KEPT: Final = 1 << 26  # bytes
_PAUSES: Final = 0.02, 0.5
"""Seconds between two attempts: the first ones, and the most."""
_LEAST: Final = 0.001  # seconds to wait for a server that has let the client in


class Noted(Protocol):
    """What a client notes with its messages: how many of them were calls, and were not."""

    @property
    def calls(self) -> int: ...
    @property
    def posts(self) -> int: ...


class _Late(Exception):
    """Nobody waits for another connection any longer."""


class _Kept(NamedTuple):
    """Messages `first` to `last`. The answer to that `call` says that they have come."""

    first: int
    last: int
    call: int
    data: list[bytes]


class _Leased(Sending):
    """What is on its way, and what the server may not have received."""

    __slots__ = ("kept",)

    def __init__(self, parts: Sequence[Buffer], note: Any, kept: list[_Kept]) -> None:
        super().__init__(parts, note)
        self.kept = kept


class LeasedStream(Stream):
    """A stream on a socket, or on another that `reconnect` gives within so many seconds after it.

    One thread sends and one receives, as with any stream. Either may find the connection lost.
    """

    def __init__(self, sock: socket, reconnect: Callable[[float], socket], seconds: float) -> None:
        super().__init__(sock)
        self._reconnect = reconnect
        self._seconds = seconds
        self._timeouts = 0.0, 0.0
        self._sends = threading.RLock()
        self._receives = threading.RLock()  # taken after `_sends`
        self._connection = 0  # a number, to tell a lost one from the next
        self._closed = False

    @property
    def is_full(self) -> bool:
        sending = self._sending
        kept = sending.kept if isinstance(sending, _Leased) else []
        return sum(len(each) for entry in kept for each in entry.data) > _MOST_KEPT

    def set_timeouts(self, receive: float, send: float) -> None:
        super().set_timeouts(receive, send)
        self._timeouts = receive, send

    def add(self, parts: Sequence[Buffer], note: Any = None) -> None:
        with self._sends:
            before = self._sending
            kept = before.kept if isinstance(before, _Leased) else []
            kept = [each for each in kept if each.call > self.received]
            if parts and note is not None:
                data = [bytes(each) for each in parts]  # whose memory it is may change it
                was: Noted | None = before.note
                first, last = _messages(was) + 1, _messages(note)
                has_call = note.calls > (0 if was is None else was.calls)
                kept = [*kept, _Kept(first, last, note.calls + (not has_call), data)]
                parts = data
            self._sending = _Leased([*before.rest(), *parts], note, kept)

    @property
    def is_lost(self) -> bool:
        return self._closed

    def is_coming(self, deadline: float) -> bool:
        while super().is_coming(deadline):
            connection = self._connection
            if self.has_received() or not _is_over(self.socket):
                return True
            try:
                self._resume(connection, ConnectionLost("the connection is lost"), deadline)
                self.flush()
            except _Late:
                return False
        return False

    def flush(self) -> None:
        with self._sends:
            while True:
                connection = self._connection
                try:
                    return super().flush()
                except ConnectionLost as error:
                    self._resume(connection, error)

    def receive(self) -> tuple[Kind, Received]:
        while True:
            connection = self._connection
            try:
                with self._receives:
                    return self._receive_whole()
            except ConnectionLost as error:
                self._resume(connection, error)
                self.flush()

    def _receive_whole(self) -> tuple[Kind, Received]:
        """The next message, once all of it is here: half of one counts as none."""
        count = self.received
        try:
            kind, reader = super().receive()
            return kind, reader.arrived() if isinstance(reader, Incoming) else reader
        except ConnectionLost:
            self._at = self._at._replace(messages=count)
            raise

    def _resume(self, connection: int, error: ConnectionLost, until: float = math.inf) -> None:
        """Go on with another connection, unless another thread has seen to it. Raises
        `ConnectionLost` if there is none, and `_Late` if there is none yet at the time `until`."""
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # wakes the other thread
        with self._sends, self._receives:
            if connection != self._connection:
                return
            fresh, arrived = self._again(error, until)
            note, kept = self._sending.note, getattr(self._sending, "kept", [])
            rest = _Leased(_after(kept, arrived), note, kept)
            at = fresh._at._replace(messages=self.received, incoming=None)
            before = self.socket
            # No call comes between these lines, so no interrupt does.
            self.socket, self._buffer, self._end = fresh.socket, fresh._buffer, fresh._end
            self._at, self._sending, self._connection = at, rest, connection + 1
            before.close()

    def _again(self, error: ConnectionLost, until: float) -> tuple[Stream, int]:
        """A stream on a new connection, which begins with the next answer, and how many messages
        have come to the server. Raises `ConnectionLost`, and `_Late` at the time `until`.

        A server that is busy with a launch says nothing till that ends. So it is asked again and
        again whether it knows this client still, each time for as long as a server is looked for.
        """
        deadline = time.monotonic() + self._seconds
        pause, most = _PAUSES
        while not self._closed and (now := time.monotonic()) < deadline:
            if now > until:
                raise _Late
            try:
                with kept_open(self._reconnect(min(deadline, until) - now)) as sock:
                    now = time.monotonic()
                    waits = max(min(self._seconds, until - now), _LEAST)
                    deadline = now + waits + self._seconds
                    return self._greeted(sock, waits)
            except AccessRefused as refused:
                raise ConnectionLost(f"{error}; it does not go on: {refused}") from None
            except (MlvmError, OSError):
                time.sleep(max(min(pause, deadline - now, until - now), 0.0))
                pause = min(2 * pause, most)
        self._closed = True
        raise error

    def _greeted(self, sock: socket, seconds: float) -> tuple[Stream, int]:
        """As `_again`, if the server says that much in so many seconds."""
        fresh = Stream(sock)
        fresh.set_timeouts(seconds, seconds)
        _, reader = fresh.receive()
        arrived, answered = reader.integer(), reader.integer()
        if 0 < answered <= self.received:  # what it repeats is here
            _, repeated = fresh.receive()
            if isinstance(repeated, Incoming):
                repeated.skip()
        fresh.set_timeouts(*self._timeouts)
        return fresh, arrived

    def renounce(self) -> None:
        self._closed = True

    def close(self) -> None:
        """End the connection, and the lease with it."""
        self._closed = True
        with suppress(OSError):
            if not self._sending.rest():
                self.socket.settimeout(1.0)
                self.socket.sendall(GOODBYE)
        super().close()


def _is_over(sock: socket) -> bool:
    """Whether the other side has hung up, and all that it said was received."""
    try:
        return has_hung_up(sock) and not socket.recv(sock, 1, MSG_PEEK)  # also where it is TLS's
    except OSError:
        return True


def _messages(note: Noted | None) -> int:
    return 0 if note is None else note.posts + note.calls


def _after(kept: Sequence[_Kept], arrived: int) -> list[bytes]:
    """The messages after that number."""
    rest: list[bytes] = []
    for each in kept:
        if each.first > arrived:
            rest += each.data
        elif each.last > arrived:
            data, at = b"".join(each.data), 0
            for _ in range(arrived - each.first + 1):
                at += HEADER.size + HEADER.unpack_from(data, at)[3]
            rest.append(data[at:])
    return rest
