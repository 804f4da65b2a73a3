"""What allocations, regions and arenas hold: slots; structs in C where the extension is here, so
that the short way of an eager call (`language/dispatch.c`) reads and writes them without Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlvm.machines.native.extension import EXTENSION


class _AllocationSlots:
    """Of an `Allocation`. The last two belong to whoever derives from it."""

    __slots__ = (
        *("__weakref__", "arena", "base", "ended", "handle", "region", "type"),
        *("node", "tape"),
    )

    arena: Any
    region: Any

    def __del__(self) -> None:
        """Whoever takes the region away ends the tensor. `language/dispatch.c` says the same."""
        try:
            region, self.region = self.region, None  # at once
        except AttributeError:  # one that no arena has made
            return
        if region is not None:
            self.arena.used -= region.nbytes  # at once
            region.bin.append(region)


class _RegionSlots:
    """Of a `Region`."""

    __slots__ = (
        *("__weakref__", "storage", "offset", "nbytes", "bin", "number", "handles"),
        *("holder", "seen", "last", "noted", "views"),
    )


class _ArenaSlots:
    """Of an `Arena`, which has others besides."""


class _CallSlots:
    """Of a `OneOp`, which has others besides."""

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
