"""Collectives as data, and the interface of communicators, which run them.

A collective is described by data: its name, attributes, the types and ranks, and the member's own
arrays. So it can be sent to a member without shared memory. A communicator synchronises the
members, detects mismatches and deadlocks, and moves and combines the elements. All communicators
combine them in the order of ranks, block by block, with the same kernels: the bits depend on the
number of members alone.
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
"""Largest number of bytes for which one of two members does all the work."""

BLOCK_NBYTES: Final = 1 << 18
"""Bytes of a block: large, so that threads rarely wait for Python's lock, and small enough for a
second-level cache."""

_MOST_TYPES: Final = 4  # in the text of an error

_MOST_LATE: Final = 8  # members, in the text of an error

_MOST_DESCRIBED: Final = 200  # types, to another member

_UFUNCS: Final = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective call of one member.

    The members with these `ranks` take part. `key` and `types` (dtype and shape) must be equal for
    all of them; between two members, `send` and `recv`, there is no key. `arrays` are the member's
    operands and results. `nbytes` is the amount of work. No member waits for another longer than
    `timeout` seconds at a stretch; None is no limit.
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
        """True if the call is between two members."""
        return not self.key

    def fits(self, other: Collective) -> bool:
        """Return whether both are the same collective on tensors of the same types."""
        return self.key == other.key and self.types == other.types

    def described_beside(self, other: Collective) -> str:
        """Describe the call, from the first tensor on that differs from the other call's."""
        pairs = enumerate(zip(self.types, other.types, strict=False))
        return self._text(next((i for i, (mine, theirs) in pairs if mine != theirs), 0))

    def described(self) -> bytes:
        """Encode the call without the arrays for another member; at most the first types."""
        types = [TensorType(dtype, shape) for dtype, shape in self.types[:_MOST_DESCRIBED]]
        writer = Writer()
        writer.value((self.name, dict(self.attributes), self.key, types, self.ranks))
        return writer.message(Kind.call)

    @staticmethod
    def of(description: bytes) -> Collective:
        """Decode a call, without its arrays."""
        _, reader = open_message(description, Kind.call)
        name, attributes, key, types, ranks = reader.value()
        of_numpy = [(type.dtype.numpy, type.shape) for type in types]
        return Collective(name, attributes, key, of_numpy, ranks, (), 0)

    def digest(self) -> bytes:
        """Return 16 bytes that are equal only for matching calls."""
        types = [(DType.of(dtype).name, shape) for dtype, shape in self.types]
        text = repr((self.key, types, self.ranks))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

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


class Communicator(Protocol):
    """Communicator of one run of a group, for one member."""

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective. Return when it is done for this member.

        Raises `GroupError` if another member calls something else, has ended or failed, or if all
        wait.
        """

    def end(self, rank: int) -> None:
        """End this member's part of the run: it will call nothing more."""

    def fail(self, rank: int, error: BaseException) -> None:
        """End this member's part of the run with an error, which ends the others."""


# --- what every place computes -------------------------------------------------------


def combine(op: Reduction, xs: Sequence[Array], total: Array) -> None:
    """Compute total = x0 + x1 + ... from the left, or another reduction. `total` overlaps no x,
    or is x0 or x1 if there are at most two."""
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
    """Compute total = total + x, or another reduction. The total of half precision is f32."""
    _UFUNCS[op](total, widened(x) if is_half(x) else x, out=total)


def end_reduction(op: Reduction, total: Array, n: int) -> None:
    """Finish the reduction of n arrays."""
    if op == "mean":
        np.divide(total, n, out=total)


def is_small(nbytes: int, members: int) -> bool:
    """Return whether each member combines all data of that size by itself, although the work of
    all grows with their number."""
    return nbytes * members <= 2 * SMALL or members == 1


def flat(arrays: Sequence[Array]) -> list[Array]:
    """Flatten the arrays. A VM's tensors are contiguous, so none is copied."""
    return [x.reshape(-1) for x in arrays]


def blocks(xs: Sequence[Array], part: int, parts: int) -> Iterator[tuple[int, slice]]:
    """Yield the blocks of one of `parts` equal parts of the flat arrays, which count as one
    array. A block is the index of an array and a slice of it."""
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
    """Describe two members, by name, whose calls do not match."""
    (name, mine), (their_name, theirs) = one, other
    return (
        f"members call different things: {name} {mine.described_beside(theirs)}, "
        f"{their_name} {theirs.described_beside(mine)}"
    )


def timeout_text(names: Sequence[str], rank: int, call: Collective, late: Sequence[int]) -> str:
    """Describe members that have not arrived in time."""
    who = ", ".join([names[each] for each in late[:_MOST_LATE]])
    if len(late) > _MOST_LATE:
        who += f" and {len(late) - _MOST_LATE} more"
    return f"{names[rank]} has waited {call.timeout:g} s in {call} for {who}"


def brief_error(error: BaseException) -> str:
    """Return the error's class and text on one line."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


Work: TypeAlias = Callable[[Collective, Sequence[tuple[Array, ...]], int, int], None]
"""`work(call, arrays, part, parts)` does part number `part` of `parts` equal ones, given the arrays
of every member in the order of `call.ranks`."""
