"""Group of processes on one host or many, which communicate by TCP.

The first member listens at an address that all members know. Each other member connects to it,
receives the addresses of all members, and connects to the members of lower rank. On each
connection, both sides prove by HMAC that they know the group's secret
(`mlvm.machines.remote.handshake`), and derive a key for each direction. The format of a message is

    u32 0x4d47, u32 bytes of the head, u64 bytes of the body
    HMAC-SHA256(key, number of the message, these 16 bytes, head, body)
    head, filled up to a multiple of 8 bytes; body

Changed, dropped, repeated and inserted messages are therefore detected. Messages are not encrypted.
Received data is never unpickled: values are encoded by `mlvm.parallel.plain`.
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
    AccessDeniedError,
    AddressError,
    ConnectionLostError,
    EncodingError,
    GroupError,
    GroupTimeoutError,
    MlvmError,
    brief,
)
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.sizes import parse_count
from mlvm.core.types import Array
from mlvm.machines.remote.address import (
    TcpAddress,
    closing_on_error,
    parse_address,
    shut,
    tune,
)
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.handshake import BUSY, Hello, admit, check_secret, greet
from mlvm.machines.remote.limits import FIXED
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
"""Environment variable with the secret of a group, if no secret is passed as an argument."""

ADVERTISE: Final = "MLVM_ADVERTISE"
PORTS: Final = "MLVM_PORTS"

_FRAME: Final = struct.Struct("<IIQ")
_MAGIC: Final = 0x4D47
_PREFIX: Final = _FRAME.size + 32
_ROOM: Final = 1 << 16  # bytes of the receive buffer for small messages
_SHAKE: Final = 10.0
"""Timeout of a handshake, in seconds."""
_AGAIN: Final = 0.05  # seconds until the next attempt to connect
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class TcpGroup(MessageGroup):
    """Group of `size` processes that were started together, on any hosts.

    `ml.parallel.group("auto")` creates this group in processes that a scheduler or `python -m mlvm
    launch` has started.

    Each process creates the group, and all processes make the same calls of `run`, `keep` and kept
    functions. `run` calls the function for this process's member, on this thread, and returns the
    results of all members. Results are plain data: numbers, strings, arrays, and lists, tuples and
    dicts of these. If a member fails, all members raise the error. If a process exits or is killed,
    the other processes raise an error that names it. Messages are authenticated, but not encrypted.

    Arguments:
        rank: the rank of this process, 0 .. size - 1.
        size: the number of processes.
        address: HOST:PORT of the first member, which listens there.
        secret: the secret of the group, 16 bytes or more, which is never sent. By default, it is
            read from `secret_file`, MLVM_SECRET, or the file in MLVM_SECRET_FILE.
        secret_file: a private file with the secret.
        timeout: the longest time in seconds that a member waits for another member without
            progress. By default, there is no limit.
        start: the longest time in seconds that a member waits until all members are connected.
        mixed: whether the processes may have different versions of mlvm, the kernels or numpy,
            which may compute different bits.
        advertise: HOST or HOST:PORT where the other members reach this member, if it uses NAT
            or on several networks. By default, MLVM_ADVERTISE, or the address that the first member
            sees.
        ports: the range of ports in which this member listens, such as "29501-29600". By default,
            MLVM_PORTS, or any free port.
        system: the clock, threads and network, for simulations.

    Raises `GroupError` if the rank or size is invalid, or a member does not join;
    `AccessDeniedError` if there is no secret, or secrets or versions differ; `AddressError` if an
    address is invalid; `MissingExtraError` without threadpoolctl.

    >>> with ml.parallel.TcpGroup(0, 1, "127.0.0.1:0", secret="between you and me") as group:
    ...     group.run(lambda rank, vm: ml.parallel.size())
    [1]

    Invalid calls:
        ml.parallel.TcpGroup(2, 2, ":1")  # GroupError
        ml.parallel.TcpGroup(0, 2, ":1", secret="short")  # AccessDeniedError
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
            raise GroupError(f"expected a rank 0 .. size - 1, got {brief(rank)} of {brief(size)}")
        if not isinstance(mixed, bool):
            raise GroupError(f"mixed=: expected True or False, got {brief(mixed)}")
        place = parse_address(address)
        if not isinstance(place, TcpAddress):
            raise AddressError(f"expected the address HOST:PORT, got {address}")
        checked_timeout(timeout)
        until = system.monotonic() + (checked_timeout(start, "start") or math.inf)
        reachable = _reachable(advertise, ports)
        one_blas_thread.prepare()
        links: Mapping[int, TcpLink] = {}
        if size > 1:
            key = secret_of(secret, secret_file)
            entry = _Entry(place, key, until, mixed, reachable)
            links = _Meeting(rank, size, entry, system).join()
        super().__init__(TcpTransport(rank, size, links, system), timeout)

    _encoding = plain


class _Reachable(NamedTuple):
    """Advertised address of this member, and the ports at which it may listen."""

    host: str = ""  # by default, the address that the first member sees
    port: int = 0  # by default, the port at which this member listens
    ports: range = range(0)


class _Entry(NamedTuple):
    """Arguments with which a member joins a group.

    address: the address of the first member. until: the time at which the member stops waiting.
    mixed: whether the other members may have different versions.
    """

    address: TcpAddress
    secret: bytes
    until: float
    mixed: bool = False
    reachable: _Reachable = _Reachable()


def _reachable(advertise: str | None, ports: range | str | None) -> _Reachable:
    """Parse the arguments or the environment variables. Raises `GroupError`."""
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
        if len(host) > FIXED.name // 2:
            most = FIXED.name // 2
            raise GroupError(
                f"advertise=: expected a host of at most {most} characters, got a longer one"
            )
    chosen = ports if isinstance(ports, range) else range(0)
    if isinstance(ports, str):
        first, last = (parse_count(text) for text in ports.partition("-")[::2])
        chosen = range(0) if first is None or last is None else range(first, last + 1)
    if ports != "" and not (chosen and 0 < chosen[0] <= chosen[-1] < 1 << 16):
        text = f"expected a range of ports, such as 29501-29600, got {brief(ports)}"
        raise GroupError(f"ports=: {text}")
    return _Reachable(host, port, chosen)


def secret_of(secret: str | bytes | None, secret_file: str | os.PathLike[str] | None) -> bytes:
    from_environment = os.environ.get(SECRET)
    if secret is None and secret_file is None and from_environment:
        return check_secret(from_environment)
    resolved = find_secret(secret, secret_file)
    if resolved is None:
        raise AccessDeniedError(
            f"a group over TCP needs a secret: pass secret= or secret_file=, or set {SECRET} or "
            f"{VARIABLE}"
        )
    return resolved


# --- messages --------------------------------------------------------------------------


class TcpLink:
    """Connection to another member, after the handshake.

    Its methods raise `ConnectionLostError` if the connection was closed; `EncodingError` if a
    message is not from that member.
    """

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        tune(sock)
        with suppress(AttributeError, OSError):  # a member may compute long without receiving
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        sock.setblocking(False)
        self.socket = sock
        self.inbox: deque[tuple[bytes, Array]] = deque()
        """Complete messages that have arrived: head and body."""
        self.unsent: deque[list[memoryview]] = deque()
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = self._received = 0
        self._room = memoryview(bytearray(_ROOM))
        self._filled = 0
        self.moved = 0
        """Number of bytes of large messages that were sent or received."""
        self._frame = b""  # frame of the large message that is being received
        self._large: Array = NOTHING
        self._large_filled = 0

    def send(self, head: bytes, body: Array) -> None:
        """Queue a message, and send as much as possible without waiting."""
        frame = _FRAME.pack(_MAGIC, len(head), body.nbytes)
        head += bytes(-len(head) % 8)
        data = memoryview(body)  # type: ignore[arg-type]
        mac = _mac(self._send_key, self._sent, frame, head, data)
        self._sent += 1
        self.unsent.append([memoryview(frame + mac + head), *([data] if body.nbytes else [])])
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as much as possible without waiting."""
        while self.unsent:
            parts = self.unsent[0]
            try:
                n = self.socket.sendmsg(parts)
                self.moved += n if sum(map(len, parts)) > _ROOM else 0
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLostError(error.strerror or "the connection has ended") from None
            while parts and n >= len(parts[0]):
                n -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][n:]
            else:
                self.unsent.popleft()

    def receive(self) -> None:
        """Receive as much as possible without waiting, and append complete messages to `inbox`."""
        while True:
            large = memoryview(self._large)[self._large_filled :]  # type: ignore[arg-type]
            target = large if self._frame else self._room[self._filled :]
            try:
                n = self.socket.recv_into(target)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLostError(error.strerror or "the connection has ended") from None
            if not n:
                raise ConnectionLostError("the connection has ended; start the group again")
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
        """Decode the messages in the receive buffer.

        An incomplete message stays there, or becomes the start of a large message.
        """
        at = 0
        while self._filled - at >= _PREFIX:
            frame = bytes(self._room[at : at + _PREFIX])
            magic, head, body = _FRAME.unpack_from(frame)
            if magic != _MAGIC or head > 1 << 20 or body > 1 << 40:
                raise EncodingError(
                    "received data is not a message; check that no other program uses the port"
                )
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
        """Authenticate a message and append it to `inbox`."""
        _, head, _ = _FRAME.unpack_from(frame)
        start = head + -head % 8
        data = memoryview(message)  # type: ignore[arg-type]
        mac = _mac(
            self._receive_key, self._received, frame[: _FRAME.size], data[:start], data[start:]
        )
        if not hmac.compare_digest(mac, frame[_FRAME.size :]):
            raise EncodingError("a message was changed in transit; start the group again")
        self._received += 1
        self.inbox.append((bytes(data[:head]), message[start:]))


def _mac(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "little"), hashlib.sha256)
    for each in parts:
        mac.update(each)
    return mac.digest()


class TcpTransport(Transport):
    """Transport over TCP connections, one per rank.

    Sending and receiving hold a lock, because asynchronous collectives run on a second thread.
    """

    def __init__(
        self, rank: int, size: int, links: Mapping[int, TcpLink], system: System = SYSTEM
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

    def _receive(self, rank: int, link: TcpLink) -> None:
        try:
            link.receive()
        finally:
            while link.inbox:
                self.take(rank, *link.inbox.popleft())

    def _move(self, rank: int, link: TcpLink, move: Callable[[], None]) -> None:
        """Send or receive, and watch for a writable socket while data is unsent.

        A member has left if its connection is closed or it sends invalid data.
        """
        was_full = bool(link.unsent)
        try:
            move()
        except (MlvmError, ValueError, LookupError) as error:
            with suppress(MlvmError, ValueError, LookupError):
                self._receive(rank, link)  # the last messages of the member
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
        """Return whether a member has not closed the connection.

        If this process closed a connection with unread bytes first, TCP would reset it, and the
        member would lose the last messages.
        """
        for link in self._links.values():
            if not link.unsent:
                shut(link.socket, socket.SHUT_WR)
        return bool(self._links)

    def close(self) -> None:
        with self._lock:
            for rank in list(self._links):
                self._drop(rank)
            self._selector.close()


# --- how members connect to each other -------------------------------------------------------


def meet(
    rank: int, size: int, address: TcpAddress, secret: bytes, until: float
) -> dict[int, TcpLink]:
    """Connect processes without a group, and return the connections by rank.

    Raises what `TcpGroup` raises.
    """
    return _Meeting(rank, size, _Entry(address, secret, until), SYSTEM).join()


_Place: TypeAlias = tuple[int, str, int]
"""Rank, host and port of a member. An empty host means the first member's host."""

_News: TypeAlias = tuple[str, Any]
"""Message between a member and the first member before all have joined:

    places, all places            from the first member, when all members have connected to it
    here, None                    from a member that is connected to all other members
    start, None                   from the first member, when all members are connected
    late, ranks                   from a member that has waited too long for these, or for `start`
    refused, text                 from the first member, for the errors of waiting members
    failed, (is late, text)       from a member that gives up, then from the first member to all
"""


def _listener(address: TcpAddress, port: int, system: System) -> socket.socket:
    """Return the listening socket of a member.

    If the address is on the loopback interface, it accepts connections only there. Otherwise, it
    accepts connections on all networks: the host's name may resolve to another address elsewhere.
    """
    try:
        if address.host in _LOOPBACK:
            return system.listen(TcpAddress(address.host, port), public=False)
        return system.listen_everywhere(port)
    except OSError as error:
        raise AddressError(
            f"cannot listen on port {port}: {error.strerror}; choose another port"
        ) from None


class _Meeting:
    """Start of a group: it connects a member to all other members.

    Each member connects to the first member, and then to the members of lower rank, whose addresses
    the first member sends. Threads open and accept the connections, so that a silent peer does not
    delay the others. The first member detects a member that leaves, and tells all other members, so
    that the error of each member names it.
    """

    def __init__(self, rank: int, size: int, entry: _Entry, system: System) -> None:
        self.rank = rank
        self.size = size
        self.entry = entry
        self.links: dict[int, TcpLink] = {}
        self._system = system
        self._expected = set(range(rank + 1, size))  # ranks of members that connect to this member
        self._lower = set(range(rank))  # ranks of members to which this member connects
        self._places: list[_Place] = []
        self._here: set[int] = set()  # ranks of members that are connected to all other members
        self._refusals = ""
        self._is_late = False  # True if this member has told the first member
        self._failure: _News | None = None
        self._unfound = ""  # text about the last member that could not be reached in time
        self._lock = threading.Lock()
        self._arrived: set[int] = set()
        self._connections: SimpleQueue[tuple[_Place, TcpLink] | MlvmError] = SimpleQueue()
        self._refused: SimpleQueue[str] = SimpleQueue()
        self._strangers = Admission(Log("none"), plain=True, system=system)

    def join(self) -> dict[int, TcpLink]:
        """Return the connections, by rank.

        Raises `GroupError` if a member does not join or leaves; `AccessDeniedError` if secrets
        differ; `AddressError` if an address is invalid.
        """
        with closing(self._listener()) as listener:
            here = self.entry.reachable.port or listener.getsockname()[1]
            try:
                if self.rank:
                    self.links[0] = self._connected(0, self.entry.address, here)
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
        """Listen at the first member's port, or at the first free port of the range."""
        if self.rank == 0:
            return _listener(self.entry.address, self.entry.address.port, self._system)
        ports = self.entry.reachable.ports
        for port in ports:
            with suppress(AddressError):
                return _listener(self.entry.address, port, self._system)
        if ports:
            text = f"{ports[0]}-{ports[-1]}"
            raise AddressError(f"ports=: no port of {text} is free here; give a wider range")
        return _listener(self.entry.address, 0, self._system)

    def _step(self, listener: socket.socket, here: int) -> bool:
        """Handle events. Return whether all members are connected to each other."""
        remaining = self.entry.until - self._system.monotonic()
        if remaining <= 0:
            missing = self._expected | self._lower if self._places or self.rank == 0 else set()
            if self.rank == 0:
                raise self._late(missing or set(range(1, self.size)) - self._here)
            if not self._is_late:  # the first member knows for which member all wait
                self._is_late = True
                tell(self.links[0], ("late", tuple(missing)))
            if remaining <= -GRACE:
                raise self._late({0, *missing})
        self._strangers.sweep()
        if self._system.has_come(listener, min(max(remaining, 0.01), _AGAIN)):
            self._accept(listener)
        while not self._connections.empty():  # only this thread removes items
            connection = self._connections.get()
            if isinstance(connection, MlvmError):
                raise connection
            (rank, host, port), link = connection
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
                    raise (GroupTimeoutError if is_late else GroupError)(text)
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

    def _late(self, missing: set[int]) -> GroupTimeoutError:
        names = ", ".join(map(self._name, sorted(missing)))
        return GroupTimeoutError(
            f"{self._name(self.rank)} waits for {names}, who did not join"
            f"{self._refusals}{self._unfound}"
        )

    def _heard(self, rank: int) -> list[_News]:
        """Return the messages of a member. Raises `GroupError` if it has left."""
        link, ended = self.links[rank], False
        with suppress(ConnectionLostError):  # the next call, or the first use, raises it
            link.flush()
        if self._system.has_come(link.socket, 0):
            try:
                link.receive()
            except ConnectionLostError:
                ended = True
        news: list[_News] = []
        while link.inbox:
            head, _ = link.inbox.popleft()
            news.append(open_message(head, Kind.answer)[1].value())
            if news[-1][0] == "start":  # the following messages belong to the first run
                return news
        if ended and not any(what == "failed" for what, _ in news):
            name = self._name(rank)
            raise GroupError(
                f"{name} has ended before all members joined{self._refusals}; "
                "start all members again"
            )
        return news

    def _tell_all(self, what: _News) -> None:
        for link in self.links.values():
            tell(link, what)

    def _leave(self, error: BaseException) -> None:
        """Send the reason to the first member, and close the connections.

        The first member sends the reason to all members. They have a moment to receive it.
        """
        is_late = isinstance(error, GroupTimeoutError)
        text = str(error) if isinstance(error, MlvmError) else type(error).__name__
        with self._lock:  # later connections also receive the reason
            self._failure = "failed", (is_late, text)
        while not self._connections.empty():
            connection = self._connections.get()
            if not isinstance(connection, MlvmError):
                self.links[connection[0][0]] = connection[1]
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

    def _put(self, connection: tuple[_Place, TcpLink] | MlvmError) -> None:
        """Pass a connection, or the error, to the thread that joins."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._connections.put(connection)
        if failure is not None and not isinstance(connection, MlvmError):
            tell(connection[1], failure)
            connection[1].socket.close()

    # --- connections ---

    def _connect_to_lower(self, here: int) -> None:
        """Connect to each member of lower rank on a separate thread."""

        def connect(place: TcpAddress, other: _Place) -> None:
            try:
                self._put((other, self._connected(other[0], place, here)))
            except GroupTimeoutError as error:
                self._unfound = f"; {error}"  # `_step` asks the first member for the cause
            except MlvmError as error:
                self._put(error)

        first = self.links[0].socket.getpeername()[0]
        for other in self._places:
            if other[0] in self._lower:
                place = TcpAddress(other[1] or first, other[2])
                self._system.start("mlvm join", connect, place, other)

    def _connected(self, rank: int, address: TcpAddress, here: int) -> TcpLink:
        """Connect to a member, which may not listen yet.

        `here` is the port at which this member listens.
        """
        why, system, secret = "", self._system, self.entry.secret
        while self._failure is None and (remaining := self.entry.until - system.monotonic()) > 0:
            nonce, patience = secrets.token_bytes(32), min(remaining, _SHAKE)
            name = f"{self.rank} {here} {nonce.hex()} {versions()}"
            hello = Hello("group", f"{self.size} {self.entry.reachable.host}".strip(), name, True)
            try:
                with closing_on_error(system.connect(address, patience)) as sock:
                    deadline = system.monotonic() + patience
                    about = greet(sock, secret, hello, deadline, system)
                    self._require_same(rank, about.get("versions"))
                    return _link(sock, secret, nonce, bytes.fromhex(about["nonce"]), True)
            except (OSError, AddressError) as error:
                if isinstance(error, AccessDeniedError) and str(error) != BUSY:
                    raise
                why = str(error)
                system.sleep(_AGAIN)
        raise GroupTimeoutError(
            f"{self._name(self.rank)} has not found {self._name(rank)} at {address}: {why}"
        )

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the peer has left, or there are too many open files
            self._system.sleep(_AGAIN)
            return
        if self._strangers.enter(sock):
            self._system.start("mlvm join", self._admitted, sock)

    def _admitted(self, sock: socket.socket) -> None:
        """Perform the handshake of a connection, on its own thread."""
        with suppress(MlvmError, OSError, ValueError), closing_on_error(sock):
            nonce = secrets.token_bytes(32)
            offers: list[tuple[int, str, int, bytes]] = []

            def decide(hello: Hello) -> Mapping[str, object]:
                rank, port, theirs, their_versions = hello.name.split(" ", 3)
                size, _, advertised = hello.vm.partition(" ")
                if size != str(self.size):
                    raise AccessDeniedError(f"expected a group of {self.size} members, got {size}")
                self._require_same(int(rank), their_versions)
                with self._lock:
                    if int(rank) not in self._expected or int(rank) in self._arrived:
                        raise AccessDeniedError(
                            f"{self._name(int(rank))} is already connected; use each rank once"
                        )
                    self._arrived.add(int(rank))
                offers.append((int(rank), advertised, int(port), bytes.fromhex(theirs)))
                return {"nonce": nonce.hex(), "versions": versions()}

            system = self._system
            until = min(self.entry.until, system.monotonic() + _SHAKE)
            try:
                host = str(sock.getpeername()[0]).removeprefix("::ffff:")
                secrets_of = {"": self.entry.secret}
                admit(sock, secrets_of, trusted=False, decide=decide, deadline=until, system=system)
                [(rank, advertised, port, theirs)] = offers
                visible = "" if ipaddress.ip_address(host).is_loopback else host
                link = _link(sock, self.entry.secret, theirs, nonce, False)
            except BaseException as error:
                with self._lock:
                    self._arrived.difference_update(each[0] for each in offers)
                if isinstance(error, AccessDeniedError):
                    self._refused.put(f"; {host} was refused: {error}")
                raise
            finally:
                self._strangers.leave(sock)
            self._put(((rank, advertised or visible, port), link))

    def _require_same(self, rank: int, theirs: object) -> None:
        """Raise `AccessDeniedError` if a member has different versions, unless `mixed=True`."""
        text = difference(theirs, self._name(rank), self._name(self.rank))
        if text is not None and not self.entry.mixed:
            raise AccessDeniedError(text)

    def _note_refusals(self) -> None:
        """Store the refusals for error messages. The first member sends them to all members."""
        while not self._refused.empty():
            text = self._refused.get()
            # characters in an error message
            if text not in self._refusals and len(self._refusals) < 1000:
                self._refusals += text
                if self.rank == 0:
                    self._tell_all(("refused", text))

    def _name(self, rank: int) -> str:
        return name_of(rank, f"vm{rank}")


def _link(
    sock: socket.socket, secret: bytes, asking_nonce: bytes, answered: bytes, asks: bool
) -> TcpLink:
    """Return the connection with the keys.

    Both sides have proved that they know the secret.
    """
    base = hmac.digest(secret, b"mlvm group " + asking_nonce + answered, "sha256")
    ours, theirs = (hmac.digest(base, side, "sha256") for side in (b"asks", b"answers"))
    return TcpLink(sock, ours, theirs) if asks else TcpLink(sock, theirs, ours)


def tell(link: TcpLink, what: _News) -> None:
    """Send a value to a process outside a run of a group."""
    writer = Writer()
    writer.value(what)
    with suppress(ConnectionLostError):  # the first member detects it
        link.send(writer.message(Kind.answer), NOTHING)
