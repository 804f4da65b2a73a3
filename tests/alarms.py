"""Interrupts at arbitrary moments, as Ctrl-C comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from mlvm.core.collecting import uncollected
from tests.brief import refuses


class Interrupted(Exception):
    """Exception of an alarm, raised wherever the program is."""


def require_interruptible(seconds: float, call: Callable[..., Any], *args: Any) -> None:
    """Check that Ctrl-C after the given number of seconds ends a call within a second."""
    main, late = threading.main_thread().ident, list[float]()
    assert main is not None

    def interrupt() -> None:
        late.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    with uncollected():  # the collector swallows interrupts
        timer.start()
        refuses(KeyboardInterrupt, "", call, *args)
    timer.join()
    assert time.monotonic() - late[0] < 1


def interrupt_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Do the work, with an alarm after the given number of seconds; return whether it came in
    time."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with suppress(Interrupted):
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                work()
                return False
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
