"""The secret that a server and its clients share: made, or read from a file that is private."""

from __future__ import annotations

import os
import secrets
import stat
from typing import Final

from mlvm.core.errors import AccessRefused
from mlvm.machines.remote.handshake import check_secret

VARIABLE: Final = "MLVM_SECRET_FILE"
"""The environment variable that names the secret's file, where no other is given."""

_MOST: Final = 4096


def make_secret() -> str:
    """A new secret of 256 random bits."""
    return secrets.token_urlsafe(32)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file, without blanks at its ends.

    Raises `AccessRefused` for one that is no file of this user's alone, that is too long, or that
    has no secret, and `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # for a pipe: no waiting
    with open(descriptor, "rb") as file:
        require_private(descriptor, path, "secret")
        data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise AccessRefused(f"{os.fspath(path)}: a secret has at most {_MOST} bytes")
        return check_secret(data.strip())


def require_private(descriptor: int, path: str | os.PathLike[str], what: str) -> None:
    """Raise `AccessRefused` unless it is a file that this user owns and nobody else can read."""
    found = os.fstat(descriptor)
    private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
    if not private or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
        kept = f"a {what} is kept in a file that is yours and only you can read (chmod 600)"
        raise AccessRefused(f"{os.fspath(path)}: {kept}")


def find_secret(
    secret: str | bytes | None, secret_file: str | os.PathLike[str] | None
) -> bytes | None:
    """The secret that is given, in the file that is given, or in the one that the environment
    names; None if there is none. Raises what `read_secret` raises."""
    if secret is not None and secret_file is not None:
        raise AccessRefused("a secret is given, or a file that has it, not both")
    if secret is not None:
        return check_secret(secret)
    path = secret_file if secret_file is not None else os.environ.get(VARIABLE)
    return None if not path else read_secret(path)
