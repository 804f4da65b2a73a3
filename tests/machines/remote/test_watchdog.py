"""The end of a launch comes in time, once, and leaves nothing behind."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from mlvm.core.errors import LimitExceededError
from mlvm.machines.remote.watchdog import Watchdog
from tests.threads import PATIENCE, in_threads, start


def spin(seconds: float) -> int:
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        rounds += 1
    return rounds


def test_what_swallows_it_gets_it_again() -> None:
    def stubborn() -> None:
        for _ in range(3):
            try:
                spin(60)
            except LimitExceededError:
                swallowed.append(1)
        spin(60)

    swallowed: list[int] = []
    with pytest.raises(LimitExceededError), Watchdog().watch(0.05):
        stubborn()
    assert len(swallowed) == 3


def test_nothing_comes_after_the_end() -> None:
    """Many blocks that end just when their time does: the error comes within them or never."""

    def work(n: int) -> int:
        ended = 0
        for k in range(15):
            try:
                with dog.watch(0.02):
                    spin(0.005 + (n * 15 + k) % 40 * 0.001)
            except LimitExceededError:
                ended += 1
            spin(0.002)
        return ended

    dog = Watchdog()
    ended = in_threads(work, range(3))
    assert 0 < sum(ended) < 45


def test_a_profiler_runs_on_after_it() -> None:
    """Python 3.11 hangs under a profiler where an error was announced and then taken back."""

    def profiled() -> int:
        sys.setprofile(lambda *_: None)
        try:
            return spin(0.01)
        finally:
            sys.setprofile(None)

    dog = Watchdog()
    with dog.watch(60):
        spin(0.01)
    assert start(profiled).result(PATIENCE) > 0
    with pytest.raises(LimitExceededError), dog.watch(0.02):
        spin(60)
    assert start(profiled).result(PATIENCE) > 0


def test_a_stop_ends_all_that_runs_and_comes() -> None:
    dog = Watchdog()
    threading.Timer(0.05, dog.stop, ["the server stops"]).start()
    for _ in range(2):
        with pytest.raises(LimitExceededError, match="the server stops"), dog.watch(60):
            spin(60)


def test_what_is_masked_stays_whole() -> None:
    dog = Watchdog()
    whole = []

    def work() -> None:
        with dog.masked:
            spin(0.2)
            whole.append(1)
        spin(60)

    with pytest.raises(LimitExceededError), dog.watch(0.05):
        work()
    assert whole
