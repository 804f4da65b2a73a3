"""A group whose members are the processes that an `mpiexec` has started, on one host or on many.

The members meet by messages between two processes each. Before a collective each tells the others
of it what it calls, so that calls that do not fit are found before any data moves; one that ends,
fails or leaves tells so too. Then arrays move by Isend and Irecv. MPI's own reductions are not
used: their order is not fixed. Who waits looks for messages, and sleeps in between.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np

from mlvm.core.errors import GroupError, MissingExtra
from mlvm.core.extras import extra
from mlvm.core.types import Array
from mlvm.machines.failure import Failure
from mlvm.machines.local import LocalVM
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.group import AnyGroup, Seat, Task, name_of
from mlvm.parallel.meeting import Collective, brief_error
from mlvm.parallel.outcome import Outcome, results_of
from mlvm.parallel.passing import NOTHING, Passing, pack, size_of
from mlvm.parallel.pickling import pickled

R = TypeVar("R")

_SPIN: Final = 200e-6  # seconds to look for messages before the first sleep
_SHORTEST: Final = 20e-6  # seconds of sleep, which double
_LONGEST: Final = 2e-3
_PATIENCE: Final = 1.0  # seconds to wait for a member before it is asked whether all wait
_GRACE: Final = 1.0  # seconds that an interrupt, or `close`, waits for the others

_TOLD, _DATA = 1, 2  # tags of messages


class MpiGroup(AnyGroup):
    """The group of all processes that were started together, by `python -m mlvm mpirun -n 4 ...`,
    by `mpiexec` or by a cluster's own program. Each process has one VM, and one thread of BLAS.

    Every process makes the group, and calls `run`, `keep` and what was kept alike. `run` calls the
    function for this process's own member, on this thread, and returns the results of all, which
    are pickled. If a member fails, all raise its error. A process that leaves the program ends the
    others' runs with an error that names it; one that is killed is ended by mpiexec with all
    others.

    Raises `MissingExtra` without mpi4py, an MPI library or threadpoolctl, `GroupError` for a
    library that can be called by one thread only.
    """

    def __init__(self) -> None:
        one_blas_thread.prepare()
        self._post = _Post(_loaded())
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(self._post.size)])
        self.rank = self._post.rank
        self.vm = LocalVM(f"vm{self.rank}")
        self._seat = Seat(self.vm, self.rank, self.size)
        self._run = 0
        atexit.register(self.close)

    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        self._begin()
        self._run += 1
        meeting = MpiMeeting(self._post, self._names, self._run)
        error: BaseException | None = None
        task = tasks[self.rank]
        try:
            with one_blas_thread.held():
                try:
                    data = self._seat.do(lambda *at: pickled(Outcome(task(*at))), meeting)
                except BaseException as raised:
                    error = raised
                    data = pickled(Outcome(None, Failure.of(raised), meeting.is_mine))
                interrupted = not isinstance(error, Exception | None)
                outcomes = meeting.conclude(data, _GRACE if interrupted else None)
            if error is not None and (meeting.is_mine or interrupted):
                error.add_note(f"raised by {self._names[self.rank]} of a group of {self.size}")
                raise error
            return results_of(outcomes, self._names)
        finally:
            self._busy.clear()
            if meeting.spoiled:
                self.close()
            error = None  # its traceback holds this frame

    def close(self) -> None:
        """Leave the group: others that still count on this process raise an error. Idempotent."""
        self._leave(getattr(sys, "last_value", None))  # what Python has printed on the way out

    def __exit__(self, *error: object) -> None:
        self._leave(error[1])

    def _leave(self, error: object) -> None:
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._post.leave(brief_error(error) if isinstance(error, BaseException) else "")
            self._seat.close()

    def __repr__(self) -> str:
        return f"<MpiGroup of {self.size}, member {self.rank}>"


def _loaded() -> Any:
    """mpi4py's module MPI, which has MPI initialized."""
    if "mpi4py.MPI" not in sys.modules:
        extra("mpi4py", "mpi").rc.thread_level = "serialized"
    try:
        mpi = extra("mpi4py.MPI", "mpi")
    except (ImportError, RuntimeError) as error:  # no library, or not the one it was built for
        raise MissingExtra(f'mpi4py does not run: {error}; pip install "mlvm[mpi]"') from None
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise GroupError("this MPI can be called by one thread only; THREAD_SERIALIZED is needed")
    return mpi


def _unlink_segments() -> None:
    """Take the name from the memory that MPICH shares on this host, so that none is left when a
    process is killed. Whoever has it keeps it."""
    with suppress(OSError):  # no Linux, or no such memory; another process may have been first
        for path in set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())):
            with suppress(FileNotFoundError):
                os.unlink(path)


# --- messages ------------------------------------------------------------------------


class _Heard(NamedTuple):
    """What members have told in a run, by rank."""

    calls: dict[tuple[int, bool, int], tuple[bytes, bytes]]
    """Digest and description by rank, whether it is of a pair, and number."""
    outcomes: dict[int, bytes]
    reasons: dict[int, str]
    """Why that member has ended the run."""
    waits: dict[int, int]
    """How many calls a member has made that has waited for long in the last one."""
    blocked: dict[int, tuple[dict[int, int], str]]
    """The `waits` of all, as a member knows them that still waits, and what it waits in."""


class _Post:
    """Messages to and from the other processes. One thread at a time is in MPI."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.comm = mpi.COMM_WORLD.Dup()
        self.comm.Barrier()  # all have what they share
        _unlink_segments()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.left: dict[int, str] = {}
        self.lock = threading.RLock()
        self._heard = defaultdict[int, _Heard](lambda: _Heard({}, {}, {}, {}, {}))
        self._sent: list[tuple[Any, bytes]] = []

    def heard(self, run: int) -> _Heard:
        """What was told in that run. Earlier ones are forgotten."""
        for old in [each for each in self._heard if each < run]:
            del self._heard[old]
        return self._heard[run]

    def tell(self, ranks: Sequence[int], run: int, kind: str, value: Any) -> None:
        """Tell these members something, without waiting for them."""
        message = pickle.dumps((run, kind, value))
        with self.lock:
            for rank in ranks:
                request = self.comm.Isend([message, self.mpi.BYTE], rank, _TOLD)
                self._sent.append((request, message))

    def listen(self) -> bool:
        """Take in what was told, and see to what is being sent. Whether there was anything."""
        heard = False
        status = self.mpi.Status()
        with self.lock:
            while (found := self.comm.Improbe(tag=_TOLD, status=status)) is not None:
                message = bytearray(status.Get_count(self.mpi.BYTE))
                source = status.Get_source()
                found.Recv([message, self.mpi.BYTE])
                self._take(source, *pickle.loads(message))
                heard = True
            if self._sent:
                self._sent = [each for each in self._sent if not each[0].Test()]
        return heard

    def _take(self, source: int, run: int, kind: str, value: Any) -> None:
        if kind == "left":
            self.left[source] = value
            return
        heard = self._heard[run]
        if kind == "call":
            *key, digest, description = value
            heard.calls[source, key[0], key[1]] = digest, description
            heard.waits.pop(source, None)
            heard.blocked.pop(source, None)
        elif kind == "outcome":
            heard.outcomes[source] = value
        elif kind == "broken":
            heard.reasons[source] = value
        elif kind == "waits":
            heard.waits[source] = value
            heard.blocked.pop(source, None)
        else:
            heard.blocked[source] = value

    def leave(self, reason: str) -> None:
        """Tell all that this process takes part in nothing more."""
        if self.mpi.Is_finalized():
            return
        self.tell(self.others, 0, "left", reason)
        until = time.monotonic() + _GRACE
        while self._sent and time.monotonic() < until:
            self.listen()
            time.sleep(_SHORTEST)


class MpiMeeting(Passing):
    """One run of a group of MPI processes, as this one sees it. `spoiled`: messages are under way
    that nobody will wait for, so there can be no other run."""

    def __init__(self, post: _Post, names: Sequence[str], run: int) -> None:
        super().__init__(post.rank, names)
        self.spoiled = False
        self.is_mine = False
        self._post = post
        self._run = run
        self._heard = post.heard(run)
        self._counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._calls = 0  # of both kinds
        self._scratch: dict[tuple[str, int], Array] = {}
        self._under_way: list[Any] = []

    # --- a member's life ---

    def end(self, rank: int) -> None:
        """Told by `conclude`, with what the member returns."""

    def fail(self, rank: int, error: BaseException) -> None:
        if not self._heard.reasons:
            self._end_run(f"{self.names[rank]} failed: {brief_error(error)}")

    def conclude(self, outcome: bytes, seconds: float | None) -> dict[int, Outcome]:
        """Tell the others how the task ended here, and wait until all have told, or so long."""
        post, heard = self._post, self._heard
        post.tell(post.others, self._run, "outcome", outcome)
        heard.outcomes[self.rank] = outcome
        until = None if seconds is None else time.monotonic() + seconds
        for _ in _patience(post.listen):
            missing = [rank for rank in range(post.size) if rank not in heard.outcomes]
            if not missing:
                break
            if any(rank in post.left for rank in missing):
                self.spoiled = True
                rank = next(rank for rank in missing if rank in post.left)
                raise GroupError(self._has_left(rank))
            if until is not None and time.monotonic() > until:
                self.spoiled = True
                break
        return {rank: pickle.loads(each) for rank, each in heard.outcomes.items()}

    # --- meeting ---

    def arrive(self, call: Collective) -> None:
        self.require_unbroken(call)
        self._calls += 1
        others = [rank for rank in call.ranks if rank != self.rank]
        channel = tuple(others) if call.is_pair else ()
        self._counts[channel] += 1
        number = self._counts[channel]
        digest = call.digest()
        told = (call.is_pair, number, digest, call.described())
        self._post.tell(others, self._run, "call", told)
        self._await(call, others, number)
        for other in others:
            theirs, description = self._heard.calls.pop((other, call.is_pair, number))
            if theirs != digest:
                self.refuse(call, other, Collective.of(description))

    def _await(self, call: Collective, others: Sequence[int], number: int) -> None:
        """Wait until the others have told of their call of that number."""
        heard, post = self._heard, self._post
        late = list(others)
        began, asked = time.monotonic(), False
        for _ in _patience(post.listen):
            late = [rank for rank in late if (rank, call.is_pair, number) not in heard.calls]
            if not late:
                return
            self.require_unbroken(call)
            for rank in late:
                if rank in heard.outcomes:
                    self.miss(call, rank)
                if rank in post.left:
                    self.spoiled = True
                    self.give_up(self._has_left(rank))
            if time.monotonic() - began > _PATIENCE:
                if not asked:
                    asked = True
                    heard.waits[self.rank] = self._calls
                    heard.blocked.pop(self.rank, None)
                    post.tell(post.others, self._run, "waits", self._calls)
                self._require_progress(call)

    def depart(self, call: Collective) -> None:
        pass

    def exchange(
        self, call: Collective, given: Sequence[Sequence[Array]], wanted: int
    ) -> list[Array]:
        messages = [self._message(i, pieces) for i, pieces in enumerate(given)]
        return self._passed(call, messages, [wanted] * len(call.ranks))

    def share(self, call: Collective, given: Sequence[Array], wanted: Sequence[int]) -> list[Array]:
        message = self._message(0, given)
        return self._passed(call, [message] * len(call.ranks), wanted)

    def _message(self, i: int, pieces: Sequence[Array]) -> Array:
        """The pieces as one message, which is not copied if it is one piece."""
        if len(pieces) == 1:
            return pieces[0].view(np.uint8)
        message = self._memory("given", i, size_of(pieces))
        pack(pieces, message)
        return message

    def _memory(self, what: str, i: int, nbytes: int) -> Array:
        """Memory that is used again and again."""
        memory = self._scratch.get((what, i), NOTHING)
        if memory.nbytes < nbytes:
            memory = self._scratch[what, i] = np.empty(nbytes, np.uint8)
        return memory[:nbytes]

    def _passed(
        self, call: Collective, given: Sequence[Array], wanted: Sequence[int]
    ) -> list[Array]:
        """Give each member of the call its message, and get theirs."""
        comm, byte = self._post.comm, self._post.mpi.BYTE
        got = []
        with self._post.lock:
            for i, rank in enumerate(call.ranks):
                mine = rank == self.rank
                message = NOTHING if mine else self._memory("got", i, wanted[i])
                got.append(message)
                if message.nbytes:
                    self._under_way.append(comm.Irecv([message, byte], rank, _DATA))
            for i, rank in enumerate(call.ranks):
                if rank != self.rank and given[i].nbytes:
                    self._under_way.append(comm.Isend([given[i], byte], rank, _DATA))
        ended = None
        for _ in _patience(self._post.listen):
            with self._post.lock:
                if self._post.mpi.Request.Testall(self._under_way):
                    break
            gone = [rank for rank in call.ranks if rank in self._post.left]
            if self._heard.reasons or gone:  # the other may have been stopped in the midst of it
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _GRACE:
                    self.spoiled = True
                    self.require_unbroken(call)
                    self.give_up(self._has_left(gone[0]))
        self._under_way.clear()
        return got

    # --- the end of a run ---

    def reason(self) -> str | None:
        return next(iter(self._heard.reasons.values()), None)

    def _has_left(self, rank: int) -> str:
        reason = self._post.left[rank]
        return f"{self.names[rank]} has left" + (f": {reason}" if reason else "")

    def _require_progress(self, call: Collective) -> None:
        """End the run if every member waits for another, or has ended.

        Who has waited for long tells all how many calls it has made. Who knows that of all, and
        still waits, tells all what it knows: nothing was under way to it then. If all know the
        same, nobody has moved in between, and nobody can.
        """
        heard, post = self._heard, self._post
        waits = {**heard.waits, **dict.fromkeys(heard.outcomes, -1)}
        if len(waits) < post.size:
            return
        if heard.blocked.get(self.rank, (None, ""))[0] != waits:
            heard.blocked[self.rank] = waits, str(call)
            post.tell(post.others, self._run, "blocked", (waits, str(call)))
        waiting = [rank for rank in sorted(waits) if rank not in heard.outcomes]
        if all(heard.blocked.get(rank, (None, ""))[0] == waits for rank in waiting):
            texts = [f"{self.names[rank]} in {heard.blocked[rank][1]}" for rank in waiting]
            self.give_up(f"no member can go on; these wait: {'; '.join(texts)}")

    def _end_run(self, reason: str) -> None:
        self.is_mine = True
        self._heard.reasons[self.rank] = reason
        self._post.tell(self._post.others, self._run, "broken", reason)

    def give_up(self, reason: str) -> NoReturn:
        self._end_run(reason)
        raise GroupError(reason)


def _patience(listen: Callable[[], bool]) -> Iterator[None]:
    """Goes on for as long as one waits: at first without rest, then with longer and longer sleep,
    unless something is heard."""
    listen()
    began, sleep = time.perf_counter(), _SHORTEST
    while True:
        yield
        if listen():
            sleep = _SHORTEST
        elif time.perf_counter() - began > _SPIN:
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST)
        else:
            time.sleep(0)  # so that others run
