"""Group of the processes that `mpiexec` has started, on one host or on many.

The members communicate by Isend and Irecv (see `mlvm.parallel.messages`). MPI's reductions are not
used, because the order of operations is not fixed. A waiting member polls for messages and sleeps
in between.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeoutError, MissingExtraError
from mlvm.core.extras import extra
from mlvm.core.types import Array
from mlvm.machines.versions import difference, versions
from mlvm.parallel import pickling
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.group import checked_timeout, name_of
from mlvm.parallel.messages import MessageGroup, Transport

_SPIN: Final = 200e-6  # seconds of polling for messages before the first sleep
_LAST_WORDS: Final = 0.5  # seconds in which the other processes may print errors

_HEAD, _BODY, _HELLO = 1, 2, 16_411  # tags of messages; the last is used in COMM_WORLD
_PIECE: Final = 1 << 20  # bytes of a body in one MPI message, so that progress is visible


class MpiGroup(MessageGroup):
    """Group of all processes that MPI has started together.

    They are started by `python -m mlvm mpirun -n 4 ...`, by `mpiexec` or by a cluster's scheduler.
    Each process has one VM and one BLAS thread.

    Each process creates the group, and all processes make the same calls of `run`, `keep` and kept
    functions. `run` calls the function for this process's member, on this thread, and returns the
    results of all members, which are pickled. If a member fails, all members raise the error, and
    one process prints the traceback. If a process leaves the program, the other processes raise an
    error that names it. If a process is killed, mpiexec kills all processes.

    Arguments:
        timeout: the longest time in seconds that a member waits for another member without
            progress, also for the creation of the group. By default, there is no limit.
        mixed: whether the processes may have different versions of mlvm, the kernels or numpy,
            which may compute different bits.

    Raises `GroupTimeoutError` if a process does not create the group; `MissingExtraError` without
    mpi4py, an MPI library or threadpoolctl; `GroupError` if the versions differ, or the library
    supports calls by one thread only.
    """

    def __init__(self, *, timeout: float | None = None, mixed: bool = False) -> None:
        one_blas_thread.prepare()
        checked_timeout(timeout)
        super().__init__(MpiTransport(_loaded(), timeout, mixed=mixed), timeout)

    _encoding = pickling


def _loaded() -> Any:
    """Import mpi4py's module MPI, which initialises MPI."""
    if "mpi4py.MPI" not in sys.modules:
        extra("mpi4py", "mpi").rc.thread_level = "serialized"
    try:
        mpi = extra("mpi4py.MPI", "mpi")
    except (
        ImportError,
        RuntimeError,
    ) as error:  # no library, or a different one
        raise MissingExtraError(
            f'cannot load MPI: {error}; install it with pip install "mlvm[mpi]"'
        ) from None
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise GroupError("this MPI library supports only one thread; THREAD_SERIALIZED is needed")
    return mpi


def _unlink_segments() -> None:
    """Unlink the shared memory of MPICH, so that none remains when a process is killed.

    Processes that have mapped the memory can still use it.
    """
    with suppress(OSError):  # not Linux, no such memory, or another process was first
        for path in set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())):
            with suppress(FileNotFoundError):
                os.unlink(path)


def _sleeps() -> Iterator[float]:
    """Yield the seconds between looks for messages: they double up to a limit."""
    yield from (20e-6 * 2**i for i in range(7))
    yield from itertools.repeat(2e-3)


def _pieces(body: Array) -> list[Array]:
    return [body[start : start + _PIECE] for start in range(0, body.nbytes, _PIECE)]


# --- messages ------------------------------------------------------------------------


class MpiTransport(Transport):
    """Transport by MPI. Head and body are separate messages, and the body is sent in pieces.

    Only one thread calls MPI at a time.
    """

    def __init__(self, mpi: Any, timeout: float | None = None, *, mixed: bool = False) -> None:
        self._mpi = mpi
        world = mpi.COMM_WORLD
        super().__init__(world.Get_rank(), world.Get_size())
        theirs = self._meet(world, timeout)
        for rank, text in theirs.items() if not mixed else ():
            other = difference(text, name_of(rank, f"vm{rank}"), name_of(self.rank, "this one"))
            if other is not None:
                raise GroupError(other)
        self._comm = world.Dup()
        self._comm.Barrier()  # all processes have mapped the shared memory
        _unlink_segments()
        self._lock = threading.RLock()
        self._sent: dict[int, list[tuple[Any, bytes | Array]]] = {rank: [] for rank in self.others}
        self._coming: deque[tuple[int, bytes, Array, list[Any]]] = deque()  # incomplete

    def _meet(self, world: Any, timeout: float | None) -> dict[int, str]:
        """Wait until all processes create the group, and return their versions.

        This is necessary because `Dup` and `Barrier` have no timeout. Raises `GroupTimeoutError`.
        """
        mine, byte = versions().encode(), self._mpi.BYTE
        theirs = {rank: bytearray(500) for rank in self.others}  # bytes
        sent = [world.Isend([mine, byte], rank, _HELLO) for rank in self.others]
        expected = {rank: world.Irecv([at, byte], rank, _HELLO) for rank, at in theirs.items()}
        began, sleeps = self.system.monotonic(), _sleeps()
        while expected or sent:
            sent = [each for each in sent if not each.Test()]
            expected = {rank: each for rank, each in expected.items() if not each.Test()}
            if timeout is not None and self.system.monotonic() - began > timeout:
                atexit.register(self._abort)
                names = ", ".join(name_of(rank, f"vm{rank}") for rank in expected)
                me = name_of(self.rank, f"vm{self.rank}")
                raise GroupTimeoutError(
                    f"{me} has waited {timeout:g} s for {names} to create the group; raise timeout="
                )
            self.system.sleep(next(sleeps))
        return {rank: text.rstrip(b"\0").decode() for rank, text in theirs.items()}

    def send(self, rank: int, head: bytes, body: Array) -> None:
        mpi, sent = self._mpi, self._sent[rank]
        head = body.nbytes.to_bytes(8, "little") + head
        with self._lock:
            sent.append((self._comm.Isend([head, mpi.BYTE], rank, _HEAD), head))
            for piece in _pieces(body):
                sent.append((self._comm.Isend([piece, mpi.BYTE], rank, _BODY), piece))

    def unsent(self, rank: int) -> int:
        return len(self._sent.get(rank, ()))

    def listen(self, seconds: float) -> None:
        until, sleeps = time.perf_counter() + seconds, _sleeps()
        spin = time.perf_counter() + _SPIN
        while not self._look() and (now := time.perf_counter()) < until:
            time.sleep(0 if now < spin else next(sleeps))  # 0 lets other processes run

    def _look(self) -> bool:
        """Receive and send what is ready. Return whether anything was received or sent."""
        mpi, moved, status = self._mpi, False, self._mpi.Status()
        with self._lock:
            while (received := self._comm.Improbe(tag=_HEAD, status=status)) is not None:
                message = bytearray(status.Get_count(mpi.BYTE))
                source = status.Get_source()
                received.Recv([message, mpi.BYTE])
                body = np.empty(int.from_bytes(message[:8], "little"), np.uint8)
                requests = [
                    self._comm.Irecv([piece, mpi.BYTE], source, _BODY) for piece in _pieces(body)
                ]
                self._coming.append((source, bytes(message[8:]), body, requests))
            late: set[int] = set()  # members with an incomplete message: order matters
            for _ in range(len(self._coming)):
                source, head, body, requests = each = self._coming.popleft()
                while source not in late and requests and requests[0].Test():
                    self.moved[source] += body.nbytes > _PIECE
                    del requests[0]
                if source in late or requests:
                    late.add(source)
                    self._coming.append(each)
                else:
                    moved = True
                    self.take(source, head, body)
            for rank, sent in self._sent.items():
                if sent:
                    self._sent[rank] = [each for each in sent if not each[0].Test()]
                    moved |= len(self._sent[rank]) < len(sent)
                    self.moved[rank] += sum(
                        [len(data) >= _PIECE for request, data in sent if not request]
                    )
        return moved

    def leave(self, reason: str) -> None:
        if not self._mpi.Is_finalized():
            super().leave(reason)
            if self.has_late:
                atexit.register(self._abort)

    def _abort(self) -> None:
        """Abort all processes when this process exits. `MPI_Finalize` would wait for late ones."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        self._mpi.COMM_WORLD.Abort(1)

    def close(self) -> None:
        """Do nothing. MPI is finalized when the process exits."""
