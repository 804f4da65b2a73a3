"""Slots of allocations, regions and arenas. With the extension they are structs in C, which the
fast path of eager calls (`language/dispatch.c`) reads and writes without Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlvm.machines.native.extension import EXTENSION


class _AllocationSlots:
    """Slots of an `Allocation`. The last two are for subclasses."""

    __slots__ = (
        *("__weakref__", "arena", "base", "ended", "handle", "region", "type"),
        *("node", "tape"),
    )

    arena: Any
    region: Any

    def __del__(self) -> None:
        """End the tensor, as in `language/dispatch.c`: the thread that removes the region does."""
        try:
            region, self.region = self.region, None  # at once
        except AttributeError:  # not created by an arena
            return
        if region is not None:
            self.arena.used -= region.nbytes  # at once
            region.bin.append(region)


class _RegionSlots:
    """Slots of a `Region`."""

    __slots__ = (
        *("__weakref__", "storage", "offset", "nbytes", "bin", "number", "handles"),
        *("holder", "holder_at_reset", "last", "noted", "views"),
    )


class _ArenaSlots:
    """Slots of an `Arena`, which has others too."""


class _CallSlots:
    """Slots of a `OneOp`, which has others too."""

    __slots__ = ()


if TYPE_CHECKING or EXTENSION is None:
    AllocationFields = _AllocationSlots
    RegionFields = _RegionSlots
    ArenaFields = _ArenaSlots
    CallFields = _CallSlots
else:
    AllocationFields = EXTENSION.AllocationFields
    RegionFields = EXTENSION.RegionFields
    ArenaFields = EXTENSION.ArenaFields
    CallFields = EXTENSION.CallFields
