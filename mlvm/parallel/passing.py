"""The collectives where members do not see each other's tensors: they pass arrays.

`Passing` is what all such places have: how a run breaks, and what an array is in a message. Where
members share windows of memory (`Exchanging`) all is made of two exchanges: each member gives
something else to every other one, or the same to all. What is large is cut into batches that stay
in the cache. Of a reduction each member combines its part, as Rabenseifner's algorithm does
(Thakur, Rabenseifner, Gropp, Int. J. of High Performance Computing Applications 19, 2005): every
element travels twice, whatever the number of members. For messages see `mlvm.parallel.messages`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeout
from mlvm.core.types import Array
from mlvm.parallel.communicator import (
    Collective,
    Communicator,
    blocks,
    combine,
    flat,
    is_small,
    mismatch,
    timeout_text,
)

NOTHING: Final = np.empty(0, np.uint8)
"""The message that a member gets from itself."""

_BATCH_NBYTES: Final = 1 << 21
"""Bytes that a member sends to all others at once: large, so that they rarely wait, and small
enough for a third-level cache."""

_ALIGNMENT: Final = 8  # of an array in a message: the largest element

Piece: TypeAlias = tuple[int, slice]
"""The number of an array and a slice of it."""

Batch: TypeAlias = Sequence[Piece]


class Passing(Communicator):
    """Communicator whose members pass arrays, for one member.

    A message has the arrays of a batch one after the other.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.rank = rank
        self.names = names
        self._last: tuple[object, ...] = ()
        self._description = b"", b""

    def description(self, call: Collective) -> tuple[bytes, bytes]:
        """Return digest and description of the call, cached for equal calls."""
        like = (call.name, call.key, call.ranks, tuple(call.types), *call.attributes.values())
        if like != self._last:
            self._last, self._description = like, (call.digest(), call.described())
        return self._description

    @abstractmethod
    def reason(self) -> GroupError | None:
        """Why the run has ended, or None."""

    @abstractmethod
    def give_up(self, reason: str, kind: type[GroupError] = GroupError) -> NoReturn:
        """End the run. Raises such a `GroupError`."""

    def require_unbroken(self, call: Collective) -> None:
        """Raise `GroupError` if the run has ended."""
        error = self.reason()
        if error is not None:
            raise type(error)(f"{self.names[self.rank]} gives up {call}: {error}")

    def refuse(self, call: Collective, other: int, theirs: Collective) -> NoReturn:
        """End the run: the other member's call does not fit."""
        calls = {self.rank: call, other: theirs}
        one, two = [(self.names[rank], calls[rank]) for rank in sorted(calls)]
        self.give_up(mismatch(one, two))

    def miss(self, call: Collective, other: int) -> NoReturn:
        """End the run: the other member will not come."""
        me, late = self.names[self.rank], self.names[other]
        self.give_up(f"{late} has ended while {me} waits for it in {call}")

    def time_out(self, call: Collective, late: Sequence[int]) -> NoReturn:
        """End the run: these members have not come in time."""
        self.give_up(timeout_text(self.names, self.rank, call, late), GroupTimeout)


class Exchanging(Passing):
    """A place of two exchanges. What is received is valid until the exchange after the next."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        super().__init__(rank, names)
        self.most = most_at_once(len(names))

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Returns when it is done for this member.

        Raises `GroupError` when the members cannot meet.
        """
        self.arrive(call)
        if call.nbytes:
            _WORK[call.name](self, call)
        self.depart(call)

    @abstractmethod
    def arrive(self, call: Collective) -> None:
        """Wait until all members of the call are here, with calls that fit. Raises `GroupError`."""

    @abstractmethod
    def depart(self, call: Collective) -> None:
        """End the call for this member."""

    @abstractmethod
    def exchange(
        self, call: Collective, parts: Sequence[Sequence[Array]], nbytes: int
    ) -> list[Array]:
        """Give `parts[i]` to the member `call.ranks[i]`, and get `nbytes` bytes from
        each, as u8 arrays in that order. The member's own is empty."""

    @abstractmethod
    def share(
        self, call: Collective, arrays: Sequence[Array], lengths: Sequence[int]
    ) -> list[Array]:
        """Give the same arrays to all members of the call. Get `lengths[i]` bytes from the member
        `call.ranks[i]`, as u8 arrays in that order. The member's own is empty."""


def most_at_once(size: int) -> int:
    """Return the largest number of bytes that a member sends to each other one at once."""
    return max(_BATCH_NBYTES // size, 1 << 14)


def packed_nbytes(nbytes: int) -> int:
    """Return the bytes of an array of that size in a message."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def pack(arrays: Sequence[Array], into: Array) -> None:
    """Write the arrays into a message, which is a u8 array."""
    start = 0
    for array in arrays:
        np.copyto(into[start : start + array.nbytes].view(array.dtype), array)
        start += packed_nbytes(array.nbytes)


def size_of(arrays: Sequence[Array]) -> int:
    """Return the bytes of the message with these arrays."""
    return sum([packed_nbytes(array.nbytes) for array in arrays])


def unpacked(message: Array, like: Sequence[Array]) -> list[Array]:
    """Unpack the arrays of a message, of the dtypes and lengths of `like`."""
    arrays, start = [], 0
    for array in like:
        arrays.append(message[start : start + array.nbytes].view(array.dtype))
        start += packed_nbytes(array.nbytes)
    return arrays


def batches(xs: Sequence[Array], part: int, parts: int, most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of one of `parts` equal parts of the flat arrays, in batches of up to
    `most` bytes."""
    batch: list[Piece] = []
    size = 0
    for i, block in blocks(xs, part, parts):
        itemsize = xs[i].itemsize
        for start in range(block.start, block.stop, most // itemsize):
            stop = min(start + most // itemsize, block.stop)
            nbytes = packed_nbytes((stop - start) * itemsize)
            if size + nbytes > most:
                yield batch
                batch, size = [], 0
            batch.append((i, slice(start, stop)))
            size += nbytes
    if batch:
        yield batch


def pieces_of(xs: Sequence[Array], batch: Batch) -> list[Array]:
    return [xs[i][block] for i, block in batch]


def _combined(call: Collective, xs: Sequence[Array], out: Array) -> None:
    """Combine the members' arrays into `out`, which may be one of them."""
    if len(xs) <= 2:
        combine(call.attributes["op"], xs, out)
    else:
        total = np.empty_like(out)
        combine(call.attributes["op"], xs, total)
        np.copyto(out, total)


def _all_reduce(place: Exchanging, call: Collective) -> None:
    xs = flat(call.arrays)
    me, parts = call.ranks.index(place.rank), len(call.ranks)
    if is_small(size_of(xs), parts):
        got = place.share(call, xs, [size_of(xs)] * parts)
        each = [xs if i == me else unpacked(message, xs) for i, message in enumerate(got)]
        for x, *theirs in zip(xs, *each, strict=True):
            _combined(call, theirs, x)
        return
    rounds = zip_longest(*[batches(xs, i, parts, place.most) for i in range(parts)], fillvalue=())
    for each_batch in rounds:
        outgoing = [pieces_of(xs, batch) for batch in each_batch]
        mine = outgoing[me]
        got = place.exchange(call, outgoing, size_of(mine))
        each = [mine if i == me else unpacked(message, mine) for i, message in enumerate(got)]
        for x, *theirs in zip(mine, *each, strict=True):
            _combined(call, theirs, x)
        for i, message in enumerate(place.share(call, mine, list(map(size_of, outgoing)))):
            if i != me:
                copy_all(unpacked(message, outgoing[i]), outgoing[i])


def _reduce_scatter(place: Exchanging, call: Collective) -> None:
    out, x = flat(call.arrays)
    me, parts = call.ranks.index(place.rank), len(call.ranks)
    pieces = [x[i * out.size : (i + 1) * out.size] for i in range(parts)]
    for batch in batches([out], 0, 1, place.most):
        outgoing = [pieces_of([piece], batch) for piece in pieces]
        mine = outgoing[me]
        got = place.exchange(call, outgoing, size_of(mine))
        each = [mine if i == me else unpacked(message, mine) for i, message in enumerate(got)]
        for y, *theirs in zip(pieces_of([out], batch), *each, strict=True):
            combine(call.attributes["op"], theirs, y)


def _all_gather(place: Exchanging, call: Collective) -> None:
    out, x = flat(call.arrays)
    me, parts = call.ranks.index(place.rank), len(call.ranks)
    outs = [out[i * x.size : (i + 1) * x.size] for i in range(parts)]
    for batch in batches([x], 0, 1, place.most):
        outgoing = pieces_of([x], batch)
        for i, message in enumerate(place.share(call, outgoing, [size_of(outgoing)] * parts)):
            theirs = outgoing if i == me else unpacked(message, outgoing)
            copy_all(theirs, pieces_of([outs[i]], batch))


def _from_one(place: Exchanging, call: Collective) -> None:
    """Return the arrays of the root become everybody's; a sender is the first of two."""
    root, xs = call.attributes.get("root", 0), flat(call.arrays)
    is_root = call.ranks[root] == place.rank
    for batch in batches(xs, 0, 1, place.most):
        pieces = pieces_of(xs, batch)
        lengths = [size_of(pieces) if i == root else 0 for i in range(len(call.ranks))]
        got = place.share(call, pieces if is_root else (), lengths)
        if not is_root:
            copy_all(unpacked(got[root], pieces), pieces)


def copy_all(sources: Sequence[Array], outs: Sequence[Array]) -> None:
    for source, out in zip(sources, outs, strict=True):
        np.copyto(out, source)


_WORK: Final[Mapping[str, Callable[[Exchanging, Collective], None]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _from_one,
    "send": _from_one,
    "recv": _from_one,
}
