"""Queue of messages that a client will send, in Python; the extension has a version in C."""

from __future__ import annotations

import time
from typing import Any, Final

GATHERED: Final = 64
PAUSE: Final = 100e-6
"""Seconds of inactivity after which a message is sent immediately: the server may be idle."""


class PythonOutbox:
    """Messages to send, numbered from 0, and the line of Python that caused each message.

    Any thread may add messages at any time; only one thread takes messages. The messages of a
    `take` remain until the next `take` reports them as done, so an interrupted caller takes them
    again. The length counts messages that no `take` has returned.
    """

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, Any]] = []
        self._first = self._shown = 0
        self._last_take = 0.0

    def __len__(self) -> int:
        return len(self._messages) - self._shown

    def add(self, message: bytes, place: Any, /) -> bool:
        """Add a message. Return whether the queue should be sent now."""
        self._messages.append((message, place))
        return len(self) >= GATHERED or time.monotonic() - self._last_take > PAUSE

    def take(self, done: int, /) -> tuple[bytes, list[Any]]:
        """Discard the messages before number `done`.

        Return the remaining messages as one bytes object, and the line of Python of each.
        """
        count = done - self._first
        if count not in (0, self._shown):
            raise ValueError(f"expected done >= {self._first}, got {done}")
        if count:
            # No calls between these lines, so no interrupts.
            self._first, self._shown, self._messages[:count] = done, 0, []
        shown = self._messages.copy()
        self._shown = len(shown)
        self._last_take = time.monotonic()
        return b"".join([message for message, _ in shown]), [place for _, place in shown]
