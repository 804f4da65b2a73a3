"""Whole messages over a socket: what docs/wire.md calls a message, sent and received.

Small messages are received into one buffer, many at a time. The elements of a large array go from
their memory to the socket, and from the socket to memory of their own; there is no copy between.

An interrupt may come between any two lines of Python. So how far the bytes have got is told by a
deque of one number, which the call that moves them fills in the same step, `extend(map(...))`, and
how far the messages have got by one tuple.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import ConnectionLost, EncodingError, LimitExceeded
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Kind, Reader, Writer
from mlvm.core.types import Array, TensorType
from mlvm.machines.remote.watchdog import has_hung_up

Buffer: TypeAlias = bytes | bytearray | memoryview

LARGE: Final = 1 << 16
"""A message of more bytes than that is received piece by piece."""

_ROOM: Final = 1 << 18
_AHEAD: Final = 1 << 14  # of a large message, for the fields that are no elements
_MOST_PARTS: Final = 256  # of one system call; Linux takes 1024
_SLOWEST: Final = 1 << 20  # bytes a second of a large message
_MOMENT: Final = 100e-6
"""Seconds that a receiver asks again and again, and lets others run between, before it sleeps."""

_AT_ONCE: Final[int] = getattr(socket, "MSG_DONTWAIT", 0)
_KINDS: Final = {kind.value: kind for kind in Kind}


class Stream:
    """The messages of a connected socket. One thread at a time sends, and one receives.

    `max_message` is the most bytes that a message from the other side may have behind its header;
    None is any number. A timeout of the socket counts as a lost connection.
    """

    def __init__(self, sock: socket.socket, max_message: int | None = None) -> None:
        self.socket = sock
        self.max_message = max_message
        self._buffer = memoryview(bytearray(_ROOM))
        self._end = deque((0,), 1)
        self._at = _At(0, 0, None)
        self._sending = Sending((), None)
        self._patience: tuple[float, float] | None = None
        self._waited = False
        self._until: float | None = None  # the message that is received is to be whole
        self._spins = hasattr(os, "sched_yield") and not isinstance(sock, ssl.SSLSocket)

    @property
    def received(self) -> int:
        """How many messages `receive` has returned."""
        return self._at.messages

    def is_coming(self, deadline: float) -> bool:
        """Wait until something can be received, or until that time of `time.monotonic`; whether it
        can."""
        if self._at.incoming is not None or self.has_received():
            return True
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1e3))

    def set_timeouts(self, receive: float, send: float) -> None:
        """Lose the connection when a message has not come, or has not gone, after so many seconds,
        and one more for each of its MiB; 0 is any number. They count from when it is waited for."""
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
        """Whether so much is kept to be sent again that the server should be asked what has come,
        as a `LeasedStream` keeps it."""
        return False

    @property
    def is_lost(self) -> bool:
        """Whether nothing will be received any more: the other side has hung up, and does not come
        again, as that of a `LeasedStream` may."""
        return has_hung_up(self.socket)

    def renounce(self) -> None:
        """Ask for no other connection when this one is lost, as a `LeasedStream` does."""

    # --- send ---

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send whole messages, given in pieces. Raises `ConnectionLost`."""
        self.add(parts)
        self.flush()

    @property
    def note(self) -> Any:
        """What the sender noted with the last message that it added."""
        return self._sending.note

    def add(self, parts: Sequence[Buffer], note: Any = None) -> None:
        """Have whole messages sent by the next `flush`. The note is changed in the same step."""
        before = self._sending.rest()
        self._sending = Sending([*before, *parts] if before else parts, note)

    def flush(self) -> None:
        """Send what was added. If it is interrupted, the rest goes with the next flush. Raises
        `ConnectionLost`."""
        sending = self._sending
        until = None
        if self._patience is not None:
            until = time.monotonic() + self._patience[1] + sending.nbytes / _SLOWEST
        try:
            send = self.socket.sendmsg
            while batch := sending.rest():
                if until is not None:
                    if time.monotonic() > until:
                        text = "the connection is lost: a message was not taken in time"
                        raise ConnectionLost(text)
                    batch = _lowest(batch, _ROOM)
                sending.sent.extend(map(sending.sent[0].__add__, map(send, (batch[:_MOST_PARTS],))))
        except OSError as error:
            raise _lost(error) from None

    # --- receive ---

    def receive(self) -> tuple[Kind, Received]:
        """The next message: its kind, and a reader of what follows its header, good until the
        next call.

        Raises `ConnectionLost` at the end of the connection, `EncodingError` for bytes that are no
        message, `LimitExceeded` for too long a one.
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
            given = bytes(self._buffer[start : start + 8])
            raise EncodingError(
                f"a message starts with {MAGIC!r}, version {VERSION} and a kind, not with {given!r}"
            )
        if self.max_message is not None and length > self.max_message:
            raise LimitExceeded(f"a message of {length:,} bytes; the limit is {self.max_message:,}")
        if length > LARGE:
            incoming = Incoming(self, length)
            self._at = _At(start + HEADER.size, count + 1, incoming)
            if self._until is not None:
                self._until += length / _SLOWEST
            return kind, incoming
        if self._end[0] - start < HEADER.size + length:
            start = self._fill(HEADER.size + length)
        start += HEADER.size
        self._at = _At(start + length, count + 1, None)
        return kind, Received(self._buffer[start : start + length], 0)

    def run(self, launches: Callable[[memoryview, int, int], tuple[int, int]]) -> int:
        """Have `launches(buffer, start, end)` take messages off what was received. Returns how many
        it says that it took."""
        start, count, incoming = self._at
        if incoming is not None:
            return 0
        start, taken = launches(self._buffer, start, self._end[0])
        self._at = _At(start, count + taken, None)
        if taken:
            self._waited = False
        return taken

    def has_received(self) -> bool:
        """Whether there are bytes that were received and not handed out."""
        return self._at.start != self._end[0]

    def wait(self) -> None:
        """Wait until there are bytes that were not handed out. Raises `ConnectionLost`."""
        if self._at.incoming is None and not self.has_received():
            self._begin()
            self._fill(1)
            self._waited = True  # for the message that `receive` returns

    def _begin(self) -> None:
        """A message is waited for from now on, if none was."""
        if self._patience is not None and not self._waited:
            self._until = time.monotonic() + self._patience[0]
        self._waited = False

    def _fill(self, n: int) -> int:
        """Receive until the buffer has n bytes, and return where they begin. It has fewer now."""
        start = self._at.start
        if start + n > _ROOM:  # the next message begins at the beginning again
            left = memoryview(bytes(self._buffer[start : self._end[0]]))
            fresh = memoryview(bytearray(_ROOM))
            fresh[: len(left)] = left
            # No call comes between these lines, so no interrupt does.
            end, at = deque((len(left),), 1), self._at._replace(start=0)
            self._buffer, self._end, self._at = fresh, end, at
            start = 0
        while (end_now := self._end[0]) - start < n:
            self.receive_into(self._end, self._buffer[end_now:])
        return start

    def receive_into(self, place: deque[int], room: memoryview) -> None:
        """Receive some bytes; `place` goes on by their number."""
        before = place[0]
        if self._until is not None and time.monotonic() > self._until:
            raise ConnectionLost("the connection is lost: a message was not whole in time")
        receive = self.socket.recv_into
        try:
            if not self._spins or not self._spin(place, room):
                place.extend(map(before.__add__, map(receive, (room,))))
        except OSError as error:
            raise _lost(error) from None
        if place[0] == before:
            raise ConnectionLost("the other side has closed the connection")

    def _spin(self, place: deque[int], room: memoryview) -> bool:
        """Receive what comes in the next moment, without going to sleep: to be woken takes longer
        than most answers. Returns whether something has come, which may be the end."""
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
        """So many of the bytes in the buffer, or all there are."""
        start = self._at.start
        end = min(start + most, self._end[0])
        self._at = self._at._replace(start=end)
        return self._buffer[start:end]

    def close(self) -> None:
        """Close the socket. Who waits for it in another thread is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _lowest(parts: Sequence[Buffer], most: int) -> list[Buffer]:
    """The first so many bytes of the pieces: a system call that sends them comes back in time."""
    found: list[Buffer] = []
    for part in parts:
        if most <= 0:
            break
        found.append(part if len(part) <= most else memoryview(part)[:most])
        most -= len(part)
    return found


class _At(NamedTuple):
    """Where in the buffer the bytes begin that were not handed out, how many messages were, and the
    last of them if it is still arriving."""

    start: int
    messages: int
    incoming: Incoming | None


class Sending:
    """Pieces on their way, how many of their bytes are sent, and what the sender notes."""

    __slots__ = ("nbytes", "note", "parts", "sent")

    def __init__(self, parts: Sequence[Buffer], note: Any) -> None:
        self.parts = parts
        self.note = note
        self.nbytes = sum(map(len, parts))
        self.sent = deque((0,), 1)

    def rest(self) -> Sequence[Buffer]:
        """The pieces that are not sent."""
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
    """A writer of a message in pieces, some of which are the memory of large arrays."""

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
        """All that was written, behind a header."""
        pieces = [*self._pieces, self._data]
        length = sum(map(len, pieces)) - HEADER.size
        HEADER.pack_into(pieces[0], 0, MAGIC, VERSION, kind.value, length)
        return pieces


class Received(Reader):
    """A reader of what follows a message's header."""

    def rest(self) -> memoryview:
        """All bytes that are left."""
        return self._take(self.remaining)


class Incoming(Received):
    """A reader of a large message that is still arriving.

    If it is interrupted, the rest of the message cannot be told from the next one, and the
    connection is lost.
    """

    def __init__(self, stream: Stream, length: int) -> None:
        super().__init__(b"", 0)
        self._stream = stream
        self._length = self._arriving = length  # the latter are not in `_data`
        self._whole = True

    def error(self, reason: str) -> EncodingError:
        return EncodingError(f"byte {self._length - self.remaining}: {reason}")

    @property
    def remaining(self) -> int:
        return self._end - self._at + self._arriving

    def skip(self) -> None:
        """Pass over what is left of the message."""
        if not self._whole:
            raise ConnectionLost("the connection was interrupted in the middle of a message")
        room = np.empty(min(self.remaining, _ROOM), np.uint8)
        while self.remaining:
            self.read_into(room[: self.remaining])

    def arrived(self) -> Received:
        """A reader of the whole message, once all of it has come."""
        data = np.empty(self.remaining, np.uint8)
        self.read_into(data)
        return Received(data.data, 0)

    def read_into(self, out: Array) -> None:
        """Take so many bytes off as the u8 array has."""
        room = out.data
        self._whole = False
        here = min(self._end - self._at, len(room))
        room[:here] = self._data[self._at : self._at + here]
        self._at += here
        taken = self._stream.take_received(len(room) - here)
        room[here : here + len(taken)] = taken
        place = deque([here + len(taken)], maxlen=1)
        while place[0] < len(room):
            self._stream.receive_into(place, room[place[0] :])
        self._arriving -= len(room) - here
        self._whole = True

    def _elements(self, n: int) -> Array:
        if n > self.remaining:
            raise self.error(f"expected {n} bytes; {self.remaining} are left")
        out = np.empty(n, np.uint8)
        self.read_into(out)
        return out

    def _take(self, n: int) -> memoryview:
        if self._at + n <= self._end or n > self.remaining:
            return super()._take(n)
        if n >= _AHEAD:
            return self._elements(n).data
        ahead = np.empty(min(self.remaining, _AHEAD), np.uint8)
        self.read_into(ahead)
        self._data, self._at, self._end = ahead.data, 0, len(ahead)
        return super()._take(n)


def _lost(error: OSError) -> ConnectionLost:
    slow = isinstance(error, (TimeoutError, BlockingIOError))
    why = "nothing was heard in time" if slow else error.strerror
    return ConnectionLost(f"the connection is lost: {why or error}")
