"""Interrupts at arbitrary moments, as Ctrl-C comes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest


class Interrupted(Exception):
    """Exception of an alarm, raised wherever the program is."""


@pytest.fixture
def alarms_interrupt() -> Iterator[None]:
    """Alarms raise `Interrupted` in the main thread."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt_after(seconds: float, work: Callable[[], Any]) -> bool:
    """Do the work, with an alarm after the given number of seconds; return whether it came in
    time."""
    with suppress(Interrupted):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return True
