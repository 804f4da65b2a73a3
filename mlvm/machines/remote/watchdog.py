"""Ends launches that take too long, or whose client is gone: an error raised in their thread.

Python raises it between two bytecodes, and the loop in C where it looks at signals. A kernel that
runs is not interrupted. The error could be swallowed, as by a finalizer in which it comes; so it is
raised again until the launch has ended.
"""

from __future__ import annotations

import ctypes
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlvm.core.errors import LimitExceeded, notes_of

_EVERY: Final = 0.02  # seconds between two looks
_AGAIN: Final = 0.2

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]


class Stopped(LimitExceeded):
    """What is raised in the thread of a launch. It leaves a watch as a `LimitExceeded`."""


class Watch:
    """One launch in the thread that made this."""

    def __init__(self, seconds: float, is_gone: Callable[[], bool | str]) -> None:
        self.thread = threading.get_ident()
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.is_gone = is_gone
        self.reason: str | None = None
        self.raised = 0.0

    def verdict(self, now: float) -> str | None:
        """Why the launch has to end, if it has to."""
        if now > self.deadline:
            return f"the launch takes longer than the {self.seconds:g} seconds it is allowed"
        gone = self.is_gone()
        if gone is True:
            return "the client of this launch is gone"
        return gone or None


class Watchdog:
    """A thread that looks at all launches in progress, as long as there are any."""

    def __init__(self) -> None:
        self.masked = threading.RLock()
        """Held, it lets no launch be ended: whoever holds it changes what must stay whole."""
        self._watches: dict[int, Watch] = {}
        self._thread: threading.Thread | None = None
        self._stop: str | None = None

    @contextmanager
    def watch(
        self, seconds: float, is_gone: Callable[[], bool | str] = lambda: False
    ) -> Iterator[None]:
        """Inside the block, which this thread may be in once, raise `LimitExceeded` after so many
        seconds, or when the client `is_gone`, or for the reason that this gives."""
        watch = Watch(seconds, is_gone)
        try:
            try:
                self._begin(watch)
                yield
            finally:
                self._end(watch)
        except Stopped as error:
            limit = LimitExceeded(watch.reason or "the launch was ended")
            for note in notes_of(error):
                limit.add_note(note)
            limit.function, limit.pc, limit.step = error.function, error.pc, error.step
            raise limit from None
        if watch.reason is not None:  # it came too late, or something has swallowed it
            raise LimitExceeded(watch.reason)

    def stop(self, reason: str) -> None:
        """End all launches, and those that come."""
        self._stop = reason

    def _begin(self, watch: Watch) -> None:
        with self.masked:
            self._watches[watch.thread] = watch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlvm watchdog", daemon=True)
                self._thread.start()

    def _end(self, watch: Watch) -> None:
        """After this nothing is raised any more. What is on its way has to be met, not taken back:
        Python 3.11 would go on looking for it, and under a profiler for ever."""
        met = False
        while True:
            try:
                with self.masked:
                    self._watches.pop(watch.thread, None)
                if not watch.raised or met:
                    return
                met = True
                _raise_in(watch.thread, Stopped)  # in place of the one that may be on its way
                while True:
                    pass
            except Stopped:
                pass

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(_EVERY)
            now = time.monotonic()
            with self.masked:
                idle = 0 if self._watches else idle + 1
                if idle > 50:  # the next launch starts another thread
                    self._thread = None
                    return
                for watch in self._watches.values():
                    if watch.reason is None:
                        watch.reason = self._stop or watch.verdict(now)
                    if watch.reason is not None and now > watch.raised + _AGAIN:
                        watch.raised = now
                        _raise_in(watch.thread, Stopped)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    try:
        poll = select.poll()
        poll.register(sock, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed on this side
        return True
