"""Encoding of a planned step: the program, the plan and the initial state.

A file of `Captured.save` runs without the Python function, on any VM. Each call continues from the
state after the previous call. A step with dynamic sizes is stored as in the last call before
saving, with a dynamic part that provides the step for other sizes (`mlvm.step.open_step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mlvm.arena.planner import Plan
from mlvm.arena.recording import Lifetime
from mlvm.core.errors import (
    DTypeError,
    HandleError,
    MlvmError,
    ProgramError,
    ShapeError,
    brief,
    counted,
    with_article,
)
from mlvm.core.memo import exact_repr
from mlvm.core.ops.half import cast, number_array
from mlvm.core.program.encoding import Kind, Reader, Writer, damaged, open_message
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle, VMProtocol
from mlvm.core.sizes import parse_count
from mlvm.core.types import MAX_NBYTES, Array, TensorType, f64
from mlvm.step.compile import ROLES, Planned
from mlvm.step.flow import Location, Role
from mlvm.step.open_step import OpenStep
from mlvm.step.templates import at


class SavedStep(NamedTuple):
    """Saved step.

    `planned`: the program and the plan.
    `inputs`, `outputs`: the types of the inputs and the allocated outputs.
    `results`: the locations of the results.
    `states`: the state tensors, by number.
    `open`: the dynamic sizes, if any; the other fields describe the call before saving.
    """

    planned: Planned
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    results: tuple[Location, ...]
    states: tuple[Array, ...]
    open: OpenStep | None = None

    @property
    def input_types(self) -> Sequence[object]:
        """The input types, with the names of sizes."""
        return self.inputs if self.open is None else self.open.input_types()

    def at(self, types: Sequence[TensorType]) -> SavedStep:
        """Return the step for inputs of these types, without the dynamic part.

        Raises `ShapeError` if it does not support these sizes.
        """
        if self.open is None:
            self._require(types, self.inputs)
            return self
        values = self.open.values_at(types)
        states = [*self.states]
        for number, place in self.open.scalars:
            dtype = TensorType.of(states[number]).dtype
            try:
                states[number] = number_array(values[place], dtype)
            except OverflowError:
                at_sizes = self.open.sizes(values)
                raise ShapeError(
                    f"step: at {at_sizes}, {values[place]} is out of range for {dtype.name}; "
                    "use a smaller size"
                ) from None
        step = self.at_values(values)._replace(states=tuple(states))
        self._require(types, step.inputs)
        return step

    def _require(self, types: Sequence[TensorType], inputs: Sequence[TensorType]) -> None:
        """Raise `ShapeError` or `DTypeError` for inputs of other types, except f64 for floats."""
        for i, (got, type) in enumerate(zip(types, inputs, strict=True)):
            narrower = got.dtype is f64 and type.dtype.is_float
            if got.shape != type.shape or not (got.dtype is type.dtype or narrower):
                text = f"step: expected input {i} as {self.input_types[i]}, got {got}"
                if got.shape != type.shape:
                    raise ShapeError(text)
                raise DTypeError(f"{text}; convert the array with astype({type.dtype.long_name!r})")

    def at_values(self, values: Sequence[Any]) -> SavedStep:
        """Return the step for these values of the formulas, with the states of this step.

        Raises `ShapeError` if a temporary is larger than in the plan.
        """
        assert self.open is not None
        results = zip(self.results, self.open.results, strict=True)
        return SavedStep(
            self.open.planned_at(values),
            tuple([at(each, values) for each in self.open.inputs]),
            tuple([at(each, values) for each in self.open.outputs]),
            tuple([each._replace(type=at(type, values)) for each, type in results]),
            self.states,
        )

    def to_bytes(self) -> bytes:
        """Encode the step in the format of docs/wire.md; `from_bytes` is the inverse."""
        planned, plan, writer = self.planned, self.planned.plan, Writer()
        writer.blob(planned.program.to_bytes())
        writer.sequence([tuple(each) for each in planned.arguments])
        writer.sequence(self.inputs, Writer.type)
        writer.sequence(self.outputs, Writer.type)
        writer.sequence([tuple(each) for each in self.results])
        writer.sequence(self.states, Writer.array)
        writer.value((plan.nbytes, plan.lower_bound, plan.unfused, plan.order))
        lines = {f"{function} {pc}": line for (function, pc), line in planned.lines.items()}
        writer.mapping(lines, Writer.text)
        writer.sequence(planned.lifetimes, _write_lifetime)
        writer.sequence(planned.moments, Writer.integer)
        if self.open is not None:
            self.open.write(writer)
        return writer.message(Kind.step)

    @staticmethod
    def from_bytes(data: bytes) -> SavedStep:
        """Decode a step. Raises `EncodingError` if the bytes are not a step."""
        _, reader = open_message(data, Kind.step)
        program = Program.from_bytes(reader.blob())
        arguments = tuple(reader.sequence(_read_location))
        inputs, outputs = (tuple(reader.sequence(Reader.type)) for _ in range(2))
        results = tuple(reader.sequence(_read_location))
        states = tuple(reader.sequence(Reader.array))
        plan = _read_plan(reader)
        lines = reader.mapping(Reader.text)
        lifetimes = tuple(reader.sequence(_read_lifetime))
        has_moments = reader.remaining  # older files have none
        moments = tuple(reader.sequence(Reader.integer)) if has_moments else ()
        by_place: dict[tuple[str, int], str] = {}
        for place, line in lines.items():
            function, _, number = place.rpartition(" ")
            if (pc := parse_count(number)) is None:
                raise damaged(f"expected a line with a function and a pc, got {brief(place)}")
            by_place[function, pc] = line
        planned = Planned(program, arguments, plan, by_place, lifetimes, moments=moments)
        opened = OpenStep.read(reader, planned) if reader.remaining else None
        reader.end()
        step = SavedStep(planned, inputs, outputs, results, states, opened)
        step._check()
        step._check_open()
        return step

    def _check_open(self) -> None:
        """Raise `EncodingError` unless the dynamic part yields this step for the saved sizes."""
        try:
            step = self.at(self.inputs)
            values = [] if self.open is None else self.open.values_at(self.inputs)
        except (
            MlvmError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as e:
            raise damaged(f"the lengths do not match the step: {e}") from None
        own = self.planned.program
        planned = replace(step.planned, program=own, lines=self.planned.lines)
        is_same = self.open is None or exact_repr(values) == exact_repr([*self.open.values])
        # by bytes, because nan differs from itself as a number
        is_same &= step.planned.program.to_bytes() == own.to_bytes()
        if not is_same or (planned, *step[1:4]) != (self.planned, *self[1:4]):
            raise damaged(f"the lengths ({self.open}) do not match the step")

    def _check(self) -> None:
        """Raise `EncodingError` unless all locations exist and are inside the scratch memory."""
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
                raise damaged(f"expected the number of {with_article(role)} of {type}, got {place}")
        size = len(self.planned.program.main.code)
        moments = self.planned.moments or range(size)  # each has at least one instruction
        for pc in moments:
            if not 0 <= pc < size:
                raise damaged(f"expected a pc below {size}, got {brief(pc)}")
        for each in self.planned.lifetimes:
            in_time = 0 <= each.start <= each.end <= len(moments)
            in_place = 0 <= each.offset <= each.offset + each.nbytes <= self.planned.plan.nbytes
            if not (in_time and in_place):
                raise damaged(
                    f"expected a tensor within {self.planned.plan.nbytes} bytes and {len(moments)} "
                    f"calls, got the result of {each.op} at {each.offset}, {each.nbytes} bytes, "
                    f"calls {each.start} to {each.end}"
                )


class LoadedStep:
    """Saved step on a VM, with memory that `close` frees."""

    def __init__(self, step: SavedStep, vm: VMProtocol) -> None:
        self.step = step
        self.vm = vm
        self._now: SavedStep | None = None
        self._is_closed = False
        self._storages: dict[tuple[str, int], StorageHandle] = {}
        self._handles: dict[tuple[str, int, TensorType], TensorHandle] = {}
        self._write_states(range(len(step.states)), step)
        self._use(step)

    def _write_states(self, places: Iterable[int], step: SavedStep) -> None:
        for place in places:
            array = step.states[place]
            self.vm.write(self._handle("state", place, TensorType.of(array)), array)

    def _use(self, step: SavedStep) -> None:
        """Prepare the memory of a step for the sizes of the next calls."""
        self._now = None  # set again when the memory is complete
        for key in [key for key in self._handles if key[0] != "state"]:
            self.vm.dealloc_tensor(self._handles.pop(key))
        for home in [home for home in self._storages if home[0] in ("input", "output")]:
            self.vm.dealloc_storage(self._storages.pop(home))
        self._args = [self._handle(*argument) for argument in step.planned.arguments]
        if self.step.open is not None:
            self._write_states([number for number, _ in self.step.open.scalars], step)
        self._now = step

    def __call__(self, *arrays: Array, max_steps: int | None = None) -> list[Array]:
        """Run the step on arrays of the input types, and return copies of the results.

        As in a captured function, f64, numpy's default, becomes a narrower float. Raises
        `ProgramError` for a wrong number of arrays, `DTypeError` and `ShapeError` for arrays of
        other types, `ShapeError` for an unsupported size, and errors of the program.
        """
        inputs = self.step.inputs
        if len(arrays) != len(inputs):
            types = ", ".join(map(str, self.step.input_types))
            text = f"step: expected {counted(len(inputs), 'array')} ({types}), got {len(arrays)}"
            raise ProgramError(text)
        if self._is_closed:
            raise HandleError("step: expected an open step, this one was closed; load it again")
        now = self._now
        actual = [*map(TensorType.of, arrays)]
        pairs = zip(actual, inputs if now is None else now.inputs, strict=True)
        if now is None or any(x.shape != type.shape for x, type in pairs):
            now = self.step.at(actual)
            now._check()
            self._use(now)
        now._require(actual, now.inputs)
        for place, (type, array) in enumerate(zip(now.inputs, arrays, strict=True)):
            if array.dtype == np.float64 and type.dtype.is_float:
                array = cast(array, type.dtype)
            self.vm.write(self._handle("input", place, type), array)
        try:
            self.vm.launch(now.planned.program, self._args, max_steps=max_steps)
        except MlvmError as error:
            now.planned.note_line(error)
            raise
        return [self.vm.read(self._handle(*result)) for result in now.results]

    def states(self) -> list[Array]:
        """Return copies of the tensors that calls update and those that they only read."""
        return [
            self.vm.read(self._handle("state", place, TensorType.of(array)))
            for place, array in enumerate(self.step.states)
        ]

    def close(self) -> None:
        """Return all memory to the VM. Idempotent. A later call raises `HandleError`."""
        self._is_closed = True
        while self._storages:
            self.vm.dealloc_storage(self._storages.popitem()[1])
        self._handles.clear()

    def _handle(self, role: Role, place: int, type: TensorType) -> TensorHandle:
        """Return the handle of the tensor of that role, with that type."""
        key = role, place, type
        if key not in self._handles:
            home, offset, nbytes = (role, place), 0, type.nbytes
            if role == "scratch":
                home, offset, nbytes = (role, 0), place, self.step.planned.plan.nbytes
            if home not in self._storages:
                self._storages[home] = self.vm.alloc_storage(nbytes)
            self._handles[key] = self.vm.tensor_from_storage(self._storages[home], type, offset)
        return self._handles[key]


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
