"""Objects that a `with` block closes."""

from __future__ import annotations

from typing import Any, Self


class Closing:
    """Context manager of an object itself: the end of the block calls its `close`."""

    __slots__ = ()

    def __enter__(self) -> Self:
        """Return the object; the end of the block closes it."""
        return self

    def __exit__(self: Any, kind: Any, error: Any, traceback: Any, /) -> None:
        self.close()
