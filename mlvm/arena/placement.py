"""Placement of tensors in an arena, which consists of chunks that are divided into regions.

`Reuse` reuses regions. Free regions are in bins by size; `tidy` sorts each bin by age. A step that
repeats the allocations of the previous step therefore gets the same addresses. `Chosen` places a
tensor at an offset chosen by the caller.

A placement calls no VM. All methods run under the arena's lock. Without the lock, threads take a
region by `bin.pop()` and return it by `bin.append(region)`, which are atomic. A region that is in
no bin therefore has an owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

from mlvm.arena.fields import RegionFields
from mlvm.core.errors import Place
from mlvm.core.protocol import StorageHandle, TensorHandle
from mlvm.core.types import ALIGNMENT, TensorType

T = TypeVar("T")

IDLE: Final = 3
"""Number of resets without use after which a growing arena may merge or free a region.

So a few kinds of steps, such as training and evaluation, may alternate.
"""

MOST_SPARE: Final = 1 << 18
"""Size from which a reused region is larger by at most an eighth; see `spare_bytes`."""

MOST_ROOM: Final = 1 << 19
"""Maximum unused bytes in a new chunk, into which a region can grow."""

_NUMBER: Final = attrgetter("number")


def rounded(nbytes: int) -> int:
    """Round a size up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_class(nbytes: int) -> int:
    """Round a size up to a size class, so that tensors of changing sizes reuse memory.

    A class adds at most an eighth up to 1 MiB, and at most 1/64 above.
    """
    bits = 4 if nbytes <= 1 << 20 else 7
    step = max(ALIGNMENT, 1 << max(nbytes.bit_length() - bits, 0))
    return -(-nbytes // step) * step


def spare_bytes(nbytes: int) -> int:
    """Return how many bytes a reused region may have in addition to those of a size class."""
    return nbytes // 8 if nbytes >= MOST_SPARE else max(nbytes, 8 * ALIGNMENT)


Reference: TypeAlias = weakref.ref[Any]
"""Reference to a tensor; the arena defines the class of the tensor."""


class Region(RegionFields):
    """Piece of a storage, and the handles of tensors in it. A free region may grow.

    `number`: index in order of creation.
    `holder`: reference to the last tensor of the region, which may have been freed.
    `holder_at_reset`: the holder at the last reset.
    `last`: number of the last reset at which the holder had changed.
    `noted`: a holder and the Python line that allocated it, if lines are recorded.
    `address`: address of the first byte in this process, for calls in C; 0 if unknown.
    `watched`: whether writes to it are counted.
    """

    __slots__ = ()

    def __init__(
        self, storage: StorageHandle, offset: int, nbytes: int, bin: list[Region], number: int = 0
    ) -> None:
        self.storage = storage
        self.offset = offset
        self.nbytes = nbytes
        self.address = 0
        self.bin = bin
        self.number = number
        self.handles: dict[TensorType, TensorHandle] = {}
        self.holder: Reference | None = None
        self.holder_at_reset: Reference | None = None
        self.last = 0
        self.watched = False
        self.noted: tuple[Reference, Place | None] | None = None

    @property
    def allocated_at(self) -> Place | None:
        """The Python location that allocated the holder, if recorded."""
        noted = self.noted
        return noted[1] if noted is not None and noted[0] is self.holder else None

    def tensor(self) -> Any:
        """Return the live tensor of the region, or None."""
        holder = self.holder
        if holder is None or holder is self.holder_at_reset:
            return None
        tensor = holder()
        return tensor if tensor is not None and tensor.region is self else None


class Chunk:
    """Storage in which regions are placed from the front.

    address: address of the first byte in this process, for calls in C; 0 if unknown
    """

    __slots__ = ("address", "carved", "nbytes", "storage")

    def __init__(self, storage: StorageHandle, nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.carved = 0
        self.address = 0


class Placement:
    """Base class of placements.

    `regions`: every region.
    `resets`: number of resets.
    `bins`: the bin of each type that was placed before, if the placement has bins.
    `sizes`: the bins by number of bytes.
    `missing`: the bytes of a chunk for the latest `find` without a result.
    `handles`, `storages`: of dropped regions and chunks; the arena returns them to the VM.
    """

    def __init__(self) -> None:
        self.handles: list[TensorHandle] = []
        self.storages: list[StorageHandle] = []
        self.chunks: list[Chunk] = []
        self.regions: list[Region] = []
        self.bins: dict[TensorType, list[Region]] = {}
        self.sizes: dict[int, list[Region]] = {}
        self.resets = 0
        self.missing = 0
        self._numbers = 0

    def find(self, type: TensorType, *, thrifty: bool, last: bool = False) -> Region | None:
        """Return a region for a type, owned by the caller; None if no chunk has enough space.

        If `thrifty`, free neighbours are merged; if it is the `last` attempt, any free neighbours.
        """
        raise NotImplementedError

    def tidy(self) -> None:
        """Sort the bins, so that the same requests get the same regions after each `tidy`."""

    def release(self, *, idle: bool = False) -> None:
        """Drop the chunks without live tensors; if `idle`, only those unused for many resets."""
        raise NotImplementedError

    def largest_gap(self) -> int:
        """Return the size of the largest possible request in bytes."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop every region and chunk."""
        self.regions.clear()
        self.bins.clear()
        for chunk in [*self.chunks]:
            self._drop_chunk(chunk)

    def _tail(self, nbytes: int) -> Chunk | None:
        """Return a chunk with `nbytes` unused bytes at the end, or None."""
        return next((c for c in self.chunks if c.nbytes - c.carved >= nbytes), None)

    def _make(self, chunk: Chunk, offset: int, nbytes: int, bin: list[Region]) -> Region:
        self._numbers += 1
        region = Region(chunk.storage, offset, nbytes, bin, self._numbers)
        region.last = self.resets
        if chunk.address:
            region.address = chunk.address + offset
        self.regions.append(region)
        return region

    def locate(self, region: Region) -> None:
        """Record a chunk's address, from a region with a known address, for later regions."""
        for chunk in self.chunks:
            if chunk.storage == region.storage:
                chunk.address = region.address - region.offset

    def _drop_chunk(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self.storages.append(chunk.storage)


class Reuse(Placement):
    """Placement with regions by size, reused last in, first out.

    If a request finds neither a region of the size nor space for a new region, free neighbours are
    merged. A fixed arena merges any regions. A growing arena merges only regions unused for several
    resets, because a repeated step requests the other regions again.

    size_of: function that rounds the bytes of a request
    spare: whether regions for slowly growing sizes are larger
    """

    def __init__(
        self, *, grows: bool, size_of: Callable[[int], int] = rounded, spare: bool = False
    ) -> None:
        super().__init__()
        self.grows = grows
        self.size_of = size_of
        self.spare = spare

    def find(self, type: TensorType, *, thrifty: bool, last: bool = False) -> Region | None:
        nbytes = self.size_of(type.nbytes)
        spare = spare_bytes(nbytes) if self.size_of is size_class and nbytes else 0
        bins = self._bins(nbytes, nbytes + spare)  # as `bin_of` in dispatch.c
        region = next(filter(None, map(pop, bins)), None)
        if region is None and thrifty and self._tail(nbytes) is None:
            if not self._merge(nbytes, idle=True) and (last or not self.grows):
                self._merge(nbytes, idle=False)
            region = pop(self.sizes.get(nbytes, []))
        if region is None:
            region = self._new_region(nbytes, spare // 2)
        if region is not None:
            self.bins[type] = region.bin
        return region

    def _new_region(self, nbytes: int, spare: int) -> Region | None:
        """Add a region at the end of a chunk.

        If free regions show growing sizes, it is larger by `spare`, or the last region of a chunk
        grows instead.
        """
        least = max(nbytes - max(spare, nbytes // 8), 1) if self.spare else nbytes
        smaller = [bin for bin in self._bins(least, nbytes - 1) if bin]
        larger = self.size_of(nbytes + spare) if smaller else nbytes
        self.missing = larger + min(nbytes, MOST_ROOM) if smaller else nbytes
        for size in dict.fromkeys((larger, nbytes)):
            for region in filter(None, map(pop, smaller)):
                [home] = [chunk for chunk in self.chunks if chunk.storage == region.storage]
                end = region.offset + size
                if region.offset + region.nbytes == home.carved and end <= home.nbytes:
                    home.carved, region.nbytes = end, size
                    region.bin = self.sizes.setdefault(size, [])
                    return region
                region.bin.append(region)
            chunk = self._tail(size)
            if chunk is not None:
                chunk.carved += size
                bin = self.sizes.setdefault(size, [])
                return self._make(chunk, chunk.carved - size, size, bin)
        return None

    def _bins(self, least: int, most: int) -> Iterator[list[Region]]:
        """Yield the bins of the size classes from `least` to `most` bytes: at most 17."""
        size = self.size_of(least)
        while size <= most:
            yield self.sizes.get(size, [])
            size = self.size_of(size + 1)

    def tidy(self) -> None:
        for bin in list(self.sizes.values()):
            bin.sort(key=_NUMBER, reverse=True)  # atomic, so that other threads see it sorted

    def release(self, *, idle: bool = False) -> None:
        free = self._free(idle=idle)
        for chunk in [*self.chunks]:
            inside = [region for region in self.regions if region.storage == chunk.storage]
            if all(id(region) in free for region in inside) and self._drop(inside):
                self._drop_chunk(chunk)

    def largest_gap(self) -> int:
        free, largest = self._free(idle=False), 0
        for chunk in self.chunks:
            gap = 0
            for region in self._inside(chunk):
                if id(region) in free:
                    gap += region.nbytes
                elif region.nbytes:
                    gap = 0
                largest = max(largest, gap)
            largest = max(largest, gap + chunk.nbytes - chunk.carved)
        return largest

    def clear(self) -> None:
        for bin in self.sizes.values():
            bin.clear()  # a thread in `alloc` may already have the bin
        super().clear()
        self.sizes.clear()

    def _free(self, *, idle: bool) -> set[int]:
        """Return the ids of the free regions; if `idle`, only of regions unused for long."""
        if idle and self.resets < IDLE:
            return set()
        waiting = [region for bin in list(self.sizes.values()) for region in bin.copy()]
        if not idle:
            return {id(region) for region in waiting}
        return {
            id(region)
            for region in waiting
            if region.holder is region.holder_at_reset and self.resets - region.last >= IDLE
        }

    def _inside(self, chunk: Chunk) -> list[Region]:
        """Return the chunk's regions in order of address."""
        inside = [region for region in self.regions if region.storage == chunk.storage]
        return sorted(inside, key=lambda region: (region.offset, region.nbytes))

    def _merge(self, nbytes: int, *, idle: bool) -> bool:
        """Merge the first free neighbours of at least `nbytes`; return whether any exist.

        They become a region of that size and one of the rest. At the end of a chunk they become
        unused bytes.
        """
        free = self._free(idle=idle)
        for chunk in self.chunks if free else ():
            run: list[Region] = []
            for region in self._inside(chunk):
                if not region.nbytes:  # empty regions may be inside of a merged region
                    continue
                run = [*run, region] if id(region) in free else []
                have = sum(region.nbytes for region in run)
                at_end = bool(run) and region.offset + region.nbytes == chunk.carved
                if at_end and have + chunk.nbytes - chunk.carved >= nbytes and self._drop(run):
                    chunk.carved = run[0].offset
                    return True
                if have >= nbytes and self._drop(run):
                    self._put(chunk, run[0].offset, nbytes)
                    if have > nbytes:
                        self._put(chunk, run[0].offset + nbytes, have - nbytes)
                    return True
        return False

    def _drop(self, run: list[Region]) -> bool:
        """Drop these regions, unless another thread has just taken one of them."""
        for i, region in enumerate(run):
            try:
                region.bin.remove(region)
            except ValueError:
                for claimed in run[:i]:
                    claimed.bin.append(claimed)
                return False
        for region in run:
            self.handles.extend(region.handles.values())
        dropped = set(run)
        self.regions[:] = [region for region in self.regions if region not in dropped]
        return True

    def _put(self, chunk: Chunk, offset: int, nbytes: int) -> None:
        """Add a new region to the bin for this size, to be used after the other regions."""
        bin = self.sizes.setdefault(nbytes, [])
        bin.insert(0, self._make(chunk, offset, nbytes, bin))


class Chosen(Placement):
    """Placement with regions at any offset of a single chunk; they may overlap.

    Regions with the same offset share handles. Successive tensors with the same offset and size
    share a region.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[int, int], list[Region]] = {}
        self._handles: dict[int, dict[TensorType, TensorHandle]] = {}

    def at(self, offset: int, nbytes: int) -> Region:
        """Return a region of `nbytes` at the offset."""
        bin = self._places.setdefault((offset, nbytes), [])
        region = pop(bin)
        if region is None:
            region = self._make(self.chunks[0], offset, nbytes, bin)
            region.handles = self._handles.setdefault(offset, {})
        return region

    def clear(self) -> None:
        super().clear()
        self._places.clear()
        self._handles.clear()


def pop(waiting: list[T]) -> T | None:
    """Remove and return the last item of a list atomically; None if it is empty."""
    try:
        return waiting.pop()
    except IndexError:
        return None
