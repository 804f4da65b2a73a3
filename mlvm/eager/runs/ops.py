"""Program of a captured call op by op: the calls as they were recorded, with names and lines.

In: a captured function and the arguments of a call. Out: an `OpProgram` and the arrays that are the
inputs of the call's program. The step of an `OpProgram` has one instruction for each recorded call,
before fusion, reordering, recomputation and layouts. The results have the bits of the captured
call. No program is launched: the function is traced once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError, brief
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.decode import decode
from mlvm.core.program.encoding import Kind, Reader, Writer, damaged, open_message
from mlvm.core.types import Array
from mlvm.eager.capture.call import as_tensors
from mlvm.eager.capture.capture import Captured
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.capture.trace import TracedCall, trace_call
from mlvm.eager.functions import random
from mlvm.eager.runs.names import KEYS, names_of_numbers, names_of_objects
from mlvm.eager.runs.source import SourceLine, line_at
from mlvm.eager.runs.variables import Variables
from mlvm.eager.tensor.constants import scalar_array
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import values_of
from mlvm.step.compile import as_recorded
from mlvm.step.saved import SavedStep

Place: TypeAlias = tuple[str, int]
"""Function and pc of an instruction."""

_VARIABLES: Final[Place] = "", 0
""""Place" of the variables in `OpProgram.values`."""


class OpProgram(NamedTuple):
    """Program of a captured call, op by op.

    Attributes:
        step: the program as a saved step, with the state before the call.
        lines: the user's line of each instruction with a known line.
        values: the `variables`; in files of earlier versions, the names of an instruction's result.
        inputs, states, results: names of the step's inputs, states and results, "" for no name.
    """

    step: SavedStep
    lines: Mapping[Place, SourceLine]
    values: Mapping[Place, tuple[str, ...]]
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    results: tuple[str, ...]

    @staticmethod
    def of_step(step: SavedStep) -> OpProgram:
        """Return the program of a saved step. An instruction may be a chain of ops.

        Lines are read from the files that the step names, if they exist. Results have no names.
        """
        lines = {place: line_at(str(line)) for place, line in step.planned.lines.items()}
        blank = [("",) * len(each) for each in (step.inputs, step.states, step.results)]
        return OpProgram(step, lines, {}, *blank)

    def host_functions(self) -> set[str]:
        """Return the names of the host functions that the program calls."""
        codes = decode(self.step.planned.program).values()
        return {each.name for code in codes for each in code.instructions() if each.name}

    @property
    def variables(self) -> tuple[str, ...]:
        """The names by number (`mlvm.step.compile.NAMED`), each as `function name`."""
        return self.values.get(_VARIABLES, ())

    @property
    def value_names(self) -> set[str]:
        """Return the names of inputs, states and the variables of the user's functions."""
        variables = [text.partition(" ")[2] for text in self.variables]
        older = chain.from_iterable(self.values.values())
        names = {*self.inputs, *self.states, *(variables or older)}
        return names - {""}

    def op_names(self) -> set[str]:
        """Return the names of the ops and functions that the program calls."""
        return {name.removesuffix(OUT) for name in self.host_functions()}

    def write(self, writer: Writer) -> None:
        """Write the program; `read` reads it back."""
        writer.blob(self.step.to_bytes())
        writer.sequence([(*place, *line) for place, line in self.lines.items()])
        writer.sequence([(*place, *names) for place, names in self.values.items()])
        for names in (self.inputs, self.states, self.results):
            writer.sequence(names, Writer.text)

    @staticmethod
    def read(reader: Reader) -> OpProgram:
        """Read a program.

        Raises `EncodingError` for invalid bytes."""
        step = SavedStep.from_bytes(reader.blob())
        line = [str, int, str, str, str]
        what = "a line: function, pc, file, number and texts"
        rows = _by_place(reader, what, lambda fields: [*map(type, fields)] == line)
        lines = {place: SourceLine(*fields) for place, fields in rows.items()}
        what = "names of values: function, pc and texts"
        values = _by_place(reader, what, lambda names: {*map(type, names)} <= {str})
        named = [tuple(reader.sequence(Reader.text)) for _ in range(3)]
        for each, row in zip(named, (step.inputs, step.states, step.results), strict=True):
            if len(each) != len(row):
                raise damaged(f"expected {len(row)} names, got {len(each)}")
        return OpProgram(step, lines, values, *named)

    def to_bytes(self) -> bytes:
        """Encode the program; `from_bytes` reads it back without Python source."""
        writer = Writer()
        self.write(writer)
        return writer.message(Kind.ops)

    @staticmethod
    def from_bytes(data: bytes) -> OpProgram:
        """Decode a program. Raises `EncodingError` for bytes that `to_bytes` did not write."""
        _, reader = open_message(data, Kind.ops)
        program = OpProgram.read(reader)
        reader.end()
        return program


def _by_place(
    reader: Reader, what: str, is_valid: Callable[[Sequence[Any]], bool]
) -> dict[Place, tuple[Any, ...]]:
    """Read the fields of instructions. Raises `EncodingError`, which names what was expected."""
    by_place: dict[Place, tuple[Any, ...]] = {}
    row: Any
    for row in reader.sequence():
        match row:
            case (str() as function, int() as pc, *fields) if is_valid(fields):
                by_place[function, pc] = (*fields,)
            case _:
                raise reader.error(f"expected {what}, got {brief(row)}")
    return by_place


def op_program(
    captured: Captured[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpProgram, list[Array]]:
    """Trace a call of a captured function; return the program and the input arrays.

    The program has the present state. Python numbers are constants of the program.

    Raises the errors of `capture`, and `CaptureError` for a function that reads a queue.
    """
    fn: Callable[..., Any] = captured.fn
    signatures = Signatures(fn)
    args, kwargs = as_tensors(signatures, current_arena().vm, args, kwargs)
    noted = Variables()
    with noted.collected():
        call, signature = trace_call(fn, args, kwargs, signatures)
    if takes_from_queue(call):
        raise CaptureError(
            f"{captured!r} reads from a queue, which cannot be saved; pass the batch as an argument"
        )
    inputs = [values_of(x.root) for x in signature.inputs]
    names = names_in_call(fn, args, kwargs, call, signature)
    return program_of_call(call, signature, names, noted), inputs


def names_in_call(
    fn: Any, args: Any, kwargs: Any, call: TracedCall, signature: Signature
) -> dict[int, str]:
    """Return the names of the tensors that a traced call reaches, by id.

    A tensor that contains a Python number is named after the numbers that it is computed from."""
    names = names_of_objects(fn, args, kwargs, signature.guards.names)
    keys = random.prepare(call.record.vm)
    names |= {id(keys.state.root): KEYS, id(keys.one.root): f"increment of the {KEYS}"}
    numbers = call.numbers
    paths = [*names_of_numbers(fn, args, kwargs, signature.guards.numbers)] if call.free else []
    for (place, _), x in numbers.tensors.items():
        used = [paths[call.free[i]] for i in sorted(numbers.sources({place})) if i < len(call.free)]
        names[id(x)] = ", ".join(used) if place < len(call.free) else f"from {', '.join(used)}"
    return names


def program_of_call(
    call: TracedCall, signature: Signature, names: Mapping[int, str], noted: Variables
) -> OpProgram:
    """Return the program of a traced call, with the present state."""
    record, outcome = call.record, call.outcome
    inputs = tuple([names.get(id(x.root), "") for x in signature.inputs])
    state_names = tuple([names.get(id(x.root), "") for x in record.outside.states])
    paths = {("input", i): name for i, name in enumerate(inputs)}
    variables = noted.insert(
        call, paths | {("state", i): name for i, name in enumerate(state_names)}
    )
    planned = as_recorded(call.flow)
    scalars = {
        id(x): scalar_array(call.numbers.values[place], dtype)
        for (place, dtype), x in call.numbers.tensors.items()
    }
    states = [scalars[id(x)] if id(x) in scalars else values_of(x) for x in record.outside.states]
    step = SavedStep(
        planned,
        tuple([x.root.type for x in signature.inputs]),
        tuple([output.type for output in outcome.outputs]),
        tuple([x.home.location(x.type) for x in outcome.results]),
        tuple(states),
    )
    returned = {number: path for path, number in reversed(outcome.named_results())}
    rebound = {number: field.name for field, number in outcome.rebound}
    lines = {
        place: line_at(str(line), getattr(line, "layer", None))
        for place, line in planned.lines.items()
    }
    return OpProgram(
        step,
        lines,
        {_VARIABLES: variables},
        inputs,
        state_names,
        tuple([returned.get(i) or rebound.get(i, "") for i in range(len(outcome.results))]),
    )


def takes_from_queue(call: TracedCall) -> bool:
    """Return whether the call reads an element of a queue."""
    is_first = bool(call.record.outside.queues)
    return is_first or any(each.queue is not None for each in call.flow.calls)
