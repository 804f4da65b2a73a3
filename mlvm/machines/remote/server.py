"""Server that admits clients and provides a VM to each client while it is connected."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import json
import os
import secrets
import socket
import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from mlvm.core import errors
from mlvm.core.errors import (
    AccessDeniedError,
    ConnectionLostError,
    EncodingError,
    LimitExceededError,
    MlvmError,
    OutOfMemoryError,
)
from mlvm.core.program.encoding import HEADER, VERSION, Allowance, Kind
from mlvm.core.store import number_apart
from mlvm.machines.closing import Closing
from mlvm.machines.local import LocalVM
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote import handshake
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.metrics import Metrics
from mlvm.machines.remote.processes import Process, Processes, relay
from mlvm.machines.remote.session import Session
from mlvm.machines.remote.stream import Buffer, Received, Stream
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.remote.tls import server_context
from mlvm.machines.remote.users import Accounts, niceness, users_of
from mlvm.machines.remote.watchdog import Watchdog
from mlvm.machines.versions import versions
from mlvm.machines.wire import encode_error

_MOST_OBSERVERS: Final = 64

_QUOTAS: Final = "user_bytes", "user_launches", "user_seconds"
_MAKING: Final = "alloc_tensor", "alloc_storage", "load_program", "launch", "write"
_LOOK_AT_QUOTAS: Final = 0.5  # seconds between checks

_LAST_WORDS: Final = 0.2  # seconds between checks for exited processes
_INTERRUPTED: Final = "the client has ended this launch"

_MOST_OBJECTS: Final = 1 << 26
"""Maximum bytes of Python objects per decoded message, without programs, elements and texts."""

_LOOK: Final = 0.1  # seconds between sweeps of refused connections

_NO_FILES: Final = {errno.EMFILE, errno.ENFILE}
_MODULES: Final = "difflib", "numpy.fft", "numpy.linalg", "numpy.random"
"""Modules that kernels and errors import on demand. A server imports them before it listens,
because an import fails when no file descriptor is left."""

_FILES: Final = "the server has too many open files: try again later"
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def _unprepared(vm: LocalVM) -> None:
    """Prepare a new VM by default: do nothing."""


class Server(Closing):
    """Server of VMs at an address, and a context manager that closes the server.

    Each client has a private VM, or a VM of the `shared` names. When the connection is closed, the
    server frees all tensors and storages of the client. A client proves that it knows the `secret`,
    except a client of the same user at a unix socket. `certificate` and `key` are PEM files for
    TLS. Without TLS, an address that other hosts can reach requires `insecure`.

    `processes` limits the number of client processes. Each client and each shared VM has a separate
    process, which may use `process_bytes`; with 0, all clients share one process. Processes share
    neither memory nor the interpreter lock. `address` may also be a listening socket.

    `options` are passed to `LocalVM` (`threads`, `native`, ...). `prepare` is called with each new
    VM, for example to register functions; `libraries` are shared libraries with functions in C.
    Clients receive the values of `about`.

    Raises `AddressError`, `AccessDeniedError` for a missing or guessable secret, and the errors of
    creating a VM.

        >>> from mlvm.machines.remote.server import Server
        >>> with Server("127.0.0.1:0", secret="between you and me") as server:
        ...     with ml.connect(str(server.address), secret="between you and me") as vm:
        ...         ml.ones(2, device=vm).tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        address: str | socket.socket | None,
        *,
        secret: str | bytes | None = None,
        certificate: str | None = None,
        key: str | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        shared: Sequence[str] = (),
        libraries: Sequence[str | os.PathLike[str]] = (),
        prepare: Callable[[LocalVM], object] = _unprepared,
        options: Mapping[str, Any] | None = None,
        about: Mapping[str, object] | None = None,
        log: Log | None = None,
        processes: int = 0,
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        public = insecure or certificate is not None
        if isinstance(address, socket.socket):
            requested: addresses.Address | None = addresses.adopt(address, public=public)
        else:
            requested = None if address is None else addresses.parse_address(address)
        self._users = None if secret is None else users_of(handshake.check_secret(secret))
        if self._users is None and isinstance(requested, addresses.TcpAddress):
            raise AccessDeniedError(f"a server at {requested} needs a secret; pass secret=")
        if key is not None and certificate is None:
            raise errors.AddressError(f"key={key!r} needs certificate= as well")
        self._files = certificate, key
        self._context = server_context(certificate, key) if certificate is not None else None
        self._limits = limits or Limits()
        self._libraries = libraries
        self._prepare = prepare
        self._options = dict(options or {})
        self._log = log or Log("none")
        self._watchdog = Watchdog(system)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._strangers = Admission(self._log, plain=self._context is None, system=system)
        self._observers: set[socket.socket] = set()
        self._clients: dict[int, _Client] = {}
        self._started = system.monotonic()
        self._draining = False
        self._launches = 0  # launches of disconnected clients
        self._metrics = Metrics()  # metrics of these clients and handshakes
        self._accounts = Accounts(self._limits)
        self._admitted = 0
        for name in shared:
            if not name or shared.count(name) > 1 or len(name) > handshake.MOST_NAME:
                shown = errors.brief(list(shared))
                most = handshake.MOST_NAME
                raise errors.MachineError(
                    f"shared=: expected distinct names of 1 to {most} characters, got {shown}"
                )
        number_apart()
        self._processes: Processes | None = None
        self._names = list(shared)
        self.shared = {} if processes else {name: self.make_vm(name) for name in shared}
        for vm in self.shared.values():
            vm.allow_several_clients()
        if requested is None:  # this process serves one client
            return
        sample = self.make_vm("sample")  # raises for invalid options
        sample.launch_cache()
        for name in _MODULES:
            importlib.import_module(name)
        of_vm = {"native": sample.native, "threads": sample.threads}
        facts = {"format": VERSION, "pid": os.getpid(), "versions": versions()}
        self._about = {**facts, **of_vm, **(about or {})}
        sample.close()
        if processes:
            if prepare is not _unprepared:
                raise errors.MachineError("prepare= does not apply with processes=: use libraries=")
            rest = self._limits, libraries, self._options, self._log.event
            self._processes = Processes(processes, shared, *rest)
        self._inode: tuple[int, int] | None = None
        opened = address if isinstance(address, socket.socket) else None
        # spare descriptor, to reject a client when none is left
        self._spare = os.open(os.devnull, os.O_RDONLY)
        try:
            self._socket = opened or system.listen(requested, public=public)
            self.address: addresses.Address = addresses.address_of(self._socket, requested)
            """The address, with the actual port instead of 0."""
            if isinstance(requested, addresses.UnixAddress) and opened is None:
                status = os.stat(requested.path)
                self._inode = status.st_dev, status.st_ino
            tls = self._context is not None
            self._log.event("listening", address=self.address, tls=tls, **self._about)
        except BaseException:
            os.close(self._spare)
            if self._processes is not None:
                self._processes.close()
            raise
        if any(getattr(self._limits, name) < getattr(Limits(), name) for name in _QUOTAS):
            system.start("mlvm quotas", self._watch_quotas)
        self._accepting = system.start("mlvm accept", self._accept)

    def reload(self, secret: str | bytes | None) -> None:
        """Replace the secret, and read the certificate files again, for new connections.

        Raises `AccessDeniedError` and `AddressError`; the server is then unchanged.
        """
        users = None if secret is None else users_of(handshake.check_secret(secret))
        if users is None and isinstance(self.address, addresses.TcpAddress):
            raise AccessDeniedError(f"a server at {self.address} needs a secret; pass secret=")
        certificate, key = self._files
        context = server_context(certificate, key) if certificate is not None else None
        self._users, self._context = users, context
        self._log.event("reloaded", tls=context is not None)

    def make_vm(self, name: str) -> BoundedVM:
        vm = BoundedVM(name, self._limits, self._watchdog, **self._options)
        for library in self._libraries:
            vm.register_library(library)
        self._prepare(vm)
        return vm

    # --- shutdown -------------------------------------------------------------------------

    def close(self, grace: float = 0.0) -> None:
        """Stop the server: refuse new clients, and close all connections. Idempotent.

        It first waits `grace` seconds for running launches.
        """
        with self._lock:
            first, self._draining = not self._draining, True
            count = len(self._clients)
        if first:
            self._log.event("draining", clients=count, grace=grace)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wake the thread that accepts
            self._socket.close()
            self._remove_file()
        self.drain()
        self._wait(grace)
        self.stop("the server is shutting down; connect again later")
        self._wait(0.5)  # wait for the answers to clients
        with self._lock:
            admitted = [each.socket for each in self._clients.values()]
            open_sockets = [*self._strangers.sockets(), *self._observers, *admitted]
        for sock in open_sockets:
            addresses.shut(sock)
        self._wait(1.0)
        if first:
            for vm in self.shared.values():
                vm.close()
            launches = self.status()["launches"]
            if self._processes is not None:
                self._processes.close()
            self._log.event("stopped", launches=launches)

    def drain(self) -> None:
        """Close each connection after all received messages are executed."""
        with self._lock:
            self._draining = True
            clients = list(self._clients.values())
        for client in clients:
            client.drain()
        if self._processes is not None:
            self._processes.send_all("drain")

    def stop(self, reason: str) -> None:
        """Abort all launches, and later launches immediately."""
        self._watchdog.stop(reason)
        if self._processes is not None:
            self._processes.send_all("stop", reason=reason)

    def _wait(self, seconds: float) -> None:
        """Wait until all clients have disconnected, at most `seconds`."""
        deadline = self._system.monotonic() + seconds
        while self._system.monotonic() < deadline:
            with self._lock:
                if not (self._clients or self._strangers or self._observers):
                    return
            self._system.sleep(0.01)

    def _remove_file(self) -> None:
        """Remove the file of a unix socket if it still belongs to this server."""
        if isinstance(self.address, addresses.UnixAddress):
            with contextlib.suppress(OSError):
                status = os.stat(self.address.path)
                if (status.st_dev, status.st_ino) == self._inode:
                    os.unlink(self.address.path)

    # --- new clients ----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            self._accept_all()
        finally:
            os.close(self._spare)
            self._strangers.sweep(last=True)

    def _accept_all(self) -> None:
        while not self._draining:
            waits = _LOOK if self._strangers.sweep() else None
            try:
                self._socket.settimeout(waits)
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._draining:
                    return
                self._log.event("error", what="accept", error=error.strerror)
                if error.errno in _NO_FILES:
                    self._refuse_for_files()
                self._system.sleep(0.1 if error.errno in _FULL else 0.01)
                continue
            with self._lock:
                if self._draining:
                    sock.close()
                    return
            if not self._strangers.enter(sock):
                continue
            try:
                self._system.start("mlvm client", self._meet, sock)
            except RuntimeError as error:  # the system cannot create a thread
                self._log.event("error", what="thread", error=error)
                self._strangers.leave(sock)
                sock.close()

    def _refuse_for_files(self) -> None:
        """Refuse the next client with the reason, using the spare descriptor."""
        os.close(self._spare)
        try:
            self._socket.settimeout(0)
            with contextlib.suppress(OSError):
                sock, _ = self._socket.accept()
                peer = addresses.peer_of(sock)
                with contextlib.suppress(OSError):
                    sock.send(handshake.refusal(_FILES), getattr(socket, "MSG_DONTWAIT", 0))
                _part(sock, self._system)
                self._strangers.note(peer, _FILES)
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _meet(self, sock: socket.socket) -> None:
        """Serve one connection from the first byte until it is closed."""
        system = self._system
        peer, client, begun = "unknown", None, system.monotonic()
        try:
            peer = addresses.peer_of(sock)
            addresses.tune(sock)
            deadline = system.monotonic() + self._limits.handshake_seconds
            sock = self._secure(sock, deadline)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            client = _Client(peer, sock, self._limits.lease_seconds, system)
            credentials = addresses.credentials(sock)
            # a process of the same user
            trusted = credentials is not None and credentials[1] == os.getuid()
            decide = partial(self._decide, client)
            handshake.admit(
                sock,
                self._users,
                trusted=trusted,
                decide=decide,
                deadline=deadline,
                system=system,
            )
        except (MlvmError, OSError) as error:
            self._strangers.note(peer, _text(error))
        except Exception as error:
            self._log_error(error, peer)
        else:
            with self._lock:
                self._metrics.observe("handshake", system.monotonic() - begun)
            self._serve(client)
        finally:
            if client is not None and client.number:
                self._free(client)
            self._strangers.leave(sock)
            with self._lock:
                self._observers.discard(sock)
            # otherwise the number belongs to a different client
            if client is None or not client.resumes:
                _part(sock if client is None else client.socket, system)
            if client is not None and client.own and client.vm is not None:
                client.session = client.vm = None
                _trim()

    def _secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Wrap the connection in TLS if the server has a certificate.

        Raises `AccessDeniedError` if only one side uses TLS.
        """
        tls = handshake.speaks_tls(sock, deadline, self._system)
        self._strangers.note_first_bytes(sock)
        if tls is None:
            raise AccessDeniedError("the client uses neither this protocol nor TLS")
        if self._context is None:
            if tls:
                raise AccessDeniedError(
                    "the client uses TLS, but this server has no certificate; connect without tls="
                )
            return sock
        if not tls:
            reason = "this server requires TLS: connect with tls="
            handshake.send(sock, handshake.refusal(reason), deadline, self._system)
            raise AccessDeniedError(reason)
        sock.settimeout(max(deadline - self._system.monotonic(), 0.001))
        wrap = self._context.wrap_socket  # it takes over the descriptor
        secured = wrap(sock, server_side=True, do_handshake_on_connect=False)
        self._strangers.replace(sock, secured)
        return secured

    def _decide(self, client: _Client, hello: handshake.Hello) -> dict[str, object]:
        """Give an authenticated client a number and a VM; return the description for the client.

        Raises `AccessDeniedError`.
        """
        if hello.wants == "status":
            with self._lock:
                if len(self._observers) >= _MOST_OBSERVERS:
                    raise AccessDeniedError(
                        f"the server has reached its limit of {_MOST_OBSERVERS} observers"
                    )
                self._strangers.leave(client.socket)
                self._observers.add(client.socket)
            return self._about
        if hello.wants == "interrupt":
            return self._interrupt(hello)
        if hello.wants == "resume":
            client.resumes = self._number_of(hello)
            self._strangers.leave(client.socket)
            return self._about
        if hello.wants not in ("vm", "lease"):
            raise AccessDeniedError(
                f"expected a request for a vm or the status, got {hello.wants[:50]!r}"
            )
        if hello.vm and hello.vm not in self._names:
            names = sorted(self._names) or "none"
            raise AccessDeniedError(f"unknown shared VM {hello.vm[:50]!r}; available are {names}")
        with self._lock:
            if self._draining:
                raise AccessDeniedError("the server is shutting down; connect again later")
            count = len(self._clients)
            if count >= self._limits.connections:
                raise AccessDeniedError(
                    f"the server has reached its limit of {count} clients; connect again later"
                )
            own = sum(each.user == hello.user for each in self._clients.values())
            if own >= self._limits.user_connections:
                raise AccessDeniedError(
                    f"this user has reached the limit of {own} clients; close one of them"
                )
            if reason := self._accounts.over(hello.user):
                raise AccessDeniedError(reason)
            client.user = hello.user
            client.number, client.name = next(self._numbers), hello.name
            client.key, client.leased = secrets.token_hex(16), hello.wants == "lease"
            self._clients[client.number] = client
            self._strangers.leave(client.socket)
            self._admitted += 1
        client.own = not hello.vm
        client.vm_name = hello.vm or f"vm{client.number}"
        if self._processes is not None:
            nice = niceness(own) if client.user else 0
            client.process = self._processes.process_for(hello.vm, client.vm_name, nice)
        else:
            client.vm = self.shared[hello.vm] if hello.vm else self.make_vm(client.vm_name)
        return {**self._about, "vm": client.vm_name, "shared": not client.own, "key": client.key}

    def _interrupt(self, hello: handshake.Hello) -> dict[str, object]:
        """Stop the launches of the client with the key `hello.vm`, up to message `hello.name`."""
        if not hello.name.isdecimal():
            raise AccessDeniedError(f"expected a message number, got {hello.name[:50]!r}")
        self.interrupt(self._number_of(hello), int(hello.name))
        return self._about

    def _number_of(self, hello: handshake.Hello) -> int:
        """Return the number of the user's client with key `hello.vm`.

        Raises `AccessDeniedError`.
        """
        whose = hello.user, hello.vm
        with self._lock:
            numbers = [n for n, each in self._clients.items() if (each.user, each.key) == whose]
        if not numbers:
            raise AccessDeniedError("the key does not belong to a connected client")
        return numbers[0]

    def interrupt(self, client: int, last: int) -> None:
        """Stop the launches of a client by number, up to the message `last`."""
        if (entry := self._clients.get(client)) is not None:
            entry.interrupt(last)

    def _serve(self, client: _Client) -> None:
        """Serve an admitted client according to the request."""
        try:
            if client.resumes:
                self.resume(client.resumes, client.socket)
                return
            if client.process is not None:
                self._hand_on(client, client.process)
                return
            if client.vm is None:
                self._tell_status(client.socket)
                return
            facts = {"client": client.number, "peer": client.peer, "vm": client.vm.name}
            self._log.event("connected", **facts, name=client.name)
            client.reason = self._lend(client, client.vm)
        except (MlvmError, OSError) as error:
            client.reason = _text(error)
        except Exception as error:
            client.reason = "an error of the server"
            self._log_error(error, client.peer)

    def _hand_on(self, client: _Client, process: Process) -> None:
        """Pass the client to the process, and wait until the process has served it."""
        facts = {"peer": client.peer, "name": client.name, "leased": client.leased}
        _pass_on(client.socket, lambda sock: process.begin(client.number, sock, facts))
        # All bytes of the process are relayed. If the process still runs, it waits for the client,
        # which must read the end of the connection. If the process has exited, the client receives
        # the reason.
        hears = threading.Timer(_LAST_WORDS, addresses.shut, (client.socket, socket.SHUT_WR))
        if isinstance(client.socket, ssl.SSLSocket):
            hears.start()
        client.launches, client.seconds, ended = process.wait(client.number)
        hears.cancel()
        if ended is not None:
            self._log.event("disconnected", client=client.number, reason=ended, left=0)
            client.socket.settimeout(self._limits.send_seconds)
            self._part_from(Stream(client.socket), ended)

    def resume(self, client: int, sock: socket.socket) -> None:
        """Replace the connection of a client, if the client is still connected."""
        entry = self._clients.get(client)
        if entry is None or not entry.go_on_with(sock):
            sock.close()
        elif entry.process is not None:
            process = entry.process
            _pass_on(sock, lambda passed: process.send("resume", passed, client=client))
            if isinstance(sock, ssl.SSLSocket):
                addresses.shut(sock, socket.SHUT_WR)

    def lend(
        self, sock: socket.socket, vm: BoundedVM, client: int, peer: str, name: str, leased: bool
    ) -> tuple[int, float]:
        """Serve a client that a different process has admitted.

        Return the number and the processor seconds of the client's launches.
        """
        lent = _Client(peer, sock, self._limits.lease_seconds, self._system)
        lent.number, lent.name, lent.leased = client, name, leased
        lent.vm, lent.own = vm, vm.name not in self.shared
        with self._lock:
            self._clients[client] = lent
        try:
            self._serve(lent)
        finally:
            self._free(lent)
            _part(lent.socket, self._system)
        return lent.launches, lent.seconds

    def _lend(self, client: _Client, vm: BoundedVM) -> str:
        """Execute the client's calls until the connection is closed; return the reason."""
        limits = self._limits
        vm.client.is_gone = client.is_gone
        session = client.session = _BoundedSession(vm, limits, self._watchdog, client)
        session.leased = client.leased
        again = False
        try:
            while True:
                stream = Stream(client.socket, limits.message_bytes, self._system)
                stream.set_timeouts(limits.idle_seconds, limits.send_seconds)
                try:
                    if again:
                        session.resume(stream)
                    session.serve(stream, lambda: self._draining)
                    return self._part_from(
                        stream, "the server is shutting down; connect again later"
                    )
                except ConnectionLostError:
                    again = session.leased and client.comes_again()
                    if not again:
                        raise
        except ConnectionLostError as error:
            return self._part_from(
                stream,
                "the server is shutting down; connect again later"
                if self._draining
                else str(error),
            )
        except (EncodingError, LimitExceededError) as error:  # the next message cannot be found
            with contextlib.suppress(MlvmError, OSError):
                stream.send([encode_error(error)])
            return _text(error)
        finally:
            client.end()
            vm.client.is_gone = lambda: False  # freeing must not be interrupted
            self._clear_up(vm, session)

    def _clear_up(self, vm: BoundedVM, session: Session) -> None:
        """Free a client's tensors, in a separate thread if a launch of another client runs."""
        if not vm._lock.acquire(blocking=False):
            self._system.start("mlvm clear up", session.close)
            return
        try:
            session.close()
        finally:
            vm._lock.release()

    def _part_from(self, stream: Stream, reason: str) -> str:
        """Send the reason for closing the connection to the client."""
        with contextlib.suppress(MlvmError, OSError):
            stream.send([encode_error(ConnectionLostError(reason))])
        return reason

    def _free(self, client: _Client) -> None:
        """Remove a client that has left, and close the private VM of the client."""
        if client.session is not None:
            client.launches, client.seconds = client.session.launches, client.session.seconds
        own = client.vm if client.own else None
        try:
            if own is not None:
                own.close()
        finally:
            with self._lock:
                del self._clients[client.number]
                self._launches += client.launches
                self._accounts.spend(client.user, client.number, client.launches, client.seconds)
                self._accounts.leave(client.number)
                if client.session is not None:
                    self._metrics.add(client.session.metrics.to_json())
        if client.process is not None:  # the process has already logged it
            if client.own:
                client.process.channel.end()
            return
        seconds = self._system.monotonic() - client.since
        nbytes = _nbytes(own) if own is not None else 0
        facts = {"client": client.number, "reason": client.reason, "seconds": seconds}
        self._log.event("disconnected", **facts, launches=client.launches, left=nbytes)

    def _log_error(self, error: Exception, peer: str) -> None:
        """Log an unexpected error."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = [f"{each.filename}:{each.lineno}" for each in place]
        self._log.event("error", peer=peer, error=repr(error), at=" ".join(where))

    # --- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return totals, and a dictionary per client and shared VM.

        `python -m mlvm top` shows them.
        """
        now = self._system.monotonic()
        remote_statuses = [] if self._processes is None else self._processes.statuses()
        remote = {each["client"]: each for status in remote_statuses for each in status["clients"]}
        with self._lock:
            living = self._clients.values()
            clients = [
                {**each.status(now), **remote.get(each.number, {}), "user": each.user}
                for each in living
            ]
            launches = self._launches
            metrics = Metrics()
            for each in (self._metrics, *[each.session.metrics for each in living if each.session]):
                metrics.add(each.to_json())
            strangers = len(self._strangers)
        vms = self.shared.items()
        shared = [{"vm": n, "bytes": _nbytes(vm), "launches": vm.launches} for n, vm in vms]
        shared += [each for status in remote_statuses for each in status["shared"]]
        if self._processes is not None:
            metrics.add(self._processes.metrics())
        own = [each for each in clients if each["vm"] not in self._names]
        return {
            "seconds": now - self._started,
            "admitted": self._admitted,
            "refused": self._strangers.refused,
            "strangers": strangers,
            "bytes": sum(each["bytes"] for each in [*own, *shared]),
            "launches": launches + sum(each["launches"] for each in clients),
            "clients": clients,
            "shared": shared,
            "metrics": metrics.to_json(),
        }

    def _watch_quotas(self) -> None:
        """Refuse calls of a client while the client's user exceeds a quota."""
        while not self._draining:
            status = self.status()
            nbytes: Counter[str] = Counter()
            with self._lock:
                for each in status["clients"]:
                    if each["client"] not in self._clients:  # the usage is already counted
                        continue
                    nbytes[each["user"]] += each["bytes"] * (each["vm"] not in self._names)
                    self._accounts.spend(
                        each["user"], each["client"], each["launches"], each["cpu_seconds"]
                    )
                self._accounts.set_bytes(nbytes)
                clients = list(self._clients.values())
                reasons = {each.user: self._accounts.over(each.user) for each in clients}
            for client in clients:
                client.refuse(reasons[client.user])
            self._system.sleep(_LOOK_AT_QUOTAS)

    def refuse(self, client: int, reason: str | None) -> None:
        """Refuse allocations and launches of a client for a reason, or allow them (None)."""
        if (entry := self._clients.get(client)) is not None:
            entry.refuse(reason)

    def admits(self) -> bool:
        """Return whether the server accepts clients."""
        return not self._draining and self._accepting.is_alive()

    def _tell_status(self, sock: socket.socket) -> None:
        """Answer each request with the status, or with the bytes of the request, if any."""
        while not self._draining:
            deadline = self._system.monotonic() + self._limits.handshake_seconds
            try:
                _, kind, message = handshake.receive(sock, deadline, system=self._system)
            except ConnectionLostError:
                return
            asks = handshake.Greeting.status
            if kind != asks.value:
                raise EncodingError(f"expected a status request ({asks.value}), got {kind}")
            body = message[HEADER.size :] or json.dumps(self.status()).encode()
            handshake.send(sock, handshake.pack(asks, body), deadline, self._system)


class _Client:
    """Connection; it has a number after admission, and a VM if requested.

    `leased`: the client may reconnect within the server's `lease_seconds`.
    `resumes`: number of the client that this connection continues.
    `key`: secret with which this client can interrupt launches.
    """

    def __init__(
        self, peer: str, sock: socket.socket, lease_seconds: float, system: System = SYSTEM
    ) -> None:
        self._system = system
        self.peer = peer
        self.socket = sock
        self.leased = False
        self.resumes = 0
        self._lease_seconds = lease_seconds
        self._change = system.condition()
        self._fresh: socket.socket | None = None
        self._lost: float | None = None  # time of `monotonic`
        self._refusal: str | None = None
        self._over = False
        self.number = 0
        self.name = ""
        self.key = ""
        self.vm: BoundedVM | None = None
        self.vm_name = ""
        self.process: Process | None = None
        self.user = ""
        self.launches = 0
        self.seconds = 0.0
        self.own = True
        self.session: _BoundedSession | None = None
        self.since = system.monotonic()
        self.reason = "it was not served"
        self._draining = False

    def drain(self) -> None:
        """Close the connection after all received messages are executed."""
        with self._change:
            self._draining = True
            self._change.notify_all()
        if self.process is None:
            addresses.shut(self.socket, socket.SHUT_RD)

    def refuse(self, reason: str | None) -> None:
        """Refuse allocations and launches for a reason, or allow them (None)."""
        if reason == self._refusal:
            return
        self._refusal = reason
        if self.process is not None:
            self.process.send("refuse", client=self.number, reason=reason)
        elif self.session is not None:
            self.session.refusal = reason

    def go_on_with(self, sock: socket.socket) -> bool:
        """Replace a lost connection, even if the server has not yet detected the loss.

        Return False if the client's lease is over.
        """
        with self._change:
            if self._over or not self.leased:
                return False
            addresses.shut(self.socket)
            if self.process is not None:
                self._take(sock)
            else:
                if self._fresh is not None:
                    self._fresh.close()
                self._fresh = sock
                self._change.notify_all()
            return True

    def _take(self, sock: socket.socket) -> None:
        self.socket.close()
        self.socket, self._fresh, self._lost = sock, None, None

    def comes_again(self) -> bool:
        """Wait for a new connection; return whether it was opened in time."""
        with self._change:
            if not self._draining:  # a client that is silent for too long is closed
                addresses.shut(self.socket)
            self._change.wait_for(lambda: self._fresh or self._draining, self._lease_seconds)
            self._over = self._fresh is None
            if self._fresh is not None:
                self._take(self._fresh)
            return not self._over

    def end(self) -> None:
        """End the lease: refuse further connections."""
        with self._change:
            self._over = True
            if self._fresh is not None:
                self._fresh.close()

    def interrupt(self, last: int) -> None:
        """Stop the launches of the messages up to number `last`."""
        if self.process is not None:
            self.process.send("interrupt", client=self.number, last=last)
        elif self.session is not None:
            self.session.last = max(self.session.last, last)

    def is_gone(self) -> bool | str:
        """Return whether the client has disconnected, or the reason for stopping the launch.

        A connection that the server drains looks disconnected, but is not counted.
        """
        if self.session is not None and self.session.is_interrupted():
            return _INTERRUPTED
        if self._draining or not self._system.has_hung_up(self.socket):
            return False
        if not self.leased or self._lost is None:
            self._lost = self._system.monotonic()
            return not self.leased
        return self._fresh is None and self._system.monotonic() - self._lost > self._lease_seconds

    def status(self, now: float) -> dict[str, Any]:
        vm, session = self.vm, self.session
        return {
            "client": self.number,
            "pid": os.getpid(),
            "peer": self.peer,
            "name": self.name,
            "user": self.user,
            "vm": vm.name if vm is not None else self.vm_name,
            "bytes": _nbytes(vm) if vm is not None else 0,
            "launches": session.launches if session is not None else 0,
            "messages": session.messages if session is not None else 0,
            "program_bytes": session.program_bytes if session is not None else 0,
            "cpu_seconds": session.seconds if session is not None else 0.0,
            "busy": session is not None and session.busy,
            "seconds": now - self.since,
        }


class _BoundedSession(Session):
    """Session with limits on the size of programs and on the time for verifying them."""

    def __init__(self, vm: BoundedVM, limits: Limits, watchdog: Watchdog, client: _Client) -> None:
        super().__init__(vm, own=client.own)
        self._bounded = vm
        self._limits = limits
        self._watchdog = watchdog
        self._client = client
        self.metrics = Metrics()
        self.refusal: str | None = None
        """Reason for refusing allocations and launches, or None."""
        self._clock: int = time.pthread_getcpuclockid(threading.get_ident())
        self.last = 0
        """Number of the message up to which launches are stopped."""
        self._arriving = Allowance(0)  # allowance of the program that is being decoded
        self._sizes: dict[int, int] = {}  # bytes of the loaded programs by number
        self.program_bytes = 0  # sum of `_sizes`

    def heed(self, error: Exception) -> None:
        """Count exceeded limits.

        Close the connection if the process itself has run out of memory, because the state may be
        inconsistent.
        """
        if isinstance(error, (LimitExceededError, OutOfMemoryError)):
            self.metrics.limits[type(error).__name__] += 1
        if isinstance(error, MemoryError) and not isinstance(error, MlvmError):
            self.leased = False
            most = f"{self._limits.process_bytes:,}"
            raise ConnectionLostError(
                f"its process has run out of memory; the limit is {most} bytes"
            )

    @property
    def seconds(self) -> float:
        """Processor seconds of the thread that created this session and serves the client."""
        return time.clock_gettime(self._clock)

    def is_interrupted(self) -> bool:
        """Return whether the client has interrupted the launch of the current message."""
        return self.messages <= self.last

    def handle(self, kind: Kind, reader: Received) -> Sequence[Buffer] | None:
        if (self.last or self.refusal) and kind is not Kind.call:
            refusal = self.refusal
            if kind is Kind.launch and self.is_interrupted():
                refusal = _INTERRUPTED
            if refusal is not None:
                self._posts += 1  # this message counts as well
                self._fail(LimitExceededError(refusal))
                self._posts -= 1
        begun = time.perf_counter()
        try:
            return super().handle(kind, reader)
        finally:
            self.metrics.observe(kind._name_, time.perf_counter() - begun)

    def run_cached(self, stream: Stream) -> int:
        if self.messages < self.last or self.refusal is not None:
            return 0
        count = super().run_cached(stream)
        self._bounded.launches += count
        return count

    def _perform_from(self, reader: Any, name: str) -> Any:
        if self.refusal is not None and name in _MAKING:
            raise LimitExceededError(self.refusal)
        reader.allowance = Allowance(_MOST_OBJECTS)
        if name not in ("load_program", "drop_program", "estimate"):
            return super()._perform_from(reader, name)
        size = reader.remaining if name == "load_program" else 0
        loaded, most = self.program_bytes, self._limits.program_bytes
        if loaded + size > most:
            usage = f"{loaded:,} are loaded, and the limit is {most:,}"
            raise LimitExceededError(f"cannot load {size:,} more bytes of programs: {usage}")
        if size:
            reader.allowance = self._arriving = Allowance(most - loaded - size)
        with self._watchdog.watch(self._limits.launch_seconds, self._client.is_gone):
            return super()._perform_from(reader, name)

    def _keep_from_reading(self, handle: int, error: Exception) -> None:
        self._bounded.spoil(handle, error)

    def perform(self, name: str, args: list[Any]) -> Any:
        result = super().perform(name, args)
        if name == "load_program":
            size = self._limits.program_bytes - self.program_bytes - self._arriving.remaining
            self.program_bytes += size - self._sizes.get(args[0], 0)
            self._sizes[args[0]] = size
        elif name == "drop_program":
            self.program_bytes -= self._sizes.pop(args[0], 0)
        return result


def _pass_on(sock: socket.socket, hand: Callable[[socket.socket], object]) -> None:
    """Pass a connection to a different process; under TLS, this process decrypts."""
    if not isinstance(sock, ssl.SSLSocket):
        hand(sock)
        return
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            hand(theirs)
        with contextlib.suppress(ValueError):  # a new connection has replaced this connection
            relay(sock, ours)


# --- sockets ----------------------------------------------------------------------------


def _part(sock: socket.socket, system: System) -> None:
    """Close a connection after the peer can read the last bytes.

    Closing with unread bytes would discard them.
    """
    with contextlib.suppress(OSError, ValueError):
        addresses.shut(sock, socket.SHUT_WR)
        deadline = system.monotonic() + 0.5
        sock.settimeout(0.1)
        while system.monotonic() < deadline and sock.recv(1 << 16):
            pass
    sock.close()


def _trim() -> None:
    """Return the memory of a disconnected client to the operating system.

    glibc keeps it in the arena of the thread that allocated it.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _nbytes(vm: LocalVM) -> int:
    return vm.memory_used()


def _text(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error) or type(error).__name__
