"""State of a run: the tensors that steps read from outside and update, as numbered cells.

A cell is a tensor that a function reads from the environment, or a Module's field that a function
rebinds. A content that differs from the content after the last step was written outside of the
steps, and the recording stores it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mlvm.arena.arena import STALE, Allocation, Region
from mlvm.arena.writes import Watch
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.capture.guards.guard_set import Field
from mlvm.eager.capture.hoisted import is_shared
from mlvm.eager.files.safetensors import METADATA, NAMES
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


class _CellDigest(NamedTuple):
    """Digest of the tensor `x` of a cell, valid until the watch of its region counts changes."""

    watch: Watch
    changes: int
    x: weakref.ref[Allocation]
    region: weakref.ref[Region]
    digest: bytes


class Cells:
    """The cells of a run that is being recorded.

    Cells refer weakly to tensors and to owners of fields. A cell is live as long as its tensor or
    owner.
    """

    def __init__(self) -> None:
        self.rows: list[StateCell] = []
        self._sources: dict[int, _Source] = {}  # of live cells
        self._numbers: dict[object, int] = {}
        self._names = {METADATA}  # a checkpoint's tensors have other names
        self._digests: dict[int, _CellDigest] = {}

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

    def tensor(self, number: int, before: Allocation) -> Allocation:
        """Return the tensor of a live cell, or else the tensor before."""
        x = self._sources[number].tensor() if number in self._sources else None
        return before if x is None else x

    def forget_ended(self) -> None:
        """Forget the cells whose tensor or owner was deleted."""
        for number in [n for n, source in self._sources.items() if source.object() is None]:
            del self._sources[number]
            self._digests.pop(number, None)

    def close(self) -> None:
        """Stop counting writes to the cells, so that calls that write to them are fast again."""
        while self._digests:
            self._digests.popitem()[1].watch.begin([])

    def digests(self, tensors: Mapping[int, Allocation]) -> dict[int, bytes]:
        """Return the digests of the present tensors of cells, which are read if they were written.

        This takes most of the time of a recorded step besides the step."""
        digests = {}
        for number, x in tensors.items():
            last = self._digests.get(number)
            if last is None or last.watch.changes != last.changes or last.x() is not x:
                digests[number] = self._read(number, x, last)
            else:
                digests[number] = last.digest
        return digests

    def _read(self, number: int, x: Allocation, last: _CellDigest | None) -> bytes:
        """Return the digest of the content of a tensor, and watch for writes."""
        vm, region = x.arena.vm, x.root.region
        if region is None or is_shared(vm):
            return digest(array_of(x))
        watch = last.watch if last is not None and last.watch.is_of(vm) else Watch(vm)
        if last is None or watch is not last.watch or last.region() is not region:
            watch.begin([x])
        changes = watch.changes  # before the content is read, so that no write is missed
        key = digest(array_of(x))
        self._digests[number] = _CellDigest(
            watch, changes, weakref.ref(x), weakref.ref(region), key
        )
        return key


class _Source(NamedTuple):
    """Weak reference to the tensor of a cell, or to the owner of a `field`: name and item."""

    object: weakref.ref[Any]
    type: TensorType
    field: tuple[str, int | None] | tuple[()] = ()

    def tensor(self) -> Allocation | None:
        """Return the tensor; None if it was deleted, or if the field contains a different value."""
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
    """Return the array in a dtype that a checkpoint supports: c128 as f64, packed values as u8."""
    if TensorType.of(array).dtype in NAMES:
        return array
    return array.reshape(-1).view("f8") if array.dtype == "c16" else array.view("u1")


def digest_of_cells(digests: Iterable[bytes]) -> int:
    """Return the digest of the contents of cells, from the digests in the order of names."""
    return number_of(digest_of(*digests))
