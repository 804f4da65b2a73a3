"""The users of a server: their secrets and quotas."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from mlvm.core.errors import AccessRefused
from mlvm.machines.remote.handshake import check_secret
from mlvm.machines.remote.limits import Limits

_HOUR: Final = 3600.0
_MINUTE: Final = 60.0
_LINE: Final = re.compile(rb"([A-Za-z][\w.-]{0,31}):(\S+)")
_STEP: Final = 1.25
"""Ratio of processor time between processes whose niceness differs by one, about."""


def users_of(secret: bytes) -> dict[str, bytes]:
    """Parse the secrets of users by name: lines `name:secret`, or one secret of the user "".
    Raises `AccessRefused` for a name that occurs twice, or a secret that could be guessed."""
    lines = [line.strip() for line in secret.splitlines() if line.strip()]
    matches = [_LINE.fullmatch(line) for line in lines]
    if not all(matches):
        return {"": check_secret(secret)}
    users: dict[str, bytes] = {}
    for match in filter(None, matches):
        name = match[1].decode()
        if name in users:
            raise AccessRefused(f"two secrets are of the user {name!r}")
        users[name] = check_secret(match[2])
    return users


def own_secret(secret: bytes) -> bytes:
    """Parse a client's secret, which may follow its user's name. Raises `AccessRefused` for the
    secrets of several users."""
    users = users_of(secret)
    if len(users) > 1:
        raise AccessRefused(f"these are the secrets of {len(users)} users; a client has one")
    return next(iter(users.values()))


def niceness(others: int) -> int:
    """Return the niceness of a new process whose user has `others` already: a user's second
    process gets half the processor share of the first, the next a third, ..."""
    return min(19, round(math.log(others + 1, _STEP)))


@dataclass
class _User:
    """Usage of a user's clients.

    nbytes: bytes of their tensors and storages
    minutes: launches and processor seconds by minute of `monotonic`, for the last hour
    """

    nbytes: int = 0
    minutes: dict[int, tuple[int, float]] = field(default_factory=dict)

    def spend(self, launches: int, seconds: float, now: float) -> None:
        this = int(now // _MINUTE)
        before = self.minutes.get(this, (0, 0.0))
        self.minutes[this] = before[0] + launches, before[1] + seconds

    def last_hour(self, now: float) -> tuple[int, float]:
        first = (now - _HOUR) // _MINUTE
        self.minutes = {each: spent for each, spent in self.minutes.items() if each > first}
        spent = self.minutes.values()
        return sum(launches for launches, _ in spent), sum(seconds for _, seconds in spent)


class Accounts:
    """Usage and quotas of users. One thread at a time uses it.

    A server reports the launches and seconds of each client since it connected, and its bytes.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._users: dict[str, _User] = {}
        self._totals: dict[int, tuple[int, float]] = {}

    def spend(self, user: str, client: int, launches: int, seconds: float) -> None:
        """Record a client's launches and seconds since it connected."""
        before = self._totals.get(client, (0, 0.0))
        self._totals[client] = launches, seconds
        new = launches - before[0], seconds - before[1]
        self._users.setdefault(user, _User()).spend(*new, monotonic())

    def set_bytes(self, nbytes: Mapping[str, int]) -> None:
        """Record the bytes of users by name; users without an entry have none."""
        for name, user in self._users.items():
            user.nbytes = nbytes.get(name, 0)

    def leave(self, client: int) -> None:
        """Forget a client that has left."""
        self._totals.pop(client, None)

    def over(self, user: str) -> str | None:
        """Return how the user exceeds a quota, or None."""
        account = self._users.get(user)
        if account is None:
            return None
        limits, (launches, seconds) = self._limits, account.last_hour(monotonic())
        for what, usage, most in (
            ("bytes", account.nbytes, limits.user_bytes),
            ("launches in an hour", launches, limits.user_launches),
            ("seconds of a processor in an hour", seconds, limits.user_seconds),
        ):
            if usage > most:
                who = f"the user {user!r} has" if user else "you have"
                return f"{who} used {usage:,.0f} {what}, and the quota is {most:,.0f}"
        return None
