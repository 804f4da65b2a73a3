"""Functions on threads of their own: results and errors come back, and none hangs a test; forked
processes; waits that end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PATIENCE: Final = 60
"""Seconds until a thread counts as one that hangs."""


class _Running(Future[R]):
    """Result of a thread. Once it is there, the thread has ended, and with it what belonged to it,
    such as its default arena."""

    thread: threading.Thread

    def result(self, timeout: float | None = None) -> R:
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self.thread.join(PATIENCE)


def start(work: Callable[..., R], *args: Any) -> Future[R]:
    """Call the function on a new thread. `result(PATIENCE)` waits for what it returns, raises what
    it raises, and `TimeoutError` if it hangs."""
    future: _Running[R] = _Running()

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    future.thread = threading.Thread(target=run, daemon=True)
    future.thread.start()
    return future


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The function of each item, all at once on a thread each. Raises what the first of them
    raised when all have ended, and `TimeoutError` if one hangs."""
    futures = [start(work, item) for item in items]
    wait(futures, PATIENCE)
    return [future.result(0) for future in futures]


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait till it is so. Raises `AssertionError` if it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.005)


@contextmanager
def taking_turns(seconds: float = 1e-6) -> Iterator[None]:
    """Let threads take turns as often as that in the block; by default as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_child(work: Callable[[], object], seconds: int = 20) -> int:
    """Return the exit status of a forked process that does the work: 0 if that returned a truth,
    SIGALRM if it takes longer than `seconds`."""
    with warnings.catch_warnings(action="ignore"):  # of other threads, and of JAX's
        child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)  # a watching thread would be counted among the threads
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Check that the block ends within that time."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def waits(future: Future[Any], seconds: float = 0.05) -> bool:
    """Return whether a thread is still at it after `seconds`."""
    return bool(wait([future], seconds).not_done)
