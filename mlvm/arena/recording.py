"""A recording as data: which tensors lived in an arena, where and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mlvm.arena.placement import Chunk, Region
from mlvm.core.errors import Place, line_of
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle
from mlvm.core.types import TensorType


@dataclass(slots=True)
class Lifetime:
    """A tensor's stay in an arena: at bytes `offset` .. `offset + nbytes - 1`, in the moments
    `start` .. `end - 1`.

    `nbytes` is its size in the arena. `op` names what wrote it first, and `place` is where in
    Python it was made, or that line as text, as far as they are known. `program` is that of the
    launch that wrote it first.
    """

    type: TensorType
    offset: int
    nbytes: int
    start: int
    end: int
    op: str = ""
    place: Place | str | None = None
    program: Program | None = None

    @property
    def line(self) -> str:
        """The Python line that made it, as `file:line`, or nothing."""
        return self.place or "" if not isinstance(self.place, tuple) else line_of(self.place)


@dataclass
class Recording:
    """The tensors that lived in an arena while it was recorded, in the order they came.

    Each allocation and each end of a tensor makes a new moment. `first` is the first recorded
    moment, `moments` the number after the last. `resets` are the moments at which the arena was
    reset. Offsets are as if the arena's storages lay end to end, in the order they came.
    `capacity` is the most that the arena held of its VM. `times` are the seconds of
    `time.perf_counter` at which the moments since `first` began, if they were taken.

        >>> arena = ml.Arena(ml.VM("mine"), "batch")
        >>> with ml.record(arena) as recording, arena: y = ml.sum(ml.ones(16))
        >>> recording.used(), len(recording.lifetimes)
        ([0, 64, 128, 64, 0], 2)
    """

    arena: str
    capacity: int = 0
    moments: int = 1
    lifetimes: list[Lifetime] = field(default_factory=list)
    first: int = 0
    resets: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _offsets: dict[StorageHandle, int] = field(default_factory=dict, repr=False)
    _extent: int = 0

    def offset(self, region: Region, chunks: Sequence[Chunk]) -> int:
        """Where the region is when the arena's storages, `chunks`, lie end to end."""
        if region.storage not in self._offsets:
            for chunk in chunks:
                if chunk.storage not in self._offsets:
                    self._offsets[chunk.storage] = self._extent
                    self._extent += chunk.nbytes
            self.hold(chunks)
        return self._offsets[region.storage] + region.offset

    def hold(self, chunks: Sequence[Chunk]) -> None:
        """Note how much the arena holds now."""
        self.capacity = max(self.capacity, sum(chunk.nbytes for chunk in chunks))

    def next_moment(self) -> int:
        """Begin a new moment, and return its number."""
        self.moments += 1
        if self.times:
            self.times.append(time.perf_counter())
        return self.moments - 1

    def so_far(self) -> Recording:
        """A copy in which the tensors that live now end at the last moment."""
        now = [
            replace(x) if x.end != x.start else replace(x, end=self.moments) for x in self.lifetimes
        ]
        return replace(self, lifetimes=now, resets=self.resets.copy(), times=self.times.copy())

    def used(self) -> list[int]:
        """The bytes in use at each moment since `first` of a complete recording. Their maximum
        is a lower bound for any placement."""
        change = [0] * (self.moments - self.first + 1)
        for lifetime in self.lifetimes:
            change[max(lifetime.start, self.first) - self.first] += lifetime.nbytes
            change[lifetime.end - self.first] -= lifetime.nbytes
        return list(accumulate(change[:-1]))

    def forget(self, most: int) -> None:
        """Forget the tensors that have ended, but for the last `most` of them."""
        ended = [lifetime.end for lifetime in self.lifetimes if lifetime.end != lifetime.start]
        if len(ended) > most:
            before, self.first = self.first, sorted(ended)[-most - 1]
            del self.times[: self.first - before]
            self.lifetimes = [
                each for each in self.lifetimes if each.end == each.start or each.end > self.first
            ]
            self.resets = [moment for moment in self.resets if moment >= self.first]
