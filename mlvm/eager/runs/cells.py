"""State of a run: the tensors that steps read from outside and update, as numbered cells.

A cell is a tensor that a function reads from the environment, or a Module's field that a function
rebinds. For each cell the digests of all contents that a replay can compute are known. Any other
content was written outside of the steps, and the recording stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
    """The cells of a run that is being recorded, with digests of the contents."""

    def __init__(self) -> None:
        self.rows: list[StateCell] = []
        self.digests: dict[int, bytes] = {}
        self._sources: list[Allocation | Field] = []  # kept alive: keys contain ids
        self._numbers: dict[object, int] = {}
        self._names: set[str] = set()
        self._watch: tuple[Watch, int] | None = None
        self._watches: dict[int, Watch] = {}  # by the id of the VM, which a watch keeps alive
        self._watched: list[Allocation | None] = []

    def of_tensor(self, x: Allocation, name: str) -> int:
        """Return the number of a tensor's cell; create the cell if necessary."""
        return self._number(id(x), x, name)

    def of_field(self, field: Field, name: str) -> int:
        """Return the number of the cell of a field that steps rebind."""
        return self._number((id(field.owner), field.name, field.item), field, name)

    def _number(self, key: object, source: Allocation | Field, name: str) -> int:
        number = self._numbers.setdefault(key, len(self.rows))
        if number == len(self.rows):
            name = unused_name(name or f"tensor {number}", self._names)
            self._names.add(name)
            self._sources.append(source)
            self.rows.append(StateCell(number, name, _tensor_of(source).type))
        return number

    def live(self) -> list[int]:
        """Return the cells with tensors that still have memory."""
        return [i for i, x in enumerate(self._tensors()) if x is not None]

    def array(self, number: int) -> Array:
        """Return the present content of a cell."""
        return array_of(_tensor_of(self._sources[number]))

    def changed(self, numbers: Iterable[int]) -> dict[int, Array]:
        """Return the contents of the cells that no step has computed, and record them."""
        if self._watch is not None and self._watch[0].changes == self._watch[1]:
            numbers = [each for each in numbers if not self._is_unwritten(each)]
        changed = {}
        for number in numbers:
            array = self.array(number)
            now = digest(array)
            if self.digests.get(number) != now:
                self.digests[number] = now
                changed[number] = array
        return changed

    def note(self, numbers: Iterable[int]) -> None:
        """Record the contents of cells that a step has updated."""
        for number in numbers:
            self.digests[number] = digest(self.array(number))

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the contents of cells because a step that updates them has raised."""
        for number in numbers:
            self.digests.pop(number, None)
        self._watch = None

    def begin_watch(self, vm: VMProtocol) -> None:
        """Watch for writes to the cells from now on; unwritten cells are not read again."""
        self._watch, self._watched = None, self._tensors()
        tensors = [x for x in self._watched if x is not None]
        if all(x.arena.vm is vm for x in tensors) and not is_shared(vm):
            watch = self._watches.get(id(vm)) or self._watches.setdefault(id(vm), Watch(vm))
            watch.begin(tensors)
            self._watch = watch, watch.changes

    def _is_unwritten(self, number: int) -> bool:
        """Return whether the cell has a digest, and still contains the watched tensor."""
        if number not in self.digests or number >= len(self._watched):
            return False
        source = self._sources[number]
        return isinstance(source, Allocation) or _live(source) is self._watched[number]

    def _tensors(self) -> list[Allocation | None]:
        """Return the tensor of each cell; None if it no longer has memory."""
        return [*map(_live, self._sources)]


def _tensor_of(source: Allocation | Field) -> Allocation:
    if isinstance(source, Allocation):
        return source
    value = source.value if source.item is None else source.value[source.item]
    return value.root  # type: ignore[no-any-return]


def _live(source: Allocation | Field) -> Allocation | None:
    try:
        x = _tensor_of(source)
    except (AttributeError, IndexError, TypeError):  # the field contains a different value
        return None
    return None if x.handle == STALE else x


def storable(array: Array) -> Array:
    """Return the array in a dtype that a checkpoint supports: c128 as pairs of f64."""
    return array.reshape(-1).view("f8") if array.dtype == "c16" else array


def digest_of_cells(digests: Mapping[int, bytes], numbers: Iterable[int]) -> int:
    """Return the digest of the contents of these cells.

    It does not depend on names and the order of first use.
    """
    return number_of(digest_of(*sorted(digests[number] for number in numbers)))
