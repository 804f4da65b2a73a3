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

    Raises `AccessRefused` for a file that others may read or that has none, and `OSError`.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            kept = "a secret is kept in a file that only its owner can read (chmod 600)"
            raise AccessRefused(f"{os.fspath(path)}: {kept}")
        return check_secret(file.read(_MOST).strip())


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
