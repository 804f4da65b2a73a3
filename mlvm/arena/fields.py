"""Slots of allocations, regions and arenas.

With the extension they are C structs, which the fast path of eager calls (`language/dispatch.c`)
reads and writes without Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from mlvm.core.locks import new_lock
from mlvm.machines.native.extension import EXTENSION


class _AllocationSlots:
    """Slots of an `Allocation`; the last three are for subclasses."""

    __slots__ = (
        *("__weakref__", "arena", "base", "ended", "handle", "region", "type"),
        *("is_part", "node", "tape"),
    )

    arena: Any
    region: Any

    def __del__(self) -> None:
        """Free the tensor if this thread removes its region, as in `language/dispatch.c`."""
        try:
            region, self.region = self.region, None  # atomic
        except AttributeError:  # the object was not created by an arena
            return
        if region is not None:
            self.arena.used -= region.nbytes  # atomic
            region.bin.append(region)


class _RegionSlots:
    """Slots of a `Region`, and the list of views.

    With the extension the views are a linked list, so that a new view needs no weak reference.
    """

    __slots__ = (
        *("__weakref__", "storage", "offset", "nbytes", "address", "bin", "number", "handles"),
        *("holder", "holder_at_reset", "last", "noted", "watched", "_views"),
    )

    _views: WeakValueDictionary[int, Any] | None

    @property
    def views(self) -> tuple[Any, ...]:
        """The live views of the tensor in this region, the oldest first."""
        views = getattr(self, "_views", None)
        # Copy the references in a single step: another thread may add a view meanwhile.
        references = views.valuerefs() if views else ()
        return tuple([view for reference in references if (view := reference()) is not None])

    def add_view(self, view: Any) -> None:
        """List a view until it is freed or removed."""
        views = getattr(self, "_views", None)
        if views is None:
            with _adding:  # several threads may view one tensor
                views = getattr(self, "_views", None) or WeakValueDictionary[int, Any]()
                self._views = views
        views[id(view)] = view

    def remove_view(self, view: Any) -> None:
        """Remove a view from the list."""
        views = getattr(self, "_views", None)
        if views is not None:
            views.pop(id(view), None)

    def take_views(self) -> tuple[Any, ...]:
        """Return all views, and clear the list."""
        views, self._views = self.views, None
        return views


_adding = new_lock()


class _ArenaSlots:
    """Base class of `Arena` if the extension is missing; it adds no fields."""


class _CallSlots:
    """Slot of `OneOp` for `Op.is_view`."""

    __slots__ = ("gives_part",)


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
