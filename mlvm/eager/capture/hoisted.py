"""Hoisted values: tensors that depend only on weights, computed once and reused by launches.

In: the hoisted part of a planned step, and the weights. Out: the results, in a separate arena.

Invariant: at each launch the values correspond to the present weights. They are computed before the
first launch, and again after a weight was written or moved, which a counter of writes detects
(`mlvm.arena.writes`). Programs of the same VM with equal hoisted parts share the values. If weights
change before each call, `Variants` selects a program without hoisted values.

Callers: `Captured` when it compiles; `Launch.run`, which holds the VM's lock until it has launched.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from mlvm.arena.arena import Allocation, Arena, stale_of
from mlvm.arena.writes import Watch
from mlvm.core.observe import explaining
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType
from mlvm.eager.tensor.constants import prepare_constants
from mlvm.eager.tensor.context import bound
from mlvm.eager.tensor.tensor import Tensor
from mlvm.step.compile import HoistedPart, Planned
from mlvm.step.flow import Location


class HoistedValues:
    """Results of the hoisted part of a step, in a separate arena.

    `vm`, `part`: the VM, and the program that computes the values.
    `sources`: the weights that they depend on.
    `values`: the tensors.
    `note_line`: adds the user's line to an error of the program.
    """

    def __init__(
        self, part: HoistedPart, states: Sequence[Allocation], vm: VMProtocol, name: str
    ) -> None:
        self.vm, self.part, self.note_line = vm, part, part.planned.note_line
        read = {place for role, place, _ in part.planned.arguments if role == "state"}
        # the hoisted values may outlive the other states
        self._states = {place: states[place] for place in sorted(read)}
        self.sources = [*self._states.values()]
        self._arena = Arena(vm, f"hoisted values of {name.lstrip('_')}", capacity=part.nbytes)
        self.values = [self._arena.alloc(type, Tensor) for type in part.types]
        for x in self.values:
            x.tape = None
        self._watch = Watch(vm)
        self._changes: int | None = None  # the write count when the values were computed

    def fits(self, part: HoistedPart, states: Sequence[Allocation], vm: VMProtocol) -> bool:
        """Return whether the part computes the same values from the same weights."""
        mine, others = self.part.planned, part.planned
        return (
            self.vm is vm
            and _tensors(mine.arguments, self._states) == _tensors(others.arguments, states)
            and mine.program == others.program
        )

    @property
    def may_change(self) -> bool:
        """True if a write may reach a source; constants are never written."""
        constants = prepare_constants(self.vm).arena
        return is_shared(self.vm) or any(x.arena is not constants for x in self.sources)

    @property
    def is_stale(self) -> bool:
        """True before the values are computed, and after a write to a weight."""
        return self._changes != self._watch.changes

    def is_current(self) -> bool:
        """Return whether a launch may read the values as they are.

        The caller holds the VM's lock."""
        return not (self.is_stale or is_shared(self.vm) or stale_of(self.sources))

    def writes(self) -> int:
        """Return the count of writes to the weights, and watch the weights' present memory.

        The caller holds the VM's lock."""
        self._watch.begin(self.sources)
        return self._watch.changes

    def refresh(self) -> None:
        """Compute the values from the present weights if they are stale.

        The caller holds the VM's lock. Raises `StaleTensorError` for a weight that was freed."""
        stale = stale_of(self.sources)
        if stale is not None:
            raise stale
        if not self.is_stale and not is_shared(self.vm):
            return
        changes, vm, planned = self.writes(), self.vm, self.part.planned
        tensors: Mapping[str, Any] = {"state": self._states, "output": self.values}
        has_scratch = any(role == "scratch" for role, _, _ in planned.arguments)
        storage = vm.alloc_storage(planned.plan.nbytes) if has_scratch else None
        try:
            handles = [
                vm.tensor_from_storage(storage, type, place)
                if storage is not None and role == "scratch"
                else as_type(tensors[role][place], type).handle
                for role, place, type in planned.arguments
            ]
            with bound(explaining, self.note_line):
                vm.launch(planned.program, handles)
        finally:
            if storage is not None:  # the VM then binds all programs again
                vm.dealloc_storage(storage)
        self._changes = changes


class HoistCache:
    """Hoisted values of a VM, kept while a program of a captured function uses them."""

    def __init__(self, vm: VMProtocol) -> None:
        self.values: weakref.WeakSet[HoistedValues] = weakref.WeakSet()


def hoisted_values(
    planned: Planned, states: Sequence[Allocation], vm: VMProtocol, name: str
) -> HoistedValues | None:
    """Return the hoisted values of a program, shared with other programs of the VM where equal.

    `name` is the name of the function; the arena is named after it."""
    if planned.hoisted is None:
        return None
    with vm.lock:
        cached = vm.attached(HoistCache).values
        for each in cached:
            if each.fits(planned.hoisted, states, vm):
                return each
        values = HoistedValues(planned.hoisted, states, vm, name)
        cached.add(values)
    return values


def is_shared(vm: VMProtocol) -> bool:
    """Return whether other clients may write to the VM's tensors without being counted."""
    return getattr(vm, "shared", False)


def as_type(x: Allocation, type: TensorType) -> Allocation:
    """Return the tensor, or a view of it with a different type."""
    return x if x.type is type else x.arena.view(x, type)


def _tensors(
    arguments: Sequence[Location], states: Sequence[Allocation] | Mapping[int, Allocation]
) -> list[object]:
    """Return the operands of a program in a form that can be compared."""
    return [
        (role, id(states[place]) if role == "state" else place, type)
        for role, place, type in arguments
    ]
