"""Who is at the other end: what passes on a connection before the first call.

    client  hello      nonce, whether it has a secret, what it wants
    server  challenge  nonce
    client  proof      HMAC(secret, "client", all that passed)
    server  welcome    what it is; HMAC(secret, "server", all that passed)

The HMAC (RFC 2104, SHA-256) of each side covers both nonces, the versions and wishes of both, the
side that it is from and, under TLS, the channel (RFC 5929). So the secret itself is never sent,
each side proves that it knows it, and what was heard on one connection is of no use on another. In
place of a challenge or welcome there may be `refused`, with a reason; its layout is the same in all
versions.
docs/wire.md has the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from mlvm.core.errors import AccessRefused, ConnectionLost, EncodingError
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Reader, Writer

NONCE: Final = 32
MOST_NAME: Final = 200
"""Characters of what a client or a VM is called."""
LEAST_SECRET: Final = 16
"""Bytes that a secret has at least: who listens to a handshake could try all shorter ones."""

BUSY: Final = "too many connections come at once: try again"
"""The reason for which a client comes again by itself."""

_LEAST_DIFFERENT: Final = 5  # bytes of a secret
_MOST_REASON: Final = 500  # characters
_MOST: Final = 4096  # bytes of a message from who has not proved anything
_TLS_RECORD: Final = b"\x16\x03"


class Greeting(Enum):
    """The kinds of message of this file, as `Kind` has those that follow."""

    hello = 16
    challenge = 17
    proof = 18
    welcome = 19
    refused = 20
    status = 21


@dataclass(frozen=True)
class Hello:
    """What a client says first. `wants`: a `vm`, its own or the shared one of the name `vm`, or
    `status`. `name` is for the server's log."""

    wants: str = "vm"
    vm: str = ""
    name: str = ""
    has_secret: bool = False
    nonce: bytes = b""
    user: str = ""
    """Whose secret it is, which the proof shows."""


# --- messages ---------------------------------------------------------------------------


class _Body(Writer):
    def body(self) -> bytes:
        return bytes(self._data[HEADER.size :])


def pack(kind: Greeting, body: bytes = b"", version: int = VERSION) -> bytes:
    """A message of the handshake."""
    return HEADER.pack(MAGIC, version, kind.value, len(body)) + body


def receive(sock: socket.socket, deadline: float, most: int = _MOST) -> tuple[int, int, bytes]:
    """The version, kind and whole bytes of the next message, received by `deadline` of
    `time.monotonic`. Raises `ConnectionLost`, `EncodingError`."""
    header = _exactly(sock, HEADER.size, deadline)
    magic, version, kind, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise EncodingError(f"a message starts with {MAGIC!r}, not {magic!r}")
    if length > most:
        raise EncodingError(f"a message of {length} bytes; {most} are the most here")
    return version, kind, header + _exactly(sock, length, deadline)


def _exactly(sock: socket.socket, n: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n:
        data += _some(sock, n - len(data), deadline)
    return data


def _some(sock: socket.socket, most: int, deadline: float, flags: int = 0) -> bytes:
    """Some bytes, at least one, by the deadline. Raises `ConnectionLost`."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            sock.settimeout(left)
            data = sock.recv(most, flags)
        except TimeoutError:
            continue
        except OSError as error:
            raise ConnectionLost(f"the connection is lost: {error.strerror or error}") from None
        if not data:
            raise ConnectionLost("the other side has closed the connection")
        return data
    raise ConnectionLost("the handshake took too long")


def send(sock: socket.socket, message: bytes, deadline: float) -> None:
    """Send by the deadline. Raises `ConnectionLost`."""
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(message)
    except OSError as error:
        raise ConnectionLost(f"the connection is lost: {error.strerror or error}") from None


def refusal(reason: str) -> bytes:
    """The message that says why nothing follows."""
    writer = _Body()
    writer.text(plain(reason))
    return pack(Greeting.refused, writer.body())


def plain(text: str, most: int = _MOST_REASON) -> str:
    """A text of another's, cut short, without what a terminal would obey."""
    shown = "".join([each if each.isprintable() else "?" for each in text[:most]])
    return shown if len(text) <= most else f"{shown}..."


# --- what both sides compute ------------------------------------------------------------


def check_secret(secret: str | bytes) -> bytes:
    """The secret as bytes. Raises `AccessRefused` for one that could be guessed."""
    if not isinstance(secret, (str, bytes)):
        raise AccessRefused(f"a secret is a str or bytes, not a {type(secret).__name__}")
    data = secret.encode() if isinstance(secret, str) else secret
    if len(data) < LEAST_SECRET:
        raise AccessRefused(f"a secret has at least {LEAST_SECRET} bytes; this one has {len(data)}")
    if len(data.strip(b" \t\r\n\v\f\0")) < LEAST_SECRET or len(set(data)) < _LEAST_DIFFERENT:
        raise AccessRefused(
            f"this is no secret: without the blanks at its ends it has fewer than {LEAST_SECRET} "
            f"bytes, or it has fewer than {_LEAST_DIFFERENT} different ones"
        )
    return data


def _proof(secret: bytes | None, side: bytes, *heard: bytes) -> bytes:
    mac = hmac.new(secret or b"", b"mlvm " + side, hashlib.sha256)
    for each in heard:
        mac.update(len(each).to_bytes(8, "little") + each)
    return mac.digest()


def _channel(sock: socket.socket) -> bytes:
    """What only the two ends of this TLS connection share; nothing without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    binding = sock.get_channel_binding("tls-unique")
    if not binding:
        raise AccessRefused("this TLS connection has no channel to bind the secret to")
    return binding


def _versions(theirs: int, side: str) -> str:
    return f"the {side} speaks version {theirs} of the format, and this side version {VERSION}"


# --- the client -------------------------------------------------------------------------


def greet(
    sock: socket.socket, secret: bytes | None, hello: Hello, deadline: float
) -> dict[str, Any]:
    """Go through the handshake as the client. Returns what the server says of itself.

    Raises `AccessRefused` with the server's reason, or if the server does not know the secret;
    `ConnectionLost`.
    """
    writer = _Body()
    writer.blob(secrets.token_bytes(NONCE))
    writer.value(secret is not None)
    for text in (hello.wants, hello.vm, hello.name):
        writer.text(text)
    first = pack(Greeting.hello, writer.body())
    with suppress(ConnectionLost):  # a server that is busy does not listen, but says why
        send(sock, first, deadline)
    challenge = _expect(sock, Greeting.challenge, deadline)
    heard = first, challenge, _channel(sock)
    proof = pack(Greeting.proof, _proof(secret, b"client", *heard))
    with suppress(ConnectionLost):
        send(sock, proof, deadline)
    welcome = _expect(sock, Greeting.welcome, deadline)
    try:
        reader = Reader(welcome, HEADER.size)
        mac, body = reader.blob(), reader.blob()
        reader.end()
        about: dict[str, Any] = Reader(body, 0).mapping()
    except EncodingError as error:
        raise AccessRefused(f"the server's welcome is none: {error}") from None
    if not hmac.compare_digest(mac, _proof(secret, b"server", *heard, proof, body)):
        raise AccessRefused("the server does not know the secret")
    return about


def _expect(sock: socket.socket, kind: Greeting, deadline: float) -> bytes:
    """The server's next message, of that kind."""
    try:
        version, given, message = receive(sock, deadline)
    except EncodingError as error:
        raise AccessRefused(f"what answers is no mlvm server, or speaks TLS: {error}") from None
    if given == Greeting.refused.value:
        try:
            reason = plain(Reader(message, HEADER.size).text())
        except EncodingError:
            reason = "the server gives no reason"
        raise AccessRefused(reason)
    if version != VERSION:
        raise AccessRefused(_versions(version, "server"))
    if given != kind.value:
        raise AccessRefused(f"the server sent {given} in place of {kind.name} ({kind.value})")
    return message


# --- the server -------------------------------------------------------------------------


def speaks_tls(sock: socket.socket, deadline: float) -> bool | None:
    """Whether the client's first bytes are TLS's; None if they are neither its nor mlvm's."""
    while True:
        start = _some(sock, 4, deadline, socket.MSG_PEEK)
        if start.startswith(_TLS_RECORD):
            return True
        if start == MAGIC:
            return False
        if not MAGIC.startswith(start) and not _TLS_RECORD.startswith(start):
            return None
        time.sleep(0.01)  # the rest is on its way


def admit(
    sock: socket.socket,
    secrets_of: Mapping[str, bytes] | None,
    *,
    trusted: bool,
    decide: Callable[[Hello], Mapping[str, object]],
    deadline: float,
) -> None:
    """Go through the handshake as the server. The client is told why it is refused.

    `secrets_of` has those of users by name. Who is `trusted` needs no secret, but one that it has
    is proved both ways. When the client has proved what it has to, `decide` on what it wants: the
    function returns what the client is told of the server, or raises `AccessRefused`. Raises
    `AccessRefused`, `ConnectionLost`, `EncodingError`.
    """
    version, kind, first = receive(sock, deadline)
    if version != VERSION:
        raise _refused(sock, _versions(version, "client"), deadline)
    if kind != Greeting.hello.value:
        raise EncodingError(f"a connection begins with hello ({Greeting.hello.value}), not {kind}")
    hello = _read_hello(first)
    if hello.has_secret and not secrets_of:
        raise _refused(sock, "this server has no secret: connect without one", deadline)
    if not hello.has_secret and not trusted:
        raise _refused(sock, "a secret is required (secret_file=, --secret-file)", deadline)
    known: Mapping[str, bytes | None] = (secrets_of or {}) if hello.has_secret else {"": None}
    writer = _Body()
    writer.blob(secrets.token_bytes(NONCE))
    challenge = pack(Greeting.challenge, writer.body())
    send(sock, challenge, deadline)
    heard = first, challenge, _channel(sock)
    version, kind, proof = receive(sock, deadline)
    if kind != Greeting.proof.value or version != VERSION:
        raise EncodingError(f"expected a proof ({Greeting.proof.value}), got {kind}")
    given = proof[HEADER.size :]
    found = [
        user
        for user, secret in known.items()
        if hmac.compare_digest(given, _proof(secret, b"client", *heard))
    ]
    if not found:
        raise _refused(sock, "the secret is another", deadline)
    shared = known[found[0]]
    try:
        about = decide(replace(hello, user=found[0]))
    except AccessRefused as error:
        raise _refused(sock, str(error), deadline) from None
    writer, described = _Body(), _Body()
    described.mapping(about, Writer.value)
    writer.blob(_proof(shared, b"server", *heard, proof, described.body()))
    writer.blob(described.body())
    send(sock, pack(Greeting.welcome, writer.body()), deadline)


def _read_hello(message: bytes) -> Hello:
    reader = Reader(message, HEADER.size)
    nonce, has_secret = reader.blob(), reader.value()
    wants, vm, name = reader.text(), reader.text(), reader.text()
    reader.end()
    if len(nonce) != NONCE or not isinstance(has_secret, bool):
        raise EncodingError("a hello has a nonce, and says whether there is a secret")
    if max(map(len, (wants, vm, name))) > MOST_NAME:
        raise EncodingError(f"a name has {MOST_NAME} characters at most")
    return Hello(wants, vm, name, has_secret, nonce)


def _refused(sock: socket.socket, reason: str, deadline: float) -> AccessRefused:
    """The error, of which the client has been told."""
    send(sock, refusal(reason), deadline)
    return AccessRefused(reason)
