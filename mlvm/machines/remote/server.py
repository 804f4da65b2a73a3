"""Server that admits clients and provides a VM to each client while it is connected."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from mlvm.core import errors
from mlvm.core.errors import (
    AccessDeniedError,
    ConnectionLostError,
    EncodingError,
    MlvmError,
)
from mlvm.core.program.encoding import HEADER, VERSION
from mlvm.core.sizes import parse_count
from mlvm.machines.closing import Closing
from mlvm.machines.local import LocalVM
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote import handshake
from mlvm.machines.remote.admission import Admission
from mlvm.machines.remote.lender import (
    CLOSING,
    Client,
    LeasedConnection,
    Lender,
    part,
    text_of,
    trim,
)
from mlvm.machines.remote.limits import FIXED, Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.remote.tls import server_context
from mlvm.machines.remote.users import niceness, users_of
from mlvm.machines.versions import versions

_QUOTAS: Final = "user_bytes", "user_launches", "user_seconds"

_LOOK: Final = 0.1  # seconds between sweeps of refused connections

_NO_FILES: Final = {errno.EMFILE, errno.ENFILE}
_MODULES: Final = "difflib", "numpy.fft", "numpy.linalg", "numpy.random"
"""Modules that kernels and errors import on demand. A server imports them before it listens,
because an import fails when no file descriptor is left."""

_FILES: Final = "the server has too many open files: try again later"
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Server(Closing):
    """Server of VMs at an address, and a context manager that closes the server.

    It admits clients; `lender` gives them VMs and executes their calls.

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
        address: str | socket.socket,
        *,
        secret: str | bytes | None = None,
        certificate: str | None = None,
        key: str | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        shared: Sequence[str] = (),
        libraries: Sequence[str | os.PathLike[str]] = (),
        prepare: Callable[[LocalVM], object] | None = None,
        options: Mapping[str, Any] | None = None,
        about: Mapping[str, object] | None = None,
        log: Log | None = None,
        processes: int = 0,
        system: System = SYSTEM,
    ) -> None:
        public = insecure or certificate is not None
        if isinstance(address, socket.socket):
            requested = addresses.adopt(address, public=public)
        else:
            requested = addresses.parse_address(address)
        self._users = _users_at(requested, secret)
        if key is not None and certificate is None:
            raise errors.AddressError(f"key={key!r} needs certificate= as well")
        self._files = certificate, key
        self._context = server_context(certificate, key) if certificate is not None else None
        lender = self.lender = Lender(
            limits=limits,
            shared=shared,
            libraries=libraries,
            prepare=prepare,
            options=options,
            log=log,
            has_processes=processes > 0,
            system=system,
        )
        self._numbers = itertools.count(1)
        self._strangers = Admission(lender.log, plain=self._context is None, system=system)
        self._observers: set[socket.socket] = set()
        self._started = system.monotonic()
        self._admitted = 0
        sample = lender.make_vm("sample")  # raises for invalid options
        sample.launch_cache()
        for name in _MODULES:
            importlib.import_module(name)
        of_vm = {"native": sample.native, "threads": sample.threads}
        facts = {"format": VERSION, "pid": os.getpid(), "versions": versions()}
        self._about = {**facts, **of_vm, **(about or {})}
        sample.close()
        if processes:
            lender.start_processes(processes)
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
            lender.log.event("listening", address=self.address, tls=tls, **self._about)
        except BaseException:
            os.close(self._spare)
            if lender.processes is not None:
                lender.processes.close()
            raise
        if any(getattr(lender.limits, name) < getattr(Limits(), name) for name in _QUOTAS):
            system.start("mlvm quotas", lender.watch_quotas)
        self._accepting = system.start("mlvm accept", self._accept)

    def reload(self, secret: str | bytes | None) -> None:
        """Replace the secret, and read the certificate files again, for new connections.

        Raises `AccessDeniedError` and `AddressError`; the server is then unchanged.
        """
        users = _users_at(self.address, secret)
        certificate, key = self._files
        context = server_context(certificate, key) if certificate is not None else None
        self._users, self._context = users, context
        self.lender.log.event("reloaded", tls=context is not None)

    # --- shutdown -------------------------------------------------------------------------

    def close(self, grace: float = 0.0) -> None:
        """Stop the server: refuse new clients, and close all connections. Idempotent.

        It first waits `grace` seconds for running launches.
        """
        lender = self.lender
        with lender.lock:
            first, lender.draining = not lender.draining, True
            count = len(lender.clients)
        if first:
            lender.log.event("draining", clients=count, grace=grace)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wake the thread that accepts
            self._socket.close()
            self._remove_file()
        lender.drain()
        self._wait(grace)
        lender.stop(CLOSING)
        self._wait(0.5)  # wait for the answers to clients
        with lender.lock:
            admitted = [each.connection.socket for each in lender.clients.values()]
            open_sockets = [*self._strangers.sockets(), *self._observers, *admitted]
        for sock in open_sockets:
            addresses.shut(sock)
        self._wait(1.0)
        if first:
            lender.close()

    def _wait(self, seconds: float) -> None:
        """Wait until all clients have disconnected, at most `seconds`."""
        lender = self.lender
        deadline = lender.system.monotonic() + seconds
        while lender.system.monotonic() < deadline:
            with lender.lock:
                if not (lender.clients or self._strangers or self._observers):
                    return
            lender.system.sleep(0.01)

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
        lender = self.lender
        while not lender.draining:
            waits = _LOOK if self._strangers.sweep() else None
            try:
                self._socket.settimeout(waits)
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if lender.draining:
                    return
                lender.log.event("error", what="accept", error=error.strerror)
                if error.errno in _NO_FILES:
                    self._refuse_for_files()
                lender.system.sleep(0.1 if error.errno in _FULL else 0.01)
                continue
            with lender.lock:
                if lender.draining:
                    sock.close()
                    return
            if not self._strangers.enter(sock):
                continue
            try:
                lender.system.start("mlvm client", self._meet, sock)
            except RuntimeError as error:  # the system cannot create a thread
                lender.log.event("error", what="thread", error=error)
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
                part(sock, self.lender.system)
                self._strangers.note(peer, _FILES)
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _meet(self, sock: socket.socket) -> None:
        """Serve one connection from the first byte until it is closed."""
        lender, system = self.lender, self.lender.system
        peer, client, begun = "unknown", None, system.monotonic()
        try:
            peer = addresses.peer_of(sock)
            addresses.tune(sock)
            deadline = system.monotonic() + lender.limits.handshake_seconds
            sock = self._secure(sock, deadline)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection = LeasedConnection(sock, lender.limits.lease_seconds, system)
            client = Client(peer, connection, system.monotonic())
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
            self._strangers.note(peer, text_of(error))
        except Exception as error:
            lender.log_error(error, peer)
        else:
            lender.observe_handshake(system.monotonic() - begun)
            lender.serve(client, self._tell_status)
        finally:
            if client is not None and client.number:
                lender.free(client)
            self._strangers.leave(sock)
            with lender.lock:
                self._observers.discard(sock)
            # otherwise the number belongs to a different client
            if client is None or not client.resumes:
                part(sock if client is None else client.connection.socket, system)
            if client is not None and client.own and client.vm is not None:
                client.session = client.vm = None
                trim()

    def _secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        """Wrap the connection in TLS if the server has a certificate.

        Raises `AccessDeniedError` if only one side uses TLS.
        """
        tls = handshake.speaks_tls(sock, deadline, self.lender.system)
        self._strangers.note_first_bytes(sock)
        if tls is None:
            raise AccessDeniedError(
                "the client uses neither this protocol nor TLS; connect with ml.connect"
            )
        if self._context is None:
            if tls:
                raise AccessDeniedError(
                    "the client uses TLS, but this server has no certificate; connect without tls="
                )
            return sock
        if not tls:
            reason = "this server requires TLS: connect with tls="
            handshake.send(sock, handshake.refusal(reason), deadline, self.lender.system)
            raise AccessDeniedError(reason)
        sock.settimeout(max(deadline - self.lender.system.monotonic(), 0.001))
        wrap = self._context.wrap_socket  # it takes over the descriptor
        secured = wrap(sock, server_side=True, do_handshake_on_connect=False)
        self._strangers.replace(sock, secured)
        return secured

    def _decide(self, client: Client, hello: handshake.Hello) -> dict[str, object]:
        """Give an authenticated client a number and a VM; return the description for the client.

        Raises `AccessDeniedError`.
        """
        lender = self.lender
        if hello.wants == "status":
            with lender.lock:
                if len(self._observers) >= FIXED.observers:
                    raise AccessDeniedError(
                        f"the server has reached its limit of {FIXED.observers} observers; close "
                        "one of them"
                    )
                self._strangers.leave(client.connection.socket)
                self._observers.add(client.connection.socket)
            return self._about
        if hello.wants == "interrupt":
            return self._interrupt(hello)
        if hello.wants == "resume":
            client.resumes = self._number_of(hello)
            self._strangers.leave(client.connection.socket)
            return self._about
        if hello.wants not in ("vm", "lease"):
            raise AccessDeniedError(
                f"expected a request for a vm or the status, got {hello.wants[:50]!r}"
            )
        if hello.vm and hello.vm not in lender.names:
            names = sorted(lender.names) or "none"
            raise AccessDeniedError(f"unknown shared VM {hello.vm[:50]!r}; available are {names}")
        with lender.lock:
            if lender.draining:
                raise AccessDeniedError(CLOSING)
            count = len(lender.clients)
            if count >= lender.limits.connections:
                raise AccessDeniedError(
                    f"the server has reached its limit of {count} clients; connect again later"
                )
            own = sum(each.user == hello.user for each in lender.clients.values())
            if own >= lender.limits.user_connections:
                raise AccessDeniedError(
                    f"this user has reached the limit of {own} clients; close one of them"
                )
            if reason := lender.accounts.over(hello.user):
                raise AccessDeniedError(reason)
            client.user = hello.user
            client.number, client.name = next(self._numbers), hello.name
            client.key = secrets.token_hex(16)
            client.connection.leased = hello.wants == "lease"
            lender.clients[client.number] = client
            self._strangers.leave(client.connection.socket)
            self._admitted += 1
        lender.provide(client, hello.vm, niceness(own) if client.user else 0)
        return {**self._about, "vm": client.vm_name, "shared": not client.own, "key": client.key}

    def _interrupt(self, hello: handshake.Hello) -> dict[str, object]:
        """Stop the launches of the client with the key `hello.vm`, up to message `hello.name`."""
        if (last := parse_count(hello.name)) is None:
            raise AccessDeniedError(f"expected a message number, got {hello.name[:50]!r}")
        self.lender.interrupt(self._number_of(hello), last)
        return self._about

    def _number_of(self, hello: handshake.Hello) -> int:
        """Return the number of the user's client with key `hello.vm`.

        Raises `AccessDeniedError`.
        """
        whose = hello.user, hello.vm
        with self.lender.lock:
            clients = self.lender.clients.items()
            numbers = [n for n, each in clients if (each.user, each.key) == whose]
        if not numbers:
            raise AccessDeniedError(
                "the key does not belong to a connected client; connect without it"
            )
        return numbers[0]

    # --- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return totals, and a dictionary per client and shared VM.

        `python -m mlvm top` shows them.
        """
        return {
            "seconds": self.lender.system.monotonic() - self._started,
            "admitted": self._admitted,
            "refused": self._strangers.refused,
            "strangers": len(self._strangers),
            **self.lender.status(),
        }

    def admits(self) -> bool:
        """Return whether the server accepts clients."""
        return not self.lender.draining and self._accepting.is_alive()

    def _tell_status(self, sock: socket.socket) -> None:
        """Answer each request with the status, or with the bytes of the request, if any."""
        while not self.lender.draining:
            deadline = self.lender.system.monotonic() + self.lender.limits.handshake_seconds
            try:
                _, kind, message = handshake.receive(sock, deadline, system=self.lender.system)
            except ConnectionLostError:
                return
            asks = handshake.Greeting.status
            if kind != asks.value:
                raise EncodingError(f"expected a status request ({asks.value}), got {kind}")
            body = message[HEADER.size :] or json.dumps(self.status()).encode()
            handshake.send(sock, handshake.pack(asks, body), deadline, self.lender.system)


def _users_at(address: addresses.Address, secret: str | bytes | None) -> dict[str, bytes] | None:
    """Return the secrets of users by name, or None. Raises `AccessDeniedError`."""
    if secret is None and isinstance(address, addresses.TcpAddress):
        raise AccessDeniedError(f"a server at {address} needs a secret; pass secret=")
    return None if secret is None else users_of(handshake.check_secret(secret))
