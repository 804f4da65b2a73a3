"""Addresses of servers: `HOST:PORT`, `[::1]:PORT`, `:PORT` for this host only, or `unix:PATH`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from mlvm.core.errors import AddressError
from mlvm.core.sizes import parse_count

_UNIX: Final = "unix:"
_FORMS: Final = "HOST:PORT, [IPV6]:PORT, :PORT (this host alone) or unix:PATH"
_BACKLOG: Final = 1024  # pending connections
_ALIVE: Final = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
"""Keep-alive options: a connection is lost if the peer is silent for half a minute."""


@dataclass(frozen=True)
class TcpAddress:
    """Host by name or number, and port; 0 is any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class UnixAddress:
    """Path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


Address: TypeAlias = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Parse an address. Raises `AddressError`."""
    if not isinstance(text, str):
        raise AddressError(f"an address: expected a str such as {_FORMS}, got {text!r}")
    if text.startswith(_UNIX):
        path = text[len(_UNIX) :]
        if not path or "\0" in path:
            raise AddressError(f"an address: expected unix:PATH, got {text!r}")
        most = 107  # of a struct sockaddr_un
        if len(os.fsencode(path)) > most:
            raise AddressError(
                f"{text!r}: expected a path of at most {most} bytes; use a shorter path"
            )
        return UnixAddress(path)
    host, _, digits = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    port = parse_count(digits)
    if port is None or len(digits) == len(text) or (":" in host and not bracketed):
        raise AddressError(f"an address: expected {_FORMS}, got {text!r}")
    if port > 65535:
        raise AddressError(f"{text!r}: expected a port of at most 65535; use a smaller port")
    host = host[1:-1] if bracketed else host
    if any(each.isspace() or each == "\0" for each in host):
        raise AddressError(f"an address: expected {_FORMS}, got {text!r}")
    return TcpAddress(host or "127.0.0.1", port)


# --- listen ---------------------------------------------------------------------------


def listen(address: Address, *, public: bool) -> socket.socket:
    """Open a listening socket; without `public`, the address must not be reachable by other hosts.

    Only the owner can use a unix socket, in a directory to which only the owner can write. The file
    of a stopped server is replaced. Raises `AddressError` and `OSError`.
    """
    if isinstance(address, UnixAddress):
        return _listen_unix(address)
    family, kind, protocol, _, place = _resolve(address)[0]
    _check_public(address, place, public)
    with _refusing(address), closing_on_error(socket.socket(family, kind, protocol)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
        return sock


@contextlib.contextmanager
def _refusing(address: Address) -> Iterator[None]:
    """Raise an `AddressError` in place of an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from None


@contextlib.contextmanager
def closing_on_error(sock: socket.socket) -> Iterator[socket.socket]:
    """Close the socket if the block raises."""
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _resolve(address: TcpAddress) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AddressError(f"cannot find host {address.host!r}: {why}; check the address") from None
    return infos  # type: ignore[return-value]


def adopt(sock: socket.socket, *, public: bool) -> Address:
    """Return the address of a listening socket that another program has opened.

    Without `public`, other hosts must not reach it. Raises `AddressError`.
    """
    place = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return UnixAddress(os.fsdecode(place))
    address = TcpAddress(*place[:2])
    _check_public(address, place, public)
    return address


def _check_public(address: TcpAddress, place: tuple[object, ...], public: bool) -> None:
    if not public and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise AddressError(
            f"{address} can be reached from other hosts, which could read and change messages: "
            "use TLS (--certificate, --key), or allow it on a trusted network (--insecure)"
        )


def _listen_unix(address: UnixAddress) -> socket.socket:
    with _refusing(address):
        home = Path(address.path).absolute().parent.stat()
    if home.st_uid != os.getuid() or home.st_mode & 0o022:
        must = "the directory must belong to you, and other users must not be able to write to it"
        raise AddressError(f"cannot listen on {address}: {must}")
    _remove_stale(address)
    with _refusing(address), closing_on_error(socket.socket(socket.AF_UNIX)) as sock:
        os.fchmod(sock.fileno(), 0o600)  # on Linux, the file has the mode of the socket
        sock.bind(address.path)
        os.chmod(address.path, 0o600)
        sock.listen(_BACKLOG)
        return sock


def _remove_stale(address: UnixAddress) -> None:
    """Remove the file of a stopped server. Raises `AddressError` for any other file."""
    try:
        if not stat.S_ISSOCK(os.lstat(address.path).st_mode):
            raise AddressError(
                f"cannot listen on {address}: a file of that name exists; remove it, or "
                "choose another path"
            )
    except FileNotFoundError:
        return
    with _refusing(address), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)
            return
    raise AddressError(
        f"cannot listen on {address}: a different server is listening there; stop it, or "
        "choose another path"
    )


def address_of(sock: socket.socket, requested: Address) -> Address:
    """Return the address of a listening socket: `requested`, with the actual port in place of 0."""
    if isinstance(requested, UnixAddress):
        return requested
    return TcpAddress(requested.host, sock.getsockname()[1])


# --- connect --------------------------------------------------------------------------


def connect(address: Address, timeout: float) -> socket.socket:
    """Connect to an address.

    Raises `ConnectionError`, `TimeoutError` or another `OSError`, and `AddressError` for an unknown
    host.
    """
    if isinstance(address, UnixAddress):
        with closing_on_error(socket.socket(socket.AF_UNIX)) as sock:
            sock.settimeout(timeout)
            sock.connect(address.path)
            return sock
    _resolve(address)
    return socket.create_connection((address.host, address.port), timeout)


def tune(sock: socket.socket) -> None:
    """Send small messages immediately, and detect a peer that vanished without closing."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        option = getattr(socket, name, None)  # not all systems have all options
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut down a connection, also below TLS; the thread that serves it reads the end."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(sock, ssl.SSLSocket):
            socket.socket.shutdown(sock, how)
        else:
            sock.shutdown(how)


def peer_of(sock: socket.socket) -> str:
    """Describe the peer for logs: host and port, or process and user."""
    if sock.family == socket.AF_UNIX:
        peer = credentials(sock)
        return f"{_UNIX}pid {peer[0]}, uid {peer[1]}" if peer else _UNIX
    try:
        place = sock.getpeername()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "unknown")
    return str(TcpAddress(place[0], place[1]))


def credentials(sock: socket.socket) -> tuple[int, int] | None:
    """Return process and user of the peer of a unix socket, or None if the system lacks this."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or sock.family != socket.AF_UNIX:
        return None
    data = sock.getsockopt(socket.SOL_SOCKET, option, 12)
    pid, uid = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in (0, 4))
    return pid, uid
