"""The free store: storages of bytes, and handles that name tensors in them.

A handle is an integer that is never used twice, in any store of this process; so a handle
that outlives its tensor is always noticed. Handles of a process that serves others begin at a
random number (`number_apart`). The store outlives launches and counts every byte.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from mlvm.core.errors import DTypeError, HandleError, MachineError, OutOfMemory, ShapeError, brief
from mlvm.core.memory import HOST, Memory
from mlvm.core.types import ALIGNMENT, MAX_NBYTES, Array, TensorType

Handle = int
_TOMBSTONES: Final = 1 << 16  # ended handles whose type and end an error can still name

_handles = itertools.count(1)
_server = 0  # the process whose numbers begin at random


def number_apart() -> None:
    """Have later handles of this process begin at a random number above 2**32. A tensor of one
    process that is used on a VM of another then names nothing there, instead of another tensor."""
    global _server, _handles
    if _server != os.getpid():  # a forked process has its parent's
        _server, _handles = os.getpid(), itertools.count(1 + secrets.randbelow(1 << 20) << 32)


@dataclass(slots=True)
class Storage:
    """A block of bytes. It counts while it is held: by its own handle, or by tensors that own it.
    `views` are the handles of tensors in it that do not own it; they end with its handle."""

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
    """Tensor of a handle: a typed array in a storage; `owner` if it holds the storage."""

    type: TensorType
    array: Array
    storage: Storage
    owner: bool


class Cache(Protocol):
    """Cache of arrays by handle, as `FreeStore.caches` lists them."""

    def clear(self) -> None: ...


class FreeStore:
    """Storages and tensors by handle.

    `consumed` is the exact sum of all storages' bytes, and `limit` the most that it may be, if any.

    `caches` are dictionaries of arrays by handle, and the like. All are cleared when a handle may
    name another array, or none: they keep no ended array alive."""

    def __init__(self, memory: Memory = HOST) -> None:
        self.memory = memory
        self.consumed = 0
        self.limit: int | None = None
        self.caches: dict[int, Cache] = {}
        self._entries: dict[Handle, Entry] = {}
        self._storages: dict[Handle, Storage] = {}
        self._by_root: dict[int, Storage] = {}  # by the number of its memory
        self._ended: dict[Handle, str] = {}
        self._closed: str | None = None

    def close(self, why: str) -> None:
        """End every tensor and storage. Uses and allocations after that raise an error that says
        `why`; what frees does nothing. Idempotent."""
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
        """Bytes for one storage; the one place that allocates. Raises `OutOfMemory`."""
        self.require_open()
        self._require_room(nbytes)
        try:
            return Storage(nbytes, self.memory.zeros(nbytes))
        except MemoryError:
            raise OutOfMemory(
                f"cannot allocate {nbytes:,} bytes; the VM holds {self.consumed:,}"
            ) from None

    def _require_room(self, nbytes: int) -> None:
        """Raise `OutOfMemory` if `nbytes` more exceed the limit."""
        if self.limit is not None and self.consumed + nbytes > self.limit:
            raise OutOfMemory(
                f"{nbytes:,} more bytes: the VM holds {self.consumed:,} of the {self.limit:,} "
                f"bytes of its memory=; free tensors, or make the VM with more"
            )

    # --- storages ---

    def alloc_storage(self, nbytes: int) -> Handle:
        if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_NBYTES:
            raise ShapeError(f"a storage: expected 0 to {MAX_NBYTES} bytes, got {nbytes!r}")
        return self._name_storage(self.new_storage(nbytes))

    def storage_over(self, memory: Array) -> Handle:
        if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8:
            raise DTypeError(f"a storage is a u8 array, not {brief(memory)}")
        if memory.ndim != 1 or not memory.flags.carray or memory.ctypes.data % ALIGNMENT:
            raise ShapeError(
                f"a storage is a writable array of one dimension, aligned to {ALIGNMENT} bytes"
            )
        if self.memory.root(memory) in self._by_root:
            raise HandleError("this memory is a storage of the VM already")
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
            self._end(view, f"ended with its storage {handle}")
        del self._storages[handle]
        storage.has_handle = False
        self._release(storage)
        self._bury(handle, f"was a storage of {storage.nbytes} bytes, ended by dealloc_storage")
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
        self._end(handle, "ended by dealloc_tensor")
        self.clear_caches()

    def tensor_from_storage(self, storage: Handle, type: TensorType, offset: int) -> Handle:
        home = self._storage(storage)
        if offset < 0 or offset + type.nbytes > home.nbytes:
            raise ShapeError(
                f"{type} at offset {offset} needs bytes {offset} to {offset + type.nbytes} "
                f"of a storage of {home.nbytes}"
            )
        if offset % type.dtype.itemsize:
            raise ShapeError(f"{type} at offset {offset} is not aligned to its elements")
        return self._name(Entry(type, home.view(type, offset), home, owner=False))

    def adopt(self, entry: Entry) -> Handle:
        """A new handle for the tensor of another store's entry, without a copy. Its whole storage
        counts here, once for all tensors adopted from it."""
        if self.memory.root(entry.storage.data) not in self._by_root:
            self._require_room(entry.storage.nbytes)
        copy = Storage(entry.storage.nbytes, entry.storage.data)
        return self._name(self._entry_in(copy, entry.array))

    def replace(self, handle: Handle, array: Array) -> None:
        """Let a handle name another array, of any type. Only one that is read-only is copied."""
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
        """Exchange what two handles name; their types must be equal. No byte moves."""
        x, y = self.entry(first), self.entry(second)
        if x.type is not y.type:
            raise DTypeError(f"swap needs two tensors of one type, not {x.type} and {y.type}")
        for entry in (x, y):
            if not entry.owner:
                entry.storage.views ^= {first, second}  # of which it has one, or twice both
        self._entries[first], self._entries[second] = y, x
        self.clear_caches()

    def entry(self, handle: Handle) -> Entry:
        """Return the handle's entry. Raises `HandleError`, which says how the handle ended."""
        try:
            return self._entries[handle]
        except (KeyError, TypeError):
            raise HandleError(f"tensor handle {brief(handle)} {self._fate(handle)}") from None

    # --- who holds what ---

    def _entry_in(self, storage: Storage, array: Array) -> Entry:
        """An entry for an array in that storage, or in the one here that has its memory."""
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
        """Forget what is known of arrays by their handles."""
        caches, self.caches = self.caches, {}
        for cache in caches.values():
            cache.clear()

    def _end(self, handle: Handle, how: str) -> None:
        entry = self._entries.pop(handle)
        self._detach(handle, entry)
        self._bury(handle, f"was a tensor {entry.type}, {how}")

    # --- limits ---

    def hold_stack(self, values: int, frames: int) -> None:
        """Raise `OutOfMemory` if a store with limits cannot hold a launch's values and frames."""

    # --- what errors say ---

    def _storage(self, handle: Handle) -> Storage:
        try:
            return self._storages[handle]
        except (KeyError, TypeError):
            raise HandleError(f"storage handle {brief(handle)} {self._fate(handle)}") from None

    def _fate(self, handle: Handle) -> str:
        if not isinstance(handle, (int, np.integer)):  # no type checker saw the call
            return "is no handle, which is an integer"
        if self._closed is not None:
            return f"names nothing any more: {self._closed}"
        if handle in self._storages:
            return "names a storage, not a tensor"
        if handle in self._entries:
            return f"names a tensor {self._entries[handle].type}, not a storage"
        return self._ended.get(handle, "names nothing in this VM: never issued, or ended long ago")

    def _bury(self, handle: Handle, fate: str) -> None:
        self._ended[handle] = fate
        if len(self._ended) > _TOMBSTONES:
            del self._ended[next(iter(self._ended))]
