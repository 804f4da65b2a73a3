"""Stream of a client that outlives a connection: `ml.connect(..., retry=)`.

Messages are numbered in order. The client retains messages that the server has not confirmed. A new
connection replaces a lost connection: the server reports the number of received messages, the
client sends the remaining messages again, and the server repeats the last answer. Therefore each
message is executed once, and the change is transparent to callers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import MSG_PEEK, SHUT_RDWR, socket
from typing import Any, Final, NamedTuple, Protocol

from mlvm.core.errors import AccessDeniedError, ConnectionLostError, MlvmError
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind
from mlvm.machines.remote.address import closing_on_error
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.stream import Buffer, Incoming, Received, Sending, Stream
from mlvm.machines.remote.system import SYSTEM

GOODBYE: Final = HEADER.pack(MAGIC, VERSION, Kind.goodbye.value, 0)
"""The message that ends a lease immediately. Without it, the client may connect again."""

_PAUSES: Final = 0.02, 0.5
"""Seconds between attempts: initial and maximum delay."""


class Noted(Protocol):
    """Counters that a client adds to messages: calls and posts so far."""

    @property
    def calls(self) -> int: ...
    @property
    def posts(self) -> int: ...


class _DeadlinePassed(Exception):
    """The caller's deadline has passed without a new connection."""


class _Unconfirmed(NamedTuple):
    """Messages `first` to `last`, as bytes. The answer to call number `call` confirms them."""

    first: int
    last: int
    call: int
    data: list[bytes]


class _Leased(Sending):
    """Bytes to send, and the messages that the server has not confirmed."""

    __slots__ = ("unconfirmed",)

    def __init__(self, parts: Sequence[Buffer], note: Any, unconfirmed: list[_Unconfirmed]) -> None:
        super().__init__(parts, note)
        self.unconfirmed = unconfirmed


class LeasedStream(Stream):
    """Stream with a socket that `reconnect` replaces within `seconds` after a loss.

    One thread sends and one receives, as with any stream. Either may find the connection lost.
    """

    _sending: _Leased

    def __init__(self, sock: socket, reconnect: Callable[[float], socket], seconds: float) -> None:
        super().__init__(sock)
        self._sending = _Leased((), None, [])
        self._reconnect = reconnect
        self._seconds = seconds
        self._timeouts = 0.0, 0.0
        self._sends = threading.RLock()
        self._receives = threading.RLock()  # acquired after `_sends`
        # Number of the connection, which shows that another thread has reconnected.
        self._connection = 0
        self._closed = False

    @property
    def is_full(self) -> bool:
        unconfirmed = self._sending.unconfirmed
        return sum(len(each) for entry in unconfirmed for each in entry.data) > FIXED.unconfirmed

    def set_timeouts(self, receive: float, send: float) -> None:
        super().set_timeouts(receive, send)
        self._timeouts = receive, send

    def add(self, parts: Sequence[Buffer], note: Any = None) -> None:
        with self._sends:
            before = self._sending
            unconfirmed = [each for each in before.unconfirmed if each.call > self.received]
            if parts and note is not None:
                # a copy, because the caller may change the memory
                data = [bytes(each) for each in parts]
                was: Noted | None = before.note
                first, last = _messages(was) + 1, _messages(note)
                has_call = note.calls > (0 if was is None else was.calls)
                unconfirmed.append(_Unconfirmed(first, last, note.calls + (not has_call), data))
                parts = data
            self._sending = _Leased([*before.rest(), *parts], note, unconfirmed)

    @property
    def is_lost(self) -> bool:
        return self._closed

    def is_coming(self, deadline: float) -> bool:
        while super().is_coming(deadline):
            connection = self._connection
            if self.has_received() or not _is_over(self.socket):
                return True
            try:
                self._resume(connection, ConnectionLostError("the connection is lost"), deadline)
                self.flush()
            except _DeadlinePassed:
                return False
        return False

    def flush(self) -> None:
        with self._sends:
            while True:
                connection = self._connection
                try:
                    return super().flush()
                except ConnectionLostError as error:
                    self._resume(connection, error)

    def receive(self) -> tuple[Kind, Received]:
        while True:
            connection = self._connection
            try:
                with self._receives:
                    return self._receive_whole()
            except ConnectionLostError as error:
                self._resume(connection, error)
                self.flush()

    def _receive_whole(self) -> tuple[Kind, Received]:
        """Receive a whole message; a partial message is ignored."""
        count = self.received
        try:
            kind, reader = super().receive()
            return kind, reader.arrived() if isinstance(reader, Incoming) else reader
        except ConnectionLostError:
            self._at = self._at._replace(messages=count)
            raise

    def _resume(self, connection: int, error: ConnectionLostError, until: float = math.inf) -> None:
        """Replace the connection, unless another thread has done so.

        Raises `ConnectionLostError` if that fails, and `_DeadlinePassed` at the time `until`.
        """
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # wake the other thread
        with self._sends, self._receives:
            if connection != self._connection:
                return
            fresh, arrived = self._open_stream(error, until)
            note, unconfirmed = self._sending.note, self._sending.unconfirmed
            rest = _Leased(_messages_after(unconfirmed, arrived), note, unconfirmed)
            at = fresh._at._replace(messages=self.received, incoming=None)
            before = self.socket
            # No calls between these lines, so no interrupts.
            self.socket, self._buffer, self._end = fresh.socket, fresh._buffer, fresh._end
            self._at, self._sending, self._connection = at, rest, connection + 1
            before.close()

    def _open_stream(self, error: ConnectionLostError, until: float) -> tuple[Stream, int]:
        """Open a stream on a new connection; it begins with the next answer.

        Return it and the number of messages that the server has received. Raises
        `ConnectionLostError`, and `_DeadlinePassed` at the time `until`.

        A server that is busy with a launch answers after the launch. Therefore the deadline
        restarts each time the server admits this client.
        """
        deadline = time.monotonic() + self._seconds
        pause, most = _PAUSES
        while not self._closed and (now := time.monotonic()) < deadline:
            if now > until:
                raise _DeadlinePassed
            try:
                with closing_on_error(self._reconnect(min(deadline, until) - now)) as sock:
                    now = time.monotonic()
                    # seconds to wait for a server that has admitted the client
                    waits = max(min(self._seconds, until - now), 0.001)
                    deadline = now + waits + self._seconds
                    return self._synchronized(sock, waits)
            except AccessDeniedError as refused:
                raise ConnectionLostError(f"{error}; reconnecting was refused: {refused}") from None
            except (MlvmError, OSError):
                time.sleep(max(min(pause, deadline - now, until - now), 0.0))
                pause = min(2 * pause, most)
        self._closed = True
        raise error

    def _synchronized(self, sock: socket, seconds: float) -> tuple[Stream, int]:
        """Receive the server's counters on a new connection, as `_open_stream` returns them."""
        fresh = Stream(sock)
        fresh.set_timeouts(seconds, seconds)
        _, reader = fresh.receive()
        arrived, answered = reader.integer(), reader.integer()
        if 0 < answered <= self.received:  # the repeated answer was already received
            _, repeated = fresh.receive()
            if isinstance(repeated, Incoming):
                repeated.skip()
        fresh.set_timeouts(*self._timeouts)
        return fresh, arrived

    def renounce(self) -> None:
        self._closed = True

    def close(self) -> None:
        """Close the connection and end the lease."""
        self._closed = True
        with suppress(OSError):
            if not self._sending.rest():
                self.socket.settimeout(1.0)
                self.socket.sendall(GOODBYE)
        super().close()


def _is_over(sock: socket) -> bool:
    """Return whether the peer has disconnected and all bytes were received."""
    try:
        # the plain socket, also under TLS
        return SYSTEM.has_hung_up(sock) and not socket.recv(sock, 1, MSG_PEEK)
    except OSError:
        return True


def _messages(note: Noted | None) -> int:
    return 0 if note is None else note.posts + note.calls


def _messages_after(unconfirmed: Sequence[_Unconfirmed], arrived: int) -> list[bytes]:
    """Return the bytes of the messages after number `arrived`."""
    rest: list[bytes] = []
    for each in unconfirmed:
        if each.first > arrived:
            rest += each.data
        elif each.last > arrived:
            data, at = b"".join(each.data), 0
            for _ in range(arrived - each.first + 1):
                at += HEADER.size + HEADER.unpack_from(data, at)[3]
            rest.append(data[at:])
    return rest
