"""Tests of cached properties without locks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlvm.core.locks import cached_property


class Slow:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.calls = 0

    @cached_property
    def value(self) -> int:
        self.wait()
        self.calls += 1
        return self.calls


def test_a_cached_property_is_computed_while_another_thread_computes_one() -> None:
    """With a lock per property, a forked child would wait for a thread that it does not have."""
    has_begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_end.wait(30)

    slow, quick = Slow(wait), Slow(lambda: None)
    first = threading.Thread(target=lambda: slow.value)
    second = threading.Thread(target=lambda: quick.value, daemon=True)
    first.start()
    assert has_begun.wait(30)
    second.start()
    second.join(10)
    is_blocked = second.is_alive()
    may_end.set()
    first.join(30)
    assert not is_blocked
    assert (quick.value, quick.calls, slow.value, slow.calls) == (1, 1, 1, 1)
    assert isinstance(Slow.value, cached_property)
