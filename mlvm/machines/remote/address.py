"""Where a server listens: `HOST:PORT`, `[::1]:PORT`, `:PORT` of this host alone, or `unix:PATH`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from mlvm.core.errors import AddressError

_UNIX: Final = "unix:"
_FORMS: Final = "HOST:PORT, [IPV6]:PORT, :PORT (this host alone) or unix:PATH"
_BACKLOG: Final = 1024  # connections that wait to be accepted
_LONGEST_PATH: Final = 107  # of a unix socket, by the system's struct
_ALIVE: Final = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
"""A peer of which nothing is heard for half a minute is gone."""


@dataclass(frozen=True)
class TcpAddress:
    """A host by name or number, and a port; 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class UnixAddress:
    """The file of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


Address: TypeAlias = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """The address that a text spells. Raises `AddressError`."""
    if not isinstance(text, str):
        raise AddressError(f"an address is a text such as {_FORMS}, not {text!r}")
    if text.startswith(_UNIX):
        path = text[len(_UNIX) :]
        if not path or "\0" in path:
            raise AddressError(f"{text!r} names no file; write unix:PATH")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise AddressError(f"{text!r}: the path has more than {_LONGEST_PATH} bytes")
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise AddressError(f"{text!r} is no address; write {_FORMS}")
    if int(port) > 65535:
        raise AddressError(f"{text!r}: a port is at most 65535")
    host = host[1:-1] if bracketed else host
    if any(each.isspace() or each == "\0" for each in host):
        raise AddressError(f"{text!r} is no address; write {_FORMS}")
    return TcpAddress(host or "127.0.0.1", int(port))


# --- listen ---------------------------------------------------------------------------


def listen(address: Address, *, public: bool) -> socket.socket:
    """A socket that listens there. Without `public`, only where other hosts cannot come from.

    The file of a unix socket is for its owner alone, in a directory that only the owner can write
    to; a file that nobody listens on any more is replaced. Raises `AddressError` and `OSError`.
    """
    if isinstance(address, UnixAddress):
        return _listen_unix(address)
    family, kind, protocol, _, place = _resolve(address)[0]
    if not public and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise AddressError(
            f"{address} can be reached from other hosts, who could read and change what passes: "
            "use TLS (--certificate, --key), or say that the network is trusted (--insecure)"
        )
    with _listening(address), kept(socket.socket(family, kind, protocol)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
        return sock


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[None]:
    """What the system refuses in the block is an `AddressError`."""
    try:
        yield
    except OSError as error:
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from None


@contextlib.contextmanager
def kept(sock: socket.socket) -> Iterator[socket.socket]:
    """The socket, which an error in the block closes."""
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _resolve(address: TcpAddress) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AddressError(f"no host {address.host!r}: {why}") from None
    return found  # type: ignore[return-value]


def _listen_unix(address: UnixAddress) -> socket.socket:
    with _listening(address):
        home = Path(address.path).absolute().parent.stat()
    if home.st_uid != os.getuid() or home.st_mode & 0o022:
        must = "its directory must be yours, and others must not be able to write to it"
        raise AddressError(f"cannot listen on {address}: {must}")
    _remove_stale(address)
    with _listening(address), kept(socket.socket(socket.AF_UNIX)) as sock:
        os.fchmod(sock.fileno(), 0o600)  # Linux gives the file the socket's own mode
        sock.bind(address.path)
        os.chmod(address.path, 0o600)
        sock.listen(_BACKLOG)
        return sock


def _remove_stale(address: UnixAddress) -> None:
    """Remove the file of a server that has gone. Raises `AddressError` for any other file."""
    try:
        if not stat.S_ISSOCK(os.lstat(address.path).st_mode):
            raise AddressError(f"cannot listen on {address}: a file of that name is there")
    except FileNotFoundError:
        return
    with _listening(address), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)
            return
    raise AddressError(f"cannot listen on {address}: another server does")


def address_of(sock: socket.socket, asked: Address) -> Address:
    """Where a socket listens: as `asked`, but for the port if any was to do."""
    if isinstance(asked, UnixAddress):
        return asked
    return TcpAddress(asked.host, sock.getsockname()[1])


# --- connect --------------------------------------------------------------------------


def connect(address: Address, timeout: float) -> socket.socket:
    """A socket that is connected. Raises `ConnectionError`, `TimeoutError` or another `OSError`,
    and `AddressError` for a host that is none."""
    if isinstance(address, UnixAddress):
        with kept(socket.socket(socket.AF_UNIX)) as sock:
            sock.settimeout(timeout)
            sock.connect(address.path)
            return sock
    _resolve(address)
    return socket.create_connection((address.host, address.port), timeout)


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer that is gone without a word."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        option = getattr(socket, name, None)  # not every system has all
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def peer_of(sock: socket.socket) -> str:
    """Who is at the other end, for logs: host and port, or process and user."""
    if sock.family == socket.AF_UNIX:
        found = credentials(sock)
        return f"{_UNIX}pid {found[0]}, uid {found[1]}" if found else _UNIX
    try:
        place = sock.getpeername()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "unknown")
    return str(TcpAddress(place[0], place[1]))


def credentials(sock: socket.socket) -> tuple[int, int] | None:
    """Process and user at the other end of a unix socket, as the system says; None where it does
    not."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or sock.family != socket.AF_UNIX:
        return None
    data = sock.getsockopt(socket.SOL_SOCKET, option, 12)
    pid, uid = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in (0, 4))
    return pid, uid
