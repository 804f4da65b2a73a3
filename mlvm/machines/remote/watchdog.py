"""Watchdog that stops launches after a time limit or when the client disconnects.

It raises an error in the thread of the launch, between two bytecodes, or when the loop in C checks
signals. A running kernel is not interrupted. A finalizer could swallow the error, so it is raised
again until the launch has stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlvm.core.errors import LimitExceededError, notes_of
from mlvm.machines.remote.system import SYSTEM, System

_EVERY: Final = 0.02  # seconds between checks
_AGAIN: Final = 0.2


class Stopped(LimitExceededError):
    """Error in the thread of a launch, which `watch` converts to a `LimitExceededError`."""


class LaunchWatch:
    """Watched launch of a thread."""

    def __init__(
        self, seconds: float, is_gone: Callable[[], bool | str], system: System = SYSTEM
    ) -> None:
        self.thread = system.ident()
        self.seconds = seconds
        self.deadline = system.monotonic() + seconds
        self.is_gone = is_gone
        self.reason: str | None = None
        self.raised = 0.0

    def verdict(self, now: float) -> str | None:
        """Return the reason for stopping the launch, or None."""
        if now > self.deadline:
            return f"the launch exceeded the limit of {self.seconds:g} seconds"
        reason = self.is_gone()
        return "the client of this launch has disconnected" if reason is True else reason or None


class Watchdog:
    """Thread that checks all running launches, and exits when none is left."""

    def __init__(self, system: System = SYSTEM) -> None:
        self._system = system
        self.masked = threading.RLock()
        """Lock that prevents stopping launches while a thread changes state that must stay
        consistent."""
        self._watches: dict[int, LaunchWatch] = {}
        self._thread: object = None
        self._stop: str | None = None

    @contextmanager
    def watch(
        self, seconds: float, is_gone: Callable[[], bool | str] = lambda: False
    ) -> Iterator[None]:
        """Raise `LimitExceededError` in the block after `seconds`, or when the client has gone.

        `is_gone` returns a reason, None or True. A thread must not nest the block.
        """
        watch = LaunchWatch(seconds, is_gone, self._system)
        try:
            try:
                self._begin(watch)
                yield
            finally:
                self._end(watch)
        except Stopped as error:
            limit = LimitExceededError(watch.reason or "the launch was stopped")
            for note in notes_of(error):
                limit.add_note(note)
            limit.function, limit.pc, limit.step = error.function, error.pc, error.step
            raise limit from None
        if watch.reason is not None:  # the error arrived too late, or was suppressed
            raise LimitExceededError(watch.reason)

    def stop(self, reason: str) -> None:
        """Stop all launches, and later launches immediately."""
        self._stop = reason

    def _begin(self, watch: LaunchWatch) -> None:
        with self.masked:
            self._watches[watch.thread] = watch
            if self._thread is None:
                self._thread = self._system.start("mlvm watchdog", self._run)

    def _end(self, watch: LaunchWatch) -> None:
        """Stop watching.

        A pending error must be caught, not withdrawn: Python 3.11 would continue to search for it,
        and under a profiler forever.
        """
        met = False
        while True:
            try:
                with self.masked:
                    self._watches.pop(watch.thread, None)
                if not watch.raised or met:
                    return
                met = True
                self._system.interrupt(watch.thread, Stopped)  # replaces a pending interrupt
                while True:
                    pass
            except Stopped:
                pass

    def _run(self) -> None:
        idle = 0
        while True:
            self._system.sleep(_EVERY)
            now = self._system.monotonic()
            with self.masked:
                idle = 0 if self._watches else idle + 1
                if idle > 50:  # the next launch starts a new thread
                    self._thread = None
                    return
                for watch in self._watches.values():
                    if watch.reason is None:
                        watch.reason = self._stop or watch.verdict(now)
                    if watch.reason is not None and now > watch.raised + _AGAIN:
                        watch.raised = now
                        self._system.interrupt(watch.thread, Stopped)
