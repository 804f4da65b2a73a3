"""Base class of communicators in which members send arrays to each other.

Members share windows of memory in `mlvm.parallel.board`, and send messages in
`mlvm.parallel.messages`. `Passing` implements what both have in common: the end of a run by an
error, and the encoding of arrays in a message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn, TypeAlias

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeoutError
from mlvm.core.types import Array
from mlvm.parallel.communicator import Collective, Communicator, blocks, mismatch, timeout_text

NOTHING: Final = np.empty(0, np.uint8)
"""Message that a member receives from itself."""

_ALIGNMENT: Final = 8  # alignment of an array in a message: the size of the largest element

Piece: TypeAlias = tuple[int, slice]
"""Index of an array, and a slice of this array."""

Batch: TypeAlias = Sequence[Piece]


class Passing(Communicator):
    """Communicator of a member that sends arrays to other members.

    A message contains the arrays of a batch, one after the other.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.rank = rank
        self.names = names
        self._last: tuple[object, ...] = ()
        self._description = b"", b""

    def description(self, call: Collective) -> tuple[bytes, bytes]:
        """Return the digest and the description of the call, cached for equal calls."""
        like = (call.name, call.key, call.ranks, tuple(call.types), *call.attributes.values())
        if like != self._last:
            self._last, self._description = like, (call.digest(), call.described())
        return self._description

    @abstractmethod
    def reason(self) -> GroupError | None:
        """Return the error that has aborted the run, or None."""

    @abstractmethod
    def give_up(self, reason: str, kind: type[GroupError] = GroupError) -> NoReturn:
        """Abort the run. Raises the `GroupError`."""

    def require_unbroken(self, call: Collective) -> None:
        """Raise `GroupError` if the run was aborted."""
        error = self.reason()
        if error is not None:
            raise type(error)(f"{self.names[self.rank]} gives up {call}: {error}")

    def refuse(self, call: Collective, other: int, theirs: Collective) -> NoReturn:
        """Abort the run because the other member's call does not match."""
        calls = {self.rank: call, other: theirs}
        one, two = [(self.names[rank], calls[rank]) for rank in sorted(calls)]
        self.give_up(mismatch(one, two))

    def miss(self, call: Collective, other: int) -> NoReturn:
        """Abort the run because the other member has finished."""
        me, late = self.names[self.rank], self.names[other]
        self.give_up(f"{late} has ended while {me} waits for it in {call}")

    def time_out(self, call: Collective, late: Sequence[int]) -> NoReturn:
        """Abort the run because these members are late."""
        self.give_up(timeout_text(self.names, self.rank, call, late), GroupTimeoutError)


def packed_nbytes(nbytes: int) -> int:
    """Return the number of bytes that an array of that size needs in a message."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def pack(arrays: Sequence[Array], into: Array) -> None:
    """Write the arrays to a message, which is a u8 array."""
    start = 0
    for array in arrays:
        np.copyto(into[start : start + array.nbytes].view(array.dtype), array)
        start += packed_nbytes(array.nbytes)


def size_of(arrays: Sequence[Array]) -> int:
    """Return the number of bytes of a message with these arrays."""
    return sum([packed_nbytes(array.nbytes) for array in arrays])


def unpacked(message: Array, like: Sequence[Array]) -> list[Array]:
    """Return the arrays of a message, with the dtypes and sizes of `like`."""
    arrays, start = [], 0
    for array in like:
        arrays.append(message[start : start + array.nbytes].view(array.dtype))
        start += packed_nbytes(array.nbytes)
    return arrays


def batches(xs: Sequence[Array], part: int, parts: int, most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of part number `part` of `parts` equal parts of the flat arrays.

    Each batch of pieces has at most `most` bytes.
    """
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


def copy_all(sources: Sequence[Array], outs: Sequence[Array]) -> None:
    for source, out in zip(sources, outs, strict=True):
        np.copyto(out, source)
