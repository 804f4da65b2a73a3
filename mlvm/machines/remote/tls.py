"""TLS of the standard library, with sockets for a `Stream`."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from typing import Any, Final

from mlvm.core.errors import AccessDeniedError, AddressError
from mlvm.machines.remote.secret import require_private

_RECORD: Final = 1 << 14  # bytes of a TLS record


class SecureSocket(ssl.SSLSocket):
    """TLS socket with `sendmsg`, which sends a message in pieces."""

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Send some of the bytes; return how many were sent."""
        record = bytearray()
        for each in buffers:
            piece = memoryview(each).cast("B")
            if not record and len(piece) >= _RECORD:
                return self.send(piece)
            record += piece[: _RECORD - len(record)]
            if len(record) >= _RECORD:
                break
        return self.send(record) if record else 0


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Create the TLS context of a server from the PEM files of a certificate and a key.

    The certificate file may also contain the key. Raises `AddressError` for unusable files,
    `AccessDeniedError` for a key that other users can read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with open(key or certificate, "rb") as file:
            if b"PRIVATE KEY" in file.read():
                require_private(file.fileno(), key or certificate, "key")
        context.load_cert_chain(certificate, key, password=_no_password)
    except AccessDeniedError:
        raise
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = certificate if key is None else f"{certificate}, {key}"
        raise AddressError(
            f"cannot read a certificate and key in {files}: {error}; pass PEM files"
        ) from None
    return _prepared(context)


def client_context(tls: bool | str | os.PathLike[str] | ssl.SSLContext) -> ssl.SSLContext:
    """Create the context of a client.

    True trusts the system's certificates, and a path the certificates in a PEM file. An
    `ssl.SSLContext` is used with a different socket class. Raises `AddressError` for a file without
    certificates.
    """
    if isinstance(tls, ssl.SSLContext):
        return _prepared(tls)
    try:
        path = None if tls is True else os.fspath(tls)  # type: ignore[arg-type]
        return _prepared(ssl.create_default_context(cafile=path))
    except (OSError, TypeError) as error:
        raise AddressError(
            f"tls={tls!r}: cannot read trusted certificates: {error}; pass a PEM file"
        ) from None


def _prepared(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    context.sslsocket_class = SecureSocket
    return context


def _no_password() -> str:
    raise ValueError(
        "the key is encrypted, but a server cannot ask for a password; decrypt it, as with "
        "openssl pkey"
    )
