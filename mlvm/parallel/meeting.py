"""What a collective is, and what a meeting place does: the members of a group meet there for it.

A collective is described by data: its name, attributes, the types and ranks, and the member's own
arrays. So it can be told to a member that shares no memory with this one. A place brings the
members together, finds out when they cannot meet, and moves and combines the elements. Every place
combines them in the order of ranks, block by block, with the same kernels: the bits depend on the
number of members alone, and not on the place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from mlvm.core.ops.half import is_half, narrow, widened
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.types import Array, DType, TensorType

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]

SMALL: Final = 1 << 18
"""Up to so many bytes, one of two members does all the work: to divide it would take longer."""

BLOCK_NBYTES: Final = 1 << 18
"""Bytes that are combined at once: so many that threads seldom wait for Python's lock, and so few
that they fit a second-level cache."""

_MOST_TYPES: Final = 4  # in the text of an error

_MOST_LATE: Final = 8  # members, in the text of an error

_MOST_DESCRIBED: Final = 200  # types, to another member

_UFUNCS: Final = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one member calls it.

    The members with these `ranks` take part. `key` and `types` (dtype and shape) must be equal for
    all of them; between two members, `send` and `recv`, there is no key. `arrays` are the
    member's own: what `name` changes or reads, and where it writes.
    `nbytes` tells how much work there is. No member waits for another longer than `timeout` seconds
    at a stretch, if there is one.
    """

    name: str
    attributes: Mapping[str, Any]
    key: tuple[object, ...]
    types: list[tuple[np.dtype[Any], tuple[int, ...]]]
    ranks: tuple[int, ...]
    arrays: tuple[Array, ...]
    nbytes: int
    timeout: float | None = None

    @property
    def is_pair(self) -> bool:
        """Whether it is between two members, and not of the whole group."""
        return not self.key

    def fits(self, other: Collective) -> bool:
        """Whether both are the same collective on tensors of the same types."""
        return self.key == other.key and self.types == other.types

    def beside(self, other: Collective) -> str:
        """The call as text, beginning with the first tensor that differs from the other call's."""
        pairs = enumerate(zip(self.types, other.types, strict=False))
        return self._text(next((i for i, (mine, theirs) in pairs if mine != theirs), 0))

    def described(self) -> bytes:
        """All but the arrays, as bytes for another member; of very many types the first."""
        types = [TensorType(dtype, shape) for dtype, shape in self.types[:_MOST_DESCRIBED]]
        writer = Writer()
        writer.value((self.name, dict(self.attributes), self.key, types, self.ranks))
        return writer.message(Kind.call)

    @staticmethod
    def of(description: bytes) -> Collective:
        """The call that is described so, without its arrays."""
        _, reader = open_message(description, Kind.call)
        name, attributes, key, types, ranks = reader.value()
        of_numpy = [(type.dtype.numpy, type.shape) for type in types]
        return Collective(name, attributes, key, of_numpy, ranks, (), 0)

    def digest(self) -> bytes:
        """16 bytes that are equal for calls that fit each other, and for no others."""
        types = [(DType.of(dtype).name, shape) for dtype, shape in self.types]
        told = repr((self.key, types, self.ranks))
        return hashlib.blake2b(told.encode(), digest_size=16).digest()

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


class Meeting(Protocol):
    """Where the members of one run of a group meet, as one member sees it."""

    def meet(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Returns when it is done for this member.

        Raises `GroupError` when the members cannot meet, because another one calls something else,
        has ended or failed, or because all wait.
        """

    def end(self, rank: int) -> None:
        """The member has ended, and will call nothing more."""

    def fail(self, rank: int, error: BaseException) -> None:
        """The member has ended with an error, which ends the others."""


# --- what every place computes -------------------------------------------------------


def combine(op: Reduction, xs: Sequence[Array], total: Array) -> None:
    """total = x0 + x1 + ... from the left, or another reduction. `total` overlaps no x, or is x0
    or x1 where there are no more than two."""
    if is_half(total):  # in f32, rounded once
        wide = np.empty(total.shape, np.float32)
        combine(op, [widened(x) for x in xs], wide)
        narrow(total, wide)
        return
    if len(xs) == 1:
        np.copyto(total, xs[0])
    else:
        _UFUNCS[op](xs[0], xs[1], out=total)
    for x in xs[2:]:
        add_to(op, total, x)
    end_reduction(op, total, len(xs))


def add_to(op: Reduction, total: Array, x: Array) -> None:
    """total = total + x, or another reduction. The total of halves is f32."""
    _UFUNCS[op](total, widened(x) if is_half(x) else x, out=total)


def end_reduction(op: Reduction, total: Array, n: int) -> None:
    """The total of n arrays becomes the result."""
    if op == "mean":
        np.divide(total, n, out=total)


def is_small(nbytes: int, members: int) -> bool:
    """Whether each member combines so many bytes of all: what each one gets then grows with their
    number, and so does what all have to do."""
    return nbytes * members <= 2 * SMALL or members == 1


def flat(arrays: Sequence[Array]) -> list[Array]:
    """The arrays in one dimension. A VM's tensors are contiguous, so none is copied."""
    return [x.reshape(-1) for x in arrays]


def blocks(xs: Sequence[Array], part: int, parts: int) -> Iterator[tuple[int, slice]]:
    """The blocks of one of `parts` equal parts of the flat arrays, which count as one long array.
    A block is the number of an array and a slice of it."""
    total = sum([x.size for x in xs])
    begin, end = total * part // parts, total * (part + 1) // parts
    for i, x in enumerate(xs):
        first, last = max(begin, 0), min(end, x.size)
        step = BLOCK_NBYTES // x.itemsize
        for start in range(first, last, step):
            yield i, slice(start, min(start + step, last))
        begin -= x.size
        end -= x.size


def mismatch(one: tuple[str, Collective], other: tuple[str, Collective]) -> str:
    """What to say of two members, by name, whose calls do not fit."""
    (name, mine), (their_name, theirs) = one, other
    return (
        f"members call different things: {name} {mine.beside(theirs)}, "
        f"{their_name} {theirs.beside(mine)}"
    )


def timeout_text(names: Sequence[str], rank: int, call: Collective, late: Sequence[int]) -> str:
    """What to say of members that have not come in time."""
    who = ", ".join([names[each] for each in late[:_MOST_LATE]])
    if len(late) > _MOST_LATE:
        who += f" and {len(late) - _MOST_LATE} more"
    return f"{names[rank]} has waited {call.timeout:g} s in {call} for {who}"


def brief_error(error: BaseException) -> str:
    """The error's class and text on one line."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


Work: TypeAlias = Callable[[Collective, Sequence[tuple[Array, ...]], int, int], None]
"""`work(call, arrays, part, parts)` does part number `part` of `parts` equal ones, given the arrays
of every member in the order of `call.ranks`."""
