"""Where the members of a group meet for a collective, or learn that they cannot meet.

A member that arrives waits for the others. They cannot meet if another member calls something
else, has ended or has failed, or if all members wait. That is noticed as soon as it is so, without
a timeout. The run is then over: every member that waits or arrives later raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import GroupError
from mlvm.core.types import Array, TensorType

SMALL: Final = 1 << 18
"""Up to so many bytes, the last member to arrive does all the work: to wake the others would take
longer."""

_MOST_TYPES: Final = 4  # in the text of an error

Arrays: TypeAlias = Sequence[tuple[Array, ...]]
"""The arrays that each member brings to a collective, in the order of `Collective.ranks`."""

Work: TypeAlias = Callable[[Arrays, int, int], None]
"""`work(arrays, part, parts)` does part number `part` of `parts` equal ones."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one member calls it.

    The members with these `ranks` take part. `key` and `types` (dtype and shape) must be equal for
    all of them. `arrays` are the member's own. `nbytes` tells how much work there is.
    """

    name: str
    attributes: Mapping[str, object]
    key: tuple[object, ...]
    types: list[tuple[np.dtype[Any], tuple[int, ...]]]
    ranks: tuple[int, ...]
    arrays: tuple[Array, ...]
    nbytes: int
    work: Work

    def fits(self, other: Collective) -> bool:
        """Whether both are the same collective on tensors of the same types."""
        return self.key == other.key and self.types == other.types

    def beside(self, other: Collective) -> str:
        """The call as text, beginning with the first tensor that differs from the other call's."""
        pairs = enumerate(zip(self.types, other.types, strict=False))
        return self._text(next((i for i, (mine, theirs) in pairs if mine != theirs), 0))

    def __str__(self) -> str:
        return self._text(0)

    def _text(self, first: int) -> str:
        last = first + _MOST_TYPES
        parts = [f"{first} tensors"] if first else []
        parts += [str(TensorType(*type)) for type in self.types[first:last]]
        if len(self.types) > last:
            parts.append(f"{len(self.types) - last} more")
        parts += [f"{name}={value!r}" for name, value in self.attributes.items()]
        return f"{self.name}({', '.join(parts)})"


@dataclass(slots=True)
class _Meeting:
    """A collective whose members have all arrived: their arrays, and how many are still at work."""

    arrays: Arrays
    ranks: tuple[int, ...]
    at_work: int


class Rendezvous:
    """One run of a group: which members call what, which have ended, and what went wrong.

    `error` is what ended the run: a member's error, an interrupt, or a `GroupError`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.error: BaseException | None = None
        self._reason = ""
        self._lock = threading.Lock()
        self._threads: list[int | None] = [None] * len(names)
        self._calls: list[Collective | None] = [None] * len(names)  # of who waits for others
        self._ended = [False] * len(names)
        self._meetings: list[_Meeting | None] = [None] * len(names)
        self._gates = [threading.Lock() for _ in names]
        self._waiting: set[int] = set()  # ranks whose gate must be opened
        self._abandoned: set[int] = set()  # ranks whose gate was opened because the run is over
        for gate in self._gates:
            gate.acquire()

    # --- a member's life ---

    def start(self, rank: int) -> None:
        """The member begins, on the thread that calls this."""
        self._threads[rank] = threading.get_ident()

    def end(self, rank: int) -> None:
        """The member has ended, and will call nothing more."""
        with self._lock:
            self._ended[rank] = True
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
        """The member has ended with an error, which ends the others."""
        with self._lock:
            self._ended[rank] = True
            if self.error is None:
                error.add_note(f"raised by {self.names[rank]} of a group of {len(self.names)}")
            self._break(f"{self.names[rank]} failed: {_brief(error)}", error)

    def abort(self, error: BaseException) -> None:
        """End the run from outside."""
        with self._lock:
            self._break(f"the run was ended from outside: {_brief(error)}", error)

    # --- meeting ---

    def meet(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Returns when its work is done for all members that take part.

        Raises `GroupError` when the members cannot meet, and on any thread but the member's own.
        """
        if self._threads[rank] != threading.get_ident():
            raise GroupError(
                f"{call} of {self.names[rank]} was called on another thread than its own"
            )
        with self._lock:
            meeting = self._arrive(rank, call)
            if meeting is None:
                self._waiting.add(rank)
        shared = call.nbytes > SMALL
        if meeting is None:
            self._wait(rank, call)
            meeting, self._meetings[rank] = self._meetings[rank], None
            assert meeting is not None  # the last member to arrive left it here
        else:
            if not shared:
                self._work(rank, call, meeting, 0, 1)
            self._open(meeting)
        if shared:
            self._work(rank, call, meeting, meeting.ranks.index(rank), len(meeting.ranks))
            self._leave(rank, call, meeting)

    def _arrive(self, rank: int, call: Collective) -> _Meeting | None:
        """The meeting, if this member is the last to arrive."""
        self._require_unbroken(rank, call)
        others = [(other, self._calls[other]) for other in call.ranks if other != rank]
        for other, theirs in others:
            if self._ended[other]:
                reason = f"{self.names[rank]} calls {call}, and {self.names[other]} has ended"
                self._break_and_raise(reason)
            if theirs is not None and theirs.ranks == call.ranks and not call.fits(theirs):
                self._break_and_raise(
                    "members call different things: "
                    f"{self.names[rank]} {call.beside(theirs)}, "
                    f"{self.names[other]} {theirs.beside(call)}"
                )
        self._calls[rank] = call
        if all(theirs is not None and theirs.ranks == call.ranks for _, theirs in others):
            arrays = [calls.arrays for r in call.ranks if (calls := self._calls[r]) is not None]
            meeting = _Meeting(arrays, call.ranks, len(call.ranks))
            for member in call.ranks:
                self._calls[member] = None
                self._meetings[member] = None if member == rank else meeting
            return meeting
        self._require_progress()
        if self.error is not None:
            raise self.error
        return None

    def _work(self, rank: int, call: Collective, meeting: _Meeting, part: int, parts: int) -> None:
        """Do one part of the work. An error ends the run, since the others' results are
        incomplete."""
        try:
            call.work(meeting.arrays, part, parts)
        except BaseException as error:
            with self._lock:
                self._break(f"{self.names[rank]} failed in {call}: {_brief(error)}", error)
            raise

    def _leave(self, rank: int, call: Collective, meeting: _Meeting) -> None:
        """Wait until all members of the meeting have done their parts."""
        with self._lock:
            self._require_unbroken(rank, call)
            meeting.at_work -= 1
            is_last = not meeting.at_work
            if not is_last:
                self._waiting.add(rank)
        if is_last:
            self._open(meeting)
        else:
            self._wait(rank, call)

    def _wait(self, rank: int, call: Collective) -> None:
        self._gates[rank].acquire()
        if rank in self._abandoned:
            raise self._given_up(rank, call)

    def _open(self, meeting: _Meeting) -> None:
        """Let the waiting members of the meeting go on."""
        with self._lock:
            for rank in self._waiting.intersection(meeting.ranks):
                self._waiting.remove(rank)
                self._gates[rank].release()

    # --- the end of a run ---

    def _require_unbroken(self, rank: int, call: Collective) -> None:
        if self.error is not None:
            raise self._given_up(rank, call)

    def _given_up(self, rank: int, call: Collective) -> GroupError:
        return GroupError(f"{self.names[rank]} gives up {call}: {self._reason}")

    def _require_progress(self) -> None:
        """End the run if every member waits for another, or has ended."""
        waiting = [
            f"{name} in {call}"
            for name, call in zip(self.names, self._calls, strict=True)
            if call is not None
        ]
        if waiting and len(waiting) + sum(self._ended) == len(self.names):
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


def _brief(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
