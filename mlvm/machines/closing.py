"""Objects that a `with` block closes."""

from __future__ import annotations

from typing import Any, Self


class Closing:
    """Context manager that returns the object and calls `close` when the block exits."""

    __slots__ = ()

    def __enter__(self) -> Self:
        """Return the object, which is closed when the block exits."""
        return self

    def __exit__(self: Any, kind: Any, error: Any, traceback: Any, /) -> None:
        self.close()
