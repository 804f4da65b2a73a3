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
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

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
    connect,
    listen,
    parse_address,
    tune,
)
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.handshake import BUSY, Hello, admit, check_secret, greet
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.secret import VARIABLE, find_secret
from mlvm.machines.remote.watchdog import has_come
from mlvm.parallel import plain
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.group import checked_timeout, name_of
from mlvm.parallel.messages import MessageGroup, Transport
from mlvm.parallel.passing import NOTHING

SECRET: Final = "MLVM_SECRET"
"""The environment variable that has a group's secret, where no other is given."""

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
    longer than `start` seconds for all to be there.

    Raises `GroupError` for an impossible rank or size, and for members that do not come,
    `AccessRefused` without a secret or with another one, `AddressError`, `MissingExtra` without
    threadpoolctl.

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
    ) -> None:
        if not all(isinstance(each, int) for each in (rank, size)) or not 0 <= rank < size:
            raise GroupError(f"a rank is 0 .. size - 1, not {brief(rank)} of {brief(size)}")
        place = parse_address(address)
        if not isinstance(place, TcpAddress):
            raise AddressError(f"members meet at HOST:PORT, not at {address}")
        checked_timeout(timeout)
        one_blas_thread.prepare()
        links: Mapping[int, Link] = {}
        if size > 1:
            key = _secret(secret, secret_file)
            links = _joined(rank, size, place, key, time.monotonic() + start)
        super().__init__(TcpTransport(rank, size, links), timeout)

    _encoding = plain


def _secret(secret: str | bytes | None, secret_file: str | os.PathLike[str] | None) -> bytes:
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

    def __init__(self, rank: int, size: int, links: Mapping[int, Link]) -> None:
        super().__init__(rank, size)
        self._links = dict(links)
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
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
            time.sleep(seconds)
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

    def close(self) -> None:
        with self._lock:
            for rank in list(self._links):
                self._drop(rank)
            self._selector.close()


# --- how members find each other -------------------------------------------------------

_Place: TypeAlias = tuple[int, str, int]
"""The rank of a member, and where it listens; an empty host is the first member's."""


def _joined(
    rank: int, size: int, address: TcpAddress, secret: bytes, until: float
) -> dict[int, Link]:
    """Connect to all other members, by the moment `until` of `time.monotonic`. Raises
    `GroupError` if one does not come; `AccessRefused` if a secret differs; `AddressError` if an
    address is invalid."""
    links: dict[int, Link] = {}
    meet = _Meet(rank, size, secret, until)
    with closing(_listener(address, address.port if rank == 0 else 0)) as listener:
        try:
            if rank == 0:
                places = meet.accepted(listener, range(1, size), links)
                for link in links.values():
                    _tell(link, tuple(places))
            else:
                here = listener.getsockname()[1]
                links[0] = meet.connected(0, address, here)
                for other, host, port in meet.receive_places(links[0]):
                    if 0 < other < rank:
                        place = TcpAddress(host or links[0].socket.getpeername()[0], port)
                        links[other] = meet.connected(other, place, here)
                meet.accepted(listener, range(rank + 1, size), links)
        except BaseException:
            for link in links.values():
                link.socket.close()
            raise
    return links


def _listener(address: TcpAddress, port: int) -> socket.socket:
    """Return the listener of a member: on this host alone if the group is, else on all its
    networks, since a host's name may resolve to another address there."""
    try:
        if address.host in _LOOPBACK:
            return listen(TcpAddress(address.host, port), public=False)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise AddressError(f"cannot listen on port {port}: {error.strerror}") from None


class _Meet(NamedTuple):
    """Parameters of a member's connections to the others."""

    rank: int
    size: int
    secret: bytes
    until: float

    def connected(self, rank: int, address: TcpAddress, here: int) -> Link:
        """Connect to a member, which may not listen yet. `here` is the port on which this one
        listens."""
        why = ""
        while (remaining := self.until - time.monotonic()) > 0:
            nonce, patience = secrets.token_bytes(32), min(remaining, _SHAKE)
            hello = Hello("group", str(self.size), f"{self.rank} {here} {nonce.hex()}", True)
            try:
                with closing_on_error(connect(address, patience)) as sock:
                    about = greet(sock, self.secret, hello, time.monotonic() + patience)
                    return _link(sock, self.secret, nonce, bytes.fromhex(about["nonce"]), True)
            except (OSError, AddressError) as error:
                if isinstance(error, AccessRefused) and str(error) != BUSY:
                    raise
                why = str(error)
                time.sleep(_AGAIN)
        raise GroupTimeout(
            f"{self._name(self.rank)} has not found {self._name(rank)} at {address}: {why}"
        )

    def accepted(
        self, listener: socket.socket, ranks: Sequence[int], links: dict[int, Link]
    ) -> list[_Place]:
        """Accept those members into `links`; return their addresses."""
        expected, places = set(ranks), []
        accepted_links: SimpleQueue[tuple[_Place, Link]] = SimpleQueue()
        lock, arrived = threading.Lock(), set[int]()
        refused: SimpleQueue[str] = SimpleQueue()
        refusals = ""
        strangers = Admission(Log("none"), plain=True)

        def admitted(sock: socket.socket) -> None:
            """Handle a connection on its thread, so that a silent one delays no other."""
            with suppress(MlvmError, OSError, ValueError), closing_on_error(sock):
                nonce = secrets.token_bytes(32)
                offers: list[tuple[int, int, bytes]] = []

                def decide(hello: Hello) -> Mapping[str, object]:
                    rank, port, theirs = hello.name.split()
                    if hello.vm != str(self.size):
                        text = f"this group has {self.size} members, not {hello.vm}"
                        raise AccessRefused(text)
                    with lock:
                        if int(rank) not in expected or int(rank) in arrived:
                            raise AccessRefused(f"{self._name(int(rank))} is here already")
                        arrived.add(int(rank))
                    offers.append((int(rank), int(port), bytes.fromhex(theirs)))
                    return {"nonce": nonce.hex()}

                until = min(self.until, time.monotonic() + _SHAKE)
                try:
                    host = str(sock.getpeername()[0]).removeprefix("::ffff:")
                    admit(sock, {"": self.secret}, trusted=False, decide=decide, deadline=until)
                    [(rank, port, theirs)] = offers
                    host = "" if ipaddress.ip_address(host).is_loopback else host
                    link = _link(sock, self.secret, theirs, nonce, False)
                except BaseException as error:
                    with lock:
                        arrived.difference_update(each[0] for each in offers)
                    if isinstance(error, AccessRefused):
                        refused.put(f"; {host} was refused: {error}")
                    raise
                finally:
                    strangers.leave(sock)
                accepted_links.put(((rank, host, port), link))

        while expected:
            remaining = self.until - time.monotonic()
            if remaining <= 0:
                late = ", ".join(map(self._name, sorted(expected)))
                raise GroupTimeout(
                    f"{self._name(self.rank)} waits for {late}, who did not join{refusals}"
                )
            strangers.sweep()
            if has_come(listener, min(remaining, _AGAIN)):
                try:
                    sock, _ = listener.accept()
                except OSError:  # it has gone, or there are too many open files
                    time.sleep(_AGAIN)
                    continue
                if strangers.enter(sock):
                    threading.Thread(target=admitted, args=(sock,), daemon=True).start()
            while not accepted_links.empty():  # this thread alone takes
                place, link = accepted_links.get()
                expected.discard(place[0])
                links[place[0]] = link
                places.append(place)
                if refusals and self.rank == 0:
                    _tell(link, refusals)
            while not refused.empty():
                text = refused.get()
                if text not in refusals and len(refusals) < _MOST_REFUSALS:
                    refusals += text
                    for link in links.values() if self.rank == 0 else ():
                        _tell(link, text)
        strangers.sweep(last=True)
        return places

    def receive_places(self, link: Link) -> list[_Place]:
        """Wait until the first member says where all the others listen. Raises `GroupError` with
        the refusals that it has told until then."""
        refusals, ended = "", False
        while not ended and (remaining := self.until - time.monotonic()) > 0:
            if has_come(link.socket, remaining):
                try:
                    link.receive()
                except ConnectionLost:  # it waits no longer
                    ended = True
                while link.inbox:
                    head, _ = link.inbox.popleft()
                    what: list[_Place] | str = open_message(head, Kind.answer)[1].value()
                    if not isinstance(what, str):
                        return list(what)
                    refusals += what
        if ended:
            name = self._name(0)
            raise GroupError(f"{name} has ended before all members joined{refusals}")
        raise GroupTimeout(f"the other members have not all joined{refusals}")

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


def _tell(link: Link, what: tuple[_Place, ...] | str) -> None:
    """Tell a member that has joined where all are, or for now who was refused."""
    writer = Writer()
    writer.value(what)
    with suppress(ConnectionLost):  # its group ends by itself
        link.send(writer.message(Kind.answer), NOTHING)
