"""Connections to a server: `connect` for a VM, `Observer` for the status."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final

from mlvm.core.errors import AccessDeniedError, ArgumentError, ConnectionLostError, MachineError
from mlvm.core.program.encoding import HEADER, VERSION
from mlvm.core.rules import is_real
from mlvm.core.sizes import parse_size
from mlvm.machines.closing import Closing
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.handshake import (
    BUSY,
    Greeting,
    Hello,
    greet,
    pack,
    receive,
    send,
)
from mlvm.machines.remote.lease import LeasedStream
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.secret import find_secret
from mlvm.machines.remote.stream import Stream
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.remote.tls import client_context
from mlvm.machines.remote.users import own_secret
from mlvm.machines.versions import difference

_PATIENCE: Final = 2.0  # seconds for a request to stop a launch
_NO_TLS: Final = (
    "cannot use TLS with this server; omit tls=, or start it with --certificate and --key"
)
_CLOSED: Final = ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError
"""Errors of a handshake if the server closes the connection, with or without an alert."""
_PAUSE: Final = 0.05  # maximum seconds between attempts at a busy server

Tls = bool | str | os.PathLike[str] | ssl.SSLContext
"""TLS argument of `connect`."""


def connect(
    address: str,
    *,
    secret: str | bytes | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: Tls = False,
    vm: str | None = None,
    name: str | None = None,
    timeout: float = 10.0,
    call_timeout: float | None = None,
    retry: float | None = None,
    mixed: bool = False,
    memory: int | str | None = None,
    system: System = SYSTEM,
) -> RemoteVM:
    """Connect to a server that `python -m mlvm serve` has started, and return a VM on it.

    Use it like any other VM: `with ml.connect(address) as vm, ml.use(vm):`, or `ml.Arena(vm, ...)`.

    `address` is HOST:PORT, [IPV6]:PORT, :PORT (this host) or unix:PATH. The server's secret is
    `secret`, in the private file `secret_file`, or in the file that the environment variable
    MLVM_SECRET_FILE names; a unix socket of the same user does not need a secret. The secret is
    never sent, and the server also proves that it knows the secret. `tls` is True to trust the
    system's certificates, the PEM file of the certificates to trust, or an `ssl.SSLContext`.
    Without TLS, others on the network can read and change the data.

    The VM belongs to this client, and is closed with the connection; `vm` names a shared VM of the
    server. `name` is the VM's name in errors and in the server's log. `timeout` is for connecting,
    in seconds. A call that waits longer than `call_timeout` seconds aborts its launch and raises
    `CallTimeoutError`. Ctrl-C also aborts it, and raises `KeyboardInterrupt`. The VM stays usable.
    With `retry`, a lost connection is replaced within this number of seconds: the VM survives, and
    each call is executed once. The server must have the same versions of mlvm, the kernels and
    numpy, because different versions may compute different bits; `mixed=True` allows any versions.
    `memory`, a size such as `"1 GiB"`, limits all storages of the client's VM together, as
    `ml.VM(memory=)` does: weights, arenas, scratch memory and results. The server's `--held-bytes`
    also limits them. An allocation beyond the smaller limit raises `OutOfMemoryError`.

    Raises `AddressError`, `AccessDeniedError` with the reason, or `ConnectionLostError` if no
    server answers; `ArgumentError` for a `memory` that is not a size, or with the name of a shared
    `vm`. Later calls raise `ConnectionLostError` if the server is lost.

        >>> from mlvm.machines.remote.server import Server
        >>> with Server("127.0.0.1:0", secret="between you and me") as server:
        ...     with ml.connect(str(server.address), secret="between you and me") as vm, ml.use(vm):
        ...         print(type(vm).__name__, ml.ones(2) + 1.0)
        RemoteVM Tensor([2., 2.], f32[2])

    Invalid calls:
        ml.connect(":1", secret="short")  # AccessDeniedError
        ml.connect("nowhere")  # AddressError
        ml.connect("unix:nowhere")  # ConnectionLostError
        ml.connect("nowhere", memory="all")  # ArgumentError
    """
    limit = None if memory is None else parse_size(memory, "ml.connect(memory=)")
    if limit is not None and vm:
        raise ArgumentError(
            f"ml.connect: expected memory= without vm=, got vm={vm!r}: other clients use it; "
            f"--held-bytes of the server limits it"
        )
    for what, seconds in {"call_timeout": call_timeout, "retry": retry}.items():
        if seconds is not None:
            _require_seconds(what, seconds)
    endpoint = _Endpoint(address, secret, secret_file, tls, system)
    hello = Hello("lease" if retry else "vm", vm or "", name or "")
    connection, about = endpoint.open(hello, timeout)
    key = str(about.get("key", ""))

    def interrupt(last: int) -> None:
        endpoint.open(Hello("interrupt", key, str(last)), min(timeout, _PATIENCE))[0].close()

    def reconnect(remaining: float) -> socket.socket:
        sock = endpoint.open(Hello("resume", key), min(timeout, remaining))[0]
        sock.settimeout(None)
        return sock

    with addresses.closing_on_error(connection) as sock:
        other = None if mixed else difference(about.get("versions"), "the server", "this client")
        if other is not None:
            raise AccessDeniedError(other)
        sock.settimeout(None)
        where = f"{name or about.get('vm', 'vm')} at {address}"
        shared = bool(about.get("shared"))
        stream = LeasedStream(sock, reconnect, retry) if retry else Stream(sock, system=system)
        far = RemoteVM(stream, name or where, where=where, shared=shared, interrupt=interrupt)
        if limit is not None:
            far.limit_memory(limit)
        far.call_timeout = call_timeout
        return far


@dataclass(frozen=True)
class _Endpoint:
    """Address of a server and credentials of a client, for any number of connections."""

    address: str
    secret: str | bytes | None
    secret_file: str | os.PathLike[str] | None
    tls: Tls
    system: System = SYSTEM

    def open(self, hello: Hello, timeout: float) -> tuple[socket.socket, dict[str, Any]]:
        """Open an authenticated connection; return it and the server's description."""
        _require_seconds("timeout", timeout)
        for text in (hello.vm, hello.name):
            if not isinstance(text, str) or len(text) > FIXED.name:
                most = f"at most {FIXED.name} characters"
                raise MachineError(f"ml.connect: expected a name of {most}, got {text!r}")
        place = addresses.parse_address(self.address)
        secret = find_secret(self.secret, self.secret_file)
        shared = None if secret is None else own_secret(secret)
        deadline = self.system.monotonic() + timeout
        cuts = 0
        while True:
            try:
                return _try(place, shared, self.tls, hello, deadline, self.system)
            except (AccessDeniedError, _Cut) as error:
                is_cut = isinstance(error, _Cut)
                cuts += is_cut
                is_busy = cuts < 10 if is_cut else str(error) == BUSY
                if not is_busy or self.system.monotonic() > deadline - _PAUSE:
                    kind = ConnectionLostError if is_cut else type(error)
                    raise kind(str(error)) from None
            # random: clients do not retry at the same moment
            self.system.sleep(self.system.uniform(0, _PAUSE))


def _require_seconds(name: str, seconds: float) -> None:
    if not is_real(seconds) or not seconds > 0:
        raise MachineError(f"ml.connect: expected {name}= in seconds > 0, got {seconds!r}")


class _Cut(ConnectionLostError):
    """The server has closed the connection without a reason, which it cannot send under TLS."""


def _try(
    place: addresses.Address,
    shared: bytes | None,
    tls: Tls,
    hello: Hello,
    deadline: float,
    system: System,
) -> tuple[socket.socket, dict[str, Any]]:
    try:
        sock = system.connect(place, max(deadline - system.monotonic(), 0.001))
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror
        raise ConnectionLostError(
            f"no server at {place}: {why or error}; check the address, or start the server"
        ) from None
    try:
        addresses.tune(sock)
        if tls is not False and tls is not None:
            host = place.host if isinstance(place, addresses.TcpAddress) else "localhost"
            sock = _secure(sock, host, tls, deadline)
        return sock, greet(sock, shared, hello, deadline, system)
    except BaseException:
        sock.close()
        raise


def _secure(sock: socket.socket, host: str, tls: Tls, deadline: float) -> socket.socket:
    context = client_context(tls)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise AccessDeniedError(
            f"the server's certificate: {error.verify_message}; pass its certificate "
            "authority as tls="
        ) from None
    except _CLOSED as error:
        raise _Cut(f"{_NO_TLS}: {error.strerror or error}") from None
    except ssl.SSLError as error:
        raise AccessDeniedError(f"{_NO_TLS}: {error.reason or error}") from None
    except OSError as error:
        raise ConnectionLostError(
            f"cannot use TLS with this server: {error.strerror or error}; "
            "omit tls=, if the server does not use it"
        ) from None


class Observer(Closing):
    """Connection without a VM, for the status of a server; arguments and errors as in `connect`.

    about: versions and machine of the server, by name
    """

    def __init__(
        self,
        address: str,
        *,
        secret: str | bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        tls: Tls = False,
        timeout: float = 10.0,
    ) -> None:
        self._timeout = timeout
        endpoint = _Endpoint(address, secret, secret_file, tls)
        self._socket, about = endpoint.open(Hello("status"), timeout)
        self.about = {"format": VERSION, **about}

    def ping(self) -> float:
        """Measure the round-trip time in seconds. Raises `ConnectionLostError`."""
        start = time.perf_counter()
        self._ask(b"ping")
        return time.perf_counter() - start

    def status(self) -> dict[str, Any]:
        """Return `Server.status()` of the server. Raises `ConnectionLostError`."""
        status: dict[str, Any] = json.loads(self._ask(b""))
        return status

    def _ask(self, body: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout
        send(self._socket, pack(Greeting.status, body), deadline)
        _, _, message = receive(self._socket, deadline, 4 << 20)
        return message[HEADER.size :]

    def close(self) -> None:
        self._socket.close()
