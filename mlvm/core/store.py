"""The free store: storages of bytes, and handles that name tensors in them.

A handle is an integer that is never used twice, in any store of this process; so a handle
that outlives its tensor is always noticed. The store outlives launches and counts every byte.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mlvm.core.errors import DTypeError, HandleError, ShapeError
from mlvm.core.types import MAX_NBYTES, Array, TensorType

Handle = int
ALIGNMENT: Final = 64
_TOMBSTONES: Final = 1 << 16  # ended handles whose type and end an error can still name

_handles = itertools.count(1)


def aligned_zeros(nbytes: int) -> Array:
    """A u8 array of zeros whose first byte lies on a 64-byte boundary."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes]


@dataclass(slots=True)
class Storage:
    """A block of bytes, and the handles of the tensors that view it."""

    nbytes: int
    data: Array
    views: set[Handle] = field(default_factory=set)

    def view(self, type: TensorType, offset: int) -> Array:
        data = self.data[offset : offset + type.nbytes]
        return data.view(type.dtype.numpy).reshape(type.shape)


@dataclass(slots=True)
class Entry:
    """What a handle names: a typed array in a storage; `owner` when the storage is its own."""

    type: TensorType
    array: Array
    storage: Storage
    owner: bool


class FreeStore:
    """Storages and tensors by handle. `consumed` is the exact sum of all storages' bytes."""

    def __init__(self) -> None:
        self.consumed = 0
        self._entries: dict[Handle, Entry] = {}
        self._storages: dict[Handle, Storage] = {}
        self._ended: dict[Handle, str] = {}

    def new_storage(self, nbytes: int) -> Storage:
        """Bytes for one storage; the one place that allocates."""
        return Storage(nbytes, aligned_zeros(nbytes))

    def alloc_storage(self, nbytes: int) -> Handle:
        if not 0 <= nbytes <= MAX_NBYTES:
            raise ShapeError(f"a storage has 0 to {MAX_NBYTES} bytes, not {nbytes}")
        handle = next(_handles)
        self._storages[handle] = self.new_storage(nbytes)
        self.consumed += nbytes
        return handle

    def dealloc_storage(self, handle: Handle) -> None:
        storage = self._storage(handle)
        for view in storage.views:
            self._end(view, f"ended with its storage {handle}")
        del self._storages[handle]
        self.consumed -= storage.nbytes
        self._bury(handle, f"was a storage of {storage.nbytes} bytes, ended by dealloc_storage")

    def alloc_tensor(self, type: TensorType) -> Handle:
        storage = self.new_storage(type.nbytes)
        handle = next(_handles)
        self._entries[handle] = Entry(type, storage.view(type, 0), storage, owner=True)
        self.consumed += type.nbytes
        return handle

    def dealloc_tensor(self, handle: Handle) -> None:
        entry = self.entry(handle)
        if entry.owner:
            self.consumed -= entry.storage.nbytes
        else:
            entry.storage.views.discard(handle)
        self._end(handle, "ended by dealloc_tensor")

    def tensor_from_storage(self, storage: Handle, type: TensorType, offset: int) -> Handle:
        home = self._storage(storage)
        if offset < 0 or offset + type.nbytes > home.nbytes:
            raise ShapeError(
                f"{type} at offset {offset} needs bytes {offset} to {offset + type.nbytes} "
                f"of a storage of {home.nbytes}"
            )
        if offset % type.dtype.itemsize:
            raise ShapeError(f"{type} at offset {offset} is not aligned to its elements")
        handle = next(_handles)
        self._entries[handle] = Entry(type, home.view(type, offset), home, owner=False)
        home.views.add(handle)
        return handle

    def swap(self, first: Handle, second: Handle) -> None:
        """Exchange what two handles name; their types must be equal. No byte moves."""
        x, y = self.entry(first), self.entry(second)
        if x.type is not y.type:
            raise DTypeError(f"swap needs two tensors of one type, not {x.type} and {y.type}")
        for entry, old, new in ((x, first, second), (y, second, first)):
            if not entry.owner:
                entry.storage.views.discard(old)
                entry.storage.views.add(new)
        self._entries[first], self._entries[second] = y, x

    def entry(self, handle: Handle) -> Entry:
        """What the handle names. Raises `HandleError` saying what became of it."""
        try:
            return self._entries[handle]
        except (KeyError, TypeError):
            raise HandleError(f"tensor handle {handle!r} {self._fate(handle)}") from None

    def _storage(self, handle: Handle) -> Storage:
        try:
            return self._storages[handle]
        except (KeyError, TypeError):
            raise HandleError(f"storage handle {handle!r} {self._fate(handle)}") from None

    def _fate(self, handle: Handle) -> str:
        if not isinstance(handle, (int, np.integer)):  # asked for what no type checker saw
            return "is no handle, which is an integer"
        if handle in self._storages:
            return "names a storage, not a tensor"
        if handle in self._entries:
            return f"names a tensor {self._entries[handle].type}, not a storage"
        return self._ended.get(handle, "names nothing in this VM: never issued, or ended long ago")

    def _end(self, handle: Handle, how: str) -> None:
        entry = self._entries.pop(handle)
        self._bury(handle, f"was a tensor {entry.type}, {how}")

    def _bury(self, handle: Handle, fate: str) -> None:
        self._ended[handle] = fate
        if len(self._ended) > _TOMBSTONES:
            del self._ended[next(iter(self._ended))]
