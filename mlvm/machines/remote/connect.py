"""The client's way to a server: `connect` for a VM, `Observer` for what `ping` and `top` show."""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final, Self

from mlvm.core.errors import AccessRefused, ConnectionLost, MachineError
from mlvm.core.program.encoding import HEADER, VERSION
from mlvm.core.rules import is_real
from mlvm.machines.remote import address as addresses
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.handshake import (
    BUSY,
    MOST_NAME,
    Greeting,
    Hello,
    greet,
    pack,
    receive,
    send,
)
from mlvm.machines.remote.lease import LeasedStream
from mlvm.machines.remote.secret import find_secret
from mlvm.machines.remote.stream import Stream
from mlvm.machines.remote.tls import client_context
from mlvm.machines.remote.users import own_secret

_MOST_STATUS: Final = 1 << 22
_PATIENCE: Final = 2.0  # seconds in which a server hears that a launch is to end
_MOST_CUTS: Final = 10
_PAUSE: Final = 0.05  # seconds, at most, till a server that is busy is asked again

Tls = bool | str | os.PathLike[str] | ssl.SSLContext
"""Whether a connection is encrypted, and what is trusted then: see `connect`."""


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
) -> RemoteVM:
    """A VM of the server at `address`, which `python -m mlvm serve` has started; a VM like any
    other: `with ml.connect(address) as vm, ml.use(vm):`, or `ml.Arena(vm, ...)`.

    `address` is HOST:PORT, [IPV6]:PORT, :PORT (this host) or unix:PATH. The server's secret is
    given as `secret`, in the private file `secret_file`, or in the one that the environment's
    MLVM_SECRET_FILE names; a unix socket of one's own needs none. It is never sent, and the server
    has to prove that it knows it, too. `tls` is True for a certificate that the system trusts, the
    PEM file of the certificates to trust, or an `ssl.SSLContext`. Without TLS others on the way can
    read and change what passes.

    The VM is the client's own, and ends with the connection; `vm` names one that the server shares.
    `name` is what errors and the server's log call it. `timeout` is for connecting, in seconds.
    A call that waits longer than `call_timeout` ends its launch and raises `CallTimeout`; so does
    Ctrl-C, as `KeyboardInterrupt`. The VM can be used on. A connection that is lost is tried again
    for `retry` seconds, if given: the VM lives on, and each call is made once.

    Raises `AddressError`, `AccessRefused` with the reason, or `ConnectionLost` if no server is
    there, or it is there no more, which each later call may raise, too.

        >>> from mlvm.machines.remote.server import Server
        >>> with Server("127.0.0.1:0", secret="between you and me") as server:
        ...     with ml.connect(str(server.address), secret="between you and me") as vm, ml.use(vm):
        ...         print(type(vm).__name__, ml.ones(2) + 1.0)
        RemoteVM Tensor([2., 2.], f32[2])

    Refuses:
        ml.connect(":1", secret="short")  # AccessRefused
        ml.connect("nowhere")  # AddressError
        ml.connect("unix:nowhere")  # ConnectionLost
    """
    for seconds in (call_timeout, retry):
        if seconds is not None and (not is_real(seconds) or not seconds > 0):
            raise MachineError(f"a timeout is a number of seconds above 0, not {seconds!r}")
    way = _Way(address, secret, secret_file, tls)
    connection, about = way.open(Hello("lease" if retry else "vm", vm or "", name or ""), timeout)
    key = str(about.get("key", ""))

    def interrupt(last: int) -> None:
        way.open(Hello("interrupt", key, str(last)), min(timeout, _PATIENCE))[0].close()

    def reconnect(left: float) -> socket.socket:
        sock = way.open(Hello("resume", key), min(timeout, left))[0]
        sock.settimeout(None)
        return sock

    with addresses.kept(connection) as sock:
        sock.settimeout(None)
        where = f"{name or about.get('vm', 'vm')} at {address}"
        shared = bool(about.get("shared"))
        stream = LeasedStream(sock, reconnect, retry) if retry else Stream(sock)
        far = RemoteVM(stream, name or where, where=where, shared=shared, interrupt=interrupt)
        far.call_timeout = call_timeout
        return far


@dataclass(frozen=True)
class _Way:
    """How to get to a server, any number of times."""

    address: str
    secret: str | bytes | None
    secret_file: str | os.PathLike[str] | None
    tls: Tls

    def open(self, hello: Hello, timeout: float) -> tuple[socket.socket, dict[str, Any]]:
        """A connection that both sides have accepted, and what the server says of itself."""
        if not is_real(timeout) or not timeout > 0:
            raise MachineError(f"a timeout is a number of seconds above 0, not {timeout!r}")
        for text in (hello.vm, hello.name):
            if not isinstance(text, str) or len(text) > MOST_NAME:
                most = f"at most {MOST_NAME} characters"
                raise MachineError(f"a name is a str of {most}, not {text!r}")
        place = addresses.parse_address(self.address)
        found = find_secret(self.secret, self.secret_file)
        shared = None if found is None else own_secret(found)
        deadline = time.monotonic() + timeout
        cuts = 0
        while True:
            try:
                return _try(place, shared, self.tls, hello, deadline)
            except (AccessRefused, _Cut) as error:
                cuts += isinstance(error, _Cut)
                is_busy = 0 < cuts < _MOST_CUTS or str(error) == BUSY
                if not is_busy or time.monotonic() > deadline - _PAUSE:
                    raise
            time.sleep(random.uniform(0, _PAUSE))  # not all at once


class _Cut(ConnectionLost):
    """The server has ended the connection before it said anything: under TLS it can say nothing."""


def _try(
    place: addresses.Address, shared: bytes | None, tls: Tls, hello: Hello, deadline: float
) -> tuple[socket.socket, dict[str, Any]]:
    try:
        sock = addresses.connect(place, max(deadline - time.monotonic(), 0.001))
    except OSError as error:
        why = "nothing answers in time" if isinstance(error, TimeoutError) else error.strerror
        raise ConnectionLost(f"no server at {place}: {why or error}") from None
    try:
        addresses.tune(sock)
        if tls is not False and tls is not None:
            host = place.host if isinstance(place, addresses.TcpAddress) else "localhost"
            sock = _secure(sock, host, tls, deadline)
        return sock, greet(sock, shared, hello, deadline)
    except BaseException:
        sock.close()
        raise


def _secure(sock: socket.socket, host: str, tls: Tls, deadline: float) -> socket.socket:
    context = client_context(tls)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise AccessRefused(f"the server's certificate: {error.verify_message}") from None
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError) as error:
        raise _Cut(f"no TLS with this server: {error.strerror or error}") from None
    except ssl.SSLError as error:
        raise AccessRefused(f"no TLS with this server: {error.reason or error}") from None
    except OSError as error:
        raise ConnectionLost(f"no TLS with this server: {error.strerror or error}") from None


class Observer:
    """A connection without a VM, for what the server says of itself: `about`, its versions and
    machine. Takes what `connect` takes, and raises it."""

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
        way = _Way(address, secret, secret_file, tls)
        self._socket, about = way.open(Hello("status"), timeout)
        self.about = {"format": VERSION, **about}

    def ping(self) -> float:
        """The seconds that a message takes to the server and back. Raises `ConnectionLost`."""
        start = time.perf_counter()
        self._ask(b"ping")
        return time.perf_counter() - start

    def status(self) -> dict[str, Any]:
        """As `Server.status`. Raises `ConnectionLost`."""
        status: dict[str, Any] = json.loads(self._ask(b""))
        return status

    def _ask(self, body: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout
        send(self._socket, pack(Greeting.status, body), deadline)
        _, _, message = receive(self._socket, deadline, _MOST_STATUS)
        return message[HEADER.size :]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
