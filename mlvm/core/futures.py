"""Ops that run beside the program: what `VM(workers=n)` adds to the machine.

The machine does not wait for an op: it hands the kernel over, with the array that the result
will be in, and goes on. Such an array is a future. Whoever needs its values waits for the
task that writes them: a jump, an output, a host function, `read`.

Tasks are ordered by the bytes they touch and by nothing else: a read after the write before
it, a write after the reads and writes before it (the hazards RAW, WAR and WAW of Hennessy &
Patterson, Computer Architecture). So results have the same bits for any number of workers. A
task that fails poisons the bytes it would have written: what reads them fails with the same
error, until something else is written there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mlvm.core.functions import OpFresh, OpInto, Slot, Value
from mlvm.core.op import Attributes, Kernel
from mlvm.core.types import Array, TensorType, aligned_array


class Span(NamedTuple):
    """The bytes from address `start` up to `end`."""

    start: int
    end: int

    @staticmethod
    def of(array: Array) -> Span:
        start = array.__array_interface__["data"][0]
        return Span(start, start + array.nbytes)

    def meets(self, others: Iterable[Span]) -> bool:
        return any(self.start < other.end and other.start < self.end for other in others)


class Task:
    """A kernel to run on arrays once the tasks it waits for are done."""

    __slots__ = (
        "blame",
        "done",
        "error",
        "followers",
        "reads",
        "run",
        "unmet",
        "writes",
    )

    def __init__(
        self,
        run: Callable[[], None],
        reads: list[Span],
        writes: list[Span],
        blame: Callable[[Exception], object],
    ) -> None:
        self.run = run
        self.reads = reads
        self.writes = writes
        self.blame = blame
        self.error: Exception | None = None
        self.unmet = 0
        self.followers: list[Task] = []
        self.done = threading.Event()


class Scheduler:
    """Runs tasks on worker threads, in any order that the bytes they touch allow."""

    def __init__(self, workers: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(
            workers, thread_name_prefix=name, initializer=np.seterr, initargs=("ignore",)
        )
        self._lock = threading.Lock()
        self._open: list[Task] = []  # not done yet, in the order they came
        self._failed: list[Task] = []  # their bytes are poisoned

    def call(
        self,
        slot: Slot,
        params: list[Value],
        attributes: Attributes,
        blame: Callable[[Exception], object],
    ) -> Sequence[Value]:
        """Call a function of the table: an op without waiting for it, others at once, when all
        that touches their parameters is done. `blame` is told of an error when it happens."""
        callee = slot.callee
        arrays = [x for x in params if isinstance(x, np.ndarray)]
        if isinstance(callee, OpInto):
            self._submit(slot.watched(callee.op.kernel), arrays, attributes, blame)
            return ()
        if isinstance(callee, OpFresh) and not callee.op.dynamic:
            type = callee.op.infer([TensorType.of(x) for x in arrays], attributes)
            assert type is not None  # not dynamic
            out = aligned_array(type)
            self._submit(slot.watched(callee.op.kernel), [out, *arrays], attributes, blame)
            return (out,)
        self.wait(arrays, writing=True)
        return slot.call(params, attributes)

    def wait(self, arrays: Iterable[Array], *, writing: bool = False) -> None:
        """Until the values of the arrays are there; if `writing`, also until nobody reads them.

        Raises the error of a task that was to write them.
        """
        spans = [Span.of(array) for array in arrays]
        self._wait(spans, writing)
        with self._lock:
            for task in self._failed:
                if any(span.meets(task.writes) for span in spans):
                    raise _again(task.error)

    def overwrite(self, array: Array) -> None:
        """Until nobody reads or writes the array; what was poisoned in it counts as whole."""
        span = Span.of(array)
        self._wait([span], writing=True)
        with self._lock:
            self._heal([span])

    def _wait(self, spans: list[Span], writing: bool) -> None:
        with self._lock:
            tasks = [
                task
                for task in self._open
                if any(s.meets(task.writes) or (writing and s.meets(task.reads)) for s in spans)
            ]
        for task in tasks:
            task.done.wait()

    def drain(self) -> None:
        """Until all tasks are done."""
        with self._lock:
            tasks = list(self._open)
        for task in tasks:
            task.done.wait()

    def synchronize(self) -> None:
        """Until all tasks are done. Raises the first error whose bytes are still poisoned, and
        forgets them all."""
        self.drain()
        with self._lock:
            failed, self._failed = self._failed, []
        if failed:
            raise _again(failed[0].error)

    def close(self) -> None:
        """End the workers when they have done what they were given. Idempotent."""
        self._pool.shutdown(wait=True)

    def _submit(
        self,
        kernel: Kernel,
        arrays: list[Array],
        attributes: Attributes,
        blame: Callable[[Exception], object],
    ) -> None:
        spans = [Span.of(array) for array in arrays]
        reads, writes = spans[1:], spans[:1]
        task = Task(lambda: kernel(*arrays, **attributes), reads, writes, blame)
        with self._lock:
            for other in self._open:
                if any(s.meets(other.writes) for s in spans) or writes[0].meets(other.reads):
                    other.followers.append(task)
                    task.unmet += 1
            for other in self._failed:
                if any(s.meets(other.writes) for s in reads):
                    task.error = other.error
            self._open.append(task)
            ready = task.unmet == 0
        if ready:
            self._pool.submit(self._run, task)

    def _run(self, task: Task) -> None:
        if task.error is None:
            try:
                task.run()
            except Exception as error:
                task.blame(error)
                task.error = error
        ready = []
        with self._lock:
            self._open.remove(task)
            self._heal(task.writes)
            if task.error is not None:
                self._failed.append(task)
            for other in task.followers:
                other.unmet -= 1
                if task.error is not None and any(s.meets(task.writes) for s in other.reads):
                    other.error = other.error or task.error
                if not other.unmet:
                    ready.append(other)
        task.run = _nothing  # drops the arrays
        task.done.set()
        for other in ready:
            self._pool.submit(self._run, other)

    def _heal(self, spans: list[Span]) -> None:
        self._failed = [
            task
            for task in self._failed
            if not all(
                any(s.start <= w.start and w.end <= s.end for s in spans) for w in task.writes
            )
        ]


def _nothing() -> None:
    """What is left of a task that is done."""


def _again(error: Exception | None) -> Exception:
    """An error to raise once more, without the traceback of the last time."""
    assert error is not None
    return error.with_traceback(None)
