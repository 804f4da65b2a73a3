"""Free store: storages of bytes, and handles of the tensors in them.

A handle is an integer that no store of this process uses twice, so the use of a freed handle is
always detected. In a process that serves remote clients, handles begin at a random number
(`number_apart`). The store outlives launches and counts every byte.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from mlvm.core.errors import (
    DTypeError,
    HandleError,
    MachineError,
    OutOfMemoryError,
    ShapeError,
    brief,
)
from mlvm.core.memory import HOST, Memory
from mlvm.core.sizes import physical_memory
from mlvm.core.types import ALIGNMENT, MAX_NBYTES, Array, TensorType

Handle = int
# freed handles for which an error can still state the type and the reason
_TOMBSTONES: Final = 1 << 16

_handles = itertools.count(1)
_server = 0  # process id for which handles begin at a random number


def number_apart() -> None:
    """Make later handles of this process begin at a random number above 2**32.

    A handle that is used on a VM of a different process is then unknown there, instead of naming
    another tensor.
    """
    global _server, _handles
    if _server != os.getpid():  # a forked process inherits the counter of the parent
        _server, _handles = os.getpid(), itertools.count(1 + secrets.randbelow(1 << 20) << 32)


@dataclass(slots=True)
class Storage:
    """Block of bytes, which is in use until the storage handle and all owning tensors are freed.

    `views` are the handles of tensors in it that do not own it; they are freed with the handle.
    """

    nbytes: int
    data: Array
    holders: int = 0
    has_handle: bool = False
    views: set[Handle] = field(default_factory=set)

    def view(self, type: TensorType, offset: int) -> Array:
        data = self.data[offset : offset + type.nbytes]
        return data.view(type.dtype.numpy).reshape(type.array_shape)


@dataclass(slots=True)
class Entry:
    """Tensor of a handle: a typed array in a storage; `owner` is true if it holds the storage."""

    type: TensorType
    array: Array
    storage: Storage
    owner: bool


class Cache(Protocol):
    """Cache of arrays by handle, listed in `FreeStore.caches`."""

    def clear(self) -> None: ...


class FreeStore:
    """Storages and tensors by handle.

    consumed: exact sum of the bytes of all storages.
    limit: maximum of `consumed`, or None.
    caches: caches of arrays by handle. All are cleared when a handle may refer to a different array
        or to none, so they keep no freed array alive.
    """

    def __init__(self, memory: Memory = HOST) -> None:
        self.memory = memory
        self.consumed = 0
        self.limit: int | None = None
        self.caches: dict[int, Cache] = {}
        self._entries: dict[Handle, Entry] = {}
        self._storages: dict[Handle, Storage] = {}
        self._by_root: dict[int, Storage] = {}  # keys are results of `Memory.root`
        self._ended: dict[Handle, str] = {}
        self._closed: str | None = None

    def close(self, why: str) -> None:
        """Free every tensor and storage. Later uses raise an error with the text `why`.

        Freeing a handle after that does nothing. Idempotent.
        """
        for storage in list(self._storages):
            self.dealloc_storage(storage)
        for tensor in list(self._entries):
            self.dealloc_tensor(tensor)
        self.clear_caches()
        self._closed = why

    def require_open(self) -> None:
        """Raise `MachineError` after `close`."""
        if self._closed is not None:
            raise MachineError(self._closed)

    def new_storage(self, nbytes: int) -> Storage:
        """Allocate the bytes of a storage; all allocations of the store call this.

        Raises `OutOfMemoryError`.
        """
        self.require_open()
        self._require_room(nbytes)
        try:
            return Storage(nbytes, self.memory.zeros(nbytes))
        except MemoryError:
            remedy, total = "free tensors", physical_memory()
            if nbytes > total > 0:
                remedy = f"this machine has {total:,}; use a smaller shape or dtype"
            raise OutOfMemoryError(
                f"cannot allocate {nbytes:,} bytes; the VM holds {self.consumed:,}; {remedy}"
            ) from None

    def _require_room(self, nbytes: int) -> None:
        """Raise `OutOfMemoryError` if an allocation of `nbytes` exceeds the limit."""
        if self.limit is not None and self.consumed + nbytes > self.limit:
            raise OutOfMemoryError(
                f"cannot allocate {nbytes:,} bytes: the VM holds {self.consumed:,} bytes, and its "
                f"limit is {self.limit:,} (memory=); free tensors, or create the VM with more"
            )

    # --- storages ---

    def alloc_storage(self, nbytes: int) -> Handle:
        if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_NBYTES:
            raise ShapeError(
                f"alloc_storage: expected a size of 0 to {MAX_NBYTES} bytes, got {nbytes!r}"
            )
        return self._name_storage(self.new_storage(nbytes))

    def storage_over(self, memory: Array) -> Handle:
        if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8:
            raise DTypeError(f"storage_over: expected a u8 array, got {brief(memory)}")
        if memory.ndim != 1 or not memory.flags.carray or memory.ctypes.data % ALIGNMENT:
            raise ShapeError(
                f"storage_over: expected a writable array of one dimension, aligned to "
                f"{ALIGNMENT} bytes; pass a copy"
            )
        if self.memory.root(memory) in self._by_root:
            raise HandleError(
                "storage_over: the memory already belongs to a storage of this VM; pass a copy"
            )
        self._require_room(memory.nbytes)
        return self._name_storage(Storage(memory.nbytes, memory))

    def _name_storage(self, storage: Storage) -> Handle:
        self.require_open()
        storage.has_handle = True
        handle = next(_handles)
        self._storages[handle] = storage
        self._hold(storage)
        return handle

    def dealloc_storage(self, handle: Handle) -> None:
        if self._closed is not None:
            return
        storage = self._storage(handle)
        for view in list(storage.views):
            self._end(view, f"freed with storage {handle}")
        del self._storages[handle]
        storage.has_handle = False
        self._release(storage)
        self._bury(handle, f"was a storage of {storage.nbytes} bytes, freed by dealloc_storage")
        self.clear_caches()

    # --- tensors ---

    def alloc_tensor(self, type: TensorType) -> Handle:
        if not isinstance(type, TensorType):
            raise ShapeError(f"expected a TensorType, got {type!r}")
        storage = self.new_storage(type.nbytes)
        return self._name(Entry(type, storage.view(type, 0), storage, owner=True))

    def dealloc_tensor(self, handle: Handle) -> None:
        if self._closed is not None:
            return
        self.entry(handle)
        self._end(handle, "freed by dealloc_tensor")
        self.clear_caches()

    def tensor_from_storage(self, storage: Handle, type: TensorType, offset: int) -> Handle:
        home = self._storage(storage)
        if offset < 0 or offset + type.nbytes > home.nbytes:
            raise ShapeError(
                f"{type} at offset {offset} ends at byte {offset + type.nbytes}, but the storage "
                f"has {home.nbytes} bytes; use a smaller offset"
            )
        if offset % type.dtype.itemsize:
            raise ShapeError(
                f"{type}: expected an offset that is a multiple of {type.dtype.itemsize} "
                f"bytes, got {offset}"
            )
        return self._name(Entry(type, home.view(type, offset), home, owner=False))

    def adopt(self, entry: Entry) -> Handle:
        """Create a handle for a tensor in an entry of a different store, without a copy.

        This store counts the whole storage, once for all tensors adopted from it.
        """
        if self.memory.root(entry.storage.data) not in self._by_root:
            self._require_room(entry.storage.nbytes)
        copy = Storage(entry.storage.nbytes, entry.storage.data)
        return self._name(self._entry_in(copy, entry.array))

    def replace(self, handle: Handle, array: Array) -> None:
        """Make a handle refer to a different array of any type. Copy only a read-only array."""
        old = self.entry(handle)
        if not self.memory.writable(array):
            array = self.memory.copy(array)
        if self.memory.root(array) not in self._by_root:
            self._require_room(array.nbytes - old.storage.nbytes * (old.storage.holders == 1))
        new = self._entry_in(Storage(array.nbytes, array), array)
        self._attach(handle, new)
        self._detach(handle, old, keep=new.storage)
        self.clear_caches()

    def swap(self, first: Handle, second: Handle) -> None:
        """Exchange the tensors of two handles of equal types, without a copy."""
        x, y = self.entry(first), self.entry(second)
        if x.type is not y.type:
            raise DTypeError(f"swap: expected two tensors of one type, got {x.type} and {y.type}")
        for entry in (x, y):
            if not entry.owner:
                entry.storage.views ^= {first, second}  # a shared storage holds both or neither
        self._entries[first], self._entries[second] = y, x
        self.clear_caches()

    def entry(self, handle: Handle) -> Entry:
        """Return the handle's entry. Raises `HandleError` with the reason for a freed handle."""
        try:
            return self._entries[handle]
        except (KeyError, TypeError):
            raise HandleError(f"tensor handle {brief(handle)} {self._fate(handle)}") from None

    # --- handles and storages ---

    def _entry_in(self, storage: Storage, array: Array) -> Entry:
        """Return an entry for an array in that storage, or in the storage that contains it."""
        storage = self._by_root.get(self.memory.root(storage.data), storage)
        return Entry(TensorType.of(array), array, storage, owner=not storage.has_handle)

    def _name(self, entry: Entry) -> Handle:
        self.require_open()
        handle = next(_handles)
        self._attach(handle, entry)
        return handle

    def _attach(self, handle: Handle, entry: Entry) -> None:
        self._entries[handle] = entry
        if entry.owner:
            self._hold(entry.storage)
        else:
            entry.storage.views.add(handle)

    def _detach(self, handle: Handle, entry: Entry, keep: Storage | None = None) -> None:
        if entry.owner:
            self._release(entry.storage)
        elif entry.storage is not keep:
            entry.storage.views.discard(handle)

    def _hold(self, storage: Storage) -> None:
        if not storage.holders:
            self.consumed += storage.nbytes
            self._by_root[self.memory.root(storage.data)] = storage
        storage.holders += 1

    def _release(self, storage: Storage) -> None:
        storage.holders -= 1
        if not storage.holders:
            self.consumed -= storage.nbytes
            del self._by_root[self.memory.root(storage.data)]
            self.memory.forget(storage.data)

    def clear_caches(self) -> None:
        """Discard all cached arrays of handles."""
        caches, self.caches = self.caches, {}
        for cache in caches.values():
            cache.clear()

    def _end(self, handle: Handle, how: str) -> None:
        entry = self._entries.pop(handle)
        self._detach(handle, entry)
        self._bury(handle, f"was a tensor {entry.type}, {how}")

    # --- limits ---

    def hold_stack(self, values: int, frames: int) -> None:
        """Raise `OutOfMemoryError` if the stack of a launch exceeds the limits of the store."""

    # --- texts of errors ---

    def _storage(self, handle: Handle) -> Storage:
        try:
            return self._storages[handle]
        except (KeyError, TypeError):
            raise HandleError(f"storage handle {brief(handle)} {self._fate(handle)}") from None

    def _fate(self, handle: Handle) -> str:
        if not isinstance(handle, (int, np.integer)):  # untyped callers pass anything
            return "is not valid: expected an integer"
        if self._closed is not None:
            return f"is no longer valid: {self._closed}"
        if handle in self._storages:
            return "refers to a storage, not to a tensor"
        if handle in self._entries:
            return f"refers to a tensor {self._entries[handle].type}, not to a storage"
        return self._ended.get(
            handle, "does not exist in this VM: it was never created, or freed long ago"
        )

    def _bury(self, handle: Handle, fate: str) -> None:
        self._ended[handle] = fate
        if len(self._ended) > _TOMBSTONES:
            del self._ended[next(iter(self._ended))]
