"""Collectives as data, and the interface of communicators, which run them.

A collective is described by data: a name, attributes, types and ranks, and the arrays of the
member. Therefore, it can be sent to a member without shared memory. A communicator synchronizes the
members, detects mismatches and deadlocks, and sends and combines the elements. All communicators
combine elements in the order of ranks, block by block, with the same kernels. The bits of a result
depend only on the number of members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from mlvm.core.errors import listed
from mlvm.core.ops.half import is_half, narrow, widened
from mlvm.core.program.encoding import Kind, Writer, open_message
from mlvm.core.types import Array, DType, TensorType

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]

SMALL: Final = 1 << 18
"""Largest number of bytes for which one of two members combines everything."""

BLOCK_NBYTES: Final = 1 << 18
"""Number of bytes of a block: large, so that threads rarely wait for Python's lock, and small
enough for a second-level cache."""


_UFUNCS: Final = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective call of a member.

    The members with these `ranks` take part. `key` and `types` (dtype and shape) must be equal for
    all of them. A call between two members, `send` or `recv`, has no key. `arrays` are the member's
    operands and results. `nbytes` is the amount of work. No member waits for another member longer
    than `timeout` seconds without progress; None means no limit.
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
        """True if the call is between two members only."""
        return not self.key

    def fits(self, other: Collective) -> bool:
        """Return whether both are the same collective on tensors of the same types."""
        return self.key == other.key and self.types == other.types

    def described_beside(self, other: Collective) -> str:
        """Describe the call, starting with the first tensor whose type differs from `other`'s."""
        pairs = enumerate(zip(self.types, other.types, strict=False))
        return self._text(next((i for i, (mine, theirs) in pairs if mine != theirs), 0))

    def described(self) -> bytes:
        """Encode the call, without arrays and with at most 200 types, for another member."""
        # types in a message to another member
        types = [TensorType(dtype, shape) for dtype, shape in self.types[:200]]
        writer = Writer()
        writer.value((self.name, dict(self.attributes), self.key, types, self.ranks))
        return writer.message(Kind.call)

    @staticmethod
    def of(description: bytes) -> Collective:
        """Decode a call without arrays."""
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
        last = first + 4  # in an error message
        parts = [f"{first} tensors"] if first else []
        parts += [str(TensorType(*type)) for type in self.types[first:last]]
        if len(self.types) > last:
            parts.append(f"{len(self.types) - last} more")
        parts += [f"{name}={value!r}" for name, value in self.attributes.items()]
        return f"{self.name}({', '.join(parts)})"


class Communicator(Protocol):
    """Communicator of a run of a group, for one member."""

    def execute(self, rank: int, call: Collective) -> None:
        """Take part in a collective, and return when this member's part is done.

        Raises `GroupError` if another member calls a different collective, has finished or failed,
        or if all members wait.
        """

    def end(self, rank: int) -> None:
        """Finish this member's part of the run; this is the last call of the member."""

    def fail(self, rank: int, error: BaseException) -> None:
        """Finish this member's part of the run with an error, which aborts the run."""


# --- reductions -------------------------------------------------------


def combine(op: Reduction, xs: Sequence[Array], total: Array) -> None:
    """Reduce the arrays from the left into `total`, for example x0 + x1 + ...

    `total` must not overlap any x. If there are at most two arrays, it may be one of them.
    """
    if is_half(total):  # computed in f32, and rounded once
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
    """Add x to the total, or reduce otherwise. The total of half precision arrays is f32."""
    _UFUNCS[op](total, widened(x) if is_half(x) else x, out=total)


def end_reduction(op: Reduction, total: Array, n: int) -> None:
    """Finish the reduction of n arrays: divide the total for a mean."""
    if op == "mean":
        np.divide(total, n, out=total)


def is_small(nbytes: int, members: int) -> bool:
    """Return whether the data is so small that each member combines all of it.

    This needs fewer messages, but the total work grows with the number of members.
    """
    return nbytes * members <= 2 * SMALL or members == 1


def flat(arrays: Sequence[Array]) -> list[Array]:
    """Flatten the arrays. A VM's tensors are contiguous, so no array is copied."""
    return [x.reshape(-1) for x in arrays]


def blocks(xs: Sequence[Array], part: int, parts: int) -> Iterator[tuple[int, slice]]:
    """Yield the blocks of part number `part` of `parts` equal parts of the flat arrays.

    The arrays are treated as one concatenated array. A block is the index of an array and a slice
    of this array.
    """
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
    """Describe the mismatched calls of two members, given their names."""
    (name, mine), (their_name, theirs) = one, other
    return (
        f"members called different collectives: {name} {mine.described_beside(theirs)}, "
        f"{their_name} {theirs.described_beside(mine)}"
    )


def timeout_text(names: Sequence[str], rank: int, call: Collective, late: Sequence[int]) -> str:
    """Describe the members that were late."""
    who = listed([names[each] for each in late], 8)
    return f"{names[rank]} has waited {call.timeout:g} s in {call} for {who}"


def brief_error(error: BaseException) -> str:
    """Return the error's class and text on one line."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


Work: TypeAlias = Callable[[Collective, Sequence[tuple[Array, ...]], int, int], None]
"""Function `work(call, arrays, part, parts)` that does part number `part` of `parts` equal parts of
the work. `arrays` has the arrays of every member in the order of `call.ranks`."""
