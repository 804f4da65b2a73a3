"""State of a run: the tensors that steps read from outside and update, as numbered cells.

A cell is a tensor that a function reads from the environment, or a Module's field that a function
rebinds. For each cell the digests of all contents that a replay can compute are known. Any other
content was written outside of the steps, and the recording stores it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from mlvm.arena.arena import STALE, Allocation
from mlvm.arena.writes import Watch
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.capture.guards.guard_set import Field
from mlvm.eager.capture.hoisted import is_shared
from mlvm.eager.runs.log import digest_of, number_of
from mlvm.eager.runs.names import unused_name
from mlvm.eager.tensor.reading import values_of
from mlvm.machines.digest import digest


def array_of(x: Allocation) -> Array:
    """Return the values of a tensor, on a VM of this process without a copy."""
    vm = x.arena.vm
    if isinstance(vm, VM) and vm.on_host and x.handle != STALE:
        return vm.array_of(x.handle)
    return values_of(x)


class StateCell(NamedTuple):
    """Number, unique name and type of a tensor of state."""

    number: int
    name: str
    type: TensorType


class Cells:
    """The cells of a run that is being recorded, with digests of the contents.

    Cells refer weakly to tensors and to owners of fields. A cell ends with its tensor or owner.
    """

    def __init__(self) -> None:
        self.rows: list[StateCell] = []
        self.digests: dict[int, bytes] = {}
        self._sources: dict[int, _Source] = {}  # of cells that have not ended
        self._numbers: dict[object, int] = {}
        self._names: set[str] = set()
        self._watch: tuple[Watch, int] | None = None
        self._watches: dict[int, Watch] = {}  # by the id of the VM, which a watch keeps alive
        self._watched: dict[int, weakref.ref[Allocation]] = {}
        self._held: dict[int, Allocation] = {}  # the tensors before the step that is running

    def of_tensor(self, x: Allocation, name: str) -> int:
        """Return the number of a tensor's cell; create the cell if necessary."""
        return self._number((id(x),), x, _Source(weakref.ref(x), x.type), name)

    def of_field(self, field: Field, x: Allocation, name: str) -> int:
        """Return the number of the cell of a field that steps rebind, with the present tensor."""
        owner, place = field.owner, (field.name, field.item)
        source = _Source(weakref.ref(owner), x.type, place)
        return self._number((id(owner), *place, x.type), owner, source, name)

    def _number(self, key: object, owner: object, source: _Source, name: str) -> int:
        number = self._numbers.get(key, -1)
        if number not in self._sources or self._sources[number].object() is not owner:
            number = self._numbers[key] = len(self.rows)
            name = unused_name(name or f"tensor {number}", self._names)
            self._names.add(name)
            self._sources[number] = source
            self.rows.append(StateCell(number, name, source.type))
        return number

    def present(self) -> dict[int, Allocation]:
        """Return the tensors of all cells that have memory, by number."""
        sources = self._sources.items()
        return {number: x for number, each in sources if (x := each.tensor()) is not None}

    def array(self, number: int) -> Array:
        """Return the present content of a cell."""
        x = self._sources[number].tensor()
        assert x is not None  # the caller has tested this
        return array_of(x)

    def ended(self) -> list[int]:
        """Return the cells that have lost their tensor since the last call, and forget them."""
        self._held = self.present()
        ended = sorted(self._sources.keys() - self._held.keys())
        for number in ended:
            if self._sources[number].object() is None:
                del self._sources[number]
        return [number for number in ended if self.digests.pop(number, None) is not None]

    def changed(self) -> dict[int, Array]:
        """Return the contents that no step has computed, of all cells, and record them.

        Call `ended` first."""
        changed: dict[int, Array] = {}
        is_unwritten = self._watch is not None and self._watch[0].changes == self._watch[1]
        for number, x in self._held.items():
            watched = self._watched.get(number) if is_unwritten else None
            if watched is not None and watched() is x and number in self.digests:
                continue
            array = array_of(x)
            now = digest(array)
            if self.digests.get(number) != now:
                self.digests[number] = now
                changed[number] = array
        return changed

    def note(self, numbers: Iterable[int]) -> None:
        """Record the contents of cells that a step has updated.

        Forget the contents of other cells with memory of theirs, which the next step stores."""
        before = self._held
        self._held = present = {**before, **self.present()}
        noted = present.keys() & numbers
        written = {id(x[number].root) for number in noted for x in (before, present) if number in x}
        for number in noted:
            self.digests[number] = digest(array_of(present[number]))
        for number in present.keys() - noted:
            x = present[number]
            if id(x.root) in written and self.digests.get(number) != digest(array_of(x)):
                self.digests.pop(number, None)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the contents of cells because a step that updates them has raised."""
        for number in numbers:
            self.digests.pop(number, None)
        self._watch, self._held = None, {}

    def begin_watch(self, vm: VMProtocol) -> None:
        """Watch for writes to the cells after `note`; unwritten cells are not read again."""
        present, self._held = self._held, {}
        self._watch, self._watched = None, {i: weakref.ref(x) for i, x in present.items()}
        if all(x.arena.vm is vm for x in present.values()) and not is_shared(vm):
            watch = self._watches.get(id(vm)) or self._watches.setdefault(id(vm), Watch(vm))
            watch.begin(present.values())
            self._watch = watch, watch.changes


class _Source(NamedTuple):
    """Weak reference to the tensor of a cell, or to the owner of a `field`: name and item."""

    object: weakref.ref[Any]
    type: TensorType
    field: tuple[str, int | None] | tuple[()] = ()

    def tensor(self) -> Allocation | None:
        """Return the tensor; None if it has ended, or if the field contains a different value."""
        x = self.object()
        if self.field and x is not None:
            name, item = self.field
            x = Field(x, name).value
            if item is not None:
                x = x[item] if isinstance(x, tuple) and item < len(x) else None
            if not isinstance(x, Allocation) or x.type != self.type:
                return None
        return None if x is None or x.handle == STALE else x


def storable(array: Array) -> Array:
    """Return the array in a dtype that a checkpoint supports: c128 as pairs of f64."""
    return array.reshape(-1).view("f8") if array.dtype == "c16" else array


def digest_of_cells(digests: Iterable[bytes]) -> int:
    """Return the digest of the contents of cells, from the digests in the order of names."""
    return number_of(digest_of(*digests))
