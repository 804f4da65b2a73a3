"""Memory of a queue's slots: private to this process, or shared with other processes.

`mlvm.machines.shared_memory` makes the shared memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mlvm.arena.placement import rounded
from mlvm.core.errors import EncodingError, OutOfMemoryError
from mlvm.core.types import ALIGNMENT, MAX_NBYTES, Array, TensorType, aligned_zeros
from mlvm.machines.shared_memory import Source, new_source


class SlotMemory:
    """Memory of `maxsize` slots in a row. Each has a tensor of every type, aligned to 64 bytes.

    Shared memory may be an argument of a `multiprocessing.Process`, started in any way; it has the
    same bytes there. Other memory is allocated by `zeros`. Raises `OutOfMemoryError`.

    slots: arrays of each slot.
    data: the whole memory, u8.
    slot_nbytes: bytes of a slot.
    offsets: offset of each tensor in a slot, bytes.
    """

    def __init__(
        self,
        types: Sequence[TensorType],
        maxsize: int,
        *,
        shared: bool = False,
        zeros: Callable[[int], Array] = aligned_zeros,
        _source: Source | None = None,
    ) -> None:
        self.types = tuple(types)
        self.maxsize = maxsize
        sizes = [rounded(type.nbytes) for type in self.types]
        *self.offsets, self.slot_nbytes = accumulate(sizes, initial=0)
        nbytes = max(self.slot_nbytes * maxsize, ALIGNMENT)
        self._source = _source
        try:
            if nbytes > MAX_NBYTES:
                raise MemoryError
            if shared and _source is None:
                self._source = new_source(nbytes)
            self.data = (
                zeros(nbytes) if self._source is None else self._mapped(self._source, nbytes)
            )
        except (MemoryError, OSError) as error:
            why = f": {error.strerror}" if isinstance(error, OSError) else ""
            text = f"cannot allocate {maxsize} slots of {self.slot_nbytes:,} bytes{why}"
            raise OutOfMemoryError(f"{text}; use a smaller maxsize") from None
        self.slots = [self._slot(k * self.slot_nbytes) for k in range(maxsize)]

    @property
    def shared(self) -> bool:
        return self._source is not None

    def _mapped(self, source: Any, nbytes: int) -> Array:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, nbytes, tagname=source)
        else:
            weakref.finalize(self, os.close, source)
            memory = mmap.mmap(source, nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def _slot(self, start: int) -> tuple[Array, ...]:
        data = self.data[start:]
        return tuple(
            type.over(data[at:]) for type, at in zip(self.types, self.offsets, strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # imported here because few programs need it
        from multiprocessing.context import get_spawning_popen

        if self._source is None or get_spawning_popen() is None:
            raise EncodingError(
                "pass the slots to a process as an argument when it starts"
                if self.shared
                else "these slots belong to one process; create the queue with shared=True"
            )
        if isinstance(self._source, int):
            from multiprocessing.reduction import DupFd

            return _attach, (self.types, self.maxsize, DupFd(self._source))
        return _attach, (self.types, self.maxsize, self._source)


def _attach(types: tuple[TensorType, ...], maxsize: int, source: Any) -> SlotMemory:
    """Map the memory in a different process."""
    if not isinstance(source, str):
        source = source.detach()
    return SlotMemory(types, maxsize, _source=source)
