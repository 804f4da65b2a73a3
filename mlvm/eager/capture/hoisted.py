"""What captured functions have computed of weights alone, and kept beside them.

It is computed before the first launch, and again before a launch once somebody has written to one
of the weights, or one of them has moved: a count of writes tells (`mlvm.arena.writes`). Where that
is so before each call, a program that computes nothing ahead takes less time: `captured` has one.
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
from mlvm.eager.tensor.tensor import Tensor
from mlvm.step.compile import Ahead, Planned
from mlvm.step.flow import Location


class Hoisted:
    """The tensors that a program `ahead` makes of `sources`, in an arena of their own."""

    def __init__(
        self,
        ahead: Ahead,
        states: Sequence[Allocation],
        vm: VMProtocol,
        name: str,
    ) -> None:
        self.vm, self.ahead, self.note_line = vm, ahead, ahead.planned.note_line
        self._states = _states_of(ahead, states)
        self.sources = [*self._states.values()]
        self._arena = Arena(vm, f"ahead of {name.lstrip('_')}", capacity=ahead.nbytes)
        self.made = [self._arena.alloc(type, Tensor) for type in ahead.types]
        for x in self.made:
            x.tape = None
        self._watch = Watch(vm)
        self._seen: int | None = None  # the watch's count when they were computed

    def fits(self, ahead: Ahead, states: Sequence[Allocation], vm: VMProtocol) -> bool:
        """Whether that program makes the same of the same."""
        mine, others = self.ahead.planned, ahead.planned
        return (
            self.vm is vm
            and _tensors(mine.arguments, self._states) == _tensors(others.arguments, states)
            and mine.program == others.program
        )

    @property
    def is_stale(self) -> bool:
        """Whether a write was counted since they were computed, or they never were."""
        return self._seen != self._watch.changes

    def writes(self) -> int:
        """How often the weights were written to, counted on where they are now. The caller has the
        VM's lock."""
        self._watch.begin(self.sources)
        return self._watch.changes

    def refresh(self) -> None:
        """See to it that they are of the present weights. The caller has the VM's lock. Raises
        `StaleTensor` for a weight that has ended."""
        stale = stale_of(self.sources)
        if stale is not None:
            raise stale
        if not self.is_stale and not is_shared(self.vm):
            return
        seen, vm, planned = self.writes(), self.vm, self.ahead.planned
        tensors: Mapping[str, Any] = {"state": self._states, "output": self.made}
        needed = any(role == "scratch" for role, _, _ in planned.arguments)
        storage = vm.alloc_storage(planned.plan.nbytes) if needed else None
        token = explaining.set(self.note_line)
        try:
            handles = [
                vm.tensor_from_storage(storage, type, place)
                if storage is not None and role == "scratch"
                else as_type(tensors[role][place], type).handle
                for role, place, type in planned.arguments
            ]
            vm.launch(planned.program, handles)
        finally:
            explaining.reset(token)
            if storage is not None:  # then the VM binds all of its programs anew
                vm.dealloc_storage(storage)
        self._seen = seen


class Kept:
    """What is computed ahead on a VM, for as long as a program of a captured function uses it."""

    def __init__(self, vm: VMProtocol) -> None:
        self.made: weakref.WeakSet[Hoisted] = weakref.WeakSet()


def hoisted_values(
    planned: Planned, states: Sequence[Allocation], vm: VMProtocol, name: str
) -> Hoisted | None:
    """Return the values that a program takes: those of another program of the VM, where they are
    the same. `name` is the function's, for their arena."""
    if planned.ahead is None:
        return None
    with vm.lock:
        kept = vm.attached(Kept).made
        for each in kept:
            if each.fits(planned.ahead, states, vm):
                return each
        values = Hoisted(planned.ahead, states, vm, name)
        kept.add(values)
    return values


def is_shared(vm: VMProtocol) -> bool:
    """Whether others write to the VM's tensors, too, and nobody here counts that."""
    return getattr(vm, "shared", False)


def as_type(x: Allocation, type: TensorType) -> Allocation:
    """The tensor, or a view of it as another type."""
    return x if x.type is type else x.arena.view(x, type)


def _tensors(
    arguments: Sequence[Location], states: Sequence[Allocation] | Mapping[int, Allocation]
) -> list[object]:
    """What a program is launched with: which states, and else by role and place."""
    return [
        (role, id(states[place]) if role == "state" else place, type)
        for role, place, type in arguments
    ]


def _states_of(ahead: Ahead, states: Sequence[Allocation]) -> dict[int, Allocation]:
    """The states that the program reads, by number. It may outlive the step that had the others."""
    read = {place for role, place, _ in ahead.planned.arguments if role == "state"}
    return {place: states[place] for place in sorted(read)}
