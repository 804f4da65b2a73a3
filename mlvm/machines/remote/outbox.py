"""What a client is about to send, in Python: where the C extension is here it has the same in C."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

GATHERED: Final = 64
PAUSE: Final = 100e-6
"""Seconds after which a message is sent at once: the server may have nothing to do."""


class Outbox(Protocol):
    """Messages to send, and the place in Python that each comes from."""

    def add(self, message: bytes, place: Any, /) -> bool: ...
    def take(self) -> tuple[bytes, list[Any]]: ...
    def __len__(self) -> int: ...


class PythonOutbox:
    """Messages are added by any thread, at any time; one thread takes them."""

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, Any]] = []
        self._taken = 0.0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: bytes, place: Any) -> bool:
        """Add a message. Returns whether it is time to send what is here."""
        self._messages.append((message, place))
        return len(self._messages) >= GATHERED or time.monotonic() - self._taken > PAUSE

    def take(self) -> tuple[bytes, list[Any]]:
        """The messages one after the other, and the place of each."""
        count = len(self._messages)
        taken = self._messages[:count]
        del self._messages[:count]  # who has added meanwhile has added behind these
        self._taken = time.monotonic()
        return b"".join([message for message, _ in taken]), [place for _, place in taken]
