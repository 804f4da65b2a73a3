"""What an arena holds over time: to draw a step's memory, and to see how little would do.

Only an arena that is being recorded pays for it: while `record` lasts, the instance has an
`alloc` and an `_end` of its own, and each tensor a weak reference that notices its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from mlvm.arena.arena import Allocation, Arena, Region
from mlvm.core.types import TensorType

A = TypeVar("A", bound=Allocation)


@dataclass
class Lifetime:
    """A tensor's stay in an arena, at bytes `offset` .. `offset + nbytes` and in the moments
    `start` .. `end - 1`. `nbytes` is its size rounded up to what it takes up."""

    type: TensorType
    offset: int
    nbytes: int
    start: int
    end: int


@dataclass
class Recording:
    """The tensors that lived in an arena while it was recorded, in the order they came.

    Each allocation and each end of a tensor makes a new moment; there are `moments` of them.
    Offsets see the arena's storages laid end to end.
    """

    arena: str
    capacity: int = 0
    moments: int = 1
    lifetimes: list[Lifetime] = field(default_factory=list)

    def used(self) -> list[int]:
        """The bytes in use at each moment. Their maximum is a lower bound for any placement."""
        change = [0] * (self.moments + 1)
        for lifetime in self.lifetimes:
            change[lifetime.start] += lifetime.nbytes
            change[lifetime.end] -= lifetime.nbytes
        return list(accumulate(change[:-1]))


@contextmanager
def record(arena: Arena) -> Iterator[Recording]:
    """Record what lives in the arena inside the block; the recording is complete after it.

        with record(batch) as recording, batch:
            train_step()

    What is there before counts as there from the first moment on, what is there after it as
    there to the last. An arena is recorded once at a time, and must not give storages back.
    """
    recording = Recording(arena.name)
    living: dict[Region, tuple[Lifetime, weakref.ref[Allocation]]] = {}

    def begin(tensor: Allocation, moment: int) -> None:
        region = tensor.region
        if region is None:
            return
        lifetime = Lifetime(tensor.type, _offset(arena, region), region.nbytes, moment, moment)
        recording.lifetimes.append(lifetime)
        living[region] = lifetime, weakref.ref(tensor, lambda _: end(region))

    def end(region: Region) -> None:
        if region in living:
            lifetime, _ = living.pop(region)
            lifetime.end = _next_moment(recording)

    def alloc(type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        tensor = Arena.alloc(arena, type, kind)
        begin(tensor, _next_moment(recording))
        return tensor

    def end_early(region: Region, why: str) -> None:
        end(region)
        Arena._end(arena, region, why)

    present = arena.live()
    while present:  # the variable of a for loop would keep the last one alive
        begin(present.pop(0), 0)
    arena.alloc = alloc  # type: ignore[method-assign]
    arena._end = end_early  # type: ignore[method-assign]
    try:
        yield recording
    finally:
        del arena.alloc, arena._end
        for lifetime, _ in living.values():
            lifetime.end = recording.moments
        living.clear()
        recording.capacity = arena.capacity


def _next_moment(recording: Recording) -> int:
    recording.moments += 1
    return recording.moments - 1


def _offset(arena: Arena, region: Region) -> int:
    """Where the region is when the arena's storages lie end to end."""
    before = 0
    for chunk in arena._chunks:
        if chunk.storage == region.storage:
            break
        before += chunk.nbytes
    return before + region.offset
