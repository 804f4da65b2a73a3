"""Locks of VMs: the one of C, and the RLock of Python that defines it."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from mlvm.core.locks import is_mine, new_lock
from mlvm.machines.native.extension import EXTENSION
from tests.alarms import interrupt_after
from tests.threads import PATIENCE, in_child, in_threads, start

KINDS: list[Callable[[], Any]] = [threading.RLock, *([] if EXTENSION is None else [EXTENSION.Lock])]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__module__)
def lock(request: pytest.FixtureRequest) -> Any:
    return new_lock(request.param)


def _held_by(lock: Any, ends: threading.Event) -> Any:
    """Let another thread acquire the lock until the event; return its future."""
    begins = threading.Event()

    def hold() -> None:
        with lock:
            begins.set()
            ends.wait(PATIENCE)

    future = start(hold)
    assert begins.wait(PATIENCE)
    return future


def test_another_thread_waits_for_the_last_release(lock: Any) -> None:
    assert not is_mine(lock)
    assert lock.acquire()
    assert lock.acquire(True, 1.0)
    with lock:
        assert is_mine(lock)
        assert lock.acquire(blocking=False)
        assert not start(is_mine, lock).result(PATIENCE)
        waiting = start(lock.acquire)
    for _ in range(3):
        assert not start(lock.acquire, False).result(PATIENCE)
        assert not waiting.done()
        lock.release()
    assert waiting.result(PATIENCE)
    assert not is_mine(lock)


def test_only_the_owner_releases(lock: Any) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
            lock.release()
        with lock, pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
            start(lock.release).result(PATIENCE)


@pytest.mark.parametrize("args", [(False, 1.0), (True, -2.0), (True, float("nan"))])
def test_invalid_timeouts(lock: Any, args: tuple[bool, float]) -> None:
    with pytest.raises(ValueError):
        lock.acquire(*args)
    assert not is_mine(lock)


def test_a_wait_ends_after_its_timeout(lock: Any) -> None:
    ends = threading.Event()
    holder = _held_by(lock, ends)
    assert not lock.acquire(timeout=0.02)
    ends.set()
    assert lock.acquire(timeout=PATIENCE)
    lock.release()
    holder.result(PATIENCE)


def test_one_thread_at_a_time(lock: Any) -> None:
    """Threads that wait, give up, and hold the lock while others run."""
    inside, most, total = 0, 0, [0]

    def work(number: int) -> None:
        nonlocal inside, most
        for i in range(300):
            if not lock.acquire(timeout=(-1, 1e-5, PATIENCE)[(i + number) % 3]):
                continue
            with lock:
                inside += 1
                most = max(most, inside)
                if i % 7 == 0:
                    time.sleep(0)
                total[0] += 1
                inside -= 1
            lock.release()

    in_threads(work, range(6))
    assert most == 1
    assert total[0] >= 6 * 200
    assert lock.acquire(False)
    assert not inside


def test_a_signal_ends_a_wait(lock: Any) -> None:
    ends = threading.Event()
    holder = _held_by(lock, ends)
    for _ in range(3):
        assert interrupt_after(0.02, lock.acquire)
        assert not is_mine(lock)
    ends.set()
    with lock:
        assert is_mine(lock)
    holder.result(PATIENCE)


def test_a_wait_continues_after_a_handler_that_returns(lock: Any) -> None:
    ends, calls = threading.Event(), []

    def handler(*_: object) -> None:
        calls.append(lock.acquire(False))
        ends.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        holder = _held_by(lock, ends)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with lock:
            assert is_mine(lock)
            assert calls == [False]
        holder.result(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_frees_the_locks_of_others(lock: Any) -> None:
    mine = new_lock(type(lock))
    ends = threading.Event()
    holder = _held_by(lock, ends)
    waiting = start(lock.acquire, True, PATIENCE)
    with mine:
        wanting = start(mine.acquire, True, PATIENCE)

        def are_free() -> bool:
            is_ours = lock.acquire(False) and is_mine(mine)
            lock.release()
            mine.release()
            return is_ours and all(start(each.acquire).result(PATIENCE) for each in (lock, mine))

        assert in_child(are_free) == 0
    ends.set()
    holder.result(PATIENCE)
    assert waiting.result(PATIENCE)
    assert wanting.result(PATIENCE)


def test_a_lock_is_freed(lock: Any) -> None:
    gone = weakref.ref(new_lock(type(lock)))
    assert gone() is None
