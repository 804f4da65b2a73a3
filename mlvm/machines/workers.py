"""Scheduler of `ml.VM(workers=n)`, which runs ops asynchronously.

The machine does not wait for an op. It creates a task from the kernel and the array for the result,
and continues. This array is a future. A jump, an output, a host function or a `read` that needs the
values waits for the task that writes them.

Tasks are ordered only by the bytes that they access. A read waits for earlier writes, and a write
waits for earlier reads and writes (the hazards RAW, WAR and WAW of Hennessy & Patterson, Computer
Architecture). Therefore results have the same bits for any number of workers. A failed task marks
the bytes of the result as bad: reading them raises the same error until they are written again. The
machine waits if too many tasks, or bytes, are pending.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.machine.callee import OpFresh, OpInto, Value, WritesInto
from mlvm.core.machine.functions import Binding
from mlvm.core.op import Attributes, Kernel
from mlvm.core.ops import half
from mlvm.core.types import Array, TensorType, aligned_array, root
from mlvm.machines.bad_bytes import BadBytes, ByteRange, again


class _Task:
    """Kernel and arrays (the first is written), to run after the tasks that it depends on."""

    __slots__ = ("blame", "done", "followers", "memory", "nbytes", "reads", "run", "unmet", "write")

    def __init__(
        self, run: Callable[[], None], arrays: list[Array], blame: Callable[[Exception], object]
    ) -> None:
        self.run = run
        self.write, *self.reads = map(ByteRange.of, arrays)
        self.nbytes = arrays[0].nbytes
        self.memory = weakref.ref(root(arrays[0]))
        self.blame = blame
        self.unmet = 0
        self.followers: list[_Task] = []
        self.done = threading.Event()

    def touches(self, span: ByteRange, writing: bool) -> bool:
        """Return whether a read (or, if `writing`, a write) of the span must wait for the task."""
        return span.meets(self.write) or (writing and any(map(span.meets, self.reads)))


class Workers:
    """Scheduler that runs tasks on worker threads, ordered only by the bytes that they access."""

    def __init__(self, workers: int, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(
            workers, thread_name_prefix=name, initializer=np.seterr, initargs=("ignore",)
        )
        self._change = threading.Condition()
        self._open: list[_Task] = []  # pending tasks, in order
        self._nbytes = 0  # bytes that the pending tasks write
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

        Ops run asynchronously. Any other function runs here, after the tasks that access the
        parameters. `blame` is called with the error of a task.
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
        """Wait until the arrays are written; if `writing`, also until no task reads them.

        Raises the error of a task that should have written them.
        """
        spans = [ByteRange.of(array) for array in arrays]
        self._wait(spans, writing)
        with self._change:
            error = self._bad.error(spans)
        if error is not None:
            raise again(error)

    def overwrite(self, array: Array) -> None:
        """Wait until no task reads or writes the array, and unmark bad bytes."""
        span = ByteRange.of(array)
        self._wait([span], writing=True)
        with self._change:
            self._bad.heal(span)

    def drain(self) -> None:
        """Wait until all current tasks are complete; other threads may submit more."""
        for task in [*self._open]:
            task.done.wait()

    def synchronize(self) -> None:
        """Wait until all current tasks are complete.

        Raises the first error that still has bad bytes, and clears all of these errors.
        """
        self.drain()
        with self._change:
            error, self._bad = self._bad.first_error(), BadBytes()
        if error is not None:
            raise again(error)

    def close(self) -> None:
        """Finish all tasks, then stop the workers; refuse new tasks. Idempotent."""
        with self._change:
            self._closed = True
        self.drain()
        self._pool.shutdown(wait=True)

    def _wait(self, spans: list[ByteRange], writing: bool) -> None:
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
            # at most 64 pending tasks, with 256 MiB of results
            while self._open and (len(self._open) >= 64 or self._nbytes + task.nbytes > 1 << 28):
                self._change.wait()
            if self._closed:
                raise MachineError(
                    f"{self._name} is closed: its workers have stopped; create a new VM"
                )
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
        """Run the task on a worker unless it reads bad bytes, then release dependent tasks."""
        with self._change:
            error = self._bad.error(task.reads)
        try:
            if error is None:
                task.run()
        except BaseException as raised:  # a worker has no caller that could handle the error
            error = raised.with_traceback(None)  # frames keep arrays alive
            if isinstance(raised, Exception):
                task.blame(raised)
        finally:
            task.run = task.blame = _nothing  # these keep arrays alive
            with self._change:
                self._finish(task, error)
            task.done.set()
            del error  # the traceback refers to this frame

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
