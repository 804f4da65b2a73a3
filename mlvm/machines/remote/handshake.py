"""Authentication of client and server, before the first call.

    client  hello      nonce, has_secret, request
    server  challenge  nonce
    client  proof      HMAC(secret, "client", all messages so far)
    server  welcome    description; HMAC(secret, "server", all messages so far)

The HMAC (RFC 2104, SHA-256) of each side covers both nonces, both versions, the request, the side
that sends it and, under TLS, the channel (RFC 5929). Therefore the secret is never sent, each side
proves that it knows the secret, and a recorded connection cannot be replayed. The server may send
`refused`, with a reason, instead of a challenge or welcome; the layout of `refused` is the same in
all versions. docs/wire.md specifies the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from mlvm.core.errors import (
    AccessDeniedError,
    ConnectionLostError,
    EncodingError,
    brief,
    shortened,
    with_article,
)
from mlvm.core.program.encoding import HEADER, MAGIC, VERSION, Reader, Writer
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.system import SYSTEM, System

NONCE: Final = 32

BUSY: Final = "too many simultaneous connections: try again"
"""The reason after which a client tries again automatically."""

_TLS_RECORD: Final = b"\x16\x03"


class Greeting(Enum):
    """Kinds of messages of the handshake; `Kind` contains the kinds of later messages."""

    hello = 16
    challenge = 17
    proof = 18
    welcome = 19
    refused = 20
    status = 21


@dataclass(frozen=True)
class Hello:
    """First message of a client: its request.

    `wants`: "vm", "lease" (a VM that survives a lost connection), "status", "interrupt" or
        "resume".
    `vm`: name of a shared VM, or empty for a private VM; for "interrupt" and "resume" the client's
    key.
    `name`: the client's name in the server's log; for "interrupt" the number of a message.
    `has_secret`: the client will prove that it knows a secret.
    `user`: user of the secret, which the server learns from the proof.
    """

    wants: str = "vm"
    vm: str = ""
    name: str = ""
    has_secret: bool = False
    user: str = ""


# --- messages ---------------------------------------------------------------------------


class _Body(Writer):
    def body(self) -> bytes:
        return bytes(self._data[HEADER.size :])


def pack(kind: Greeting, body: bytes = b"", version: int = VERSION) -> bytes:
    """Encode a message of the handshake."""
    return HEADER.pack(MAGIC, version, kind.value, len(body)) + body


def receive(
    sock: socket.socket, deadline: float, most: int = FIXED.handshake_bytes, system: System = SYSTEM
) -> tuple[int, int, bytes]:
    """Receive the next message by `deadline` of `system.monotonic`.

    A peer that is not authenticated may send up to `FIXED.handshake_bytes`. Return the version of
    the message, its kind and all its bytes. Raises `ConnectionLostError`, `EncodingError`.
    """
    header = _exactly(sock, HEADER.size, deadline, system)
    magic, version, kind, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise EncodingError(f"a message must start with {MAGIC!r}, got {magic!r}")
    if length > most:
        raise EncodingError(f"expected a message of at most {most} bytes, got {length}")
    return version, kind, header + _exactly(sock, length, deadline, system)


def _exactly(sock: socket.socket, n: int, deadline: float, system: System) -> bytes:
    data = b""
    while len(data) < n:
        data += _some(sock, n - len(data), deadline, system)
    return data


def _some(sock: socket.socket, most: int, deadline: float, system: System, flags: int = 0) -> bytes:
    """Receive at least one byte by the deadline. Raises `ConnectionLostError`."""
    while (remaining := deadline - system.monotonic()) > 0:
        try:
            sock.settimeout(remaining)
            data = sock.recv(most, flags)
        except TimeoutError:
            continue
        except OSError as error:
            raise ConnectionLostError(
                f"the connection is lost: {error.strerror or error}"
            ) from None
        if not data:
            raise ConnectionLostError("the other side has closed the connection; connect again")
        return data
    raise ConnectionLostError("the handshake took too long; raise timeout=")


def send(sock: socket.socket, message: bytes, deadline: float, system: System = SYSTEM) -> None:
    """Send a message by the deadline. Raises `ConnectionLostError`."""
    try:
        sock.settimeout(max(deadline - system.monotonic(), 0.001))
        sock.sendall(message)
    except OSError as error:
        raise ConnectionLostError(f"the connection is lost: {error.strerror or error}") from None


def refusal(reason: str) -> bytes:
    """Encode a refusal with the reason."""
    writer = _Body()
    writer.text(plain(reason))
    return pack(Greeting.refused, writer.body())


def plain(text: str, most: int = FIXED.reason) -> str:
    """Truncate a text of the peer, and replace characters that control a terminal."""
    return "".join([each if each.isprintable() else "?" for each in shortened(text, most)])


# --- secrets and proofs ------------------------------------------------------------------


def check_secret(secret: str | bytes) -> bytes:
    """Return the secret as bytes. Raises `AccessDeniedError` for a guessable secret."""
    if not isinstance(secret, (str, bytes)):
        raise AccessDeniedError(
            f"a secret: expected a str or bytes, got {with_article(type(secret).__name__)}"
        )
    data = secret.encode() if isinstance(secret, str) else secret
    least = FIXED.secret
    if len(data) < least:
        raise AccessDeniedError(f"a secret: expected at least {least} bytes, got {len(data)}")
    if len(data.strip(b" \t\r\n\v\f\0")) < least or len(set(data)) < FIXED.distinct:
        raise AccessDeniedError(
            f"a secret: expected {least} bytes without blanks at the ends, at least "
            f"{FIXED.distinct} of them different; got a secret that is easier to guess"
        )
    return data


def _proof(secret: bytes | None, side: bytes, *heard: bytes) -> bytes:
    mac = hmac.new(secret or b"", b"mlvm " + side, hashlib.sha256)
    for each in heard:
        mac.update(len(each).to_bytes(8, "little") + each)
    return mac.digest()


def _channel(sock: socket.socket) -> bytes:
    """Return the channel binding of a TLS connection; empty without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    binding = sock.get_channel_binding("tls-unique")
    if not binding:
        raise AccessDeniedError("this TLS connection has no channel binding; connect again")
    return binding


def _versions(theirs: int, side: str) -> str:
    return f"the {side} uses version {theirs} of the format, and this side version {VERSION}"


# --- the client -------------------------------------------------------------------------


def greet(
    sock: socket.socket,
    secret: bytes | None,
    hello: Hello,
    deadline: float,
    system: System = SYSTEM,
) -> dict[str, Any]:
    """Perform the handshake as the client; return the server's description.

    Raises `AccessDeniedError` with the server's reason, or if the server does not know the secret;
    `ConnectionLostError`.
    """
    writer = _Body()
    writer.blob(secrets.token_bytes(NONCE))
    writer.value(secret is not None)
    for text in (hello.wants, hello.vm, hello.name):
        writer.text(text)
    first = pack(Greeting.hello, writer.body())
    with suppress(ConnectionLostError):  # a busy server does not read, but sends the reason
        send(sock, first, deadline, system)
    heard = first, _expect(sock, Greeting.challenge, deadline, system), _channel(sock)
    proof = pack(Greeting.proof, _proof(secret, b"client", *heard))
    with suppress(ConnectionLostError):
        send(sock, proof, deadline, system)
    welcome = _expect(sock, Greeting.welcome, deadline, system)
    try:
        reader = Reader(welcome, HEADER.size)
        mac, body = reader.blob(), reader.blob()
        reader.end()
        about: dict[str, Any] = Reader(body, 0).mapping()
    except EncodingError as error:
        raise AccessDeniedError(
            f"the server's welcome cannot be read: {error}; use the same mlvm on both sides"
        ) from None
    if not hmac.compare_digest(mac, _proof(secret, b"server", *heard, proof, body)):
        raise AccessDeniedError(
            "the server does not know the secret; pass the server's secret as secret= or "
            "secret_file="
        )
    return about


def _expect(sock: socket.socket, kind: Greeting, deadline: float, system: System) -> bytes:
    """Receive the server's next message, of that kind. Raises `AccessDeniedError`."""
    try:
        version, number, message = receive(sock, deadline, system=system)
    except EncodingError as error:
        raise AccessDeniedError(
            f"no mlvm server answers at this address, or it requires TLS: {error}"
        ) from None
    if number == Greeting.refused.value:
        try:
            reason = plain(Reader(message, HEADER.size).text())
        except EncodingError:
            reason = "the server did not state a reason"
        raise AccessDeniedError(reason)
    if version != VERSION:
        raise AccessDeniedError(_versions(version, "server"))
    if number != kind.value:
        raise AccessDeniedError(
            f"expected {kind.name} ({kind.value}) from the server, got {number}"
        )
    return message


# --- the server -------------------------------------------------------------------------


def speaks_tls(sock: socket.socket, deadline: float, system: System = SYSTEM) -> bool | None:
    """Return whether the first bytes are TLS (True) or mlvm (False); None for anything else."""
    while True:
        start = _some(sock, 4, deadline, system, socket.MSG_PEEK)
        if start.startswith(_TLS_RECORD):
            return True
        if start == MAGIC:
            return False
        if not MAGIC.startswith(start) and not _TLS_RECORD.startswith(start):
            return None
        system.sleep(0.01)  # until the rest arrives


def admit(
    sock: socket.socket,
    secrets_of: Mapping[str, bytes] | None,
    *,
    trusted: bool,
    decide: Callable[[Hello], Mapping[str, object]],
    deadline: float,
    system: System = SYSTEM,
) -> None:
    """Perform the handshake as the server. A refused client receives the reason.

    `secrets_of` contains the secrets of users by name. A `trusted` client does not need a secret;
    if it has a secret, both sides prove it. `decide` then grants the client's request: it returns
    the server's description for the client, or raises `AccessDeniedError`. Raises
    `AccessDeniedError`, `ConnectionLostError`, `EncodingError`.
    """
    version, kind, first = receive(sock, deadline, system=system)
    if version != VERSION:
        raise _refused(sock, _versions(version, "client"), deadline, system)
    if kind != Greeting.hello.value:
        raise EncodingError(
            f"expected a connection to begin with hello ({Greeting.hello.value}), not {kind}"
        )
    hello = _read_hello(first)
    if hello.has_secret and not secrets_of:
        raise _refused(sock, "this server has no secret: connect without one", deadline, system)
    if not hello.has_secret and not trusted:
        raise _refused(sock, "a secret is required (secret_file=, --secret-file)", deadline, system)
    candidates: Mapping[str, bytes | None] = (secrets_of or {}) if hello.has_secret else {"": None}
    writer = _Body()
    writer.blob(secrets.token_bytes(NONCE))
    challenge = pack(Greeting.challenge, writer.body())
    send(sock, challenge, deadline, system)
    heard = first, challenge, _channel(sock)
    version, kind, proof = receive(sock, deadline, system=system)
    if kind != Greeting.proof.value or version != VERSION:
        raise EncodingError(f"expected a proof ({Greeting.proof.value}), got {kind}")
    mac = proof[HEADER.size :]
    users = [
        user
        for user, secret in candidates.items()
        if hmac.compare_digest(mac, _proof(secret, b"client", *heard))
    ]
    if not users:
        raise _refused(sock, "the secret is wrong; pass the server's secret", deadline, system)
    shared = candidates[users[0]]
    try:
        about = decide(replace(hello, user=users[0]))
    except AccessDeniedError as error:
        raise _refused(sock, str(error), deadline, system) from None
    writer, described = _Body(), _Body()
    described.mapping(about, Writer.value)
    writer.blob(_proof(shared, b"server", *heard, proof, described.body()))
    writer.blob(described.body())
    send(sock, pack(Greeting.welcome, writer.body()), deadline, system)


def _read_hello(message: bytes) -> Hello:
    reader = Reader(message, HEADER.size)
    nonce, has_secret = reader.blob(), reader.value()
    wants, vm, name = reader.text(), reader.text(), reader.text()
    reader.end()
    if len(nonce) != NONCE or not isinstance(has_secret, bool):
        raise EncodingError(
            f"expected a hello with a nonce of {NONCE} bytes and a flag for the secret, got "
            f"{len(nonce)} bytes and {brief(has_secret)}; use the same mlvm on both sides"
        )
    if max(map(len, (wants, vm, name))) > FIXED.name:
        raise EncodingError(f"expected a name of at most {FIXED.name} characters, got a longer one")
    return Hello(wants, vm, name, has_secret)


def _refused(
    sock: socket.socket, reason: str, deadline: float, system: System
) -> AccessDeniedError:
    """Send a refusal to the client, and return the error to raise."""
    send(sock, refusal(reason), deadline, system)
    return AccessDeniedError(reason)
