"""The tests' own threads: results come back in order, errors are raised, and none hangs a test."""

from __future__ import annotations

import threading
import time

import pytest

from tests import threads
from tests.brief import refuses
from tests.threads import PATIENCE, in_threads, start, waits


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def work(n: int) -> None:
        if n:
            raise SystemExit(n)
        ended.append(n)

    refuses(SystemExit, "1", in_threads, work, range(3))
    assert ended == [0]


def test_a_thread_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 0.05)
    leave = threading.Event()
    refuses(TimeoutError, "", in_threads, lambda n: leave.wait(30), [1])
    hanging = start(leave.wait, 30)
    assert waits(hanging)
    leave.set()
    assert not waits(hanging, 30)
    assert hanging.result(0) is True


def test_whoever_has_the_result_knows_that_the_thread_has_ended() -> None:
    own = threading.local()

    class EndsLate:
        def __del__(self) -> None:
            time.sleep(0.05)

    def work() -> threading.Thread:
        own.value = EndsLate()
        return threading.current_thread()

    assert not start(work).result(PATIENCE).is_alive()
