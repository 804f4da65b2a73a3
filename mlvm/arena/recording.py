"""A recording as data: which tensors lived in an arena, where and when."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from mlvm.arena.placement import Chunk, Region
from mlvm.core.errors import Place, line_of
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle
from mlvm.core.types import TensorType


@dataclass(slots=True)
class Lifetime:
    """A tensor's stay in an arena: at bytes `offset` .. `offset + nbytes - 1`, in the moments
    `start` .. `end - 1`.

    `nbytes` is its size in the arena. `op` names what wrote it first, or the kind of a tensor that
    has a name, and `path` which one of these it is. `place` is where in Python it was made, or that
    line as text. All are there as far as they are known. Where programs are kept, `program` is the
    one whose launch wrote it first, and `pc` the place of that call in its main.
    """

    type: TensorType
    offset: int
    nbytes: int
    start: int
    end: int
    op: str = ""
    place: Place | str | None = None
    program: Program | None = None
    pc: int | None = None
    path: str = ""

    @property
    def line(self) -> str:
        """The Python line that made it, as `file:line`, or nothing."""
        return self.place or "" if not isinstance(self.place, tuple) else line_of(self.place)


@dataclass
class Recording:
    """The tensors that lived in an arena while it was recorded, in the order they came.

    Each allocation and each end of a tensor makes a new moment. `first` is the first recorded
    moment, `moments` the number after the last. `resets` are the moments at which the arena was
    reset. Offsets are as if the arena's storages lay end to end, in the order they came, also those
    that it gave back. `capacity` is the most that the arena held of its VM at once. `times` are the
    seconds of `time.perf_counter` at which the moments since `first` began, if they were taken.

    Of very many tensors only the latest may be kept. `forgotten` is the number of the others, and
    `high_before` the most bytes that were in use before `first`. `merged` recordings of several
    arenas are one.

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
    vm: str = ""
    arenas: int = 1
    forgotten: int = 0
    high_before: int = 0
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
        """The bytes in use at each moment since `first`."""
        change = [0] * (self.moments - self.first + 1)
        for lifetime in self.lifetimes:
            end = lifetime.end if lifetime.end != lifetime.start else self.moments
            change[max(lifetime.start, self.first) - self.first] += lifetime.nbytes
            change[end - self.first] -= lifetime.nbytes
        return list(accumulate(change[:-1]))

    @property
    def high_water(self) -> int:
        """The most bytes that were in use at any moment, also of what is forgotten: a lower bound
        for any placement."""
        return max([self.high_before, *self.used()])

    def forget(self, most: int) -> None:
        """Forget the tensors that have ended, but for the last `most` of them."""
        ended = [lifetime.end for lifetime in self.lifetimes if lifetime.end != lifetime.start]
        if len(ended) > most:
            used, before, count = self.used(), self.first, len(self.lifetimes)
            self.first = sorted(ended)[-most - 1]
            self.high_before = max([self.high_before, *used[: self.first - before]])
            del self.times[: self.first - before]
            self.lifetimes = [
                each for each in self.lifetimes if each.end == each.start or each.end > self.first
            ]
            self.resets = [moment for moment in self.resets if moment >= self.first]
            self.forgotten += count - len(self.lifetimes)


def merged_if_many(recordings: Sequence[Recording], most: int) -> list[Recording]:
    """The recordings, with fewer of one name. Where more than `most` are of arenas of one name, on
    VMs of one name, they become one. A recording that has forgotten something stays by itself, as
    it does not tell how much was in use at the moments of others."""
    groups: dict[tuple[str, str], list[Recording]] = {}
    for each in recordings:
        if not each.forgotten and each.times:
            groups.setdefault((each.arena, each.vm), []).append(each)
    many = {key: group for key, group in groups.items() if len(group) > most}
    inside = {id(each) for group in many.values() for each in group}
    found: list[Recording] = []
    for each in recordings:
        group = many.pop((each.arena, each.vm), []) if id(each) in inside else [each]
        found += [merged(group)] if len(group) > 1 else group
    return found


def merged(recordings: Sequence[Recording]) -> Recording:
    """One recording of what several have, with the moments of all in the order of their `times`.

    All are complete, and none has forgotten anything. Arenas that have tensors at the same time lie
    above each other. Others may have the same offsets.
    """
    order = sorted(
        (seconds, i, moment)
        for i, each in enumerate(recordings)
        for moment, seconds in enumerate(each.times, each.first)
    )
    moment_of = {(i, moment): new for new, (_, i, moment) in enumerate(order)}
    whole = Recording(
        recordings[0].arena,
        vm=recordings[0].vm,
        arenas=len(recordings),
        moments=len(order),
        times=[seconds for seconds, _, _ in order],
    )
    stays: list[_Stay] = []
    for i, each in enumerate(recordings):
        stay = [
            replace(
                x,
                start=moment_of[i, x.start],
                end=moment_of.get((i, x.end), len(order)),  # one that stays does so to the last
            )
            for x in each.lifetimes
        ]
        whole.lifetimes += stay
        whole.resets += [moment_of.get((i, moment), len(order)) for moment in each.resets]
        if stay:
            first, last = min(x.start for x in stay), max(x.end for x in stay)
            stays.append(_Stay(first, last, each.capacity, stay))
    whole.resets.sort()
    whole.capacity = _lay_apart(stays)
    return whole


class _Stay(NamedTuple):
    """What lived in one arena between its first moment and its last."""

    first: int
    last: int
    capacity: int
    lifetimes: Sequence[Lifetime]


def _lay_apart(stays: Sequence[_Stay]) -> int:
    """Move the tensors of each arena above those of arenas that are there at the same time. Returns
    the most bytes that the arenas held at once."""
    capacity = 0
    there: list[tuple[int, int, _Stay]] = []  # from that offset to that, the lowest first
    for stay in sorted(stays, key=lambda each: each.first):
        there = [each for each in there if each[2].last > stay.first]
        extent, base = max(x.offset + x.nbytes for x in stay.lifetimes), 0
        for low, high, _ in there:
            if base + extent <= low:
                break
            base = max(base, high)
        insort(there, (base, base + extent, stay), key=itemgetter(0))
        for x in stay.lifetimes:
            x.offset += base
        capacity = max(capacity, sum(other.capacity for _, _, other in there))
    return capacity
