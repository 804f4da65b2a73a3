"""The server: it listens, lets clients in, and lends each a VM for as long as it is connected."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from mlvm.core import errors
from mlvm.core.errors import AccessRefused, ConnectionLost, EncodingError, LimitExceeded, MlvmError
from mlvm.core.program.encoding import HEADER, VERSION, Allowance
from mlvm.machines.local import LocalVM
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote import handshake
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.session import Session
from mlvm.machines.remote.stream import Stream
from mlvm.machines.remote.tls import server_context
from mlvm.machines.remote.watchdog import Watchdog, has_hung_up
from mlvm.machines.wire import encode_error

_MOST_OBSERVERS: Final = 64

_MOST_OBJECTS: Final = 1 << 26
"""Bytes of Python's objects that a message may become, other than a program, elements and texts."""

_LOOK: Final = 0.1  # seconds between two looks for connections that are to be closed

_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Server:
    """Lends VMs at an address; `with` closes it at the end.

    Each client has a VM of its own, or one of the `shared` names. When its connection ends, however
    it ends, all that it has made is freed. A client proves that it knows the `secret`, but for one
    of the server's own user at a unix socket. `certificate` and `key` are PEM files, for TLS;
    without, an address that other hosts can reach has to be `insecure`.

    `options` are those of `LocalVM` (`threads`, `native`, ...). `prepare` is called with each VM
    that is made, as to register functions; `libraries` are shared libraries with functions in C.
    `about` is told to clients.

    Raises `AddressError`, `AccessRefused` for a secret that is missing or could be guessed, and
    what making a VM raises.

        >>> from mlvm.machines.remote.server import Server
        >>> with Server("127.0.0.1:0", secret="between you and me") as server:
        ...     with ml.connect(str(server.address), secret="between you and me") as vm:
        ...         ml.ones(2, device=vm).tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        address: str,
        *,
        secret: str | bytes | None = None,
        certificate: str | None = None,
        key: str | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        shared: Sequence[str] = (),
        libraries: Sequence[str | os.PathLike[str]] = (),
        prepare: Callable[[LocalVM], object] = lambda vm: None,
        options: Mapping[str, Any] | None = None,
        about: Mapping[str, object] | None = None,
        log: Log | None = None,
    ) -> None:
        asked = addresses.parse_address(address)
        self._secret = None if secret is None else handshake.check_secret(secret)
        if self._secret is None and not isinstance(asked, addresses.UnixAddress):
            raise AccessRefused(f"a server at {asked} needs a secret")
        if key is not None and certificate is None:
            raise errors.AddressError(f"the key {key} is of no use without its certificate")
        self._context = server_context(certificate, key) if certificate is not None else None
        self._limits = limits or Limits()
        self._libraries = libraries
        self._prepare = prepare
        self._options = dict(options or {})
        self._log = log or Log("none")
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._strangers = Admission(self._log, plain=self._context is None)
        self._observers: set[socket.socket] = set()
        self._clients: dict[int, _Client] = {}
        self._started = time.monotonic()
        self._draining = False
        self._launches = 0  # of clients that have gone
        self._admitted = 0
        self._shared: dict[str, BoundedVM] = {}
        for name in shared:
            if not name or name in self._shared or len(name) > handshake.MOST_NAME:
                given = errors.brief(list(shared))
                most = handshake.MOST_NAME
                raise errors.MachineError(
                    f"shared VMs have names of their own, of {most} characters at most, not {given}"
                )
            self._shared[name] = self._make_vm(name)
            self._shared[name].let_several_in()
        sample = self._make_vm("sample")  # what cannot be made is known now
        of_vm = {"native": sample.native, "threads": sample.threads}
        self._about = {"format": VERSION, "pid": os.getpid(), **of_vm, **(about or {})}
        sample.close()
        self._inode: tuple[int, int] | None = None
        self._socket = addresses.listen(asked, public=insecure or self._context is not None)
        self.address: addresses.Address = addresses.address_of(self._socket, asked)
        """Where it listens, with the port that was free if 0 was asked for."""
        if isinstance(asked, addresses.UnixAddress):
            found = os.stat(asked.path)
            self._inode = found.st_dev, found.st_ino
        tls = self._context is not None
        self._log.event("listening", address=self.address, tls=tls, **self._about)
        _thread("accept", self._accept).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_vm(self, name: str) -> BoundedVM:
        vm = BoundedVM(name, self._limits, self._watchdog, **self._options)
        for library in self._libraries:
            vm.register_library(library)
        self._prepare(vm)
        return vm

    # --- the end --------------------------------------------------------------------------

    def close(self, grace: float = 0.0) -> None:
        """Let nobody in any more, let launches that run finish for `grace` seconds, and end all
        connections. Idempotent."""
        with self._lock:
            first, self._draining = not self._draining, True
            clients = list(self._clients.values())
        if first:
            self._log.event("draining", clients=len(clients), grace=grace)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._socket.close()
            self._remove_file()
        for client in clients:
            client.drain()
        self._wait(grace)
        self._watchdog.stop("the server stops")
        self._wait(0.5)  # they say so to their clients
        with self._lock:
            admitted = [each.socket for each in self._clients.values()]
            left = [*self._strangers.sockets(), *self._observers, *admitted]
        for sock in left:
            _shut(sock, socket.SHUT_RDWR)
        self._wait(1.0)
        if first:
            for vm in self._shared.values():
                vm.close()
            self._log.event("stopped", launches=self.status()["launches"])

    def _wait(self, seconds: float) -> None:
        """Wait till there are no clients, for so long at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if not (self._clients or self._strangers or self._observers):
                    return
            time.sleep(0.01)

    def _remove_file(self) -> None:
        """Remove a unix socket's file, if it is still this server's."""
        if isinstance(self.address, addresses.UnixAddress):
            with contextlib.suppress(OSError):
                found = os.stat(self.address.path)
                if (found.st_dev, found.st_ino) == self._inode:
                    os.unlink(self.address.path)

    # --- who comes ------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            self._accept_all()
        finally:
            self._strangers.sweep(last=True)

    def _accept_all(self) -> None:
        while not self._draining:
            self._socket.settimeout(_LOOK if self._strangers.sweep() else None)
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._draining:
                    return
                self._log.event("error", what="accept", error=error.strerror)
                time.sleep(0.1 if error.errno in _FULL else 0.01)
                continue
            with self._lock:
                if self._draining:
                    sock.close()
                    return
            if not self._strangers.enter(sock):
                continue
            try:
                _thread("client", self._meet, sock).start()
            except RuntimeError as error:  # the system has no more threads
                self._log.event("error", what="thread", error=error)
                self._strangers.leave(sock)
                sock.close()

    def _meet(self, sock: socket.socket) -> None:
        """Serve one connection, from its first byte to its end."""
        peer, client = "unknown", None
        try:
            peer = addresses.peer_of(sock)
            addresses.tune(sock)
            deadline = time.monotonic() + self._limits.handshake_seconds
            sock = self._secure(sock, deadline)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            client = _Client(peer, sock)
            found = addresses.credentials(sock)
            trusted = found is not None and found[1] == os.getuid()  # a process of the same user's
            decide = partial(self._decide, client)
            handshake.admit(sock, self._secret, trusted=trusted, decide=decide, deadline=deadline)
        except (MlvmError, OSError) as error:
            self._strangers.note(peer, _text(error))
        except Exception as error:
            self._log_error(error, peer)
        else:
            self._serve(client)
        finally:
            if client is not None and client.number:
                self._free(client)
            self._strangers.leave(sock)
            with self._lock:
                self._observers.discard(sock)
            _part(sock)

    def _secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        """The connection, with TLS to be begun if that is what is spoken here. Raises
        `AccessRefused`."""
        tls = handshake.speaks_tls(sock, deadline)
        self._strangers.spoke(sock)
        if tls is None:
            raise AccessRefused("the client speaks neither this protocol nor TLS")
        if self._context is None:
            if tls:
                raise AccessRefused("the client speaks TLS, and this server has no certificate")
            return sock
        if not tls:
            reason = "this server speaks TLS only: connect with tls="
            handshake.send(sock, handshake.refusal(reason), deadline)
            raise AccessRefused(reason)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        wrap = self._context.wrap_socket  # which takes the descriptor over
        secured = wrap(sock, server_side=True, do_handshake_on_connect=False)
        self._strangers.becomes(sock, secured)
        return secured

    def _decide(self, client: _Client, hello: handshake.Hello) -> dict[str, object]:
        """Give a client that has proved who it is its VM, and a number. Returns what it is told.
        Raises `AccessRefused`."""
        if hello.wants == "status":
            with self._lock:
                if len(self._observers) >= _MOST_OBSERVERS:
                    raise AccessRefused(f"{_MOST_OBSERVERS} others watch already")
                self._strangers.leave(client.socket)
                self._observers.add(client.socket)
            return self._about
        if hello.wants != "vm":
            raise AccessRefused(f"a vm or the status is to be had, not {hello.wants[:50]!r}")
        shared = self._shared.get(hello.vm)
        if hello.vm and shared is None:
            names = sorted(self._shared) or "none"
            raise AccessRefused(f"no shared VM {hello.vm[:50]!r}; there are {names}")
        with self._lock:
            if self._draining:
                raise AccessRefused("the server stops")
            count = len(self._clients)
            if count >= self._limits.connections:
                raise AccessRefused(f"{count} clients are connected, the most that may be")
            client.number, client.name = next(self._numbers), hello.name
            self._clients[client.number] = client
            self._strangers.leave(client.socket)
            self._admitted += 1
        client.own = shared is None
        client.vm = shared if shared is not None else self._make_vm(f"vm{client.number}")
        return {**self._about, "vm": client.vm.name, "shared": not client.own}

    def _serve(self, client: _Client) -> None:
        """Do what a client wants who has been let in."""
        try:
            if client.vm is None:
                self._tell_status(client.socket)
                return
            facts = {"client": client.number, "peer": client.peer, "vm": client.vm.name}
            self._log.event("connected", **facts, name=client.name)
            client.reason = self._lend(client, client.vm)
        except (MlvmError, OSError) as error:
            client.reason = _text(error)
        except Exception as error:
            client.reason = "an error of the server's"
            self._log_error(error, client.peer)

    def _lend(self, client: _Client, vm: BoundedVM) -> str:
        """Perform what the client calls till its connection ends; why it ended."""
        limits = self._limits
        vm.client.is_gone = client.is_gone
        stream = Stream(client.socket, limits.message_bytes)
        stream.set_timeouts(limits.idle_seconds, limits.send_seconds)
        session = client.session = _BoundedSession(vm, limits, self._watchdog, client)
        try:
            session.serve(stream, lambda: self._draining)
            return self._part_from(stream, "the server stops")
        except ConnectionLost as error:
            return self._part_from(stream, "the server stops" if self._draining else str(error))
        except (EncodingError, LimitExceeded) as error:  # what follows cannot be told apart
            with contextlib.suppress(MlvmError, OSError):
                stream.send([encode_error(error)])
            return _text(error)
        finally:
            vm.client.is_gone = lambda: False  # what follows has to be done
            self._clear_up(vm, session)

    def _clear_up(self, vm: BoundedVM, session: Session) -> None:
        """Free what the client of a session has made; later, if another's launch runs meanwhile."""
        if not vm._lock.acquire(blocking=False):
            _thread("clear up", session.close).start()
            return
        try:
            session.close()
        finally:
            vm._lock.release()

    def _part_from(self, stream: Stream, reason: str) -> str:
        """Tell a client that may be there why its connection ends."""
        with contextlib.suppress(MlvmError, OSError):
            stream.send([encode_error(ConnectionLost(reason))])
        return reason

    def _free(self, client: _Client) -> None:
        """Give up a client that has gone, and all that it had."""
        launches = client.session.launches if client.session is not None else 0
        own = client.vm if client.own else None
        try:
            if own is not None:
                own.close()
        finally:
            with self._lock:
                del self._clients[client.number]
                self._launches += launches
        seconds, left = time.monotonic() - client.since, _nbytes(own) if own is not None else 0
        facts = {"client": client.number, "reason": client.reason, "seconds": seconds}
        self._log.event("disconnected", **facts, launches=launches, left=left)

    def _log_error(self, error: Exception, peer: str) -> None:
        """Log what should not have happened."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = [f"{each.filename}:{each.lineno}" for each in place]
        self._log.event("error", peer=peer, error=repr(error), at=" ".join(where))

    # --- what it is doing -----------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `python -m mlvm top` shows: totals, and a dictionary for each client and each
        shared VM."""
        now = time.monotonic()
        with self._lock:
            clients = [each.status(now) for each in self._clients.values()]
            gone = self._launches
            strangers = len(self._strangers)
        vms = self._shared.items()
        shared = [{"vm": n, "bytes": _nbytes(vm), "launches": vm.launches} for n, vm in vms]
        own = [each for each in clients if each["vm"] not in self._shared]
        return {
            "seconds": now - self._started,
            "admitted": self._admitted,
            "refused": self._strangers.refused,
            "strangers": strangers,
            "bytes": sum(each["bytes"] for each in [*own, *shared]),
            "launches": gone + sum(each["launches"] for each in clients),
            "clients": clients,
            "shared": shared,
        }

    def _tell_status(self, sock: socket.socket) -> None:
        """Answer each request with the status, or with the same bytes if it has some."""
        while not self._draining:
            deadline = time.monotonic() + self._limits.handshake_seconds
            try:
                _, kind, message = handshake.receive(sock, deadline)
            except ConnectionLost:
                return
            asks = handshake.Greeting.status
            if kind != asks.value:
                raise EncodingError(f"a status is asked for by {asks.value}, not {kind}")
            body = message[HEADER.size :] or json.dumps(self.status()).encode()
            handshake.send(sock, handshake.pack(asks, body), deadline)


class _Client:
    """A connection; it has a number once it was let in, and a VM if it wants one."""

    def __init__(self, peer: str, sock: socket.socket) -> None:
        self.peer = peer
        self.socket = sock
        self.number = 0
        self.name = ""
        self.vm: BoundedVM | None = None
        self.own = True
        self.session: Session | None = None
        self.since = time.monotonic()
        self.program_bytes = 0
        self.reason = "it was never served"
        self._draining = False

    def drain(self) -> None:
        """End the connection once what has arrived is done."""
        self._draining = True
        _shut(self.socket, socket.SHUT_RD)

    def is_gone(self) -> bool:
        """Whether the client has hung up. A connection that is drained looks the same."""
        return not self._draining and has_hung_up(self.socket)

    def status(self, now: float) -> dict[str, Any]:
        vm, session = self.vm, self.session
        return {
            "client": self.number,
            "peer": self.peer,
            "name": self.name,
            "vm": vm.name if vm is not None else "",
            "bytes": _nbytes(vm) if vm is not None else 0,
            "launches": session.launches if session is not None else 0,
            "messages": session.messages if session is not None else 0,
            "program_bytes": self.program_bytes,
            "busy": session is not None and session.busy,
            "seconds": now - self.since,
        }


class _BoundedSession(Session):
    """A session whose programs are of so many bytes at most, and are not verified for ever."""

    def __init__(self, vm: BoundedVM, limits: Limits, watchdog: Watchdog, client: _Client) -> None:
        super().__init__(vm, own=client.own)
        self._bounded = vm
        self._limits = limits
        self._watchdog = watchdog
        self._client = client
        self._arriving = Allowance(0)  # for the program that is read
        self._sizes: dict[int, int] = {}

    def run_known(self, stream: Stream) -> int:
        count = super().run_known(stream)
        self._bounded.launches += count
        return count

    def _perform_from(self, reader: Any, name: str) -> Any:
        reader.allowance = Allowance(_MOST_OBJECTS)
        if name not in ("load_program", "drop_program", "estimate"):
            return super()._perform_from(reader, name)
        size = reader.left if name == "load_program" else 0
        loaded, most = self._client.program_bytes, self._limits.program_bytes
        if loaded + size > most:
            held = f"{loaded:,} are loaded, and the limit is {most:,}"
            raise LimitExceeded(f"{size:,} more bytes of programs: {held}")
        if size:
            reader.allowance = self._arriving = Allowance(most - loaded - size)
        with self._watchdog.watch(self._limits.launch_seconds, self._client.is_gone):
            return super()._perform_from(reader, name)

    def _keep_from_reading(self, handle: int, error: Exception) -> None:
        self._bounded.spoil(handle, error)

    def perform(self, name: str, args: list[Any]) -> Any:
        result = super().perform(name, args)
        if name in ("load_program", "drop_program"):
            number, loaded = args[0], self._client.program_bytes
            size = self._limits.program_bytes - loaded - self._arriving.left
            size = size if name == "load_program" else 0
            self._client.program_bytes += size - self._sizes.pop(number, 0)
            if size:
                self._sizes[number] = size
        return result


def _thread(does: str, target: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=f"mlvm {does}", daemon=True)


# --- sockets ----------------------------------------------------------------------------


def _shut(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(sock, how)


def _part(sock: socket.socket) -> None:
    """Close, but let the other side read what was sent last: a close with bytes unread would take
    that from it."""
    with contextlib.suppress(OSError, ValueError):
        _shut(sock, socket.SHUT_WR)
        deadline = time.monotonic() + 0.5
        sock.settimeout(0.1)
        while time.monotonic() < deadline and sock.recv(1 << 16):
            pass
    sock.close()


def _nbytes(vm: LocalVM) -> int:
    return round(vm.consumed_size_in_mib() * 2**20)


def _text(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__
