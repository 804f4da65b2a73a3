"""Loans of tensor memory to code outside of the arenas.

When a tensor is freed, the region normally returns to a bin for the next tensor. While the region
is lent, the bin is a `_Waiting`, and the region returns to the original bin only after the last
loan was closed. Neither a reset nor freeing the tensor therefore changes the bytes that the
borrower sees.
"""

from __future__ import annotations

from typing import Final

from mlvm.arena.arena import Allocation
from mlvm.arena.placement import Region, Reuse
from mlvm.core.locks import new_lock

_lock: Final = new_lock()  # reentrant, as the garbage collector may close a loan while it is held


class _Waiting(list[Region]):
    """Bin of a lent region; `own` is the previous bin."""

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
    """Loan of a tensor's memory, which no other tensor gets before `end`.

    Raises `StaleTensorError`.
    """

    def __init__(self, tensor: Allocation) -> None:
        region = self._region = tensor.root.region
        if region is None:
            raise tensor.stale()
        with _lock:
            if not isinstance(region.bin, _Waiting):
                region.bin = _Waiting(region.bin)
            region.bin.loans += 1

    def end(self) -> None:
        """Close the loan. Idempotent."""
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
    """Return whether the tensor's memory can be lent.

    Memory of a scratch pad or of a queue's slot cannot be lent, because tensors in it may overlap.
    """
    region = tensor.root.region
    bin = region.bin if region is not None else None
    return isinstance(tensor.arena._placement, Reuse) and (
        bin.__class__ is list or isinstance(bin, _Waiting)
    )
