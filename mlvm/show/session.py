"""What happens in a process while it is looked at: arenas, functions of VMs, waits for queues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from mlvm.arena.arena import Arena, on_made
from mlvm.core.observe import observed, on_wait
from mlvm.core.protocol import VMProtocol
from mlvm.core.vm import VM
from mlvm.show.record import record_all
from mlvm.show.trace import Trace

MOST_TENSORS: Final = 20_000
"""So many of each arena that have ended are kept, the latest."""

MOST_SPANS: Final = 100_000
"""So many of each VM are kept, and so many waits, the latest."""


class Wait(NamedTuple):
    """A thread has waited for `what` of a queue, between two times in nanoseconds of
    `time.perf_counter_ns`."""

    queue: str
    what: str
    thread: str
    began: int
    ended: int


class Session:
    """What was recorded, between two times in nanoseconds of `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.traces: list[Trace] = []
        self.waits: deque[Wait] = deque(maxlen=MOST_SPANS)
        self.began = self.ended = time.perf_counter_ns()


@contextmanager
def all_recorded() -> Iterator[Session]:
    """Record every arena that is made inside the block, every VM that it is made on, and every wait
    for a queue tensor."""
    session, seen = Session(), set[int]()

    with ExitStack() as stack:

        def begin(arena: Arena) -> None:
            if id(arena.vm) not in seen and arena.vm.stands_for is arena.vm:
                seen.add(id(arena.vm))
                session.traces.append(stack.enter_context(_traced(arena.vm)))

        def waited(queue: str, what: str, began: float) -> None:
            span = round(began * 1e9), time.perf_counter_ns()
            session.waits.append(Wait(queue, what, threading.current_thread().name, *span))

        session.arenas = stack.enter_context(record_all(most=MOST_TENSORS // 2))
        on_made.append(begin)
        stack.callback(on_made.remove, begin)
        on_wait.append(waited)
        stack.callback(on_wait.remove, waited)
        try:
            yield session
        finally:
            session.ended = time.perf_counter_ns()


@contextmanager
def _traced(vm: VMProtocol) -> Iterator[Trace]:
    """Time what the VM runs, or, of one elsewhere, the calls that it answers."""
    seen = Trace(vm.name, most=MOST_SPANS)
    if isinstance(vm, VM):
        with vm.instrumented(seen), observed(vm, launch=seen.launching):
            yield seen
    else:
        with observed(vm, **seen.layers()):
            yield seen
