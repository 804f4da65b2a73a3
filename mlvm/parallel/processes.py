"""Group of processes on this host.

Each process has a VM. A server that has imported mlvm once forks the process, so it starts quickly.
It receives tasks through a connection, and exits when the connection is closed: when the group is
closed, or this process exits. The members communicate through a board in shared memory. The memory
has no name, so it is freed with the last process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection as connections
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeoutError, brief
from mlvm.machines.failure import Failure, killed_by
from mlvm.machines.local import LocalVM
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.board import Bells, Board, BoardCommunicator
from mlvm.parallel.communicator import brief_error
from mlvm.parallel.group import (
    AnyGroup,
    Seat,
    Task,
    checked_cores,
    checked_timeout,
    cores_here,
    name_of,
    one_at_a_time,
)
from mlvm.parallel.outcome import Outcome, results_of
from mlvm.parallel.pickling import packed, packed_failure, pickled, unpacked

R = TypeVar("R")

_GRACE: Final = 1.0
"""Seconds that an interrupt, or `close`, waits for members that are computing."""

_LAST: Final = 3.0
"""Seconds that the members have to finish after one of them has died."""


class ProcessGroup(AnyGroup):
    """Group of `size` processes on this host, each with a VM and one BLAS thread.

    Tasks and results are pickled. Functions at the top level of a module are pickled by name, other
    functions by cloudpickle (`pip install "mlvm[processes]"`). A script creates such a group under
    `if __name__ == "__main__":`. If a member dies or is late, all members are stopped and the group
    is closed.

    Arguments:
        size: the number of processes, 1 to 256.
        cores: the core for the process of each member (Linux only). By default, processes are not
            pinned.
        timeout: the longest time in seconds that a member waits for another member without
            progress, and that `run` waits for the other members after the first has finished. By
            default, there is no limit.

    Raises `GroupError` if the size or cores are invalid, or a process does not start;
    `MissingExtraError` without threadpoolctl.

    Invalid calls:
        ml.parallel.ProcessGroup(0)  # GroupError
    """

    def __init__(
        self, size: int, *, cores: Sequence[int] | None = None, timeout: float | None = None
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 256:
            raise GroupError(f"a group must have 1 to 256 processes, got {brief(size)}")
        if os.name != "posix":
            raise GroupError(
                "groups of processes need a POSIX system; use threads: ml.parallel.Group(2)"
            )
        pins = checked_cores(cores, size)
        self.timeout = checked_timeout(timeout)
        one_blas_thread.prepare()
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(size)])
        self._board = Board(size, spins=size <= cores_here())
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self._bells = Bells([reader for reader, _ in pipes], [writer for _, writer in pipes])
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._end = weakref.finalize(self, _end, self._processes, self._connections, self._bells)
        common = self._names, self._board, self._bells, timeout, dict(os.environ)
        _start_server()  # the server unblocks the signals that are blocked here
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for the parent only
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                process = context.Process(
                    target=_serve,
                    args=(rank, theirs, pins[rank], *common),
                    name=self._names[rank],
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._each([_nothing] * size)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the members, in order of rank."""
        return [process.pid for process in self._processes]

    @one_at_a_time
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        first = pickled(tasks[0])
        messages = [first if task is tasks[0] else pickled(task) for task in tasks]
        self._board.clear()
        run = _Run(self)
        try:
            run.send(messages)
            run.collect(None)
        except BaseException as error:  # Ctrl-C
            run.end(GroupError(f"the run was ended from outside: {brief_error(error)}"))
            run.collect(_GRACE)
            raise
        finally:
            if run.dead or run.missing:
                self.close()
        return run.results()

    def close(self) -> None:
        """Stop the processes. Kill those that still compute after a second. Idempotent."""
        self._closed = True
        self._end()


class _Run:
    """Parent's view of a run: the members that have answered, and those that have died."""

    def __init__(self, group: ProcessGroup) -> None:
        self._names = group._names
        self._processes = group._processes
        self._connections = group._connections
        self._board = group._board
        self._bells = group._bells
        self._timeout = group.timeout
        self._outcomes: dict[int, Outcome] = {}
        self._last = 0.0  # when the last member has answered
        self.missing = set(range(group.size))
        self.dead: GroupError | None = None

    def send(self, messages: Sequence[bytes]) -> None:
        """Send a task to each member."""
        for rank, message in enumerate(messages):
            with suppress(OSError):  # the member has died; `collect` detects it
                self._connections[rank].send_bytes(message)

    def collect(self, seconds: float | None) -> None:
        """Wait for all members, at most `seconds`. After a death, wait some seconds more."""
        until = None if seconds is None else time.monotonic() + seconds
        while self.missing:
            limit = until
            if until is None and self._timeout is not None and self._outcomes:
                limit = self._last + self._timeout
            remaining = None if limit is None else limit - time.monotonic()
            if remaining is not None and remaining <= 0:
                if until is None:
                    late = ", ".join(self._names[rank] for rank in sorted(self.missing))
                    self.dead = GroupTimeoutError(
                        f"{late} did not finish within {self._timeout:g} s"
                    )
                    self.end(self.dead)
                return
            watched: list[Any] = [self._connections[rank] for rank in self.missing]
            watched += [self._processes[rank].sentinel for rank in self.missing]
            ready = connections.wait(watched, remaining)
            for rank in sorted(self.missing):
                if self._connections[rank] in ready:
                    self._receive(rank)
                elif self._processes[rank].sentinel in ready:
                    if self._connections[rank].poll():
                        self._receive(rank)
                    else:
                        self._bury(rank)
            if until is None and (self.dead is not None or self._board.is_late):
                until = time.monotonic() + (_LAST if self.dead is not None else _GRACE)

    def end(self, error: GroupError) -> None:
        """Abort the run. Members that wait now or arrive later raise the error."""
        self._board.end_run(self._board.size, error)
        for rank in range(self._board.size):
            self._bells.ring(rank)

    def results(self) -> list[Any]:
        """Return the results of the members. Raises the first error of a member."""
        if self.dead is not None:
            # a copy, because the traceback of the kept error would keep all frames
            raise type(self.dead)(str(self.dead))
        return results_of(self._outcomes, self._names)

    def _receive(self, rank: int) -> None:
        try:
            message = self._connections[rank].recv_bytes()
        except (EOFError, OSError):
            self._bury(rank)
            return
        self.missing.discard(rank)
        self._last = time.monotonic()
        try:
            self._outcomes[rank] = unpacked(message)
        except Exception as error:  # raised by a __setstate__ or an import
            failure = GroupError(f"what {self._names[rank]} returned cannot be read: {error}")
            self._outcomes[rank] = Outcome(None, Failure.of(failure), True)

    def _bury(self, rank: int) -> None:
        self.missing.discard(rank)
        process = self._processes[rank]
        process.join(_GRACE)
        code = process.exitcode
        how = f"ended with exit code {code}" if code is None or code >= 0 else killed_by(code)
        if self.dead is None:
            if code == 1:
                how += '; a script that starts processes does so under `if __name__ == "__main__":`'
            self.dead = GroupError(f"{self._names[rank]}, process {process.pid}, {how}")
            self.end(self.dead)


def _end(processes: Sequence[BaseProcess], connections: Sequence[Connection], bells: Bells) -> None:
    """Close the connections, so that the processes exit. Kill them after a second."""
    for connection in connections:
        connection.close()
    until = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    bells.close()


def _start_server() -> None:
    """Start the server that forks the members, unless it runs.

    It imports the modules of mlvm that this process has imported, from the same path. Python 3.11
    does not pass the path itself.
    """
    forkserver.set_forkserver_preload([each for each in sys.modules if each.startswith("mlvm.")])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _nothing(rank: int, vm: LocalVM) -> None:
    """Do nothing. The first task shows that the process has started."""


# --- in a member's process -----------------------------------------------------------


def _serve(
    rank: int,
    connection: Connection,
    core: int | None,
    names: Sequence[str],
    board: Board,
    bells: Bells,
    timeout: float | None,
    environ: dict[str, str],
) -> None:
    """Run a member's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It may start processes, such as a pipeline's workers. `_listen` makes it exit.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.clear()  # the server has the environment of its start
    os.environ.update(environ)
    np.random.seed()
    if core is not None:
        os.sched_setaffinity(0, {core})
    tasks: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    one_blas_thread.prepare()
    with one_blas_thread.limited():
        seat = Seat(LocalVM(f"vm{rank}"), rank, len(names), timeout)
        while (message := tasks.get()) is not None:
            communicator = BoardCommunicator(board, names, rank, bells)
            answer = _done(seat, communicator, message)
            with suppress(OSError):  # the parent has exited; `_listen` detects it
                connection.send_bytes(answer)
            del answer, message, communicator


def _listen(connection: Connection, tasks: SimpleQueue[bytes | None]) -> None:
    """Receive tasks, and exit when the connection is closed."""
    with suppress(EOFError, OSError):
        while True:
            tasks.put(connection.recv_bytes())
    tasks.put(None)
    time.sleep(_GRACE)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _done(seat: Seat, communicator: BoardCommunicator, message: bytes) -> bytes:
    """Run the task, and return the outcome as bytes."""
    try:
        return seat.do(lambda rank, vm: packed(pickle.loads(message)(rank, vm)), communicator)
    except BaseException as error:  # the parent raises it
        return packed_failure(error, first=communicator.is_mine)
