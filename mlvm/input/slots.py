"""The slots of a queue tensor, and the arena they lie in.

Producers fill slots in memory of this process. A VM of this process has the same memory. Any other
VM has memory of its own for each slot, to which an element is written once it is complete.

A slot is free, being filled, waiting, or lent to a consumer as tensors. Its tensors are
allocations like any other. When the last of them ends, in any way and on any thread, the slot
returns to the ring of free slots. The garbage collector may end a tensor in the middle of any
call. So no lock is taken, and rings are `SimpleQueue`s, whose `put` may interrupt any of their
calls.
"""

from __future__ import annotations

import itertools
import queue
import weakref
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Final, Protocol, TypeVar

from mlvm.arena.arena import Allocation, Arena, scope
from mlvm.arena.placement import Chunk, Region
from mlvm.core.errors import ArenaError
from mlvm.core.protocol import LocalVMProtocol, StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import TensorType
from mlvm.input.slot_memory import SlotMemory

A = TypeVar("A", bound=Allocation)

_NOBODY: Final = 0


class Ring(Protocol):
    """Slots in the order in which they were put; None marks the end. `get` raises `queue.Empty` if
    no slot comes in time."""

    def put(self, slot: Slot | None, /) -> object: ...
    def get(self, block: bool = True, timeout: float | None = None) -> Slot | None: ...
    def get_nowait(self) -> Slot | None: ...
    def qsize(self) -> int: ...


class SingleThreadedRing:
    """A ring without locks, in which nobody waits."""

    def __init__(self) -> None:
        self._slots: deque[Slot | None] = deque()
        self.put = self._slots.append
        self.qsize = self._slots.__len__

    def get_nowait(self) -> Slot | None:
        try:
            return self._slots.popleft()
        except IndexError:
            raise queue.Empty from None

    def get(self, block: bool = True, timeout: float | None = None) -> Slot | None:
        return self.get_nowait()


class Slot:
    """Memory for one element. `lent_to` is the thread that got its tensors, 0 if they have ended.

    `loan` are the tensors, if they were got inside `with arena:`, and end with its reset.
    """

    __slots__ = ("_ring", "index", "lent_to", "loan", "parts")

    def __init__(self, index: int, ring: Ring) -> None:
        self.index = index
        self.parts: list[tuple[Region, TensorType]] = []
        self.loan: Loan | None = None
        self.lent_to = _NOBODY
        self._ring = ring

    def come_back(self) -> None:
        """All tensors have ended: the slot is free."""
        loan, self.loan = self.loan, None
        if loan is not None:
            loan.host.guests.discard(loan)
        self.lent_to = _NOBODY
        self._ring.put(self)


class Loan:
    """A slot's tensors, got inside `with host:`. It does not keep them."""

    __slots__ = ("_references", "host")

    def __init__(self, host: Arena, tensors: Sequence[Allocation]) -> None:
        self.host = host
        self._references = [weakref.ref(tensor) for tensor in tensors]

    def end(self, why: str) -> None:
        """End those that still live."""
        for reference in self._references:
            tensor = reference()
            if tensor is not None:
                tensor.arena._end(tensor, why)


class _Bin(list[Region]):
    """The bin of a slot's regions. It keeps none, and frees the slot when the last has come.

    `next` counts atomically: if two tensors end at once on two threads, one of them is the last.
    """

    def __init__(self, slot: Slot, nregions: int) -> None:
        self._slot = slot
        self._nregions = nregions
        self._count = itertools.count(1)

    def append(self, region: Region) -> None:
        if next(self._count) % self._nregions == 0:
            self._slot.come_back()


class SlotArena(Arena):
    """The arena of a queue tensor's slots. Its tensors are those that were got and still live.

    Nothing else is allocated here. Its bytes return to the VM when queue and tensors are gone.
    `local` is the VM if it is of this process; so is `lender` if it has the slots' own memory. To
    any other elements are copied.
    """

    def __init__(self, vm: VMProtocol, name: str, memory: SlotMemory, free: Ring) -> None:
        self._memory = memory
        self.local = vm if isinstance(vm, LocalVMProtocol) else None
        self.lender = self.local if self.local is not None and self.local.on_host else None
        super().__init__(vm, name, capacity=memory.data.nbytes)
        [chunk] = self._placement.chunks
        chunk.carved = chunk.nbytes
        self.storage: StorageHandle = chunk.storage
        self.slots = [Slot(k, free) for k in range(memory.maxsize)]
        for slot in self.slots:
            self._carve(chunk, slot)
            free.put(slot)

    def begin(self, slot: Slot) -> None:
        """Wait until nobody uses the slot's memory, which a producer is about to fill."""
        if self.local is not None:
            self.local.make_writable(self.handles(slot))

    def complete(self, slot: Slot) -> None:
        """Have the VM see what the producer has filled in. Raises what `write` does, and what went
        wrong elsewhere before: then nothing may have been written."""
        if self.lender is None:
            arrays = self._memory.slots[slot.index]
            for handle, array in zip(self.handles(slot), arrays, strict=True):
                self.vm.write(handle, array)
            if self.local is None:
                self.vm.synchronize()

    def lend(self, slot: Slot, kind: type[A]) -> tuple[A, ...]:
        """The slot's tensors, for the thread that calls, and the arena that it is in."""
        slot.lent_to = get_ident()
        tensors = tuple([self.alloc(type, kind, region) for region, type in slot.parts])
        for tensor in tensors:
            tensor.prepare()
        host = scope.get()
        if host is not None:
            slot.loan = Loan(host, tensors)
            host.guests.add(slot.loan)
        return tensors

    def handles(self, slot: Slot) -> list[TensorHandle]:
        """A handle for each part of a slot in which no tensor lives."""
        return [region.handles.get(type) or self._view(region, type) for region, type in slot.parts]

    def _carve(self, chunk: Chunk, slot: Slot) -> None:
        memory = self._memory
        bin = _Bin(slot, len(memory.types))
        ends = [*memory.offsets[1:], memory.slot_nbytes]
        for type, offset, end in zip(memory.types, memory.offsets, ends, strict=True):
            at = slot.index * memory.slot_nbytes + offset
            region = self._placement._make(chunk, at, end - offset, bin)
            slot.parts.append((region, type))
        self.handles(slot)

    def _add_chunk(self, nbytes: int) -> None:
        if self.lender is not None:
            storage = self.lender.storage_over(self._memory.data)
        else:
            storage = self.vm.alloc_storage(nbytes)
        self._placement.chunks.append(Chunk(storage, nbytes))

    def _find(self, type: TensorType) -> Region:
        raise ArenaError(
            f"arena {self.name!r} has the slots of a queue tensor and no room for other tensors"
        )
