"""Arenas: named memory for tensors that live and end together.

An arena takes storages from its VM, carves them into regions, and hands the regions out again
and again. A region that comes back waits in the bin of its size; a reset refills the bins in
the order the regions were first carved. So a step that allocates as the step before gets the
same addresses, and the views remembered there: in steady state nothing is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Final

from typing_extensions import TypeVar

from mlvm.core.errors import ArenaError, ArenaOverflow, StaleTensor
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import ALIGNMENT, TensorType

SMALLEST_CHUNK: Final = 1 << 16
_RESTLESS: Final = 4
STALE: Final = 0  # no VM ever issues this handle

_new: Final = object.__new__

A = TypeVar("A", bound="Allocation", default="Allocation")


class Region:
    """A piece of a storage, and the tensors ever viewed there. Its size never changes."""

    __slots__ = ("__weakref__", "bin", "handles", "holder", "nbytes", "offset", "storage", "views")

    def __init__(self, storage: StorageHandle, offset: int, nbytes: int, bin: list[Region]) -> None:
        self.storage = storage
        self.offset = offset
        self.nbytes = nbytes
        self.bin = bin
        self.handles: dict[TensorType, TensorHandle] = {}
        self.holder: weakref.ref[Allocation] | None = None
        self.views: weakref.WeakValueDictionary[int, Allocation] | None = None


class Allocation:
    """A typed tensor in an arena, until it dies, is freed, or its arena is reset.

    `handle` names it in `arena.vm`. A view has a `base` that it keeps alive, and no region
    of its own. A stale one has handle 0, and `ended` says why.
    """

    __slots__ = ("__weakref__", "arena", "base", "ended", "handle", "region", "type")

    arena: Arena
    handle: TensorHandle
    type: TensorType
    region: Region | None
    base: Allocation | None
    ended: str

    def __del__(self) -> None:
        try:
            region = self.region
        except AttributeError:  # one that no arena has made
            return
        if region is not None:
            region.holder = None
            region.bin.append(region)
            self.arena.used -= region.nbytes

    @property
    def root(self) -> Allocation:
        """What owns the bytes: the base of a view, else the allocation itself."""
        return self if self.base is None else self.base

    def stale(self) -> StaleTensor:
        """The error for using this allocation after its end."""
        return StaleTensor(f"this {self.type} of arena {self.arena.name!r} ended: {self.ended}")


class Chunk:
    """A storage, carved from the front."""

    __slots__ = ("carved", "nbytes", "storage")

    def __init__(self, storage: StorageHandle, nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.carved = 0


def regions(vm: VMProtocol) -> weakref.WeakValueDictionary[TensorHandle, Region]:
    """The region that each handle views which an arena on the VM has made."""
    found: weakref.WeakValueDictionary[TensorHandle, Region] = vm.attachments.setdefault(
        "regions", weakref.WeakValueDictionary()
    )
    return found


scope: ContextVar[Arena | None] = ContextVar("scope", default=None)
"""The arena that results are allocated in, for each thread or task."""


class Arena:
    """Memory of a VM under a name. `with arena:` allocates in it, and resets it at the end.

    `used` bytes are taken now, `high_water` is the most there ever were, `capacity` is what
    the arena holds of its VM. Without `capacity` it grows by chunks; with `trims` it first gives
    empty chunks back, once they outweigh what is in use. With `capacity` it never grows, and
    merges free neighbours for a size it has no region of. Sizes are in bytes, each tensor's
    rounded up to 64. An arena serves one thread at a time.
    """

    used: int
    high_water: int

    def __init__(
        self, vm: VMProtocol, name: str, *, capacity: int | None = None, trims: bool = False
    ) -> None:
        if capacity is not None and (not isinstance(capacity, int) or capacity < 0):
            raise ArenaError(f"arena {name!r}: a capacity is >= 0 bytes, not {capacity!r}")
        self.vm = vm
        self.name = name
        self.used = 0
        self.high_water = 0
        self.capacity = 0
        self.views_created = 0
        self.grows = capacity is None
        self.trims = trims
        self._bins: dict[TensorType, list[Region]] = {}
        self._sizes: dict[int, list[Region]] = {}
        self._regions: list[Region] = []
        self._chunks: list[Chunk] = []
        self._entered: list[Token[Arena | None]] = []
        self._carved_before = 0
        self._restless = 0  # how many resets in a row found regions of new sizes
        if capacity is not None:
            self._add_chunk(capacity)
        # Not the VM itself: it may hold this arena in its attachments, and must be free to die.
        self._close = weakref.finalize(self, _dealloc, weakref.ref(vm), self._chunks)
        self._close.atexit = False

    # --- allocation ---

    def alloc(self, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """A tensor of that type, its bytes undefined.

        Raises `ArenaOverflow` when a fixed capacity does not suffice, `ArenaError` after close.
        """
        try:
            region = self._bins[type].pop()
        except (KeyError, IndexError):
            region = self._carve(type)
        self.used = used = self.used + region.nbytes
        if used > self.high_water:
            self.high_water = used
        tensor = _new(kind)
        tensor.region = region
        tensor.arena = self
        tensor.type = type
        tensor.base = None
        tensor.handle = region.handles.get(type) or self._view(region, type)
        region.holder = weakref.ref(tensor)
        return tensor

    def view(self, base: Allocation, type: TensorType, kind: type[A] = Allocation) -> A:  # type: ignore[assignment]
        """Another tensor over the same bytes, of a type with as many. It keeps `base` alive.

        Raises `StaleTensor`, or `ArenaError` for a type of other size or a base of another arena.
        """
        self._require_own(base)
        base = base.root
        region = base.region
        if region is None:
            raise base.stale()
        if type.nbytes != base.type.nbytes:
            raise ArenaError(f"a view of {base.type} has as many bytes; {type} has {type.nbytes}")
        tensor = _new(kind)
        tensor.region = None
        tensor.arena = self
        tensor.type = type
        tensor.base = base
        tensor.handle = region.handles.get(type) or self._view(region, type)
        if region.views is None:
            region.views = weakref.WeakValueDictionary()
        region.views[id(tensor)] = tensor
        return tensor

    def free(self, tensor: Allocation) -> None:
        """Give the tensor's bytes back now; it is stale from here on.

        Raises `StaleTensor`, or `ArenaError` for a view or a tensor of another arena.
        """
        self._require_own(tensor)
        if tensor.region is None:
            raise tensor.stale() if tensor.base is None else ArenaError("free the base of a view")
        region = tensor.region
        self._end(region, "it was freed")
        region.bin.append(region)
        self.used -= region.nbytes

    def reset(self) -> None:
        """End every tensor of the arena. Its memory and remembered views stay."""
        self._end_all("its arena was reset")
        self._settle()

    def trim(self) -> None:
        """Give storages in which no tensor lives back to the VM; a fixed capacity stays."""
        if not self.grows:
            return
        busy = {region.storage for region in self._regions if region.holder is not None}
        for chunk in [c for c in self._chunks if c.storage not in busy]:
            self._chunks.remove(chunk)
            self.capacity -= chunk.nbytes
            self.vm.dealloc_storage(chunk.storage)
        self._regions = [region for region in self._regions if region.storage in busy]
        for bin in self._sizes.values():
            bin[:] = [region for region in bin if region.storage in busy]

    def close(self) -> None:
        """End every tensor and give all memory back to the VM. Idempotent."""
        self._end_all("its arena was closed")
        self._regions.clear()
        self._bins.clear()
        self._sizes.clear()
        self._close()
        self.capacity = 0

    # --- where results go ---

    def __enter__(self) -> Arena:
        self._entered.append(scope.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        scope.reset(self._entered.pop())
        if not self._entered:
            self.reset()

    @contextmanager
    def allocating(self) -> Iterator[Arena]:
        """Allocate results here, and reset nothing at the end: for weights."""
        before = scope.set(self)
        try:
            yield self
        finally:
            scope.reset(before)

    def live(self) -> list[Allocation]:
        """The tensors that hold a region now, in order of address."""
        regions = sorted(self._regions, key=lambda region: (region.storage, region.offset))
        holders = [region.holder() for region in regions if region.holder is not None]
        return [tensor for tensor in holders if tensor is not None]

    def __repr__(self) -> str:
        return (
            f"<Arena {self.name!r} on {self.vm.name}: {self.used:,} of {self.capacity:,} bytes "
            f"used, high water {self.high_water:,}>"
        )

    # --- inside ---

    def _require_own(self, tensor: Allocation) -> None:
        if tensor.arena is not self:
            raise ArenaError(
                f"arena {self.name!r} was given a {tensor.type} of arena {tensor.arena.name!r}"
            )

    def _view(self, region: Region, type: TensorType) -> TensorHandle:
        handle = self.vm.tensor_from_storage(region.storage, type, region.offset)
        region.handles[type] = handle
        regions(self.vm)[handle] = region
        self.views_created += 1
        return handle

    def _end_all(self, why: str) -> None:
        for region in self._regions:
            if region.holder is not None:
                self._end(region, why)
        for bin in self._sizes.values():
            bin.clear()
        self.used = 0
        for region in reversed(self._regions):
            if region.holder is None:
                region.bin.append(region)
            else:
                self.used += region.nbytes

    def _end(self, region: Region, why: str) -> None:
        """End the tensor in the region, and its views. One that the garbage collector is about
        to finalize cannot be reached any more: it keeps the region until its `__del__`."""
        holder = region.holder() if region.holder is not None else None
        views = list(region.views.values()) if region.views else []
        for tensor in [holder, *views] if holder is not None else views:
            tensor.region = None
            tensor.handle = STALE
            tensor.ended = why
        region.views = None
        if holder is not None:
            region.holder = None

    def _settle(self) -> None:
        """After a reset: an arena whose steps keep asking for other sizes, and which holds more
        than twice what it ever had in use, starts over with nothing."""
        carved = sum(chunk.carved for chunk in self._chunks)
        self._restless = self._restless + 1 if carved != self._carved_before else 0
        self._carved_before = carved
        if self.grows and self._restless >= _RESTLESS and carved > 2 * self.high_water:
            self.trim()
            self._restless = 0

    def _carve(self, type: TensorType) -> Region:
        """A region for a type whose bin is empty: a free one of that size, or a new one."""
        nbytes = -(-type.nbytes // ALIGNMENT) * ALIGNMENT
        bin = self._bins[type] = self._sizes.setdefault(nbytes, [])
        if bin:
            return bin.pop()
        if not self.grows and self._tail(nbytes) is None:
            self._merge(nbytes)
            if bin:
                return bin.pop()
        chunk = self._tail(nbytes) or self._grow(type, nbytes)
        region = Region(chunk.storage, chunk.carved, nbytes, bin)
        chunk.carved += nbytes
        self._regions.append(region)
        return region

    def _tail(self, nbytes: int) -> Chunk | None:
        """A chunk that still has so many bytes to carve."""
        return next((c for c in self._chunks if c.nbytes - c.carved >= nbytes), None)

    def _merge(self, nbytes: int) -> None:
        """Make the first free neighbours that together have so many bytes one region of that
        size and one of the rest, or, at the end of the chunk, bytes to carve again."""
        for chunk in self._chunks:
            run: list[Region] = []
            inside = [region for region in self._regions if region.storage == chunk.storage]
            for region in sorted(inside, key=lambda region: (region.offset, region.nbytes)):
                if region.holder is None:
                    run.append(region)
                elif region.nbytes:  # an empty tensor is in nobody's way
                    run = []
                free = sum(region.nbytes for region in run)
                at_end = bool(run) and region.offset + region.nbytes == chunk.carved
                if at_end and free + chunk.nbytes - chunk.carved >= nbytes:
                    self._drop(run)
                    chunk.carved = run[0].offset
                    return
                if free >= nbytes:
                    self._drop(run)
                    self._add_free(chunk, run[0].offset, nbytes)
                    if free > nbytes:
                        self._add_free(chunk, run[0].offset + nbytes, free - nbytes)
                    return

    def _drop(self, run: list[Region]) -> None:
        for region in run:
            self._regions.remove(region)
            region.bin.remove(region)
            for handle in region.handles.values():
                self.vm.dealloc_tensor(handle)

    def _add_free(self, chunk: Chunk, offset: int, nbytes: int) -> None:
        bin = self._sizes.setdefault(nbytes, [])
        region = Region(chunk.storage, offset, nbytes, bin)
        self._regions.append(region)
        bin.append(region)

    def _grow(self, type: TensorType, nbytes: int) -> Chunk:
        if not self._close.alive:
            raise ArenaError(f"arena {self.name!r} is closed")
        if not self.grows:
            raise ArenaOverflow(
                f"arena {self.name!r}: {type} asks for {nbytes:,} bytes; {self.used:,} of "
                f"{self.capacity:,} are in use"
            )
        if self.trims and self.capacity - self.used > self.used + nbytes:
            self.trim()
        return self._add_chunk(max(nbytes, self.capacity // 4, SMALLEST_CHUNK))

    def _add_chunk(self, nbytes: int) -> Chunk:
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        chunk = Chunk(self.vm.alloc_storage(nbytes), nbytes)
        self._chunks.append(chunk)
        self.capacity += nbytes
        return chunk


def _dealloc(reference: weakref.ref[VMProtocol], chunks: list[Chunk]) -> None:
    vm = reference()
    if vm is not None:
        for chunk in chunks:
            vm.dealloc_storage(chunk.storage)
    chunks.clear()
