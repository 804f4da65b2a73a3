"""Loans: memory of tensors that somebody outside of the arenas reads.

A region whose tensor ends goes back to its bin, and from there to the next tensor. While it is
lent, its bin is a `_Waiting`: the region gets to the bin that it came from only after the last loan
has ended. So neither a reset nor the end of the tensor changes what the borrower sees.
"""

from __future__ import annotations

from typing import Final

from mlvm.arena.arena import Allocation
from mlvm.arena.placement import Region, Reuse
from mlvm.core.locks import new_lock

_lock: Final = new_lock()  # a loan may end in a garbage collection inside of it


class _Waiting(list[Region]):
    """The bin of a region that is lent; `own` is the bin that it came from."""

    def __init__(self, own: list[Region]) -> None:
        super().__init__()
        self.own = own
        self.loans = 0

    def append(self, region: Region) -> None:
        with _lock:
            if self.loans:
                super().append(region)
            else:
                self.own.append(region)


class Loan:
    """The memory of a tensor, which no other tensor gets before `end`. Raises `StaleTensor`."""

    def __init__(self, tensor: Allocation) -> None:
        region = self._region = tensor.root.region
        if region is None:
            raise tensor.stale()
        with _lock:
            if not isinstance(region.bin, _Waiting):
                region.bin = _Waiting(region.bin)
            region.bin.loans += 1

    def end(self) -> None:
        """Give the memory back. Idempotent."""
        with _lock:
            region, self._region = self._region, None
            if region is None or not isinstance(region.bin, _Waiting):
                return
            bin = region.bin
            bin.loans -= 1
            if not bin.loans:
                region.bin = bin.own
                bin.own.extend(bin)


def can_lend(tensor: Allocation) -> bool:
    """Whether the tensor's memory is its own for as long as its arena says: that of a scratch pad
    or a queue's slot is not."""
    region = tensor.root.region
    bin = region.bin if region is not None else None
    return isinstance(tensor.arena._placement, Reuse) and (
        bin.__class__ is list or isinstance(bin, _Waiting)
    )
