"""Shared secret of a server and the clients: random, or read from a private file."""

from __future__ import annotations

import os
import secrets
import stat
from typing import Final

from mlvm.core.errors import AccessDeniedError
from mlvm.machines.remote.handshake import check_secret

VARIABLE: Final = "MLVM_SECRET_FILE"
"""Environment variable with the default path of the secret file."""


def make_secret() -> str:
    """Create a secret of 256 random bits."""
    return secrets.token_urlsafe(32)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read the secret in a file, without leading and trailing blanks.

    Raises `AccessDeniedError` for a guessable secret or if other users can read the file, and
    `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # do not wait for a pipe
    with open(descriptor, "rb") as file:
        require_private(descriptor, path, "secret")
        return check_secret(file.read().strip())


def require_private(descriptor: int, path: str | os.PathLike[str], what: str) -> None:
    """Raise `AccessDeniedError` unless this user owns the file and no other user can read it."""
    status = os.fstat(descriptor)
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    if not private or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
        must = f"the file of a {what} must belong to you, and only you may read it (chmod 600)"
        raise AccessDeniedError(f"{os.fspath(path)}: {must}")


def find_secret(
    secret: str | bytes | None, secret_file: str | os.PathLike[str] | None
) -> bytes | None:
    """Return the secret from `secret`, `secret_file` or the environment, or None.

    The environment variable contains the path of a file. Raises the errors of `read_secret`.
    """
    if secret is not None and secret_file is not None:
        raise AccessDeniedError("expected secret= or secret_file=, got both")
    if secret is not None:
        return check_secret(secret)
    path = secret_file if secret_file is not None else os.environ.get(VARIABLE)
    return None if not path else read_secret(path)
