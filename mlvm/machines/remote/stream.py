"""Messages over a socket, in the format of docs/wire.md.

Many small messages are received into one buffer with one system call. The elements of a large array
are sent directly from memory and received into new memory, without an intermediate copy.

An interrupt may occur between any two lines of Python. Therefore the number of bytes sent or
received is stored in a deque of length 1. The call that transfers the bytes updates it in the same
step, `extend(map(...))`. The position in the messages is one tuple.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import ConnectionLostError, EncodingError, LimitExceededError, counted
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind, Reader, Writer
from mlvm.core.types import Array, TensorType
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.system import SYSTEM, System

Buffer: TypeAlias = bytes | bytearray | memoryview

LARGE: Final = 1 << 16
"""Messages with more bytes are received piece by piece."""

_ROOM: Final = 1 << 18
_AHEAD: Final = 1 << 14  # bytes of a large message that contain the fields before the elements
_MOMENT: Final = 100e-6
"""Seconds that a receiver polls, yielding the processor, before it sleeps."""

_AT_ONCE: Final[int] = getattr(socket, "MSG_DONTWAIT", 0)
_KINDS: Final = {kind.value: kind for kind in Kind}


class Stream:
    """Messages of a connected socket. Only one thread may send, and only one thread may receive.

    max_message: maximum bytes of a received message after the header, or None A timeout of the
    socket counts as a lost connection.
    """

    def __init__(
        self, sock: socket.socket, max_message: int | None = None, system: System = SYSTEM
    ) -> None:
        self.socket = sock
        self.system = system
        self.max_message = max_message
        self._buffer = memoryview(bytearray(_ROOM))
        self._end = deque((0,), 1)
        self._at = _At(0, 0, None)
        self._sending = Sending((), None)
        self._patience: tuple[float, float] | None = None
        self._waited = False
        self._until: float | None = None  # deadline of the message that is being received
        is_plain = not isinstance(sock, ssl.SSLSocket)
        self._spins = system.spins and hasattr(os, "sched_yield") and is_plain

    @property
    def received(self) -> int:
        """The number of messages that `receive` has returned."""
        return self._at.messages

    def is_coming(self, deadline: float) -> bool:
        """Wait until bytes can be received, or until `deadline` of `system.monotonic`.

        Return whether they can.
        """
        if self._at.incoming is not None or self.has_received():
            return True
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        return self.system.has_come(self.socket, deadline - self.system.monotonic())

    def set_timeouts(self, receive: float, send: float) -> None:
        """Set the timeout for receiving or sending a message; on a timeout, the connection is lost.

        It is this number of seconds, plus one second per MiB of the message; 0 disables the
        timeout. The time starts with the wait for the message.
        """
        self._patience = (receive, send) if receive or send else None
        self._until = None
        if not self._spins:
            self.socket.settimeout(max(receive, send) or None)
            return
        self.socket.settimeout(None)
        for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
            whole, rest = divmod(round(seconds * 1e6), 1_000_000)
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, rest))

    @property
    def is_full(self) -> bool:
        """Return whether a `LeasedStream` retains too many unconfirmed bytes.

        The client should then wait for the server's confirmation.
        """
        return False

    @property
    def is_lost(self) -> bool:
        """Return whether the stream has ended.

        The peer has disconnected, and a `LeasedStream` does not reconnect.
        """
        return self.system.has_hung_up(self.socket)

    def renounce(self) -> None:
        """Do not reconnect when the connection is lost (a `LeasedStream` does)."""

    # --- send ---

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send whole messages, in pieces. Raises `ConnectionLostError`."""
        self.add(parts)
        self.flush()

    @property
    def note(self) -> Any:
        """The `note` of the last `add`."""
        return self._sending.note

    def add(self, parts: Sequence[Buffer], note: Any = None) -> None:
        """Queue whole messages for the next `flush`, and set `note` in the same step."""
        before = self._sending.rest()
        self._sending = Sending([*before, *parts] if before else parts, note)

    def flush(self) -> None:
        """Send the queued messages.

        After an interrupt, the next flush sends the rest. Raises `ConnectionLostError`.
        """
        sending = self._sending
        until = None
        if self._patience is not None:
            until = self.system.monotonic() + self._patience[1] + sending.nbytes / FIXED.speed
        try:
            send = self.socket.sendmsg
            while batch := sending.rest():
                if until is not None:
                    if self.system.monotonic() > until:
                        raise ConnectionLostError(
                            "sending a message took too long; check the network"
                        )
                    batch = _lowest(batch, _ROOM)
                # parts per system call; the limit of Linux is 1024
                sending.sent.extend(map(sending.sent[0].__add__, map(send, (batch[:256],))))
        except OSError as error:
            raise _lost(error) from None

    # --- receive ---

    def receive(self) -> tuple[Kind, Received]:
        """Receive the next message.

        Return the kind, and a reader of the bytes after the header, which is valid until the next
        call.

        Raises `ConnectionLostError` at the end of the connection, `EncodingError` for bytes that
        are not a message, `LimitExceededError` for a message that is too long.
        """
        if self._at.incoming is not None:
            self._at.incoming.skip()
            self._at = self._at._replace(incoming=None)
        self._begin()
        start, count, _ = self._at
        if self._end[0] - start < HEADER.size:
            start = self._fill(HEADER.size)
        magic, version, number, length = HEADER.unpack_from(self._buffer, start)
        kind = _KINDS.get(number)
        if magic != MAGIC or version != VERSION or kind is None:
            start_bytes = bytes(self._buffer[start : start + 8])
            raise EncodingError(
                f"a message: expected {MAGIC!r}, version {VERSION} and a kind, got {start_bytes!r}"
            )
        if self.max_message is not None and length > self.max_message:
            raise LimitExceededError(
                f"expected a message of at most {self.max_message:,} bytes, got {length:,}"
            )
        if length > LARGE:
            incoming = Incoming(self, length)
            self._at = _At(start + HEADER.size, count + 1, incoming)
            if self._until is not None:
                self._until += length / FIXED.speed
            return kind, incoming
        if self._end[0] - start < HEADER.size + length:
            start = self._fill(HEADER.size + length)
        start += HEADER.size
        self._at = _At(start + length, count + 1, None)
        return kind, Received(self._buffer[start : start + length], 0)

    def run(self, launches: Callable[[memoryview, int, int], tuple[int, int]]) -> int:
        """Let `launches(buffer, start, end)` consume received messages; return how many."""
        start, count, incoming = self._at
        if incoming is not None:
            return 0
        start, consumed = launches(self._buffer, start, self._end[0])
        self._at = _At(start, count + consumed, None)
        if consumed:
            self._waited = False
        return consumed

    def has_received(self) -> bool:
        """Return whether the buffer has unread bytes."""
        return self._at.start != self._end[0]

    def wait(self) -> None:
        """Wait until the buffer has unread bytes. Raises `ConnectionLostError`."""
        if self._at.incoming is None and not self.has_received():
            self._begin()
            self._fill(1)
            self._waited = True  # seconds of waiting for the message that `receive` returns

    def _begin(self) -> None:
        """Start the timeout of the next message, unless it is already running."""
        if self._patience is not None and not self._waited:
            self._until = self.system.monotonic() + self._patience[0]
        self._waited = False

    def _fill(self, n: int) -> int:
        """Receive until the buffer has n unread bytes; return the start of these bytes."""
        start = self._at.start
        if start + n > _ROOM:  # move the unread bytes to the start of a new buffer
            rest = memoryview(bytes(self._buffer[start : self._end[0]]))
            fresh = memoryview(bytearray(_ROOM))
            fresh[: len(rest)] = rest
            # No calls between these lines, so no interrupts.
            end, at = deque((len(rest),), 1), self._at._replace(start=0)
            self._buffer, self._end, self._at = fresh, end, at
            start = 0
        while (end_now := self._end[0]) - start < n:
            self.receive_into(self._end, self._buffer[end_now:])
        return start

    def receive_into(self, place: deque[int], room: memoryview) -> None:
        """Receive some bytes into `room`, and add the number of bytes to `place`."""
        before = place[0]
        if self._until is not None and self.system.monotonic() > self._until:
            raise ConnectionLostError(
                "the connection is lost: receiving a message took too long; check the network"
            )
        receive = self.socket.recv_into
        try:
            if not self._spins or not self._spin(place, room):
                place.extend(map(before.__add__, map(receive, (room,))))
        except OSError as error:
            raise _lost(error) from None
        if place[0] == before:
            raise ConnectionLostError("the other side has closed the connection; connect again")

    def _spin(self, place: deque[int], room: memoryview) -> bool:
        """Poll for bytes for `_MOMENT`, because waking up needs more time than most answers.

        Return whether bytes or the end of the connection were received.
        """
        add, receive = place[0].__add__, self.socket.recv_into
        until = time.perf_counter() + _MOMENT
        while True:
            try:
                place.extend(map(add, map(receive, (room,), (0,), (_AT_ONCE,))))
                return True
            except BlockingIOError:
                if time.perf_counter() > until:
                    return False
            os.sched_yield()

    def take_received(self, most: int) -> memoryview:
        """Consume at most `most` unread bytes of the buffer, and return them."""
        start = self._at.start
        end = min(start + most, self._end[0])
        self._at = self._at._replace(start=end)
        return self._buffer[start:end]

    def close(self) -> None:
        """Close the socket, and wake a thread that waits for it. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _lowest(parts: Sequence[Buffer], most: int) -> list[Buffer]:
    """Return the first `most` bytes of the pieces, as many as one system call can send in time."""
    batch: list[Buffer] = []
    for part in parts:
        if most <= 0:
            break
        batch.append(part if len(part) <= most else memoryview(part)[:most])
        most -= len(part)
    return batch


class _At(NamedTuple):
    """Position of the receiver.

    start: offset of the first unread byte of the buffer.
    messages: number of messages returned.
    incoming: the last message, if it is still arriving.
    """

    start: int
    messages: int
    incoming: Incoming | None


class Sending:
    """Pieces to send, the number of bytes that were sent, and the sender's note."""

    __slots__ = ("nbytes", "note", "parts", "sent")

    def __init__(self, parts: Sequence[Buffer], note: Any) -> None:
        self.parts = parts
        self.note = note
        self.nbytes = sum(map(len, parts))
        self.sent = deque((0,), 1)

    def rest(self) -> Sequence[Buffer]:
        """Return the pieces that are not sent."""
        sent = self.sent[0]
        if not sent and self.nbytes:
            return self.parts
        if sent == self.nbytes:
            return ()
        for i, part in enumerate(self.parts):
            if sent < len(part):
                return [memoryview(part)[sent:], *self.parts[i + 1 :]]
            sent -= len(part)
        return ()


class Outgoing(Writer):
    """Writer of a message in pieces; the memory of a large array is a separate piece."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[Buffer] = []

    def array(self, array: Array) -> None:
        if array.nbytes < LARGE or not array.flags.c_contiguous or array.dtype.byteorder == ">":
            super().array(array)
            return
        self.type(TensorType.of(array))
        self._pieces += [self._data, array.reshape(-1).view(np.uint8).data]
        self._data = bytearray()

    def parts(self, kind: Kind) -> list[Buffer]:
        """Return the pieces, with the header first."""
        pieces = [*self._pieces, self._data]
        length = sum(map(len, pieces)) - HEADER.size
        HEADER.pack_into(pieces[0], 0, MAGIC, VERSION, kind.value, length)
        return pieces


class Received(Reader):
    """Reader of a message's bytes after the header."""

    def rest(self) -> memoryview:
        """Return all unread bytes."""
        return self._take(self.remaining)


class Incoming(Received):
    """Reader of a large message that is still arriving.

    After an interrupt, the rest of the message cannot be distinguished from the next message, and
    the connection is lost.
    """

    def __init__(self, stream: Stream, length: int) -> None:
        super().__init__(b"", 0)
        self._stream = stream
        self._length = self._arriving = length  # `_arriving` counts bytes that are not in `_data`
        self._whole = True

    def error(self, reason: str) -> EncodingError:
        return EncodingError(f"byte {self._length - self.remaining}: {reason}")

    @property
    def remaining(self) -> int:
        return self._end - self._at + self._arriving

    def skip(self) -> None:
        """Skip the rest of the message."""
        if not self._whole:
            raise ConnectionLostError(
                "the connection was interrupted in the middle of a message; connect again"
            )
        room = np.empty(min(self.remaining, _ROOM), np.uint8)
        while self.remaining:
            self.read_into(room[: self.remaining])

    def arrived(self) -> Received:
        """Receive the whole message, and return a reader of it."""
        data = np.empty(self.remaining, np.uint8)
        self.read_into(data)
        return Received(data.data, 0)

    def read_into(self, out: Array) -> None:
        """Read bytes to fill the u8 array `out`."""
        room = out.data
        self._whole = False
        here = min(self._end - self._at, len(room))
        room[:here] = self._data[self._at : self._at + here]
        self._at += here
        chunk = self._stream.take_received(len(room) - here)
        room[here : here + len(chunk)] = chunk
        place = deque([here + len(chunk)], maxlen=1)
        while place[0] < len(room):
            self._stream.receive_into(place, room[place[0] :])
        self._arriving -= len(room) - here
        self._whole = True

    def _elements(self, n: int) -> Array:
        if n > self.remaining:
            raise self.error(f"expected {counted(n, 'byte')}, got {self.remaining}")
        out = np.empty(n, np.uint8)
        self.read_into(out)
        return out

    def _take(self, n: int) -> memoryview:
        if self._at + n <= self._end or n > self.remaining:
            return super()._take(n)
        if n >= _AHEAD:
            return self._elements(n).data
        prefix = np.empty(min(self.remaining, _AHEAD), np.uint8)
        self.read_into(prefix)
        self._data, self._at, self._end = prefix.data, 0, len(prefix)
        return super()._take(n)


def _lost(error: OSError) -> ConnectionLostError:
    why = "timeout" if isinstance(error, (TimeoutError, BlockingIOError)) else error.strerror
    return ConnectionLostError(f"the connection is lost: {why or error}")
