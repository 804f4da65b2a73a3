"""Recordings of an arena: tensors with offsets and lifetimes."""

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
from mlvm.machines.old_keywords import old_keywords


@dataclass(slots=True)
class Lifetime:
    """Lifetime of a tensor in an arena.

    `offset`, `nbytes`: the byte range in the arena.
    `start`, `end`: it is live at the times `start` .. `end - 1`.
    `op`: the op that wrote it first, or the kind of a named tensor; empty if unknown.
    `place`: the Python location that allocated it, or that line as text; None if unknown.
    `program`, `pc`: the program whose launch wrote it first, and the call in its main, if recorded.
    `path`: path of a named tensor, which distinguishes tensors of the same kind.
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
        """The Python line that allocated it, as `file:line`, or an empty text."""
        return self.place or "" if not isinstance(self.place, tuple) else line_of(self.place)


@dataclass
class Recording:
    """Recording of the tensors in an arena, in order of allocation.

    Time advances by one with each allocation and each free. Offsets are computed as if the arena's
    storages, including freed ones, were concatenated, oldest first. If there are very many tensors,
    only the most recent may be kept.

    `capacity`: the largest capacity of the arena in bytes.
    `first`, `moments`: the first recorded time, and the time after the last.
    `resets`: times at which the arena was reset.
    `times`: `time.perf_counter` at each time since `first`, if recorded.
    `arenas`: number of arenas in a recording that `merged` returned.
    `forgotten`: number of tensors that were dropped.
    `high_before`: peak use in bytes before `first`.

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
        """Return the region's offset in the concatenated storages `chunks` of the arena."""
        if region.storage not in self._offsets:
            for chunk in chunks:
                if chunk.storage not in self._offsets:
                    self._offsets[chunk.storage] = self._extent
                    self._extent += chunk.nbytes
            self.note_capacity(chunks)
        return self._offsets[region.storage] + region.offset

    def note_capacity(self, chunks: Sequence[Chunk]) -> None:
        """Update `capacity` with the arena's storages."""
        self.capacity = max(self.capacity, sum(chunk.nbytes for chunk in chunks))

    def next_moment(self) -> int:
        """Advance the time by one, and return it."""
        self.moments += 1
        if self.times:
            self.times.append(time.perf_counter())
        return self.moments - 1

    def so_far(self) -> Recording:
        """Return a copy in which the live tensors end at the last time."""
        now = [
            replace(x) if x.end != x.start else replace(x, end=self.moments) for x in self.lifetimes
        ]
        return replace(self, lifetimes=now, resets=self.resets.copy(), times=self.times.copy())

    def used(self) -> list[int]:
        """Return the bytes in use at each time since `first`."""
        change = [0] * (self.moments - self.first + 1)
        for lifetime in self.lifetimes:
            end = lifetime.end if lifetime.end != lifetime.start else self.moments
            change[max(lifetime.start, self.first) - self.first] += lifetime.nbytes
            change[end - self.first] -= lifetime.nbytes
        return list(accumulate(change[:-1]))

    def at_peak(self) -> tuple[int, list[Lifetime]]:
        """Return the first time of peak use, and the live tensors at that time."""
        used = self.used()
        moment = used.index(max(used)) + self.first
        return moment, [each for each in self.lifetimes if each.start <= moment < each.end]

    @property
    def high_water(self) -> int:
        """Peak use in bytes, including dropped tensors: a lower bound for any placement."""
        return max([self.high_before, *self.used()])

    @old_keywords("Recording.forget")
    def forget(self, max_tensors: int) -> None:
        """Drop the freed tensors, except the last `max_tensors` of them."""
        ended = [lifetime.end for lifetime in self.lifetimes if lifetime.end != lifetime.start]
        if len(ended) > max_tensors:
            used, before, count = self.used(), self.first, len(self.lifetimes)
            self.first = sorted(ended)[-max_tensors - 1]
            self.high_before = max([self.high_before, *used[: self.first - before]])
            del self.times[: self.first - before]
            self.lifetimes = [
                each for each in self.lifetimes if each.end == each.start or each.end > self.first
            ]
            self.resets = [moment for moment in self.resets if moment >= self.first]
            self.forgotten += count - len(self.lifetimes)


def merged_if_many(recordings: Sequence[Recording], most: int) -> list[Recording]:
    """Merge recordings of arenas with equal names on VMs with equal names, if more than `most`.

    A recording with dropped tensors is not merged, because the memory use at other times is
    unknown.
    """
    groups: dict[tuple[str, str], list[Recording]] = {}
    for each in recordings:
        if not each.forgotten and each.times:
            groups.setdefault((each.arena, each.vm), []).append(each)
    many = {key: group for key, group in groups.items() if len(group) > most}
    inside = {id(each) for group in many.values() for each in group}
    merged_recordings: list[Recording] = []
    for each in recordings:
        group = many.pop((each.arena, each.vm), []) if id(each) in inside else [each]
        merged_recordings += [merged(group)] if len(group) > 1 else group
    return merged_recordings


def merged(recordings: Sequence[Recording]) -> Recording:
    """Merge recordings into one, in the order of `times`.

    All must be complete, without dropped tensors. Arenas with tensors at the same time get separate
    offsets. Other arenas may share offsets.
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
                end=moment_of.get((i, x.end), len(order)),  # live tensors: the last time
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
    """Tensors of an arena, from the first recorded time to the last."""

    first: int
    last: int
    capacity: int
    lifetimes: Sequence[Lifetime]


def _lay_apart(stays: Sequence[_Stay]) -> int:
    """Move the tensors of each arena above simultaneously used arenas.

    Return the largest total capacity of the arenas.
    """
    capacity = 0
    there: list[tuple[int, int, _Stay]] = []  # start and end offsets, sorted
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
