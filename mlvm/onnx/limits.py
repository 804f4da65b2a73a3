"""Limits on memory, because a small file may request a large amount."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from mlvm.arena.arena import scope
from mlvm.core.errors import OutOfMemoryError
from mlvm.core.observe import observed
from mlvm.eager.tensor.context import bound, current_arena


class Limit:
    """Limit of the bytes that a graph allocates, while it is folded or in a call.

    It is the larger of `least` and `times` the bytes of the inputs.
    """

    def __init__(self, what: str, least: int, times: int) -> None:
        self.what, self.times = what, times
        self.most = self.remaining = least
        self._entered = 0

    def enter(self, nbytes: int) -> None:
        """Count bytes of inputs, which raise the limit."""
        self._entered += nbytes
        more = max(self._entered * self.times - self.most, 0)
        self.most, self.remaining = self.most + more, self.remaining + more

    def check(self, nbytes: int) -> None:
        """Raise `OutOfMemoryError` if more bytes than the remaining bytes are requested."""
        if nbytes > self.remaining:
            raise OutOfMemoryError(
                f"cannot allocate {nbytes:,} bytes: {self.what} may allocate {self.most:,}, and "
                f"{max(self.remaining, 0):,} remain; set a larger `limit` of the model for calls"
            )

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count the memory that the current VM allocates inside the block."""
        arena = scope() or current_arena()

        def grow(proceed: Callable[[int], Any], nbytes: int) -> Any:
            if limit.get() is self:  # not the limit of a different thread
                self.check(nbytes - arena.capacity // 4)  # every arena grows by this fraction
                self.remaining -= nbytes
            return proceed(nbytes)

        with bound(limit, self), observed(arena.vm, alloc_storage=grow):
            yield


limit: Final[ContextVar[Limit | None]] = ContextVar("limit", default=None)
"""Limit of the graph that is being folded or run."""
