"""What a client is about to send, in Python: where the C extension is here it has the same in C."""

from __future__ import annotations

import time
from typing import Any, Final

GATHERED: Final = 64
PAUSE: Final = 100e-6
"""Seconds after which a message is sent at once: the server may have nothing to do."""


class PythonOutbox:
    """Messages to send, numbered from 0, and the place in Python that each comes from.

    Any thread adds, at any time; one takes. What `take` shows is here until the next `take` says
    that it is done: who is interrupted between takes it again. The length is what no `take` has
    shown.
    """

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, Any]] = []
        self._first = self._shown = 0
        self._taken = 0.0

    def __len__(self) -> int:
        return len(self._messages) - self._shown

    def add(self, message: bytes, place: Any, /) -> bool:
        """Add a message. Returns whether it is time to send what is here."""
        self._messages.append((message, place))
        return len(self) >= GATHERED or time.monotonic() - self._taken > PAUSE

    def take(self, done: int, /) -> tuple[bytes, list[Any]]:
        """Forget the messages before number `done`. All others, one after the other, and the place
        of each."""
        count = done - self._first
        if count not in (0, self._shown):
            raise ValueError(f"messages before {self._first} are done, not {done}")
        if count:
            # No call comes between, so no interrupt does.
            self._first, self._shown, self._messages[:count] = done, 0, []
        shown = self._messages.copy()
        self._shown = len(shown)
        self._taken = time.monotonic()
        return b"".join([message for message, _ in shown]), [place for _, place in shown]
