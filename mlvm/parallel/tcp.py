"""Groups of processes on one host or many, by TCP.

The first member listens at an address that all know. Each other one connects there, receives the
addresses of the others, and connects to those of lower rank. On every connection both sides prove
by HMAC that they know the group's secret (`mlvm.machines.remote.handshake`), and agree on a key for
each direction. Then each message is

    u32 0x4d47, u32 bytes of the head, u64 bytes of the body
    HMAC-SHA256(key, number of the message, these 16 bytes, head, body)
    head, filled up to a multiple of 8 bytes; body

so that changed, dropped, repeated or added messages are detected. Messages are not encrypted.
Nothing is unpickled: values are encoded by `mlvm.parallel.plain`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import (
    AccessRefused,
    AddressError,
    ConnectionLost,
    EncodingError,
    GroupError,
    GroupTimeout,
    MlvmError,
    brief,
)
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.types import Array
from mlvm.machines.remote.address import (
    TcpAddress,
    closing_on_error,
    parse_address,
    shut,
    tune,
)
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.handshake import BUSY, MOST_NAME, Hello, admit, check_secret, greet
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.secret import VARIABLE, find_secret
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.versions import difference, versions
from mlvm.parallel import plain
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.group import checked_timeout, name_of
from mlvm.parallel.messages import GRACE, MessageGroup, Transport
from mlvm.parallel.passing import NOTHING

SECRET: Final = "MLVM_SECRET"
"""The environment variable that has a group's secret, where no other is given."""

ADVERTISE: Final = "MLVM_ADVERTISE"
PORTS: Final = "MLVM_PORTS"

_FRAME: Final = struct.Struct("<IIQ")
_MAGIC: Final = 0x4D47
_PREFIX: Final = _FRAME.size + 32
_MOST_HEAD: Final = 1 << 20
_MOST_BODY: Final = 1 << 40
_ROOM: Final = 1 << 16  # bytes that are received at once, where there is no large message
_SHAKE: Final = 10.0
"""Seconds for a handshake."""
_AGAIN: Final = 0.05  # seconds until one tries again to connect
_MOST_REFUSALS: Final = 1000  # characters in the error of who waits
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class TcpGroup(MessageGroup):
    """The group of `size` processes that were started together, on any hosts: this one is the
    member `rank`. The first one listens at `address`, HOST:PORT, where the others find it.

    The members share a secret of 16 bytes or more: `secret`, or the one in the private file
    `secret_file`, in the environment's MLVM_SECRET, or in the file that its MLVM_SECRET_FILE names.
    It is never sent. Messages are authenticated, and not encrypted. See `ml.parallel.group("auto")`
    for processes that a scheduler or `python -m mlvm launch` started.

    Every process makes the group, and calls `run`, `keep` and what was kept alike. `run` calls the
    function for this process's own member, on this thread, and returns the results of all. These
    are plain data: numbers, texts, arrays, and lists, tuples and dicts of them. If a member fails,
    all raise its error. A process that ends or is killed ends the others' runs with an error that
    names it. No member waits for another longer than `timeout` seconds at a stretch, and none
    longer than `start` seconds for all to be there. All have the same versions of mlvm, its kernels
    and numpy, since others may give other bits; `mixed=True` allows any.

    Each member listens, too. The others reach it at the address that the first member sees, or at
    `advertise`, HOST or HOST:PORT, behind NAT or on another network (MLVM_ADVERTISE). It listens at
    a free port, or at one of the range `ports`, such as "29501-29600" (MLVM_PORTS).

    Raises `GroupError` for an impossible rank or size, and for members that do not come,
    `AccessRefused` without a secret or with another one, or for other versions, `AddressError`,
    `MissingExtra` without threadpoolctl.

    >>> with ml.parallel.TcpGroup(0, 1, "127.0.0.1:0", secret="between you and me") as group:
    ...     group.run(lambda rank, vm: ml.parallel.size())
    [1]

    Refuses:
        ml.parallel.TcpGroup(2, 2, ":1")  # GroupError
        ml.parallel.TcpGroup(0, 2, ":1", secret="short")  # AccessRefused
        ml.parallel.TcpGroup(0, 2, "unix:x")  # AddressError
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        secret: str | bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        start: float = 300.0,
        mixed: bool = False,
        advertise: str | None = None,
        ports: range | str | None = None,
        system: System = SYSTEM,
    ) -> None:
        if not all(isinstance(each, int) for each in (rank, size)) or not 0 <= rank < size:
            raise GroupError(f"a rank is 0 .. size - 1, not {brief(rank)} of {brief(size)}")
        if not isinstance(mixed, bool):
            raise GroupError(f"mixed=: expected True or False, got {brief(mixed)}")
        place = parse_address(address)
        if not isinstance(place, TcpAddress):
            raise AddressError(f"members meet at HOST:PORT, not at {address}")
        checked_timeout(timeout)
        until = system.monotonic() + (checked_timeout(start, "start") or math.inf)
        ways = _ways(advertise, ports)
        one_blas_thread.prepare()
        links: Mapping[int, Link] = {}
        if size > 1:
            key = secret_of(secret, secret_file)
            links = _Meeting(rank, size, place, key, until, system, mixed, ways).join()
        super().__init__(TcpTransport(rank, size, links, system), timeout)

    _encoding = plain


class _Ways(NamedTuple):
    """How the others reach this member, where that is not the address that they see."""

    host: str
    port: int  # 0: the one at which this member listens
    ports: range


def _ways(advertise: str | None, ports: range | str | None) -> _Ways:
    """Return what the arguments or the environment say. Raises `GroupError`."""
    advertise = os.environ.get(ADVERTISE, "") if advertise is None else advertise
    ports = os.environ.get(PORTS, "") if ports is None else ports
    host, port = "", 0
    if advertise:
        try:
            assert isinstance(advertise, str)
            has_port = advertise.rpartition("]")[2].count(":") == 1
            place = parse_address(advertise if has_port else f"{advertise}:0")
            assert isinstance(place, TcpAddress)
        except (AddressError, AssertionError):
            text = f"expected HOST or HOST:PORT, got {brief(advertise)}"
            raise GroupError(f"advertise=: {text}") from None
        host, port = place.host, place.port
        if len(host) > MOST_NAME // 2:
            raise GroupError(f"advertise=: a host has at most {MOST_NAME // 2} characters")
    chosen = ports if isinstance(ports, range) else range(0)
    if isinstance(ports, str):
        first, _, last = ports.partition("-")
        is_range = first.isdecimal() and last.isdecimal()
        chosen = range(int(first), int(last) + 1) if is_range else range(0)
    if ports != "" and not (chosen and 0 < chosen[0] <= chosen[-1] < 1 << 16):
        text = f"expected a range of ports, such as 29501-29600, got {brief(ports)}"
        raise GroupError(f"ports=: {text}")
    return _Ways(host, port, chosen)


def secret_of(secret: str | bytes | None, secret_file: str | os.PathLike[str] | None) -> bytes:
    from_environment = os.environ.get(SECRET)
    if secret is None and secret_file is None and from_environment:
        return check_secret(from_environment)
    resolved = find_secret(secret, secret_file)
    if resolved is None:
        raise AccessRefused(
            f"members of a group over TCP share a secret: give secret= or secret_file=, or set "
            f"{SECRET} or {VARIABLE} where they are started"
        )
    return resolved


# --- messages --------------------------------------------------------------------------


class Link:
    """Connection to another member, after the handshake. Raises `ConnectionLost` if it has
    ended; `EncodingError` if a message is not from that member."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        tune(sock)
        with suppress(AttributeError, OSError):  # a member may compute for long, and not listen
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        sock.setblocking(False)
        self.socket = sock
        self.inbox: deque[tuple[bytes, Array]] = deque()
        """Messages that have come whole: head and body."""
        self.unsent: deque[list[memoryview]] = deque()
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = self._received = 0
        self._room = memoryview(bytearray(_ROOM))
        self._filled = 0
        self.moved = 0
        """Number of bytes of large messages that were sent or received."""
        self._frame = b""  # of the large message that is being received
        self._large: Array = NOTHING
        self._large_filled = 0

    def send(self, head: bytes, body: Array) -> None:
        """Put a message on its way, and send what can be sent at once."""
        frame = _FRAME.pack(_MAGIC, len(head), body.nbytes)
        head += bytes(-len(head) % 8)
        data = memoryview(body)  # type: ignore[arg-type]
        mac = _mac(self._send_key, self._sent, frame, head, data)
        self._sent += 1
        self.unsent.append([memoryview(frame + mac + head), *([data] if body.nbytes else [])])
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as much as can be sent now."""
        while self.unsent:
            parts = self.unsent[0]
            try:
                n = self.socket.sendmsg(parts)
                self.moved += n if sum(map(len, parts)) > _ROOM else 0
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(error.strerror or "the connection has ended") from None
            while parts and n >= len(parts[0]):
                n -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][n:]
            else:
                self.unsent.popleft()

    def receive(self) -> None:
        """Put what has come into `inbox`."""
        while True:
            large = memoryview(self._large)[self._large_filled :]  # type: ignore[arg-type]
            target = large if self._frame else self._room[self._filled :]
            try:
                n = self.socket.recv_into(target)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(error.strerror or "the connection has ended") from None
            if not n:
                raise ConnectionLost("the connection has ended")
            if self._frame:
                self._large_filled += n
                self.moved += n
                if n == len(large):
                    self._open(self._frame, self._large)
                    self._frame = b""
            else:
                self._filled += n
                self._parse()
                if n < len(target) and not self._frame:
                    return

    def _parse(self) -> None:
        """Open the messages in the room. The rest of one that is not whole stays there, or becomes
        the beginning of a large one."""
        at = 0
        while self._filled - at >= _PREFIX:
            frame = bytes(self._room[at : at + _PREFIX])
            magic, head, body = _FRAME.unpack_from(frame)
            if magic != _MAGIC or head > _MOST_HEAD or body > _MOST_BODY:
                raise EncodingError("what came is no message")
            nbytes = head + -head % 8 + body
            there = self._room[at + _PREFIX : min(at + _PREFIX + nbytes, self._filled)]
            if len(there) < nbytes <= _ROOM - _PREFIX:
                break
            message = np.empty(nbytes, np.uint8)
            message[: len(there)] = there
            at += _PREFIX + len(there)
            if len(there) < nbytes:
                self._frame, self._large, self._large_filled = frame, message, len(there)
            else:
                self._open(frame, message)
        rest = bytes(self._room[at : self._filled])
        self._room[: len(rest)] = rest
        self._filled = len(rest)

    def _open(self, frame: bytes, message: Array) -> None:
        """Take a message into `inbox`, if it is that member's next one."""
        _, head, _ = _FRAME.unpack_from(frame)
        start = head + -head % 8
        data = memoryview(message)  # type: ignore[arg-type]
        mac = _mac(
            self._receive_key, self._received, frame[: _FRAME.size], data[:start], data[start:]
        )
        if not hmac.compare_digest(mac, frame[_FRAME.size :]):
            raise EncodingError("a message was changed on its way")
        self._received += 1
        self.inbox.append((bytes(data[:head]), message[start:]))


def _mac(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "little"), hashlib.sha256)
    for each in parts:
        mac.update(each)
    return mac.digest()


class TcpTransport(Transport):
    """Messages over these connections, by rank. Sending and receiving go under a lock, since a
    member has a thread for what was started."""

    def __init__(
        self, rank: int, size: int, links: Mapping[int, Link], system: System = SYSTEM
    ) -> None:
        super().__init__(rank, size, system)
        self._links = dict(links)
        self._lock = threading.RLock()
        self._selector = system.selector()
        for other, link in links.items():
            self._selector.register(link.socket, selectors.EVENT_READ, other)
            self._move(other, link, partial(self._receive, other, link))

    def send(self, rank: int, head: bytes, body: Array) -> None:
        with self._lock:
            link = self._links.get(rank)
            if link is not None:
                self._move(rank, link, partial(link.send, head, body))

    def unsent(self, rank: int) -> int:
        link = self._links.get(rank)
        return 0 if link is None else len(link.unsent)

    def listen(self, seconds: float) -> None:
        if not self._links:
            self.system.sleep(seconds)
            return
        for key, events in self._selector.select(seconds):
            with self._lock:
                link = self._links.get(key.data)
                if link is not None and events & selectors.EVENT_WRITE:
                    self._move(key.data, link, link.flush)
                if link is not None and link is self._links.get(key.data):
                    self._move(key.data, link, partial(self._receive, key.data, link))

    def _receive(self, rank: int, link: Link) -> None:
        try:
            link.receive()
        finally:
            while link.inbox:
                self.take(rank, *link.inbox.popleft())

    def _move(self, rank: int, link: Link, move: Callable[[], None]) -> None:
        """Send or receive, and see to it that what cannot be sent now will be. A member whose
        connection has ended, or which sends what has no meaning, has left."""
        was_full = bool(link.unsent)
        try:
            move()
        except (MlvmError, ValueError, LookupError) as error:
            with suppress(MlvmError, ValueError, LookupError):
                self._receive(rank, link)  # its last words
            self.departed.setdefault(rank, str(error))
            self._drop(rank)
            return
        self.moved[rank] = link.moved
        if rank in self._links and bool(link.unsent) != was_full:
            write = selectors.EVENT_WRITE if link.unsent else 0
            self._selector.modify(link.socket, selectors.EVENT_READ | write, rank)

    def _drop(self, rank: int) -> None:
        link = self._links.pop(rank)
        self._selector.unregister(link.socket)
        link.socket.close()

    def has_last_words(self) -> bool:
        """Return whether a member has not closed its connection. Closed here first, with bytes that
        nobody has read, it would be reset, and the member would lose what was sent last."""
        for link in self._links.values():
            if not link.unsent:
                shut(link.socket, socket.SHUT_WR)
        return bool(self._links)

    def close(self) -> None:
        with self._lock:
            for rank in list(self._links):
                self._drop(rank)
            self._selector.close()


# --- how members find each other -------------------------------------------------------


def meet(rank: int, size: int, address: TcpAddress, secret: bytes, until: float) -> dict[int, Link]:
    """Connect processes that are no group; return the connections by rank. Raises what `TcpGroup`
    raises."""
    return _Meeting(
        rank, size, address, secret, until, SYSTEM, False, _Ways("", 0, range(0))
    ).join()


_Place: TypeAlias = tuple[int, str, int]
"""The rank of a member, and where it listens; an empty host is the first member's."""

_News: TypeAlias = tuple[str, Any]
"""What members tell the first one before all have joined, and what it tells them:

    places, the places of all     from the first member, when all have connected to it
    here, None                    from a member that is connected to all others
    start, None                   from the first member, when all are here
    late, ranks                   from a member that has waited for these, or for `start`, in vain
    refused, a text               from the first member, for the error of who waits in vain
    failed, (is late, a text)     from a member that gives up, and then from the first one to all
"""


def _listener(address: TcpAddress, port: int, system: System) -> socket.socket:
    """Return the listener of a member: on this host alone if the group is, else on all its
    networks, since a host's name may resolve to another address there."""
    try:
        if address.host in _LOOPBACK:
            return system.listen(TcpAddress(address.host, port), public=False)
        return system.listen_everywhere(port)
    except OSError as error:
        raise AddressError(f"cannot listen on port {port}: {error.strerror}") from None


class _Meeting:
    """A member's connections to all others, until all members are connected to each other.

    Each connects to the first member, and then to those of lower rank, which the first member
    knows. Connections are made and accepted on threads, so that a silent one delays no other. The
    first member notices who leaves; it tells all others, so that each names the member that failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: TcpAddress,
        secret: bytes,
        until: float,
        system: System,
        mixed: bool,
        ways: _Ways,
    ) -> None:
        self._ways = ways
        self.rank = rank
        self.size = size
        self.address = address
        self.links: dict[int, Link] = {}
        self._secret = secret
        self._until = until
        self._system = system
        self._mixed = mixed
        self._expected = set(range(rank + 1, size))  # who connect to this one
        self._lower = set(range(rank))  # to whom this one connects
        self._places: list[_Place] = []
        self._here: set[int] = set()  # who are connected to all others
        self._refusals = ""
        self._is_late = False  # this member has told the first one so
        self._failure: _News | None = None
        self._unfound = ""  # the last member of lower rank that could not be reached in time
        self._lock = threading.Lock()
        self._arrived: set[int] = set()
        self._made: SimpleQueue[tuple[_Place, Link] | MlvmError] = SimpleQueue()
        self._refused: SimpleQueue[str] = SimpleQueue()
        self._strangers = Admission(Log("none"), plain=True, system=system)

    def join(self) -> dict[int, Link]:
        """Return the connections, by rank. Raises `GroupError` if a member does not come, or
        leaves; `AccessRefused` if a secret differs; `AddressError` if an address is invalid."""
        with closing(self._listener()) as listener:
            here = self._ways.port or listener.getsockname()[1]
            try:
                if self.rank:
                    self.links[0] = self._connected(0, self.address, here)
                    self._lower.discard(0)
                while not self._step(listener, here):
                    pass
            except BaseException as error:
                self._leave(error)
                raise
            finally:
                self._strangers.sweep(last=True)
        return self.links

    def _listener(self) -> socket.socket:
        """Listen at the first member's port, or at the first free one of the range."""
        if self.rank == 0:
            return _listener(self.address, self.address.port, self._system)
        ports = self._ways.ports
        for port in ports:
            with suppress(AddressError):
                return _listener(self.address, port, self._system)
        if ports:
            text = f"{ports[0]}-{ports[-1]}"
            raise AddressError(f"ports=: no port of {text} is free here; give a wider range")
        return _listener(self.address, 0, self._system)

    def _step(self, listener: socket.socket, here: int) -> bool:
        """See to what has come. Return whether all members are connected to each other."""
        remaining = self._until - self._system.monotonic()
        if remaining <= 0:
            missing = self._expected | self._lower if self._places or self.rank == 0 else set()
            if self.rank == 0:
                raise self._late(missing or set(range(1, self.size)) - self._here)
            if not self._is_late:  # the first member knows whom all wait for
                self._is_late = True
                tell(self.links[0], ("late", tuple(missing)))
            if remaining <= -GRACE:
                raise self._late({0, *missing})
        self._strangers.sweep()
        if self._system.has_come(listener, min(max(remaining, 0.01), _AGAIN)):
            self._accept(listener)
        while not self._made.empty():  # this thread alone takes
            made = self._made.get()
            if isinstance(made, MlvmError):
                raise made
            (rank, host, port), link = made
            self._expected.discard(rank)
            self._lower.discard(rank)
            self.links[rank] = link
            if self.rank == 0:
                self._places.append((rank, host, port))
                if self._refusals:
                    tell(link, ("refused", self._refusals))
                if not self._expected:
                    self._tell_all(("places", tuple(self._places)))
        self._note_refusals()
        for rank in list(self.links) if self.rank == 0 else [0]:
            for what, content in self._heard(rank):
                if what == "places":
                    self._places = list(content)
                    self._connect_to_lower(here)
                elif what == "here":
                    self._here.add(rank)
                elif what == "refused":
                    self._refusals += content
                elif what == "late":
                    missing = self._expected or set(content)
                    raise self._late(missing or set(range(1, self.size)) - self._here)
                elif what == "failed":
                    is_late, text = content
                    raise (GroupTimeout if is_late else GroupError)(text)
                else:
                    return True
        if self._expected or self._lower or not self._places:
            return False
        if self.rank:
            if not self._here:
                self._here.add(self.rank)
                tell(self.links[0], ("here", None))
        elif len(self._here) == self.size - 1:
            self._tell_all(("start", None))
            return True
        return False

    def _late(self, missing: set[int]) -> GroupTimeout:
        names = ", ".join(map(self._name, sorted(missing)))
        return GroupTimeout(
            f"{self._name(self.rank)} waits for {names}, who did not join"
            f"{self._refusals}{self._unfound}"
        )

    def _heard(self, rank: int) -> list[_News]:
        """Return what a member has told. Raises `GroupError` if it has left."""
        link, ended = self.links[rank], False
        with suppress(ConnectionLost):  # raised by the next look, or by the first use
            link.flush()
        if self._system.has_come(link.socket, 0):
            try:
                link.receive()
            except ConnectionLost:
                ended = True
        news: list[_News] = []
        while link.inbox:
            head, _ = link.inbox.popleft()
            news.append(open_message(head, Kind.answer)[1].value())
            if news[-1][0] == "start":  # what follows is of the first run
                return news
        if ended and not any(what == "failed" for what, _ in news):
            name = self._name(rank)
            raise GroupError(f"{name} has ended before all members joined{self._refusals}")
        return news

    def _tell_all(self, what: _News) -> None:
        for link in self.links.values():
            tell(link, what)

    def _leave(self, error: BaseException) -> None:
        """Close the connections; tell the first member why, or all others from there, and give
        them a moment to hear it."""
        is_late = isinstance(error, GroupTimeout)
        text = str(error) if isinstance(error, MlvmError) else type(error).__name__
        with self._lock:  # a connection that is made from now on hears it, too
            self._failure = "failed", (is_late, text)
        while not self._made.empty():
            made = self._made.get()
            if not isinstance(made, MlvmError):
                self.links[made[0][0]] = made[1]
        waits = {rank: link for rank, link in self.links.items() if self.rank == 0 or rank == 0}
        for link in waits.values():
            tell(link, self._failure)
        until = self._system.monotonic() + GRACE
        while waits and isinstance(error, MlvmError) and self._system.monotonic() < until:
            for rank, link in list(waits.items()):
                try:
                    link.flush()
                    if not link.unsent:
                        shut(link.socket, socket.SHUT_WR)
                    link.receive()
                except MlvmError:
                    del waits[rank]
            self._system.sleep(_AGAIN)
        for link in self.links.values():
            link.socket.close()

    def _put(self, made: tuple[_Place, Link] | MlvmError) -> None:
        """Pass a connection, or why there is none, to the thread that joins."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._made.put(made)
        if failure is not None and not isinstance(made, MlvmError):
            tell(made[1], failure)
            made[1].socket.close()

    # --- who connects to whom ---

    def _connect_to_lower(self, here: int) -> None:
        """Connect to the members of lower rank, each on a thread."""

        def connect(place: TcpAddress, other: _Place) -> None:
            try:
                self._put((other, self._connected(other[0], place, here)))
            except GroupTimeout as error:
                self._unfound = (
                    f"; {error}"  # it may wait for another member: `_step` asks the first
                )
            except MlvmError as error:
                self._put(error)

        first = self.links[0].socket.getpeername()[0]
        for other in self._places:
            if other[0] in self._lower:
                place = TcpAddress(other[1] or first, other[2])
                self._system.start("mlvm join", connect, place, other)

    def _connected(self, rank: int, address: TcpAddress, here: int) -> Link:
        """Connect to a member, which may not listen yet. `here` is the port on which this one
        listens."""
        why, system = "", self._system
        while self._failure is None and (remaining := self._until - system.monotonic()) > 0:
            nonce, patience = secrets.token_bytes(32), min(remaining, _SHAKE)
            name = f"{self.rank} {here} {nonce.hex()} {versions()}"
            hello = Hello("group", f"{self.size} {self._ways.host}".strip(), name, True)
            try:
                with closing_on_error(system.connect(address, patience)) as sock:
                    deadline = system.monotonic() + patience
                    about = greet(sock, self._secret, hello, deadline, system)
                    self._require_same(rank, about.get("versions"))
                    return _link(sock, self._secret, nonce, bytes.fromhex(about["nonce"]), True)
            except (OSError, AddressError) as error:
                if isinstance(error, AccessRefused) and str(error) != BUSY:
                    raise
                why = str(error)
                system.sleep(_AGAIN)
        raise GroupTimeout(
            f"{self._name(self.rank)} has not found {self._name(rank)} at {address}: {why}"
        )

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone, or there are too many open files
            self._system.sleep(_AGAIN)
            return
        if self._strangers.enter(sock):
            self._system.start("mlvm join", self._admitted, sock)

    def _admitted(self, sock: socket.socket) -> None:
        """Handle a connection on its thread."""
        with suppress(MlvmError, OSError, ValueError), closing_on_error(sock):
            nonce = secrets.token_bytes(32)
            offers: list[tuple[int, str, int, bytes]] = []

            def decide(hello: Hello) -> Mapping[str, object]:
                rank, port, theirs, their_versions = hello.name.split(" ", 3)
                size, _, advertised = hello.vm.partition(" ")
                if size != str(self.size):
                    raise AccessRefused(f"this group has {self.size} members, not {size}")
                self._require_same(int(rank), their_versions)
                with self._lock:
                    if int(rank) not in self._expected or int(rank) in self._arrived:
                        raise AccessRefused(f"{self._name(int(rank))} is here already")
                    self._arrived.add(int(rank))
                offers.append((int(rank), advertised, int(port), bytes.fromhex(theirs)))
                return {"nonce": nonce.hex(), "versions": versions()}

            system = self._system
            until = min(self._until, system.monotonic() + _SHAKE)
            try:
                host = str(sock.getpeername()[0]).removeprefix("::ffff:")
                secrets_of = {"": self._secret}
                admit(sock, secrets_of, trusted=False, decide=decide, deadline=until, system=system)
                [(rank, advertised, port, theirs)] = offers
                seen = "" if ipaddress.ip_address(host).is_loopback else host
                link = _link(sock, self._secret, theirs, nonce, False)
            except BaseException as error:
                with self._lock:
                    self._arrived.difference_update(each[0] for each in offers)
                if isinstance(error, AccessRefused):
                    self._refused.put(f"; {host} was refused: {error}")
                raise
            finally:
                self._strangers.leave(sock)
            self._put(((rank, advertised or seen, port), link))

    def _require_same(self, rank: int, theirs: object) -> None:
        """Raise `AccessRefused` if a member has other versions, unless members may differ."""
        text = difference(theirs, self._name(rank), self._name(self.rank))
        if text is not None and not self._mixed:
            raise AccessRefused(text)

    def _note_refusals(self) -> None:
        """Note who was refused; the first member tells all others."""
        while not self._refused.empty():
            text = self._refused.get()
            if text not in self._refusals and len(self._refusals) < _MOST_REFUSALS:
                self._refusals += text
                if self.rank == 0:
                    self._tell_all(("refused", text))

    def _name(self, rank: int) -> str:
        return name_of(rank, f"vm{rank}")


def _link(
    sock: socket.socket, secret: bytes, asking_nonce: bytes, answered: bytes, asks: bool
) -> Link:
    """Return the connection with its keys, after both sides have proved that they know the
    secret."""
    base = hmac.digest(secret, b"mlvm group " + asking_nonce + answered, "sha256")
    ours, theirs = (hmac.digest(base, side, "sha256") for side in (b"asks", b"answers"))
    return Link(sock, ours, theirs) if asks else Link(sock, theirs, ours)


def tell(link: Link, what: _News) -> None:
    """Send a value to a process that is in no run of a group."""
    writer = Writer()
    writer.value(what)
    with suppress(ConnectionLost):  # which the first member notices
        link.send(writer.message(Kind.answer), NOTHING)
