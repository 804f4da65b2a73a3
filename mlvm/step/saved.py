"""A planned step as bytes: its program and plan, and the state it starts from.

A file of `Captured.save` runs without the Python function, on any VM. Each call goes on from the
state after the call before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mlvm.arena.planner import Plan
from mlvm.arena.recording import Lifetime
from mlvm.core.errors import EncodingError, ProgramError, brief
from mlvm.core.ops.half import cast
from mlvm.core.program.encoding import Kind, Reader, Writer, open_message
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.types import MAX_NBYTES, Array, TensorType
from mlvm.step.compile import ROLES, Planned
from mlvm.step.flow import Location, Role


class SavedStep(NamedTuple):
    """Saved step.

    planned: its program and plan.
    inputs, outputs: the types that it takes and allocates.
    results: the locations of its results.
    states: its state, by number.
    """

    planned: Planned
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    results: tuple[Location, ...]
    states: tuple[Array, ...]

    def to_bytes(self) -> bytes:
        """Encode the step as docs/wire.md describes; `from_bytes` reads it back."""
        planned, plan, writer = self.planned, self.planned.plan, Writer()
        writer.blob(planned.program.to_bytes())
        writer.sequence(planned.arguments, _write_location)
        writer.sequence(self.inputs, Writer.type)
        writer.sequence(self.outputs, Writer.type)
        writer.sequence(self.results, _write_location)
        writer.sequence(self.states, Writer.array)
        writer.value((plan.nbytes, plan.lower_bound, plan.unfused, plan.order))
        lines = {f"{function} {pc}": line for (function, pc), line in planned.lines.items()}
        writer.mapping(lines, Writer.text)
        writer.sequence(planned.lifetimes, _write_lifetime)
        writer.sequence(planned.moments, Writer.integer)
        return writer.message(Kind.step)

    @staticmethod
    def from_bytes(data: bytes) -> SavedStep:
        """Decode a step. Raises `EncodingError` if the bytes are no step of `to_bytes`."""
        _, reader = open_message(data, Kind.step)
        program = Program.from_bytes(reader.blob())
        arguments = tuple(reader.sequence(_read_location))
        inputs, outputs = (tuple(reader.sequence(Reader.type)) for _ in range(2))
        results = tuple(reader.sequence(_read_location))
        states = tuple(reader.sequence(Reader.array))
        plan = _read_plan(reader)
        lines = reader.mapping(Reader.text)
        lifetimes = tuple(reader.sequence(_read_lifetime))
        has_moments = reader.remaining  # an older file has none
        moments = tuple(reader.sequence(Reader.integer)) if has_moments else ()
        reader.end()
        by_place: dict[tuple[str, int], str] = {}
        for place, line in lines.items():
            function, _, pc = place.rpartition(" ")
            if not pc.isdecimal():
                raise EncodingError(f"a line has a function and a pc, not {brief(place)}")
            by_place[function, int(pc)] = line
        planned = Planned(program, arguments, plan, by_place, lifetimes, moments=moments)
        step = SavedStep(planned, inputs, outputs, results, states)
        step._check()
        return step

    def _check(self) -> None:
        """Raise `EncodingError` unless all locations exist and lie within the scratch memory."""
        types = {
            "input": self.inputs,
            "output": self.outputs,
            "state": [TensorType.of(array) for array in self.states],
        }
        for role, place, type in (*self.planned.arguments, *self.results):
            if role == "scratch":
                fits = 0 <= place <= self.planned.plan.nbytes - type.nbytes
            else:
                homes = types[role]
                fits = 0 <= place < len(homes) and homes[place].nbytes == type.nbytes
            if not fits:
                raise EncodingError(f"there is no {role} {place} for a {type}")
        size = len(self.planned.program.main.code)
        moments = self.planned.moments or range(size)  # each is of one instruction or more
        for pc in moments:
            if not 0 <= pc < size:
                raise EncodingError(f"main has {size} instructions, and no pc {brief(pc)}")
        for each in self.planned.lifetimes:
            in_time = 0 <= each.start <= each.end <= len(moments)
            in_place = 0 <= each.offset <= each.offset + each.nbytes <= self.planned.plan.nbytes
            if not (in_time and in_place):
                raise EncodingError(f"{brief(each)} is not within the step")


class LoadedStep:
    """A saved step on a VM, with its memory, which `close` gives back."""

    def __init__(self, step: SavedStep, vm: VMProtocol) -> None:
        self.step = step
        self.vm = vm
        self._storages: dict[tuple[str, int], StorageHandle] = {}
        self._handles: dict[tuple[str, int, TensorType], TensorHandle] = {}
        for place, array in enumerate(step.states):
            vm.write(self._handle("state", place, TensorType.of(array)), array)
        self._args = [self._handle(*argument) for argument in step.planned.arguments]

    def __call__(self, *arrays: Array, max_steps: int | None = None) -> list[Array]:
        """Run the step on arrays of its inputs' types, and return copies of its results. As in a
        captured function, f64, numpy's default, becomes a narrower float.

        Raises `ProgramError` for another number of arrays, `DTypeError` and `ShapeError` for
        arrays of other types, and errors of the program.
        """
        inputs = self.step.inputs
        if len(arrays) != len(inputs):
            types = ", ".join(map(str, inputs))
            raise ProgramError(f"the step takes {len(inputs)} arrays ({types}), not {len(arrays)}")
        for place, (type, array) in enumerate(zip(inputs, arrays, strict=True)):
            if array.dtype == np.float64 and type.dtype.is_float:
                array = cast(array, type.dtype)
            self.vm.write(self._handle("input", place, type), array)
        self.vm.launch(self.step.planned.program, self._args, max_steps=max_steps)
        return [self.vm.read(self._handle(*result)) for result in self.step.results]

    def states(self) -> list[Array]:
        """Return copies of the tensors that calls update, and of those that they only read."""
        return [
            self.vm.read(self._handle("state", place, TensorType.of(array)))
            for place, array in enumerate(self.step.states)
        ]

    def close(self) -> None:
        """Give all memory back to the VM. Idempotent."""
        while self._storages:
            self.vm.dealloc_storage(self._storages.popitem()[1])
        self._handles.clear()

    def _handle(self, role: Role, place: int, type: TensorType) -> TensorHandle:
        """Return the handle of the tensor of that role, as the type."""
        key = role, place, type
        if key not in self._handles:
            home, offset, nbytes = (role, place), 0, type.nbytes
            if role == "scratch":
                home, offset, nbytes = (role, 0), place, self.step.planned.plan.nbytes
            if home not in self._storages:
                self._storages[home] = self.vm.alloc_storage(nbytes)
            self._handles[key] = self.vm.tensor_from_storage(self._storages[home], type, offset)
        return self._handles[key]


def _write_location(writer: Writer, location: Location) -> None:
    writer.value(tuple(location))


def _read_location(reader: Reader) -> Location:
    match reader.value():
        case (str() as role, int() as place, TensorType() as type) if role in ROLES:
            return Location(role, place, type)
        case other:
            raise reader.error(f"expected a role, a number and a type, got {brief(other)}")


def _read_plan(reader: Reader) -> Plan:
    match reader.value():
        case (int() as nbytes, int() as bound, int() as unfused, str() as order) if (
            0 <= bound <= nbytes <= MAX_NBYTES and 0 <= unfused <= MAX_NBYTES
        ):
            return Plan((), nbytes, bound, order, unfused)
        case other:
            parts = "bytes, lower bound, bytes unfused and order"
            raise reader.error(f"expected a plan ({parts}), got {brief(other)}")


def _write_lifetime(writer: Writer, each: Lifetime) -> None:
    writer.value((each.type, each.offset, each.nbytes, each.start, each.end, each.op, each.line))


def _read_lifetime(reader: Reader) -> Lifetime:
    match reader.value():
        case (
            TensorType() as type, int() as offset, int() as nbytes,
            int() as start, int() as end, str() as op, str() as line,
        ):  # fmt: skip
            return Lifetime(type, offset, nbytes, start, end, op, line)
        case other:
            raise reader.error(f"expected a tensor's lifetime, got {brief(other)}")
