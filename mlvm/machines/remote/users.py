"""The users of a server, each with a secret, and what each may take of it."""

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
"""How much more of a processor a process has than one whose niceness is one more, about."""


def users_of(secret: bytes) -> dict[str, bytes]:
    """The secrets of users by their names: of lines `name:secret`, or else one of nobody's name.
    Raises `AccessRefused` for a name that comes twice, or a secret that could be guessed."""
    lines = [line.strip() for line in secret.splitlines() if line.strip()]
    found = [_LINE.fullmatch(line) for line in lines]
    if not all(found):
        return {"": check_secret(secret)}
    users: dict[str, bytes] = {}
    for match in filter(None, found):
        name = match[1].decode()
        if name in users:
            raise AccessRefused(f"two secrets are of the user {name!r}")
        users[name] = check_secret(match[2])
    return users


def own_secret(secret: bytes) -> bytes:
    """A client's secret, which may have its user's name before it. Raises `AccessRefused` for the
    secrets of several users."""
    users = users_of(secret)
    if len(users) > 1:
        raise AccessRefused(f"these are the secrets of {len(users)} users; a client has one")
    return next(iter(users.values()))


def niceness(others: int) -> int:
    """How nice a process has to be whose user has so many already, so that the more one user has,
    the less each adds: half of the first one's share, then a third, ..."""
    return min(19, round(math.log(others + 1, _STEP)))


@dataclass
class _User:
    """What a user's clients have taken: the bytes that they hold, and launches and seconds by the
    minute of the last hour."""

    held: int = 0
    minutes: dict[int, tuple[int, float]] = field(default_factory=dict)

    def spend(self, launches: int, seconds: float, now: float) -> None:
        this = int(now // _MINUTE)
        before = self.minutes.get(this, (0, 0.0))
        self.minutes[this] = before[0] + launches, before[1] + seconds

    def last_hour(self, now: float) -> tuple[int, float]:
        first = (now - _HOUR) // _MINUTE
        self.minutes = {each: taken for each, taken in self.minutes.items() if each > first}
        taken = self.minutes.values()
        return sum(launches for launches, _ in taken), sum(seconds for _, seconds in taken)


class Accounts:
    """Holds users to their quotas. One thread at a time uses it.

    What is counted is what a server has seen of its clients: the launches and seconds that each
    has had since it came, and the bytes that it holds.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._users: dict[str, _User] = {}
        self._seen: dict[int, tuple[int, float]] = {}

    def spend(self, user: str, client: int, launches: int, seconds: float) -> None:
        """A client has had so many launches and seconds since it came."""
        before = self._seen.get(client, (0, 0.0))
        self._seen[client] = launches, seconds
        new = launches - before[0], seconds - before[1]
        self._users.setdefault(user, _User()).spend(*new, monotonic())

    def hold(self, held: Mapping[str, int]) -> None:
        """Users hold so many bytes now, all others none."""
        for name, user in self._users.items():
            user.held = held.get(name, 0)

    def leave(self, client: int) -> None:
        """A client is gone."""
        self._seen.pop(client, None)

    def over(self, user: str) -> str | None:
        """Why the user has to wait or to give something up; None if it need not."""
        found = self._users.get(user)
        if found is None:
            return None
        limits, (launches, seconds) = self._limits, found.last_hour(monotonic())
        for what, taken, most in (
            ("bytes", found.held, limits.user_bytes),
            ("launches in an hour", launches, limits.user_launches),
            ("seconds of a processor in an hour", seconds, limits.user_seconds),
        ):
            if taken > most:
                who = f"the user {user!r} has" if user else "you have"
                return f"{who} taken {taken:,.0f} {what}, and the quota is {most:,.0f}"
        return None
