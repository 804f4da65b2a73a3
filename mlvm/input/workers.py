"""Workers of a pipeline: threads that prefetch batches, directly or through a process.

A worker claims the next batch in order, together with a slot. Batches are constructed in any order,
and committed to the queues in the original order. An error replaces the batch: a reader of the
queues gets all earlier batches and then the error.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from mlvm.core.errors import PipelineError, QueueClosedError, WorkerDiedError
from mlvm.core.types import Shape
from mlvm.input.batches import Batch, Recipe
from mlvm.input.queue import QueueTensor, Reservation
from mlvm.input.slot_memory import SlotMemory
from mlvm.machines.failure import Failure

_POLL: Final = 0.05  # seconds between checks of `closing` and for a silent process
_GRACE: Final = 1.0  # seconds that a process may need to exit
_PATIENCE: Final = 10.0  # seconds that `close` waits for threads in a dataset's code

Fill = Callable[[Batch, Reservation], None]


class Crew:
    """Workers that construct `batches`, each in a slot of the queue for the batch size.

    failure: error that stopped the workers early; the queues are closed.
    ready: False during start and end, and while a batch is taken.
    producers_waited: seconds that all workers have waited for free slots.
    """

    def __init__(
        self, recipe: Recipe, batches: Iterator[Batch], queues: Mapping[int, QueueTensor]
    ) -> None:
        self.queues = queues
        self.failure: Exception | None = None
        self.ready = False
        self.producers_waited = 0.0
        self.closing = False  # not an Event: an interrupted `set` may keep the lock
        self._pid = os.getpid()
        self._recipe = recipe
        self._numbered = enumerate(batches)
        self._claiming = threading.Lock()
        self._settling = threading.Lock()
        self._settled: dict[int, Reservation | Exception] = {}  # results of batches after `_next`
        self._next = 0  # the batch to be committed next
        self._threads: list[threading.Thread] = []

    def start(self, workers: int, *, processes: bool, name: str) -> None:
        """Start the threads, with `processes` each with a separate process."""
        if processes and os.name == "posix":
            # started first, as it unblocks signals that these threads block
            resource_tracker.ensure_running()
        for i in range(workers):
            thread = threading.Thread(
                target=self._work, args=(processes,), name=f"{name} worker {i}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self.ready = True

    def close(self) -> None:
        """Stop the workers; batches in the queues are lost. Idempotent.

        A thread that still runs code of the data set or the transform after ten seconds continues,
        and a `RuntimeWarning` is issued. A forked child has no worker threads, and does not touch
        the parent's slots and processes.
        """
        if os.getpid() != self._pid:
            return
        self.ready = False
        self.closing = True
        for queue in self.queues.values():
            queue.cancel(QueueClosedError(f"{queue.name} was closed"))
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            started = thread.ident is not None  # an interrupt may have occurred in `start`
            if started and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        if stuck:
            warnings.warn(
                f"threads still run after close: {', '.join(stuck)}; shorten the transform",
                RuntimeWarning,
                stacklevel=3,
            )

    def make_one(self) -> None:
        """Construct the next batch on the caller's thread.

        Raises `QueueFullError` if all slots are in use. An error during construction becomes the
        crew's failure.
        """
        self._step(self._fill_here)

    # --- inside ---

    def _work(self, processes: bool) -> None:
        with ExitStack() as stack:
            fill = self._fill_in_thread
            if processes:
                process = _WorkerProcess(self._recipe, self.queues, lambda: self.closing)
                stack.callback(process.end)
                fill = process.fill
            while self._step(fill):
                pass

    def _fill_here(self, batch: Batch, slot: Reservation) -> None:
        slot.resize(self._recipe.fill(batch, slot.arrays))

    def _fill_in_thread(self, batch: Batch, slot: Reservation) -> None:
        try:
            self._fill_here(batch, slot)
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit, which would stop the thread silently
            raise WorkerDiedError(
                f"a worker was stopped by {error!r}; correct the dataset or transform"
            ) from error

    def _step(self, fill: Fill) -> bool:
        """Claim a batch, construct it and settle it. Return False if no batch remains."""
        began = time.perf_counter()
        with self._claiming:
            number, batch = next(self._numbered, (0, None))
            if batch is None:
                return False
            queue = self.queues[batch.size]
            try:
                slot = queue.reserve()
            except Exception:
                if queue.closed:  # or cancelled
                    return False
                raise
            finally:
                self.producers_waited += time.perf_counter() - began
        try:
            fill(batch, slot)
        except _Closing:
            slot.cancel()
            return False
        except Exception as error:
            slot.cancel()
            self._settle(number, error)
        except BaseException:  # an interrupt of `make_one`
            slot.cancel()
            raise
        else:
            self._settle(number, slot)
        return True

    def _settle(self, number: int, result: Reservation | Exception) -> None:
        """Commit the batch, and later batches that have waited for it."""
        with self._settling:
            self._settled[number] = result
            while self.failure is None and self._next in self._settled:
                result = self._settled.pop(self._next)
                self._next += 1
                if isinstance(result, Exception):
                    self._fail(result)
                else:
                    try:
                        result.commit()
                    except QueueClosedError:  # after `close`
                        pass
                    except Exception as error:  # errors of writing to the VM
                        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stop early: readers get the elements of the queues, and then the error."""
        self.failure = error
        for queue in self.queues.values():
            queue.close()


# --- processes -----------------------------------------------------------------------


class _Closing(Exception):
    """Exception that the crew closes while a process works."""


class _WorkerProcess:
    """Process that constructs batches in shared slots for the thread that calls `fill`.

    It starts with the first batch. It exits when the connection is closed, by `end` or because this
    process exits. After that, `fill` raises `WorkerDiedError`.
    """

    def __init__(
        self, recipe: Recipe, queues: Mapping[int, QueueTensor], is_closing: Callable[[], bool]
    ) -> None:
        self._recipe = recipe
        self._slots = {size: queue.memory for size, queue in queues.items()}
        self._is_closing = is_closing
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def fill(self, batch: Batch, slot: Reservation) -> None:
        if self._connection is None:
            self._connection = self._started()
        try:
            self._connection.send((batch, slot.index))
            answer = self._answer(self._connection)
        except (EOFError, OSError):
            raise self._death(batch) from None
        if isinstance(answer, Failure):
            raise answer.error("a worker process", PipelineError)
        slot.resize(answer)

    def end(self) -> None:
        """Let the process exit, and kill it after a second."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(_GRACE)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process.close()

    def _started(self) -> Connection:
        # the parent handles interrupts, and stops all workers
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(self._recipe, self._slots, theirs), daemon=True
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise PipelineError(
                f"dataset or transform cannot be sent to a worker process: {error}; what is "
                f"pickled must be defined at the top of a module"
            ) from error
        finally:
            theirs.close()
        self._process = process
        return ours

    def _answer(self, connection: Connection) -> Failure | list[Shape]:
        """Receive the shapes of the batch, or a failure. Raises `EOFError` if the process died."""
        assert self._process is not None
        while not connection.poll(_POLL):
            if self._is_closing():
                raise _Closing
            if not self._process.is_alive() and not connection.poll():
                raise EOFError
        answer: Failure | list[Shape] = connection.recv()
        return answer

    def _death(self, batch: Batch) -> WorkerDiedError:
        assert self._process is not None
        self._process.join(_GRACE)
        return WorkerDiedError(
            f"a worker process exited with code {self._process.exitcode} while it constructed the "
            f"samples at positions {batch.start} to {batch.stop - 1} of epoch {batch.epoch}; a "
            f'script that starts processes does so under `if __name__ == "__main__":`'
        )


def _serve(recipe: Recipe, slots: Mapping[int, SlotMemory], connection: Connection) -> None:
    """Serve batches in a worker process until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            batch, index = connection.recv()
            answer: Failure | list[Shape]
            try:
                answer = recipe.fill(batch, slots[batch.size].slots[index])
            except Exception as error:
                answer = Failure.of(error)
            connection.send(answer)
