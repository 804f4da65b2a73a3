"""Bounds on memory: a small file may ask for more than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from mlvm.arena.arena import scope
from mlvm.core.errors import OutOfMemory
from mlvm.core.observe import observed
from mlvm.eager.tensor.context import current_arena


class Limit:
    """Bytes that a graph may allocate in all, while it is folded, or in a call: so many at least,
    or as many times those of what goes in."""

    def __init__(self, what: str, least: int, times: int) -> None:
        self.what, self.times = what, times
        self.most = self.left = least
        self._entered = 0

    def enter(self, nbytes: int) -> None:
        """Count bytes of what goes in."""
        self._entered += nbytes
        more = max(self._entered * self.times - self.most, 0)
        self.most, self.left = self.most + more, self.left + more

    def check(self, nbytes: int) -> None:
        """Raise `OutOfMemory` for more bytes than are left."""
        if nbytes > self.left:
            raise OutOfMemory(
                f"{nbytes:,} bytes are asked for; {self.what} may allocate {self.most:,}, of which "
                f"{max(self.left, 0):,} are left; a larger `limit` of the model allows a call more"
            )

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count the memory that the current VM takes on inside."""
        arena, token = scope.get() or current_arena(), limit.set(self)

        def grow(proceed: Callable[[int], Any], nbytes: int) -> Any:
            if limit.get() is self:  # no other thread's
                self.check(nbytes - arena.capacity // 4)  # by which any arena grows
                self.left -= nbytes
            return proceed(nbytes)

        try:
            with observed(arena.vm, alloc_storage=grow):
                yield
        finally:
            limit.reset(token)


limit: Final[ContextVar[Limit | None]] = ContextVar("limit", default=None)
"""That of the graph which is folded or runs."""
