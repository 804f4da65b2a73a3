"""Communication of threads, which share the memory of a process.

A member that arrives at a collective waits for the other members. They cannot meet if a member
calls a different collective, has finished or has failed, or if all members wait. This is detected
immediately. A member that is late is detected only if there is a timeout. In all these cases, the
run is aborted: each member that waits, or arrives later, raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mlvm.core.errors import GroupError, GroupTimeoutError
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.parallel.communicator import Collective, brief_error, is_small, mismatch, timeout_text
from mlvm.parallel.sharing import WORK, Arrays


@dataclass(slots=True)
class _Barrier:
    """Collective at which all members have arrived.

    `at_work` is the number of members that have not finished.
    """

    arrays: Arrays
    ranks: tuple[int, ...]
    at_work: int


class Rendezvous:
    """Communicator of a run of a group of threads.

    `error` is the error that has aborted the run: an error of a member, an interrupt, or a
    `GroupError`.
    """

    def __init__(self, names: Sequence[str], system: System = SYSTEM) -> None:
        self.names = names
        self.error: BaseException | None = None
        self._reason = ""
        self._lock = system.lock()
        self._calls: list[Collective | None] = [None] * len(names)  # calls of waiting members
        self._ended = [False] * len(names)
        self._at_rest = 0  # number of members that wait or have finished
        self._gathering: Collective | None = None  # the first waiting call of the whole group
        self._gathered = 0  # number of members that have arrived at it
        self._barriers: list[_Barrier | None] = [None] * len(names)
        self._gates = [system.lock() for _ in names]
        self._waiting: set[int] = set()  # ranks of members that wait at a gate
        self._abandoned: set[int] = set()  # ranks whose gate was opened because the run was aborted
        for gate in self._gates:
            gate.acquire()

    # --- a member's life ---

    def end(self, rank: int) -> None:
        """Finish this member's part of the run; this is the last call of the member."""
        with self._lock:
            self._ended[rank] = True
            self._at_rest += 1
            if self.error is not None:
                return
            for other, call in enumerate(self._calls):
                if call is not None and rank in call.ranks:
                    self._break(
                        f"{self.names[rank]} has ended while {self.names[other]} waits for it "
                        f"in {call}"
                    )
                    return
            self._require_progress()

    def fail(self, rank: int, error: BaseException) -> None:
        """Finish this member's part of the run with an error, which aborts the run."""
        with self._lock:
            self._ended[rank] = True
            if self.error is None:
                error.add_note(f"raised by {self.names[rank]} of a group of {len(self.names)}")
            self._break(f"{self.names[rank]} failed: {brief_error(error)}", error)

    def abort(self, error: BaseException) -> None:
        """Abort the run, for example after Ctrl-C in the caller's thread."""
        with self._lock:
            self._break(f"the run was ended from outside: {brief_error(error)}", error)

    # --- barrier ---

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective, and return when the work of all members is done.

        Raises `GroupError` if the members cannot meet.
        """
        with self._lock:
            barrier = self._arrive(rank, call)
            if barrier is None:
                self._waiting.add(rank)
        shared = not is_small(call.nbytes, len(call.ranks))
        if barrier is None:
            self._wait(rank, call)
            barrier, self._barriers[rank] = self._barriers[rank], None
            assert barrier is not None  # the last member to arrive has stored it
        else:
            if not shared:
                self._work(rank, call, barrier, 0, 1)
            self._open(barrier)
        if shared:
            self._work(rank, call, barrier, barrier.ranks.index(rank), len(barrier.ranks))
            self._leave(rank, call, barrier)

    def _arrive(self, rank: int, call: Collective) -> _Barrier | None:
        """Arrive at the collective; return the barrier if this member is the last to arrive."""
        self._require_unbroken(rank, call)
        if call.is_pair:
            for other in call.ranks:
                if other != rank and self._ended[other]:
                    self._refuse_ended(rank, call, other)
            there = [each for each in self._calls if each is not None and each.is_pair]
            theirs = next((each for each in there if each.ranks == call.ranks), None)
            is_last = theirs is not None
        else:
            if any(self._ended):
                self._refuse_ended(rank, call, self._ended.index(True))
            theirs, self._gathering = self._gathering, self._gathering or call
            self._gathered += 1
            is_last = self._gathered == len(self.names)
        if theirs is not None and not call.fits(theirs):
            other = next(i for i, each in enumerate(self._calls) if each is theirs)
            self._break_and_raise(mismatch((self.names[rank], call), (self.names[other], theirs)))
        self._calls[rank] = call
        self._at_rest += 1
        if not is_last:
            self._require_progress()
            if self.error is not None:
                raise self.error
            return None
        if not call.is_pair:
            self._gathering, self._gathered = None, 0
        self._at_rest -= len(call.ranks)
        arrays = [calls.arrays for r in call.ranks if (calls := self._calls[r]) is not None]
        barrier = _Barrier(arrays, call.ranks, len(call.ranks))
        for member in call.ranks:
            self._calls[member] = None
            self._barriers[member] = None if member == rank else barrier
        return barrier

    def _refuse_ended(self, rank: int, call: Collective, other: int) -> NoReturn:
        self._break_and_raise(f"{self.names[rank]} calls {call}, and {self.names[other]} has ended")

    def _work(self, rank: int, call: Collective, barrier: _Barrier, part: int, parts: int) -> None:
        """Do one part of the work.

        An error aborts the run, because the results of the other members are incomplete.
        """
        try:
            WORK[call.name](call, barrier.arrays, part, parts)
        except BaseException as error:
            with self._lock:
                self._break(f"{self.names[rank]} failed in {call}: {brief_error(error)}", error)
            raise

    def _leave(self, rank: int, call: Collective, barrier: _Barrier) -> None:
        """Wait until all members have finished the work."""
        with self._lock:
            self._require_unbroken(rank, call)
            barrier.at_work -= 1
            is_last = not barrier.at_work
            if not is_last:
                self._waiting.add(rank)
        if is_last:
            self._open(barrier)
        else:
            self._wait(rank, call)

    def _wait(self, rank: int, call: Collective) -> None:
        if not self._gates[rank].acquire(timeout=-1 if call.timeout is None else call.timeout):
            self._time_out(rank, call)
        if rank in self._abandoned:
            raise self._given_up(rank, call)

    def _time_out(self, rank: int, call: Collective) -> None:
        """Abort the run, unless the other members have just arrived."""
        with self._lock:
            if rank in self._waiting:
                others = [each for each in call.ranks if each != rank]
                late = [each for each in others if each not in self._waiting]
                text = timeout_text(self.names, rank, call, late or others)
                self._break(text, GroupTimeoutError(text))
        self._gates[rank].acquire()

    def _open(self, barrier: _Barrier) -> None:
        """Wake the members that wait for the barrier."""
        with self._lock:
            for rank in self._waiting.intersection(barrier.ranks):
                self._waiting.remove(rank)
                self._gates[rank].release()

    # --- the end of a run ---

    def _require_unbroken(self, rank: int, call: Collective) -> None:
        if self.error is not None:
            raise self._given_up(rank, call)

    def _given_up(self, rank: int, call: Collective) -> GroupError:
        kind = GroupTimeoutError if isinstance(self.error, GroupTimeoutError) else GroupError
        return kind(f"{self.names[rank]} gives up {call}: {self._reason}")

    def _require_progress(self) -> None:
        """Abort the run if each member waits for another member or has finished."""
        if self._at_rest < len(self.names):
            return
        waiting = [
            f"{name} in {call}"
            for name, call in zip(self.names, self._calls, strict=True)
            if call is not None
        ]
        if waiting:
            self._break(f"deadlock: all members wait: {'; '.join(waiting)}")

    def _break(self, reason: str, error: BaseException | None = None) -> None:
        """Abort the run, unless it was aborted. Members that wait or arrive later raise errors."""
        if self.error is None:
            self.error = GroupError(reason) if error is None else error
            self._reason = reason
        for rank in self._waiting:
            self._gates[rank].release()
        self._abandoned |= self._waiting
        self._waiting.clear()

    def _break_and_raise(self, reason: str) -> NoReturn:
        self._break(reason)
        assert self.error is not None
        raise self.error
