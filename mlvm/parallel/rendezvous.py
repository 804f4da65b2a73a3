"""Communication of threads: members of one process, which share their memory.

A member that arrives waits for the others. They cannot meet if another member calls something
else, has ended or has failed, or if all members wait. That is noticed as soon as it is so; a member
that only does not come is noticed where there is a timeout. The run is then over: every member that
waits or arrives later raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mlvm.core.errors import GroupError, GroupTimeout
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.parallel.communicator import Collective, brief_error, is_small, mismatch, timeout_text
from mlvm.parallel.sharing import WORK, Arrays


@dataclass(slots=True)
class _Barrier:
    """A collective whose members have all arrived: their arrays, and how many are still at work."""

    arrays: Arrays
    ranks: tuple[int, ...]
    at_work: int


class Rendezvous:
    """One run of a group: which members call what, which have ended, and what went wrong.

    `error` is what ended the run: a member's error, an interrupt, or a `GroupError`.
    """

    def __init__(self, names: Sequence[str], system: System = SYSTEM) -> None:
        self.names = names
        self.error: BaseException | None = None
        self._reason = ""
        self._lock = system.lock()
        self._calls: list[Collective | None] = [None] * len(names)  # of who waits for others
        self._ended = [False] * len(names)
        self._at_rest = 0  # how many members wait for others, or have ended
        self._gathering: Collective | None = None  # the first call of the whole group that waits
        self._gathered = 0  # how many members have come to it
        self._barriers: list[_Barrier | None] = [None] * len(names)
        self._gates = [system.lock() for _ in names]
        self._waiting: set[int] = set()  # ranks whose gate must be opened
        self._abandoned: set[int] = set()  # ranks whose gate was opened because the run is over
        for gate in self._gates:
            gate.acquire()

    # --- a member's life ---

    def end(self, rank: int) -> None:
        """End this member's part of the run: it will call nothing more."""
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
        """End this member's part of the run with an error, which ends the others."""
        with self._lock:
            self._ended[rank] = True
            if self.error is None:
                error.add_note(f"raised by {self.names[rank]} of a group of {len(self.names)}")
            self._break(f"{self.names[rank]} failed: {brief_error(error)}", error)

    def abort(self, error: BaseException) -> None:
        """End the run from outside."""
        with self._lock:
            self._break(f"the run was ended from outside: {brief_error(error)}", error)

    # --- barrier ---

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Returns when its work is done for all members that take part.

        Raises `GroupError` when the members cannot meet.
        """
        with self._lock:
            barrier = self._arrive(rank, call)
            if barrier is None:
                self._waiting.add(rank)
        shared = not is_small(call.nbytes, len(call.ranks))
        if barrier is None:
            self._wait(rank, call)
            barrier, self._barriers[rank] = self._barriers[rank], None
            assert barrier is not None  # the last member to arrive left it here
        else:
            if not shared:
                self._work(rank, call, barrier, 0, 1)
            self._open(barrier)
        if shared:
            self._work(rank, call, barrier, barrier.ranks.index(rank), len(barrier.ranks))
            self._leave(rank, call, barrier)

    def _arrive(self, rank: int, call: Collective) -> _Barrier | None:
        """Arrive at the barrier; return the call's work if this member is the last."""
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
        """Do one part of the work. An error ends the run, since the others' results are
        incomplete."""
        try:
            WORK[call.name](call, barrier.arrays, part, parts)
        except BaseException as error:
            with self._lock:
                self._break(f"{self.names[rank]} failed in {call}: {brief_error(error)}", error)
            raise

    def _leave(self, rank: int, call: Collective, barrier: _Barrier) -> None:
        """Wait until all members of the barrier have done their parts."""
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
        """End the run, unless the others have come at this very moment."""
        with self._lock:
            if rank in self._waiting:
                others = [each for each in call.ranks if each != rank]
                late = [each for each in others if each not in self._waiting]
                text = timeout_text(self.names, rank, call, late or others)
                self._break(text, GroupTimeout(text))
        self._gates[rank].acquire()

    def _open(self, barrier: _Barrier) -> None:
        """Let the waiting members of the barrier go on."""
        with self._lock:
            for rank in self._waiting.intersection(barrier.ranks):
                self._waiting.remove(rank)
                self._gates[rank].release()

    # --- the end of a run ---

    def _require_unbroken(self, rank: int, call: Collective) -> None:
        if self.error is not None:
            raise self._given_up(rank, call)

    def _given_up(self, rank: int, call: Collective) -> GroupError:
        kind = GroupTimeout if isinstance(self.error, GroupTimeout) else GroupError
        return kind(f"{self.names[rank]} gives up {call}: {self._reason}")

    def _require_progress(self) -> None:
        """End the run if every member waits for another, or has ended."""
        if self._at_rest < len(self.names):
            return
        waiting = [
            f"{name} in {call}"
            for name, call in zip(self.names, self._calls, strict=True)
            if call is not None
        ]
        if waiting:
            self._break(f"no member can go on; these wait: {'; '.join(waiting)}")

    def _break(self, reason: str, error: BaseException | None = None) -> None:
        """End the run, unless it is over. Members that wait now or arrive later raise."""
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
