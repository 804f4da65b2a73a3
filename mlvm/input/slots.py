"""Slots of a queue tensor, and the arena of the slots.

Producers fill slots in memory of this process. A VM of this process uses the same memory. Any other
VM has separate memory for each slot; complete elements are copied to it.

A slot is free, being filled, waiting, or lent to a consumer as tensors. The tensors are ordinary
allocations. When the last tensor is freed, for any reason and on any thread, the slot returns to
the ring of free slots. The garbage collector may free a tensor in the middle of any call. Therefore
slots use no locks, and rings are `SimpleQueue`s, which allow a finalizer to call `put` during any
other call.

Ctrl-C may also interrupt any call between two lines. Therefore each slot has one `Claim`. The owner
of the
claim owns the slot: a ring, a reservation, a call, or the slot itself while it is lent. Each step
moves the claim by a single call in C. If the last reference was in an interrupted call, the
finalizer returns the claim.
"""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from threading import get_ident
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from mlvm.arena.arena import Allocation, Arena, scope, set_name
from mlvm.arena.placement import Chunk, Region
from mlvm.core.errors import ArenaError
from mlvm.core.protocol import LocalVMProtocol, StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import TensorType
from mlvm.input.slot_memory import SlotMemory

A = TypeVar("A", bound=Allocation)

_NOBODY: Final = 0


class Ring(Protocol):
    """Claims in `put` order; a claim that has no slot marks the end.

    `get` raises `queue.Empty` on a timeout.
    """

    def put(self, claim: Claim, /) -> object: ...
    def get(self, block: bool = True, timeout: float | None = None) -> Claim: ...
    def get_nowait(self) -> Claim: ...
    def qsize(self) -> int: ...


class SingleThreadedRing:
    """Ring without locks; calls never wait."""

    def __init__(self) -> None:
        self._claims: deque[Claim] = deque()
        self.put = self._claims.append
        self.qsize = self._claims.__len__

    def get_nowait(self) -> Claim:
        try:
            return self._claims.popleft()
        except IndexError:
            raise queue.Empty from None

    def get(self, block: bool = True, timeout: float | None = None) -> Claim:
        return self.get_nowait()


class Slot:
    """Memory for one element.

    `lent_to`: thread that got the tensors; 0 after they are freed.
    `loan`: the tensors, if they were returned inside `with arena:` and are freed by the arena's
    reset.
    `lent`: regions of live tensors, and a list of the claim while the slot is lent.

    `lent` is new for each borrower: a late thread of an earlier borrower cannot change it.
    """

    __slots__ = ("_borrower", "index", "lent", "loan", "parts")

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[tuple[Region, TensorType]] = []
        self.loan: SlotLoan | None = None
        self.lent: tuple[set[Region], list[Claim]] = set(), []
        self._borrower = _NOBODY

    @property
    def lent_to(self) -> int:
        return self._borrower if self.lent[1] else _NOBODY

    def lend(self, claim: Claim) -> None:
        """Lend the slot to the calling thread, which has allocated the tensors."""
        self._borrower = get_ident()
        self.lent = {region for region, _ in self.parts}, [claim]

    def settle(self) -> None:
        """Free the slot if all tensors are freed.

        If two threads free tensors at the same time, only one thread gets the claim.
        """
        living, claims = self.lent
        if living or not claims:
            return
        with suppress(IndexError):
            claim = claims.pop()
            loan, self.loan = self.loan, None
            if loan is not None:
                loan.host.guests.discard(loan)
            claim.reuse()

    def sweep(self) -> None:
        """Free the slot if all tensors are gone, even if freeing a tensor was interrupted."""
        living, _ = self.lent
        for region in living.copy():
            tensor = region.holder() if region.holder is not None else None
            if tensor is None or tensor.region is None:
                living.discard(region)
        self.settle()


class Claim:
    """Ownership of a slot, or a mark for the end of a queue.

    A dropped claim returns to a ring while the ring exists.

    `home`: ring to which it returns; for a slot's claim, the ring of free slots.
    `element`: tensors over the regions of a slot that is being filled or waits.
    `types`: types of an element that is smaller than the slot, otherwise empty.
    """

    __slots__ = ("_finalizers", "element", "home", "slot", "types")

    def __init__(
        self, slot: Slot | None, home: weakref.ref[Ring], newest: list[Any] | None = None
    ) -> None:
        self.slot = slot
        self.home = home
        self.element: Sequence[Allocation] = ()
        self.types: tuple[TensorType, ...] = ()
        key = object()
        newest = [key] if newest is None else newest
        self._finalizers = tuple([_Finalizer(key, newest, slot, home) for _ in range(2)])

    def reuse(self) -> None:
        """Put the claim itself into the ring. The caller must hold the only reference."""
        self.element, self.types = (), ()
        ring = self.home()
        if ring is not None:
            ring.put(self)

    def give_back(self) -> None:
        """Put a new claim into the ring; a traceback may hold this claim, which becomes invalid."""
        self.element, self.types = (), ()
        self._finalizers[0].put()


class _Finalizer(NamedTuple):
    """Finalizer of a claim, which puts a new claim into the ring.

    A claim has two finalizers, because Ctrl-C may interrupt a finalizer at any line.

    newest: list that all claims of a slot share; the last item is the key of the newest claim
    """

    key: object
    newest: list[Any]
    slot: Slot | None
    home: weakref.ref[Ring]

    def __del__(self) -> None:
        self.put()

    def put(self) -> None:
        """Put the next claim into the ring, unless that has been done."""
        ring = self.home()
        if ring is not None and self.newest[-1] is self.key:
            claim = Claim(self.slot, self.home, self.newest)
            key = claim._finalizers[0].key
            self.newest[:] = chain(map(ring.put, [claim]), [key])  # one call in C, hence atomic


class SlotLoan:
    """Weak references to a slot's tensors that were returned inside `with host:`."""

    __slots__ = ("_references", "host")

    def __init__(self, host: Arena, tensors: Sequence[Allocation]) -> None:
        self.host = host
        self._references = [weakref.ref(tensor) for tensor in tensors]

    def end(self, why: str) -> None:
        """Free the remaining tensors."""
        for reference in self._references:
            tensor = reference()
            if tensor is not None:
                tensor.arena._end(tensor, why)


class _Bin(list[Region]):
    """Bin of a slot's regions, which stores nothing; the last region to arrive frees the slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def append(self, region: Region) -> None:
        living, _ = self._slot.lent  # read this first: it may belong to an earlier borrower
        if region.tensor() is None:  # otherwise a tensor of an interrupted call was freed
            living.discard(region)
            self._slot.settle()


class SlotArena(Arena):
    """Arena of a queue tensor's slots.

    It contains the live tensors of consumers, and a tensor for each part of a slot that is being
    filled or waits.

    The memory returns to the VM when the queue and all tensors are freed.

    `end`: mark that `close` puts into the free ring.
    `local`: the VM if it belongs to this process, otherwise None.
    `lender`: the VM if it uses the slots' memory; None if elements are copied to the VM.
    """

    def __init__(self, vm: VMProtocol, name: str, memory: SlotMemory, free: Ring) -> None:
        self._memory = memory
        home = self._free = weakref.ref(free)
        self.end = [Claim(None, home)]
        self.local = vm if isinstance(vm, LocalVMProtocol) else None
        self.lender = self.local if self.local is not None and self.local.on_host else None
        super().__init__(vm, name, capacity=memory.data.nbytes)
        [chunk] = self._placement.chunks
        chunk.carved = chunk.nbytes
        self.storage: StorageHandle = chunk.storage
        self.slots = [Slot(k) for k in range(memory.maxsize)]
        for slot in self.slots:
            self._carve(chunk, slot)
            free.put(Claim(slot, home))

    def free_slots(self) -> int:
        """Return the number of free slots."""
        self.sweep()
        free = self._free()
        return 0 if free is None else max(free.qsize() - (not self.end), 0)

    def sweep(self) -> None:
        """Free all slots without tensors, even if freeing a tensor was interrupted."""
        for slot in self.slots:
            slot.sweep()

    def begin(self, claim: Claim, slot: Slot) -> None:
        """Wait until the memory of a slot is no longer in use, before a producer fills it."""
        if self.local is not None:
            self.local.make_writable(
                [each for region, _ in slot.parts for each in [*region.handles.values()]]
            )
        claim.element = [self.alloc(type, Allocation, region) for region, type in slot.parts]
        self._name(claim.element, "full slot")

    def complete(self, claim: Claim, slot: Slot) -> None:
        """Copy a filled element to a VM with separate memory.

        Raises the errors of `write`, and earlier errors of a remote VM, after which the element may
        not have been written.
        """
        if self.lender is None:
            arrays = self._memory.slots[slot.index]
            for (region, type), array in zip(self._parts(claim, slot), arrays, strict=True):
                handle = region.handles.get(type) or self._view(region, type)
                self.vm.write(handle, array.reshape(-1)[: type.size].reshape(type.shape))
            if self.local is None:
                self.vm.synchronize()

    def lend(self, claim: Claim, kind: type[A]) -> tuple[A, ...]:
        """Allocate the slot's tensors for the calling thread and its current arena."""
        slot = claim.slot
        assert slot is not None  # a claim that has no slot closes the queue
        claim.element = ()
        parts = self._parts(claim, slot)
        tensors = tuple([self.alloc(type, kind, region) for region, type in parts])
        self._name(tensors, "lent slot")
        for tensor in tensors:
            tensor.prepare()
        slot.lend(claim)
        host = scope()
        if host is not None:
            slot.loan = SlotLoan(host, tensors)
            host.guests.add(slot.loan)
        return tensors

    def handles(self, slot: Slot) -> list[TensorHandle]:
        """Return a handle for each part of a slot without live tensors."""
        return [region.handles.get(type) or self._view(region, type) for region, type in slot.parts]

    @staticmethod
    def _parts(claim: Claim, slot: Slot) -> list[tuple[Region, TensorType]]:
        """Return the regions of a slot, with the types of the element."""
        if not claim.types:
            return slot.parts
        return list(zip([region for region, _ in slot.parts], claim.types, strict=True))

    def _name(self, tensors: Sequence[Allocation], kind: str) -> None:
        for tensor in tensors if self._watchers else ():
            set_name(tensor, kind)

    def _carve(self, chunk: Chunk, slot: Slot) -> None:
        memory = self._memory
        bin = _Bin(slot)
        ends = [*memory.offsets[1:], memory.slot_nbytes]
        for type, offset, end in zip(memory.types, memory.offsets, ends, strict=True):
            at = slot.index * memory.slot_nbytes + offset
            slot.parts.append((self._placement._make(chunk, at, end - offset, bin), type))
        self.handles(slot)

    def _add_chunk(self, nbytes: int) -> None:
        if self.lender is not None:
            storage = self.lender.storage_over(self._memory.data)
        else:
            storage = self.vm.alloc_storage(nbytes)
        self._placement.chunks.append(Chunk(storage, nbytes))

    def _find(self, type: TensorType) -> Region:
        raise ArenaError(
            f"arena {self.name!r} is reserved for the slots of a queue tensor; allocate other "
            "tensors in a different arena"
        )
