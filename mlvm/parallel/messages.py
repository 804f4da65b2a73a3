"""Communication of processes by messages, on one host or many.

A `Transport` sends the messages, by MPI (`mlvm.parallel.mpi`) or by TCP (`mlvm.parallel.tcp`). This
file implements the collectives for both.

Before any data is sent, the members exchange descriptions of the calls, in ceil(log2 n) messages
each (Bruck et al., IEEE Trans. Parallel and Distributed Systems 8, 1997). A member sends to the
members at distances 1, 2, 4, ... before it.

- Small data is a part of these messages, and each member combines all of it.
- For medium data, each member combines one part of all members' data, and sends the result to all.
- Large data is sent along a ring in blocks, with many blocks in flight. Each member from the first
  to the last adds data, and the result is sent along the ring again. The number of hops is the
  number of members, and only the last member of a host sends to another host.

All three algorithms add elements in order of rank.
"""

from __future__ import annotations

import atexit
import struct
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np

from mlvm.core.errors import EncodingError, GroupError, GroupTimeoutError
from mlvm.core.ops.half import is_half, narrow, widened
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.system import SYSTEM, System
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.communicator import (
    BLOCK_NBYTES,
    Collective,
    add_to,
    brief_error,
    combine,
    end_reduction,
    flat,
    is_small,
)
from mlvm.parallel.group import AnyGroup, Seat, Task, name_of, one_at_a_time
from mlvm.parallel.outcome import Outcome, print_once, results_of
from mlvm.parallel.passing import (
    NOTHING,
    Passing,
    Piece,
    batches,
    copy_all,
    pack,
    pieces_of,
    size_of,
    unpacked,
)

R = TypeVar("R")

GRACE: Final = 1.0
"""Seconds that an interrupt, or `close`, waits for the other members."""

_PATIENCE: Final = 1.0  # seconds of waiting before a member asks whether all members wait
_LOOK: Final = 0.05  # seconds of waiting for a message between two checks of the run's state
_AHEAD: Final = 8  # blocks in flight to a member before the next block is created
RING: Final = 1 << 20
"""Smallest number of bytes per member of data that is sent along the ring."""

_HEAD: Final = struct.Struct("<QIIBB6x16s")  # run, number, part, kind, is_pair, digest


class MessageKind(IntEnum):
    """Kind of a message."""

    call = 1
    block = 2
    outcome = 3
    broken = 4
    waits = 5
    blocked = 6
    departed = 7


class Round(NamedTuple):
    """Message of a round before the data: the description of a call, and small data."""

    digest: bytes
    description: bytes
    body: Array


@dataclass
class Inbox:
    """Messages of a run that have arrived, by the rank of the sender."""

    rounds: dict[tuple[int, bool, int, int], Round] = field(default_factory=dict)
    """Messages by rank, whether the call is between two members, number of the call, and round."""
    blocks: defaultdict[int, deque[tuple[int, Array]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    outcomes: dict[int, bytes] = field(default_factory=dict)
    reasons: dict[int, GroupError] = field(default_factory=dict)
    """Reason for which a member has aborted the run."""
    waits: dict[int, int] = field(default_factory=dict)
    """Number of steps of members that have waited for long, or were asked."""
    answers: dict[int, int] = field(default_factory=dict)
    """Members that have answered this member's question, and the member that each waits for.

    It is the member itself if it has made progress since the answer.
    """
    is_asked: bool = False
    """True if another member has asked for the steps of this member."""
    blocked: dict[int, tuple[dict[int, int], str]] = field(default_factory=dict)
    """The `waits` of all members as known to a waiting member, and the call in which it waits."""


class Transport(ABC):
    """Messages to and from the other processes, in order between any two of them."""

    def __init__(self, rank: int, size: int, system: System = SYSTEM) -> None:
        self.rank = rank
        self.size = size
        self.system = system
        self.moved = Counter[int]()
        """Number of bytes of large messages that were sent to that member or received from it.

        A member is not late while this number increases.
        """
        self.others = [each for each in range(size) if each != rank]
        self.departed: dict[int, str] = {}
        """Members that have left the group, and why."""
        self.has_late = False
        """True if this process has given up waiting for a member, which may never exit."""
        self._inbox = defaultdict[int, Inbox](Inbox)
        self._last_sent: dict[int, bytes] = {}  # digest of the last call sent to that member
        self._described: dict[int, bytes] = {}  # last call received from that member

    @abstractmethod
    def send(self, rank: int, head: bytes, body: Array) -> None:
        """Start to send a message, and return immediately. The body is not copied."""

    @abstractmethod
    def listen(self, seconds: float) -> None:
        """Pass arrived messages to `take`, and continue to send. Wait at most `seconds`."""

    @abstractmethod
    def unsent(self, rank: int) -> int:
        """Return the number of queued messages to a member."""

    @abstractmethod
    def close(self) -> None:
        """Stop sending and receiving."""

    def inbox(self, run: int) -> Inbox:
        """Return the inbox of a run, and drop the inboxes of earlier runs."""
        for old in [each for each in self._inbox if each < run]:
            del self._inbox[old]
        return self._inbox[run]

    def tell(self, ranks: Iterable[int], run: int, kind: MessageKind, value: Any) -> None:
        """Send a value to these members, without waiting for them."""
        writer = Writer()
        writer.value(value)
        head = _HEAD.pack(run, 0, 0, kind, False, b"") + writer.message(Kind.answer)
        for rank in ranks:
            self.send(rank, head, NOTHING)

    def answer_early(self, run: int, awaited: int) -> None:
        """Answer a question of a run that this member has not begun.

        The answer is 0 steps, and that this member waits for `awaited` in the run before.
        """
        inbox = self._inbox[run]
        if inbox.is_asked:
            inbox.is_asked = False
            self.tell(self.others, run, MessageKind.waits, (0, False, awaited))

    def tell_outcome(self, run: int, outcome: bytes) -> None:
        """Send the outcome of this member's task to all members."""
        head = _HEAD.pack(run, 0, 0, MessageKind.outcome, False, b"")
        body = np.frombuffer(outcome, "u1")
        for rank in self.others:
            self.send(rank, head, body)

    def tell_round(self, rank: int, run: int, at: tuple[bool, int, int], message: Round) -> None:
        """Send the description of a call to a member, or only the digest of a repeated call."""
        is_pair, number, part = at
        head = _HEAD.pack(run, number, part, MessageKind.call, is_pair, message.digest)
        if self._last_sent.get(rank) != message.digest:
            self._last_sent[rank] = message.digest
            head += message.description
        self.send(rank, head, message.body)

    def tell_block(self, rank: int, run: int, part: int, body: Array) -> None:
        self.send(rank, _HEAD.pack(run, 0, part, MessageKind.block, False, b""), body)

    def take(self, source: int, head: bytes, body: Array) -> None:
        """Store a message. Raises `EncodingError` if it is invalid."""
        if len(head) < _HEAD.size:
            raise EncodingError(f"a message must begin with {_HEAD.size} bytes, got {len(head)}")
        run, number, part, kind, is_pair, digest = _HEAD.unpack_from(head)
        inbox, rest = self._inbox[run], head[_HEAD.size :]
        if kind in (MessageKind.call, MessageKind.block):
            inbox.waits.pop(source, None)
            inbox.blocked.pop(source, None)
            if source in inbox.answers:
                inbox.answers[source] = source
        if kind == MessageKind.call:
            description = self._described[source] = rest or self._described[source]
            inbox.rounds[source, bool(is_pair), number, part] = Round(digest, description, body)
        elif kind == MessageKind.block:
            inbox.blocks[source].append((part, body))
        elif kind == MessageKind.outcome:
            inbox.outcomes[source] = body.tobytes()
            for rank, awaited in inbox.answers.items():
                if awaited == source:  # no longer
                    inbox.answers[rank] = rank
        else:
            value = open_message(rest, Kind.answer)[1].value()
            if kind == MessageKind.broken:
                is_late, reason = value
                inbox.reasons[source] = (GroupTimeoutError if is_late else GroupError)(reason)
            elif kind == MessageKind.waits:
                inbox.waits[source], asks, inbox.answers[source] = value
                inbox.is_asked |= asks
                inbox.blocked.pop(source, None)
            elif kind == MessageKind.blocked:
                inbox.blocked[source] = dict(value[0]), value[1]
            else:
                self.departed.setdefault(source, value)

    def leave(self, reason: str) -> None:
        """Tell all members that this process leaves the group.

        Wait a moment until they have received the message.
        """
        self.tell(self.others, 0, MessageKind.departed, reason)
        until = self.system.monotonic() + GRACE
        while self.system.monotonic() < until and self.has_last_words():
            self.listen(_LOOK)
        self.close()

    def has_last_words(self) -> bool:
        """Return whether the last messages may not have reached a member."""
        return any(self.unsent(rank) for rank in self.others)


class _Wait:
    """Timer of a wait for some members.

    It restarts when a part of a large message is sent to one of them or received from one of them.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.has_asked = False
        """True if this member has asked the other members whether all wait."""
        self._ranks = ranks
        self._transport = transport
        self._moved = 0
        self.begin()

    def begin(self) -> None:
        self._began = self._transport.system.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last progress."""
        moved = sum([self._transport.moved[rank] for rank in self._ranks])
        if moved != self._moved:
            self._moved = moved
            self.begin()
        return self._transport.system.monotonic() - self._began


def _look(call: Collective, waited: float) -> float:
    """Return the seconds to wait for a message before the next check of the run's state."""
    return _LOOK if call.timeout is None else min(_LOOK, max(0, call.timeout - waited))


class MessageCommunicator(Passing):
    """Communicator of a run.

    `spoiled` is True if unreceived messages are in flight. Then there cannot be another run.
    `is_mine` is True if this member has aborted the run.
    """

    def __init__(self, transport: Transport, names: Sequence[str], run: int) -> None:
        super().__init__(transport.rank, names)
        self.spoiled = False
        self.is_mine = False
        self._transport = transport
        self._run = run
        self._inbox = transport.inbox(run)
        self._counts: defaultdict[int, int] = defaultdict(int)  # key: rank of a member
        self._moves = 1  # 0 is the answer before a run
        self._late: list[int] = []  # members whose end this member has not awaited

    # --- a member's life ---

    def end(self, rank: int) -> None:
        """Do nothing: `conclude` sends the result."""

    def fail(self, rank: int, error: BaseException) -> None:
        reason = self.reason()
        if reason is None:
            self._end_run(GroupError(f"{self.names[rank]} failed: {brief_error(error)}"))
        elif not self.is_mine:  # otherwise, the other members would blame this member
            self._tell_reason(reason)

    def conclude(
        self, outcome: bytes, seconds: float | None, timeout: float | None
    ) -> dict[int, bytes]:
        """Send the outcome of this member's task, and return the outcomes of all by rank.

        Wait at most `seconds` without progress. Raises `GroupError` if a member has left;
        `GroupTimeoutError` if no member finishes for `timeout` seconds.
        """
        transport, inbox = self._transport, self._inbox
        transport.tell_outcome(self._run, outcome)
        inbox.outcomes[self.rank] = outcome
        wait, there = _Wait(transport, transport.others), 1
        inbox.answers.clear()
        while len(inbox.outcomes) < transport.size or any(map(transport.unsent, transport.others)):
            missing = [rank for rank in transport.others if rank not in inbox.outcomes]
            departed = [rank for rank in missing if rank in transport.departed]
            if len(inbox.outcomes) > there:
                there = len(inbox.outcomes)
                wait.begin()
            slow = missing or [rank for rank in transport.others if transport.unsent(rank)]
            if slow:
                transport.answer_early(self._run + 1, slow[0])
            waited = wait.seconds()
            late = any(isinstance(error, GroupTimeoutError) for error in inbox.reasons.values())
            if departed or (late and waited > GRACE) or (seconds is not None and waited > seconds):
                self.spoiled = True
                transport.has_late |= late and not departed
                if departed and not inbox.reasons:
                    raise GroupError(self._has_left(departed[0]))
                break
            if timeout is not None and waited >= timeout:
                self.spoiled = transport.has_late = True
                self._late = sorted({self._cause(rank) for rank in slow})
                names = ", ".join(self.names[rank] for rank in self._late)
                what = "the end of" if missing else "its result to be received by"
                text = f"{self.names[self.rank]} has waited {timeout:g} s for {what} {names}"
                text += "; raise timeout="
                self._end_run(GroupTimeoutError(text))
                raise GroupTimeoutError(text)
            transport.listen(_LOOK)
        return dict(inbox.outcomes)

    def printer(self, unpacked: Callable[[bytes], Outcome]) -> int:
        """Return the member that prints the traceback of an error that all members raise.

        It is the first member with a failed task. If no task failed, it is the first member that
        has not left and is not late.
        """
        failed = [rank for rank, data in self._inbox.outcomes.items() if unpacked(data).first]
        absent = {*self._late, *self._transport.departed}
        present = [rank for rank in range(self._transport.size) if rank not in absent]
        return min(failed, default=min(present, default=self.rank))

    # --- communication ---

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective, and return when this member's part is done and sent.

        Raises `GroupError` if the members cannot meet.
        """
        self.require_unbroken(call)
        small = is_small(call.nbytes, len(call.ranks))
        arrays = _contribution(call, self.rank) if small else []
        each = self._tell_all(call, _packed(arrays))
        if small:
            _AT_ONCE[call.name](call, call.ranks.index(self.rank), each)
        else:
            _ROUND[call.name](self, call)
        self._send_all(call, call.ranks, 1)

    def _tell_all(self, call: Collective, mine: Array) -> list[Array]:
        """Exchange the descriptions of the calls and small messages with the other members.

        Return the messages in the order of `call.ranks`. Raises `GroupError` if the calls do not
        match.
        """
        n, me = len(call.ranks), call.ranks.index(self.rank)
        channel = call.ranks[1 - me] if call.is_pair else self.rank
        self._counts[channel] += 1
        number = self._counts[channel]
        digest, description = self.description(call)
        received, step, part = [mine], 1, 0
        while step < n:
            count = min(step, n - step)
            at = (call.is_pair, number, part)
            message = Round(digest, description, _framed(received[:count]))
            self._transport.tell_round(self._neighbour(call, -step), self._run, at, message)
            source = self._neighbour(call, step)
            key = (source, *at)
            self._wait(call, lambda key=key: key in self._inbox.rounds, source)  # type: ignore[misc]
            theirs = self._inbox.rounds.pop(key)
            if theirs.digest != digest:
                self.refuse(call, source, Collective.of(theirs.description))
            received += _unframed(theirs.body)
            step *= 2
            part += 1
        return [received[(i - me) % n] for i in range(n)]

    def _neighbour(self, call: Collective, steps: int) -> int:
        """Return the rank of the member that is `steps` further along the ring."""
        me = call.ranks.index(self.rank)
        return call.ranks[(me + steps) % len(call.ranks)]

    # --- the ring ---

    def go_round(
        self,
        call: Collective,
        first: Iterable[tuple[int, Array]],
        expected: int,
        take: Callable[[int, Array], None],
    ) -> None:
        """Send blocks to the next member, and receive blocks from the previous one.

        `first` are the blocks of this member. `take` is called with each of the `expected` blocks
        when it arrives.
        """
        source = self._neighbour(call, -1)
        blocks = self._inbox.blocks[source]
        for part, body in first:
            self.pass_on(call, part, body)
            while blocks:
                take(*blocks.popleft())
                expected -= 1
        while expected:
            self._wait(call, lambda: bool(blocks), source)
            take(*blocks.popleft())
            expected -= 1

    def pass_on(self, call: Collective, part: int, body: Array) -> None:
        """Send a block to the next member."""
        self.give(call, self._neighbour(call, 1), part, body)

    def get(self, call: Collective, source: int) -> Array:
        """Receive the next block from a member."""
        blocks = self._inbox.blocks[source]
        self._wait(call, lambda: bool(blocks), source)
        return blocks.popleft()[1]

    def give(self, call: Collective, to: int, part: int, body: Array) -> None:
        """Send a block to that member, after most of the previous blocks were sent."""
        self.require_unbroken(call)
        self._send_all(call, [to], _AHEAD)
        self._transport.tell_block(to, self._run, part, body)

    # --- waiting ---

    def _wait(self, call: Collective, ready: Callable[[], bool], source: int) -> None:
        """Wait for a message of that member.

        Raises `GroupError` if it cannot arrive, and `GroupTimeoutError` if it is late.
        """
        inbox, transport = self._inbox, self._transport
        if not ready():
            transport.listen(0)
        if not ready():
            wait = _Wait(transport, [source])
            while not ready():
                self.require_unbroken(call)
                if source in inbox.outcomes:
                    self.miss(call, source)
                departed = [rank for rank in call.ranks if rank in transport.departed]
                if departed:
                    self.spoiled = True
                    self.give_up(self._has_left(departed[0]))
                if self._tell_waits(call, wait, source):
                    self._require_progress(call)
                waited = wait.seconds()
                if call.timeout is not None and waited >= call.timeout:
                    responsive = {self.rank, *inbox.answers, *inbox.outcomes}
                    late = [rank for rank in call.ranks if rank not in responsive]
                    self.time_out(call, late or [self._cause(source)])
                transport.listen(_look(call, waited))
        self._has_moved()

    def _send_all(self, call: Collective, ranks: Sequence[int], most: int) -> None:
        """Wait until fewer than `most` messages to each of these members are unsent.

        A member that only sends needs other members only to receive, and they receive until all
        have finished. Therefore, this method does not raise if the run is aborted or a member has
        finished, and a sending member does not count as waiting in `_require_progress`. It does
        answer questions, and it raises `GroupTimeoutError` if a member does not receive.
        """
        transport = self._transport

        def slow() -> list[int]:
            return [rank for rank in ranks if transport.unsent(rank) >= most]

        if not slow():
            return
        transport.listen(0)
        wait = _Wait(transport, ranks)
        while late := [rank for rank in slow() if rank not in transport.departed]:
            self._tell_waits(call, wait, late[0])
            waited = wait.seconds()
            if call.timeout is not None and waited >= call.timeout:
                self.require_unbroken(call)
                self.time_out(call, late)
            transport.listen(_look(call, waited))
        self._has_moved()

    def _tell_waits(self, call: Collective, wait: _Wait, source: int) -> bool:
        """Ask the other members whether they wait, and answer their question.

        A member asks if it has waited for long. The answer is that this member waits for `source`.
        Return whether the other members were told that this member waits.
        """
        inbox, transport = self._inbox, self._transport
        patience = _PATIENCE if call.timeout is None else min(_PATIENCE, call.timeout / 2)
        asks = not wait.has_asked and wait.seconds() > patience
        if asks or inbox.is_asked:
            wait.has_asked |= asks
            inbox.is_asked = False
            if asks:
                inbox.answers.clear()
            inbox.waits[self.rank] = self._moves
            inbox.blocked.pop(self.rank, None)
            transport.tell(
                transport.others, self._run, MessageKind.waits, (self._moves, asks, source)
            )
        return self.rank in inbox.waits

    def _cause(self, rank: int) -> int:
        """Return the member that causes this member to be late.

        It is the last member in the chain of members that wait for each other. It is the late
        member itself if they wait in a circle.
        """
        answers, visited, cause = self._inbox.answers, {self.rank}, rank
        while cause not in visited and answers.get(cause, cause) != cause:
            visited.add(cause)
            cause = answers[cause]
        return rank if cause in visited else cause

    def _has_moved(self) -> None:
        self._moves += 1
        self._inbox.waits.pop(self.rank, None)
        self._inbox.blocked.pop(self.rank, None)

    # --- the end of a run ---

    def reason(self) -> GroupError | None:
        return next(iter(self._inbox.reasons.values()), None)

    def _has_left(self, rank: int) -> str:
        reason = self._transport.departed[rank]
        return f"{self.names[rank]} has left" + (f": {reason}" if reason else "")

    def _require_progress(self, call: Collective) -> None:
        """Abort the run if each member waits for another member or has finished.

        A member that waits for long sends the number of steps to all members. A member that still
        waits when it has received all numbers sends these numbers to all members. No message was in
        flight to it then. If all members send the same numbers, no member has made progress in
        between, and no member can.
        """
        inbox, transport = self._inbox, self._transport
        waits = {**inbox.waits, **dict.fromkeys(inbox.outcomes, -1)}
        if len(waits) < transport.size:
            return
        if inbox.blocked.get(self.rank, (None, ""))[0] != waits:
            inbox.blocked[self.rank] = waits, str(call)
            transport.tell(
                transport.others, self._run, MessageKind.blocked, (list(waits.items()), str(call))
            )
        waiting = [rank for rank in sorted(waits) if rank not in inbox.outcomes]
        if all(inbox.blocked.get(rank, (None, ""))[0] == waits for rank in waiting):
            texts = [f"{self.names[rank]} in {inbox.blocked[rank][1]}" for rank in waiting]
            texts += [f"{self.names[rank]} has ended" for rank in sorted(inbox.outcomes)]
            self.give_up(f"deadlock: all members wait: {'; '.join(texts)}")

    def _end_run(self, error: GroupError) -> None:
        self.is_mine = True
        self._inbox.reasons[self.rank] = error
        self._tell_reason(error)

    def _tell_reason(self, error: GroupError) -> None:
        reason = isinstance(error, GroupTimeoutError), str(error)
        self._transport.tell(self._transport.others, self._run, MessageKind.broken, reason)

    def give_up(self, reason: str, kind: type[GroupError] = GroupError) -> NoReturn:
        self._end_run(kind(reason))
        raise kind(reason)


# --- small data: each member combines all of it ------------------------------------------------


def _contribution(call: Collective, rank: int) -> Sequence[Array]:
    """Return the arrays that a member sends to all members."""
    if call.name in ("all_gather", "reduce_scatter"):
        return flat(call.arrays[1:])
    if call.name == "all_reduce" or call.ranks[call.attributes.get("root", 0)] == rank:
        return flat(call.arrays)
    return ()


def _packed(arrays: Sequence[Array]) -> Array:
    message = np.empty(size_of(arrays), np.uint8)
    pack(arrays, message)
    return message


def _framed(messages: Sequence[Array]) -> Array:
    """Encode several messages as one message, with the lengths."""
    if not any(each.nbytes for each in messages):
        return np.array([len(messages)], "<i8").view(np.uint8)
    lengths = np.array([len(messages), *[each.nbytes for each in messages]], "<i8")
    return np.concatenate([lengths.view(np.uint8), *messages])


def _unframed(body: Array) -> Iterator[Array]:
    """Yield the messages that were encoded as one message."""
    count = int(body[:8].view("<i8")[0])
    if body.nbytes == 8:
        yield from [NOTHING] * count
        return
    start = 8 * (count + 1)
    for length in body[8:start].view("<i8").tolist():
        yield body[start : start + length]
        start += length


def _reduced_at_once(call: Collective, me: int, each: Sequence[Array]) -> None:
    xs = flat(call.arrays)
    for x, *theirs in zip(xs, *[unpacked(message, xs) for message in each], strict=True):
        combine(call.attributes["op"], theirs, x)


def _scattered_at_once(call: Collective, me: int, each: Sequence[Array]) -> None:
    out, x = flat(call.arrays)
    own = slice(me * out.size, (me + 1) * out.size)
    pieces = [unpacked(message, [x])[0][own] for message in each]
    combine(call.attributes["op"], pieces, out)


def _gathered_at_once(call: Collective, me: int, each: Sequence[Array]) -> None:
    out, x = flat(call.arrays)
    for i, message in enumerate(each):
        copy_all(unpacked(message, [x]), [out[i * x.size : (i + 1) * x.size]])


def _from_one_at_once(call: Collective, me: int, each: Sequence[Array]) -> None:
    """Copy the arrays of the root. In a `send`, the root is the first of two members."""
    root, xs = call.attributes.get("root", 0), flat(call.arrays)
    if me != root:
        copy_all(unpacked(each[root], xs), xs)


_AT_ONCE: Final[Mapping[str, Callable[[Collective, int, Sequence[Array]], None]]] = {
    "all_reduce": _reduced_at_once,
    "reduce_scatter": _scattered_at_once,
    "all_gather": _gathered_at_once,
    **dict.fromkeys(("broadcast", "send", "recv", "barrier"), _from_one_at_once),
}


# --- large data: along the ring -----------------------------------------------------


def _blocks(xs: Sequence[Array], call: Collective) -> list[list[Piece]]:
    """Split the arrays into several blocks per member, so that most members are busy."""
    most = call.nbytes // (4 * len(call.ranks))
    return list(batches(xs, 0, 1, min(max(most, 1 << 15), BLOCK_NBYTES)))


def _totals(xs: Sequence[Array]) -> list[Array]:
    """Return empty arrays for partial totals, in f32 for half precision."""
    return [np.empty(x.size, np.float32) if is_half(x) else x for x in xs]


def _one_message(arrays: Sequence[Array]) -> Array:
    """Pack the arrays into a message, without a copy if there is one array."""
    return arrays[0].view(np.uint8) if len(arrays) == 1 else _packed(arrays)


def _reduce_round(
    comm: MessageCommunicator,
    call: Collective,
    sources: Sequence[Sequence[Array]],
    results: Sequence[Sequence[Array]],
    last_with: Callable[[int], int],
) -> None:
    """Reduce `sources[k]` of all members, from the first to the last member, for each k.

    The result is sent along the ring to the member `last_with(k)`. Each member that receives it and
    has `results[k]` copies it.
    """
    op, n, me = call.attributes["op"], len(call.ranks), call.ranks.index(comm.rank)
    total_blocks, last = len(sources), len(call.ranks) - 1

    def take(part: int, message: Array) -> None:
        k = part % total_blocks
        if part >= total_blocks:
            copy_all(unpacked(message, results[k]), results[k])
            if me != last_with(k):
                comm.pass_on(call, part, message)
            return
        totals = unpacked(message, _totals(sources[k]))
        for total, x in zip(totals, sources[k], strict=True):
            add_to(op, total, x)
        if me < last:
            comm.pass_on(call, part, message)
            return
        for total in totals:
            end_reduction(op, total, n)
        if any(map(is_half, sources[k])):
            totals = [_narrowed(*each) for each in zip(totals, sources[k], strict=True)]
            message = _one_message(totals)
        copy_all(totals[: len(results[k])], results[k])
        if last_with(k) != last:
            comm.pass_on(call, part + total_blocks, message)

    if me == 0:
        first = (
            (k, _one_message([widened(x) if is_half(x) else x for x in xs]))
            for k, xs in enumerate(sources)
        )
        comes = [k for k in range(total_blocks) if last_with(k) != last]
        comm.go_round(call, first, len(comes), take)
    else:
        comes = [k for k in range(total_blocks) if me <= last_with(k) != last]
        comm.go_round(call, (), total_blocks + (len(comes) if me != last else 0), take)


def _narrowed(total: Array, x: Array) -> Array:
    """Convert the total to the dtype of x."""
    if not is_half(x):
        return total
    narrow(out := np.empty_like(x), total)
    return out


def _combine_part(
    comm: MessageCommunicator,
    call: Collective,
    sources: Sequence[Sequence[Sequence[Array]]],
    results: Sequence[Sequence[Array]],
) -> None:
    """Send the blocks `sources[i]` to each member i, and combine the blocks of this member.

    `results` has one list of arrays for each block of this member.
    """
    me, n = call.ranks.index(comm.rank), len(call.ranks)
    for i in [(me + step) % n for step in range(1, n)]:
        for k, arrays in enumerate(sources[i]):
            comm.give(call, call.ranks[i], k, _one_message(arrays))
    for arrays, into in zip(sources[me], results, strict=True):
        each = [
            arrays if i == me else unpacked(comm.get(call, rank), arrays)
            for i, rank in enumerate(call.ranks)
        ]
        for out, *theirs in zip(into, *each, strict=True):
            total = np.empty_like(out)
            combine(call.attributes["op"], theirs, total)
            np.copyto(out, total)


def _reduced_by_parts(comm: MessageCommunicator, call: Collective) -> None:
    xs, n = flat(call.arrays), len(call.ranks)
    parts = [list(batches(xs, i, n, BLOCK_NBYTES)) for i in range(n)]
    sources = [[pieces_of(xs, block) for block in part] for part in parts]
    me = call.ranks.index(comm.rank)
    _combine_part(comm, call, sources, sources[me])
    for i in [(me + step) % n for step in range(1, n)]:
        for k, arrays in enumerate(sources[me]):
            comm.give(call, call.ranks[i], k, _one_message(arrays))
    for i, rank in enumerate(call.ranks):
        for into in sources[i] if i != me else ():
            copy_all(unpacked(comm.get(call, rank), into), into)


def _reduced(comm: MessageCommunicator, call: Collective) -> None:
    xs, n = flat(call.arrays), len(call.ranks)
    if call.nbytes < RING * n:
        _reduced_by_parts(comm, call)
        return
    sources = [pieces_of(xs, block) for block in _blocks(xs, call)]
    _reduce_round(comm, call, sources, sources, lambda k: n - 2)


def _scattered(comm: MessageCommunicator, call: Collective) -> None:
    out, x = flat(call.arrays)
    me, n = call.ranks.index(comm.rank), len(call.ranks)
    parts = _blocks([out], call)
    pieces = [x[i * out.size : (i + 1) * out.size] for i in range(n)]
    sources = [pieces_of([piece], block) for piece in pieces for block in parts]
    own = [pieces_of([out], block) for block in parts]
    if call.nbytes < RING * n:
        by_member = [sources[i * len(parts) : (i + 1) * len(parts)] for i in range(n)]
        _combine_part(comm, call, by_member, own)
        return
    results = [own[k % len(parts)] if k // len(parts) == me else [] for k in range(len(sources))]
    _reduce_round(comm, call, sources, results, lambda k: k // len(parts))


def _gathered(comm: MessageCommunicator, call: Collective) -> None:
    out, x = flat(call.arrays)
    parts = _blocks([x], call)
    outs = [out[i * x.size : (i + 1) * x.size] for i in range(len(call.ranks))]
    copy_all([x], [outs[call.ranks.index(comm.rank)]])
    blocks = [pieces_of([each], block) for each in outs for block in parts]
    _spread_round(comm, call, blocks, lambda k: k // len(parts))


def _from_one(comm: MessageCommunicator, call: Collective) -> None:
    """Send the arrays of the root along the ring. In a `send`, the root is the first member."""
    root, xs = call.attributes.get("root", 0), flat(call.arrays)
    blocks = [pieces_of(xs, block) for block in _blocks(xs, call)]
    _spread_round(comm, call, blocks, lambda k: root)


def _spread_round(
    comm: MessageCommunicator,
    call: Collective,
    blocks: Sequence[Sequence[Array]],
    owner_of: Callable[[int], int],
) -> None:
    """Send each block of arrays along the ring from its owner. Each other member copies it."""
    me, n = call.ranks.index(comm.rank), len(call.ranks)

    def take(part: int, message: Array) -> None:
        copy_all(unpacked(message, blocks[part]), blocks[part])
        if (me + 1) % n != owner_of(part):
            comm.pass_on(call, part, message)

    own = [k for k in range(len(blocks)) if owner_of(k) == me]
    first = ((k, _one_message(blocks[k])) for k in own)
    comm.go_round(call, first, len(blocks) - len(own), take)


_ROUND: Final[Mapping[str, Callable[[MessageCommunicator, Collective], None]]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_gather": _gathered,
    **dict.fromkeys(("broadcast", "send", "recv"), _from_one),
}


# --- the group -------------------------------------------------------------------------


class MessageGroup(AnyGroup):
    """Group of processes that were started together.

    Each process creates the group, and all processes make the same calls of `run`, `keep` and kept
    functions. `run` calls the function for this process's member, on this thread, and returns the
    results of all members. If a member fails, all members raise the error. If a process leaves the
    program, the other processes raise an error that names it.
    """

    _encoding: Any
    """Module that encodes outcomes for the other members.

    `packed` encodes a result, and raises `GroupError` if it cannot. `packed_failure` encodes an
    error. `unpacked` decodes both.
    """

    def __init__(self, transport: Transport, timeout: float | None) -> None:
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(transport.size)])
        self._transport = transport
        self.rank = transport.rank
        self.timeout = timeout
        self.vm = LocalVM(f"vm{self.rank}")
        self._seat = Seat(self.vm, self.rank, self.size, timeout)
        self._run = 0
        atexit.register(self.close)

    @one_at_a_time
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        task = tasks[self.rank]
        communicator: MessageCommunicator | None = None
        error: BaseException | None = None
        concluded = False  # otherwise, the other members would wait for this member
        try:
            self._run += 1
            communicator = MessageCommunicator(self._transport, self._names, self._run)
            with one_blas_thread.limited():
                try:
                    data = self._seat.do(lambda *at: self._encoding.packed(task(*at)), communicator)
                except BaseException as raised:
                    error = raised
                    data = self._encoding.packed_failure(raised, first=communicator.is_mine)
                interrupted = not isinstance(error, Exception | None)
                seconds = GRACE if interrupted else None
                results_by_rank = communicator.conclude(data, seconds, self.timeout)
                concluded = True
            if error is not None and (communicator.is_mine or interrupted or communicator.spoiled):
                error.add_note(f"raised by {self._names[self.rank]} of a group of {self.size}")
                raise error
            unpacked: Callable[[bytes], Outcome] = self._encoding.unpacked
            outcomes = {rank: unpacked(each) for rank, each in sorted(results_by_rank.items())}
            if len(outcomes) < self.size and not any(each.failure for each in outcomes.values()):
                raise communicator.reason() or GroupError("a member has left")
            return results_of(outcomes, self._names)
        except Exception as raised:
            if communicator is not None:
                printer = communicator.printer(self._encoding.unpacked)
                print_once(raised, self._names[self.rank], self._names[printer])
            raise
        finally:
            if communicator is None or communicator.spoiled or not concluded:
                reason = sys.exc_info()[1]
                if reason is None and communicator is not None:  # all results have arrived
                    reason = communicator.reason()
                if reason is not None:
                    kind = type(reason) if isinstance(reason, GroupError) else GroupError
                    self._why_closed = kind, f"the group is closed: {brief_error(reason)}"
                self._leave(reason)
            error = None  # because the traceback refers to this frame

    def close(self) -> None:
        """Leave the group. Members that still wait for this process raise an error. Idempotent."""
        self._leave(getattr(sys, "last_value", None))  # the uncaught error that Python has printed

    def __exit__(self, *error: object) -> None:
        self._leave(error[1])

    def _leave(self, error: object) -> None:
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._transport.leave(brief_error(error) if isinstance(error, BaseException) else "")
            self._seat.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.size}, member {self.rank}>"
