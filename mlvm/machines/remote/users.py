"""Secrets and quotas of the users of a server."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from time import monotonic
from typing import Final

from mlvm.core.errors import AccessDeniedError
from mlvm.machines.remote.handshake import check_secret
from mlvm.machines.remote.limits import Limits

_HOUR: Final = 3600.0
_MINUTE: Final = 60.0
_LINE: Final = re.compile(rb"([A-Za-z][\w.-]{0,31}):(\S+)")
_STEP: Final = 1.25
"""Approximate ratio of the processor shares of processes that differ by one in niceness."""


def users_of(secret: bytes) -> dict[str, bytes]:
    """Parse the secrets of users by name: lines `name:secret`, or one secret of the user "".

    Raises `AccessDeniedError` for a name that occurs twice, or a guessable secret.
    """
    lines = [line.strip() for line in secret.splitlines() if line.strip()]
    matches = [_LINE.fullmatch(line) for line in lines]
    if not all(matches):
        return {"": check_secret(secret)}
    users: dict[str, bytes] = {}
    for match in filter(None, matches):
        name = match[1].decode()
        if name in users:
            raise AccessDeniedError(f"user {name!r} has two secrets; remove a line")
        users[name] = check_secret(match[2])
    return users


def own_secret(secret: bytes) -> bytes:
    """Parse a client's secret, which may follow the name of the user.

    Raises `AccessDeniedError` for the secrets of several users.
    """
    users = users_of(secret)
    if len(users) > 1:
        raise AccessDeniedError(f"expected a single secret, got the secrets of {len(users)} users")
    return next(iter(users.values()))


def niceness(others: int) -> int:
    """Return the niceness of a new process whose user already has `others` processes.

    The second process of a user gets half the processor share of the first process, the third
    process a third, and so on.
    """
    return min(19, round(math.log(others + 1, _STEP)))


class Accounts:
    """Usage and quotas of users. Only one thread at a time may use it.

    For each client, the server reports the launches and seconds since the client connected, and the
    bytes.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nbytes: Mapping[str, int] = {}
        self._totals: dict[int, tuple[int, float]] = {}  # totals by client
        self._spent: dict[str, dict[int, tuple[int, float]]] = {}
        """Launches and processor seconds by user and minute of `monotonic`, for the last hour."""

    def spend(self, user: str, client: int, launches: int, seconds: float) -> None:
        """Record a client's launches and seconds since it connected."""
        before = self._totals.get(client, (0, 0.0))
        self._totals[client] = launches, seconds
        minutes, now = self._spent.setdefault(user, {}), int(monotonic() // _MINUTE)
        earlier = minutes.get(now, (0, 0.0))
        minutes[now] = earlier[0] + launches - before[0], earlier[1] + seconds - before[1]

    def set_bytes(self, nbytes: Mapping[str, int]) -> None:
        """Record the bytes of users by name; users without an entry have none."""
        self._nbytes = nbytes

    def leave(self, client: int) -> None:
        """Remove a client that has left."""
        self._totals.pop(client, None)

    def over(self, user: str) -> str | None:
        """Return how the user exceeds a quota, or None."""
        first = (monotonic() - _HOUR) // _MINUTE
        minutes = self._spent.setdefault(user, {})
        for old in [each for each in minutes if each <= first]:
            del minutes[old]
        limits, spent = self._limits, minutes.values()
        for what, usage, most in (
            ("bytes", self._nbytes.get(user, 0), limits.user_bytes),
            ("launches per hour", sum(each for each, _ in spent), limits.user_launches),
            ("seconds of processor time per hour", sum(x for _, x in spent), limits.user_seconds),
        ):
            if usage > most:
                who = f"the user {user!r} has" if user else "you have"
                return f"{who} used {usage:,.0f} {what}, and the quota is {most:,.0f}"
        return None
