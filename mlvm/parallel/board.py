"""Communication of processes through shared memory.

Members communicate in rounds. In a round, each member writes to one window, publishes the number of
the round, and waits until all members have published this number. Then all members read. Each
member alternates between two windows. A member publishes a round only after it has read the
previous round, so no member overwrites unread data. The whole group and each pair of members have
separate rounds.

A waiting member spins for some microseconds, and then sleeps until another member wakes it. The
memory has no locks, so it stays usable when a member dies. The parent process detects the death and
publishes it.

A collective consists of two kinds of exchange: each member sends different data to each member, or
the same data to all members. Large data is split into batches that fit the cache. In a reduction,
each member combines one part, as in Rabenseifner's algorithm (Thakur, Rabenseifner, Gropp, Int. J.
of High Performance Computing Applications 19, 2005). Each element is sent twice, for any number of
members.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from math import prod
from mmap import mmap
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from typing import Any, Final, NoReturn

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeoutError, OutOfMemoryError
from mlvm.core.types import Array
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.machines.shared_memory import new_source
from mlvm.parallel.communicator import Collective, brief_error, combine, flat, is_small
from mlvm.parallel.passing import (
    Passing,
    batches,
    copy_all,
    pack,
    pieces_of,
    size_of,
    unpacked,
)

_SPIN: Final = 200e-6  # seconds of spinning before a sleep, if each member has a core
_LOOK: Final = 0.05  # seconds between checks of which members have finished, and which wait
_TEXT: Final = 1 << 15  # bytes of a description or an error message
_DIGEST: Final = 16
_PAGE: Final = 4096
_BATCH_NBYTES: Final = 1 << 21
"""Number of bytes that a member sends to all members in one round: large, so that members rarely
wait, and small enough for a third-level cache."""


class Board:
    """Shared memory of a group of processes. The parent creates it and passes it to the members.

    - `counts[r, c]` is the last round that member r has published on channel c. Channel r is for
      the whole group; any other channel is for the pair of r and the member with that rank.
    - `waits[r]` are the channel and the round that r waits for, if the round is not 0.
    - `ended[r]` is set when r has finished this run.
    - `broken[r]` is set when r has aborted the run (2: a member was late). The last entry belongs
      to the parent.
    - `calls[r]` describes the call of r.
    - `asleep[r]` is set when r sleeps, and needs a byte in the pipe of r to wake.
    - `spins` is True if waiting members spin first.

    Raises `OutOfMemoryError` if the memory cannot be allocated.
    """

    def __init__(self, size: int, spins: bool, _source: Any = None) -> None:
        self.size = size
        self.spins = spins
        window = size * _most_at_once(size)  # more than SMALL
        layout: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "counts": (np.int64, (size, size)),
            "waits": (np.int64, (size, 2)),
            "ended": (np.int64, (size,)),
            "broken": (np.int64, (size + 1,)),
            "asleep": (np.int64, (size,)),
            "digests": (np.uint8, (size, size, 2, _DIGEST)),
            "calls": (np.uint8, (size, _TEXT)),
            "reasons": (np.uint8, (size + 1, _TEXT)),
            "windows": (np.uint8, (size, 2, window)),
            "pair_windows": (np.uint8, (size, 2, _most_at_once(size))),
        }
        sizes = {name: prod(shape) * dtype().itemsize for name, (dtype, shape) in layout.items()}
        nbytes = sum(-(-each // _PAGE) * _PAGE for each in sizes.values())
        try:
            source: Any = new_source(nbytes) if _source is None else _source
        except (MemoryError, OSError) as error:
            raise OutOfMemoryError(
                f"cannot allocate {nbytes:,} bytes of shared memory for {size} processes: {error}; "
                "use fewer processes"
            ) from None
        self._source: int = source
        weakref.finalize(self, os.close, self._source)
        memory = mmap(self._source, nbytes)
        parts: list[Array] = []
        start = 0
        for name, (dtype, shape) in layout.items():
            parts.append(np.frombuffer(memory, dtype, prod(shape), start).reshape(shape))
            start += -(-sizes[name] // _PAGE) * _PAGE
        self.counts, self.waits, self.ended, self.broken, self.asleep = parts[:5]
        self.digests, self.calls, self._reasons, self.windows, self.pair_windows = parts[5:]

    def clear(self) -> None:
        """Clear the state of the last run. No member is in a run."""
        for part in (self.counts, self.waits, self.ended, self.broken, self.asleep):
            part[:] = 0

    def end_run(self, i: int, error: GroupError) -> None:
        """Abort the run on behalf of member i or the parent.

        Members that wait now or arrive later raise the error.
        """
        write_text(self._reasons[i], str(error).encode(errors="replace"))
        fence()
        self.broken[i] = 2 if isinstance(error, GroupTimeoutError) else 1

    def reason(self) -> GroupError | None:
        """Return the error that has aborted the run, or None."""
        if not self.broken.any():
            return None
        fence()
        first = int(self.broken.argmax())
        kind = GroupTimeoutError if self.broken[first] == 2 else GroupError
        return kind(text_of(self._reasons[first]).decode(errors="replace"))

    @property
    def is_late(self) -> bool:
        """True if the run was aborted because a member was late."""
        return bool((self.broken == 2).any())

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            raise GroupError(
                "a group's shared memory can only be passed to a process that starts; "
                "pass it to a new process"
            )
        from multiprocessing.reduction import DupFd

        return _attached, (self.size, self.spins, DupFd(self._source))


def _most_at_once(size: int) -> int:
    """Return the largest number of bytes that a member sends to each other member in one round."""
    return max(_BATCH_NBYTES // size, 1 << 14)


def _attached(size: int, spins: bool, source: Any) -> Board:
    """Attach the same memory in another process."""
    return Board(size, spins, source.detach())


def write_text(field: Array, text: bytes) -> None:
    """Write the text to a field, which `text_of` reads. Truncate a long text."""
    text = text[: len(field) - 8]
    field[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    field[:8].view(np.int64)[0] = len(text)


def text_of(field: Array) -> bytes:
    """Return the text in a field."""
    return field[8 : 8 + int(field[:8].view(np.int64)[0])].tobytes()


def fence() -> None:
    """Order the memory accesses before this call and after it, on any processor.

    The function releases and acquires a lock, which is a memory barrier.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class Bells:
    """A pipe for each process, to wake it from sleep."""

    def __init__(self, readers: Sequence[Connection], writers: Sequence[Connection]) -> None:
        self.readers = readers
        self._writers = writers
        for each in (*readers, *writers):
            os.set_blocking(each.fileno(), False)

    def ring(self, rank: int) -> None:
        """Wake a member."""
        with suppress(OSError):  # a full pipe, so the member wakes anyway; or a dead member
            os.write(self._writers[rank].fileno(), b"\0")

    def wait(self, rank: int, seconds: float) -> bool:
        """Sleep until another member wakes this one, at most `seconds`. Return whether one did."""
        bell = self.readers[rank].fileno()
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        woken = bool(poll.poll(1e3 * seconds))
        if woken:
            os.read(bell, _PAGE)
        return woken

    def close(self) -> None:
        for each in (*self.readers, *self._writers):
            each.close()


class BoardCommunicator(Passing):
    """Communicator of a member of a group of processes, for one run.

    Received data is valid until the second exchange after the exchange that received it.
    """

    def __init__(
        self,
        board: Board,
        names: Sequence[str],
        rank: int,
        bells: Bells,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(rank, names)
        self._now = system.monotonic
        self.most = _most_at_once(len(names))
        self._board = board
        self._bells = bells
        # A memoryview is read faster than an array.
        self._counts = board.counts.reshape(-1).data
        self._asleep = board.asleep.data
        self._broken = board.broken.data
        self._written = b""  # description of the last call
        self._spin = _SPIN if board.spins and system.spins else 0.0

    # --- a member's life ---

    def end(self, rank: int) -> None:
        fence()
        self._board.ended[rank] = 1
        fence()
        self._wake(range(self._board.size))

    def fail(self, rank: int, error: BaseException) -> None:
        if not self.is_broken:
            reason = f"{self.names[rank]} failed: {brief_error(error)}"
            self._board.end_run(rank, GroupError(reason))
        self.end(rank)

    @property
    def is_mine(self) -> bool:
        """True if this member has aborted the run."""
        return bool(self._broken[self.rank])

    @property
    def is_broken(self) -> bool:
        """True if a member has aborted the run."""
        return any(self._broken)

    # --- communication ---

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Return when it is done for this member.

        Raises `GroupError` when the members cannot meet.
        """
        self._arrive(call)
        if call.nbytes:
            _WORK[call.name](self, call)
        if call.is_pair:  # because the next pair uses the same windows
            self._round(call)

    def _arrive(self, call: Collective) -> None:
        """Wait for all members of the call. Raises `GroupError` if their calls do not match."""
        self.require_unbroken(call)
        if len(call.ranks) == 1:
            return
        board, rank = self._board, self.rank
        digest, description = self.description(call)
        if description is not self._written:
            write_text(board.calls[rank], description)
            self._written = description
        channel, count = self._next(call)
        board.digests[rank, channel, count & 1] = np.frombuffer(digest, np.uint8)
        self._round(call)
        for other in call.ranks:
            if other != rank:
                theirs = board.digests[other, self._channel(call, other), count & 1]
                if theirs.tobytes() != digest:
                    self.refuse(call, other, self._call_of(other))

    def exchange(self, call: Collective, parts: Sequence[Sequence[Array]]) -> list[Sequence[Array]]:
        """Send `parts[i]` to the member `call.ranks[i]`.

        Return the arrays that each member sends to this member, in the order of the ranks.
        """
        me, most = call.ranks.index(self.rank), self.most
        if len(call.ranks) > 1:
            window = self._window(call, self.rank)
            for i, arrays in enumerate(parts):
                if i != me:
                    pack(arrays, window[i * most : (i + 1) * most])
            self._round(call)
        return self._received(call, me * most, [parts[me]] * len(call.ranks))

    def share(
        self, call: Collective, arrays: Sequence[Array], like: Sequence[Sequence[Array]]
    ) -> list[Sequence[Array]]:
        """Send the same arrays to all members of the call.

        Member `call.ranks[i]` sends arrays with the dtypes and sizes of `like[i]`. Return the
        arrays of all members, and `like` for this member, in the order of the ranks.
        """
        if len(call.ranks) > 1:
            pack(arrays, self._window(call, self.rank))
            self._round(call)
        return self._received(call, 0, like)

    def _received(
        self, call: Collective, start: int, like: Sequence[Sequence[Array]]
    ) -> list[Sequence[Array]]:
        """Return the arrays at an offset of each member's window, and `like` for this member."""
        return [
            arrays if other == self.rank else unpacked(self._window(call, other, 0)[start:], arrays)
            for other, arrays in zip(call.ranks, like, strict=True)
        ]

    def _window(self, call: Collective, rank: int, rounds: int = 1) -> Array:
        """Return the window of a member for the round that is `rounds` after the last round."""
        windows = self._board.pair_windows if call.is_pair else self._board.windows
        _, count = self._next(call)
        window: Array = windows[rank, (count - 1 + rounds) & 1]
        return window

    # --- rounds ---

    def _channel(self, call: Collective, rank: int) -> int:
        """Return the channel that the member with this rank uses for the call."""
        if not call.is_pair:
            return rank
        first, second = call.ranks
        return second if rank == first else first

    def _next(self, call: Collective) -> tuple[int, int]:
        """Return the channel of this member for the call, and the number of the next round."""
        channel = self._channel(call, self.rank)
        return channel, self._counts[self.rank * self._board.size + channel] + 1

    def _round(self, call: Collective) -> None:
        """Publish this member's data, and wait for the other members of the call."""
        size = self._board.size
        channel, count = self._next(call)
        others = [other for other in call.ranks if other != self.rank]
        watched = [other * size + self._channel(call, other) for other in others]
        counts = self._counts
        fence()
        counts[self.rank * size + channel] = count
        fence()
        if self._all_here(watched, count):  # only the last member to arrive wakes members
            self._wake(others)
            fence()
            return
        until = time.perf_counter() + self._spin
        while time.perf_counter() < until:
            os.sched_yield()
            if self._all_here(watched, count):
                fence()
                return
        self._sleep(call, channel, count, dict(zip(others, watched, strict=True)))

    def _all_here(self, watched: Sequence[int], count: int) -> bool:
        counts = self._counts
        return all(counts[i] >= count for i in watched)

    def _sleep(self, call: Collective, channel: int, count: int, watched: dict[int, int]) -> None:
        """Sleep until all other members of the call have published the round."""
        board, rank = self._board, self.rank
        board.waits[rank] = (channel, count)
        until = None if call.timeout is None else self._now() + call.timeout
        try:
            while True:
                self._asleep[rank] = 1
                fence()
                late = [other for other, i in watched.items() if self._counts[i] < count]
                if not late:
                    return
                self.require_unbroken(call)
                for other in late:
                    if board.ended[other]:
                        fence()
                        if self._counts[watched[other]] < count:
                            self.miss(call, other)
                remaining = _LOOK if until is None else min(_LOOK, max(until - self._now(), 0))
                if self._bells.wait(rank, remaining):
                    continue
                if until is not None and self._now() >= until:
                    here = board.waits[:, 1]
                    self.time_out(call, [each for each in late if not here[each]] or late)
                else:
                    self._require_progress()
        finally:
            self._asleep[rank] = 0
            board.waits[rank] = 0
            fence()

    def _wake(self, others: Sequence[int]) -> None:
        for other in others:
            if self._asleep[other]:
                self._bells.ring(other)

    # --- the end of a run ---

    def _call_of(self, rank: int) -> Collective:
        return Collective.of(text_of(self._board.calls[rank]))

    def reason(self) -> GroupError | None:
        return self._board.reason() if self.is_broken else None

    def _require_progress(self) -> None:
        """Abort the run if each member waits for another member or has finished.

        The counters only increase. Therefore, two equal snapshots show one consistent state.
        """
        board = self._board
        snapshot = self._look()
        waiting = [rank for rank in range(board.size) if self._is_stuck(rank)]
        if len(waiting) + int(board.ended.sum()) < board.size or self._look() != snapshot:
            return
        texts = [f"{self.names[rank]} in {self._call_of(rank)}" for rank in waiting]
        self.give_up(f"deadlock: all members wait: {'; '.join(texts)}")

    def _look(self) -> bytes:
        board = self._board
        fence()
        return b"".join([x.tobytes() for x in (board.counts, board.waits, board.ended)])

    def _is_stuck(self, rank: int) -> bool:
        """Return whether a member waits for a member that has not arrived."""
        board = self._board
        channel, count = map(int, board.waits[rank])
        if not count or board.ended[rank]:
            return False
        if channel != rank:
            return bool(board.counts[channel, rank] < count)
        return bool((board.counts.diagonal() < count).any())

    def give_up(self, reason: str, kind: type[GroupError] = GroupError) -> NoReturn:
        error = kind(reason)
        self._board.end_run(self.rank, error)
        fence()
        self._wake(range(self._board.size))
        raise error


# --- collectives as exchanges ----------------------------------------------------


def _combined(call: Collective, xs: Sequence[Array], out: Array) -> None:
    """Combine the members' arrays into `out`, which may be one of these arrays."""
    if len(xs) <= 2:
        combine(call.attributes["op"], xs, out)
    else:
        total = np.empty_like(out)
        combine(call.attributes["op"], xs, total)
        np.copyto(out, total)


def _all_reduce(comm: BoardCommunicator, call: Collective) -> None:
    xs = flat(call.arrays)
    me, parts = call.ranks.index(comm.rank), len(call.ranks)
    if is_small(size_of(xs), parts):
        for x, *theirs in zip(xs, *comm.share(call, xs, [xs] * parts), strict=True):
            _combined(call, theirs, x)
        return
    rounds = zip_longest(*[batches(xs, i, parts, comm.most) for i in range(parts)], fillvalue=())
    for each_batch in rounds:
        outgoing = [pieces_of(xs, batch) for batch in each_batch]
        for x, *theirs in zip(outgoing[me], *comm.exchange(call, outgoing), strict=True):
            _combined(call, theirs, x)
        for arrays, into in zip(comm.share(call, outgoing[me], outgoing), outgoing, strict=True):
            if arrays is not into:
                copy_all(arrays, into)


def _reduce_scatter(comm: BoardCommunicator, call: Collective) -> None:
    out, x = flat(call.arrays)
    parts = len(call.ranks)
    pieces = [x[i * out.size : (i + 1) * out.size] for i in range(parts)]
    for batch in batches([out], 0, 1, comm.most):
        each = comm.exchange(call, [pieces_of([piece], batch) for piece in pieces])
        for y, *theirs in zip(pieces_of([out], batch), *each, strict=True):
            combine(call.attributes["op"], theirs, y)


def _all_gather(comm: BoardCommunicator, call: Collective) -> None:
    out, x = flat(call.arrays)
    parts = len(call.ranks)
    outs = [out[i * x.size : (i + 1) * x.size] for i in range(parts)]
    for batch in batches([x], 0, 1, comm.most):
        outgoing = pieces_of([x], batch)
        for theirs, into in zip(comm.share(call, outgoing, [outgoing] * parts), outs, strict=True):
            copy_all(theirs, pieces_of([into], batch))


def _from_one(comm: BoardCommunicator, call: Collective) -> None:
    """Copy the arrays of the root to all members. In a `send`, the root is the first of two."""
    root, xs = call.attributes.get("root", 0), flat(call.arrays)
    is_root = call.ranks[root] == comm.rank
    for batch in batches(xs, 0, 1, comm.most):
        pieces = pieces_of(xs, batch)
        like = [pieces if i == root else () for i in range(len(call.ranks))]
        got = comm.share(call, pieces if is_root else (), like)
        if not is_root:
            copy_all(got[root], pieces)


_WORK: Final[Mapping[str, Callable[[BoardCommunicator, Collective], None]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    **dict.fromkeys(("broadcast", "send", "recv"), _from_one),
}
