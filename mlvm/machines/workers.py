"""Scheduler of `ml.VM(workers=n)`, which runs ops asynchronously.

The machine does not wait for an op. It makes a task of the kernel and the array for the result, and
continues. Such an array is a future. A jump, an output, a host function or `read` that needs its
values waits for the task that writes them.

Tasks are ordered only by the bytes they access. A read waits for the writes before it, a write for
the reads and writes before it (the hazards RAW, WAR and WAW of Hennessy & Patterson, Computer
Architecture). So results have the same bits for any number of workers. A task that fails marks its
bytes as bad: reads of them raise the same error, until they are written again. The machine waits
when too many tasks, or bytes, are pending.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.machine.callee import OpFresh, OpInto, Value, WritesInto
from mlvm.core.machine.functions import Binding
from mlvm.core.op import Attributes, Kernel
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType, aligned_array, root
from mlvm.machines.bad_bytes import BadBytes, Span, again

_MOST_TASKS: Final = 64
_MOST_BYTES: Final = 1 << 28  # maximum bytes of pending results


class _Task:
    """Kernel to run on arrays, the first of which it writes, after the tasks that it depends on."""

    __slots__ = ("blame", "done", "followers", "memory", "nbytes", "reads", "run", "unmet", "write")

    def __init__(
        self, run: Callable[[], None], arrays: list[Array], blame: Callable[[Exception], object]
    ) -> None:
        self.run = run
        self.write, *self.reads = map(Span.of, arrays)
        self.nbytes = arrays[0].nbytes
        self.memory = weakref.ref(root(arrays[0]))
        self.blame = blame
        self.unmet = 0
        self.followers: list[_Task] = []
        self.done = threading.Event()

    def touches(self, span: Span, writing: bool) -> bool:
        """Return True if a read of the span (a write, if `writing`) has to wait for the task."""
        return span.meets(self.write) or (writing and any(map(span.meets, self.reads)))


class Workers:
    """Scheduler that runs tasks on worker threads, in any order that the bytes they touch allow."""

    def __init__(self, workers: int, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(
            workers, thread_name_prefix=name, initializer=np.seterr, initargs=("ignore",)
        )
        self._change = threading.Condition()
        self._open: list[_Task] = []  # pending tasks, in order
        self._nbytes = 0  # bytes that these write
        self._bad = BadBytes()
        self._closed = False

    def call(
        self,
        binding: Binding,
        params: Sequence[Value],
        attributes: Attributes,
        blame: Callable[[Exception], object],
    ) -> Sequence[Value]:
        """Call a function of the table.

        An op is not waited for. Any other function runs here, after the tasks that touch its
        parameters. `blame` is called with an error of a task.
        """
        callee = binding.callee
        arrays = [x for x in params if isinstance(x, np.ndarray)]
        if isinstance(callee, OpInto):
            kernel = half.suited(callee.op, callee.kernel, arrays)
            self._submit(binding.watched(kernel), arrays, attributes, blame)
            return ()
        if isinstance(callee, OpFresh) and not callee.op.dynamic and binding.instrument is None:
            type = callee.op.infer([TensorType.of(x) for x in arrays], attributes)
            assert type is not None  # static shape
            out = aligned_array(type)
            kernel = half.suited(callee.op, callee.fill, (out, *arrays))
            self._submit(kernel, [out, *arrays], attributes, blame)
            return (out,)
        if isinstance(callee, WritesInto):
            written = callee.writes(attributes)
            self.wait(arrays[written:])
            for array in arrays[:written]:
                self.overwrite(array)
        else:
            self.wait(arrays, writing=True)
        return binding.call(params, attributes)

    def wait(self, arrays: Iterable[Array], *, writing: bool = False) -> None:
        """Wait until the arrays have their values; if `writing`, also until no task reads them.

        Raises the error of a task that should have written them.
        """
        spans = [Span.of(array) for array in arrays]
        self._wait(spans, writing)
        with self._change:
            error = self._bad.error(spans)
        if error is not None:
            raise again(error)

    def overwrite(self, array: Array) -> None:
        """Wait until no task reads or writes the array. Its bytes are not bad any more."""
        span = Span.of(array)
        self._wait([span], writing=True)
        with self._change:
            self._bad.heal(span)

    def drain(self) -> None:
        """Wait until all tasks so far are done. Another thread may submit more meanwhile."""
        for task in [*self._open]:
            task.done.wait()

    def synchronize(self) -> None:
        """Wait until all tasks so far are done.

        Raises the first error whose bytes are still bad, and forgets all such errors.
        """
        self.drain()
        with self._change:
            error, self._bad = self._bad.first_error(), BadBytes()
        if error is not None:
            raise again(error)

    def close(self) -> None:
        """End the workers after their tasks; refuse new ones. Idempotent."""
        with self._change:
            self._closed = True
        self.drain()
        self._pool.shutdown(wait=True)

    def _wait(self, spans: list[Span], writing: bool) -> None:
        with self._change:
            tasks = [x for x in self._open if any(x.touches(span, writing) for span in spans)]
        for task in tasks:
            task.done.wait()

    def _submit(
        self,
        kernel: Kernel,
        arrays: list[Array],
        attributes: Attributes,
        blame: Callable[[Exception], object],
    ) -> None:
        task = _Task(lambda: kernel(*arrays, **attributes), arrays, blame)
        with self._change:
            while self._open and (
                len(self._open) >= _MOST_TASKS or self._nbytes + task.nbytes > _MOST_BYTES
            ):
                self._change.wait()
            if self._closed:
                raise MachineError(f"{self._name} is closed: its workers have stopped")
            for other in self._open:
                if other.touches(task.write, True) or any(
                    other.touches(span, False) for span in task.reads
                ):
                    other.followers.append(task)
                    task.unmet += 1
            self._open.append(task)
            self._nbytes += task.nbytes
            if not task.unmet:
                self._pool.submit(self._run, task)

    def _run(self, task: _Task) -> None:
        """Run the task on a worker unless it reads bad bytes, then release its followers."""
        with self._change:
            error = self._bad.error(task.reads)
        try:
            if error is None:
                task.run()
        except BaseException as raised:  # a worker has no caller that could handle it
            error = raised.with_traceback(None)  # frames keep arrays alive
            if isinstance(raised, Exception):
                task.blame(raised)
        finally:
            task.run = task.blame = _nothing  # these keep arrays alive
            with self._change:
                self._finish(task, error)
            task.done.set()
            del error  # its traceback refers to this frame

    def _finish(self, task: _Task, error: BaseException | None) -> None:
        self._open.remove(task)
        self._nbytes -= task.nbytes
        self._bad.heal(task.write)
        if error is not None:
            self._bad.add(task.write, error, task.memory)
        for follower in task.followers:
            follower.unmet -= 1
            if not follower.unmet:
                self._pool.submit(self._run, follower)
        self._change.notify_all()


def _nothing(*_: object) -> None:
    """Do nothing: replaces the functions of a finished task."""
