"""Program of a captured call op by op: the calls as they were recorded, with names and lines.

In: a captured function and the arguments of a call. Out: an `OpProgram`, whose step has one
instruction for each recorded call, before fusion, reordering, recomputation and layouts; and the
arrays that are the inputs of the call's program. The results have the bits of the captured call.
No program is launched: the function is traced once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError, EncodingError
from mlvm.core.machine.decode import decode
from mlvm.core.program.encoding import Kind, Reader, Writer, open_message
from mlvm.core.program.program import Program
from mlvm.core.types import Array
from mlvm.eager.capture.call import as_tensors
from mlvm.eager.capture.capture import Captured
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.capture.trace import TracedCall, trace
from mlvm.eager.functions import random
from mlvm.eager.recording.recorder import RetryAfterCopy
from mlvm.eager.runs.names import KEYS, names_of_tensors
from mlvm.eager.runs.nesting import LOOP, Span, spans_of
from mlvm.eager.runs.source import Line, line_at, statement_of
from mlvm.eager.tensor.constants import scalar_array
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.update import make_exclusive
from mlvm.step.compile import as_recorded
from mlvm.step.saved import SavedStep

Place: TypeAlias = tuple[str, int]
"""Function and pc of an instruction."""


class OpProgram(NamedTuple):
    """Program of a captured call, op by op.

    Attributes:
        step: the program as a saved step, with the state before the call.
        lines: the user's line of each instruction with a known line.
        values: the names that the user's line assigns to the results of an instruction.
        inputs, states, results: names of the step's inputs, states and results, "" without a name.
    """

    step: SavedStep
    lines: Mapping[Place, Line]
    values: Mapping[Place, tuple[str, ...]]
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    results: tuple[str, ...]

    @staticmethod
    def of_step(step: SavedStep) -> OpProgram:
        """Return the program of a saved step, whose instructions may be chains of ops.

        Lines are read from the files that the step names, if these exist.
        """
        lines = {place: line_at(str(line)) for place, line in step.planned.lines.items()}
        values = names_of_values(step.planned.program, lines)
        blank = [("",) * len(each) for each in (step.inputs, step.states, step.results)]
        return OpProgram(step, lines, values, *blank)

    def with_states(self, states: Sequence[Array]) -> OpProgram:
        """Return the program with other values of its states, of the same types."""
        return self._replace(step=self.step._replace(states=tuple(states)))

    def write(self, writer: Writer) -> None:
        """Write the program; `read` reads it back."""
        writer.blob(self.step.to_bytes())
        writer.sequence([(*place, *line) for place, line in self.lines.items()])
        writer.sequence([(*place, *names) for place, names in self.values.items()])
        for names in (self.inputs, self.states, self.results):
            writer.sequence(names, Writer.text)

    @staticmethod
    def read(reader: Reader) -> OpProgram:
        """Read a program. Raises `EncodingError` for bytes that are none."""
        step = SavedStep.from_bytes(reader.blob())
        lines: dict[Place, Line] = {}
        row: Any
        for row in reader.sequence():
            match row:
                case (
                    str() as function, int() as pc,
                    str() as file, int() as number, str() as around, str() as text, str() as layer,
                ):  # fmt: skip
                    lines[function, pc] = Line(file, number, around, text, layer)
                case _:
                    raise reader.error("expected a line: function, pc, file, number and texts")
        values: dict[Place, tuple[str, ...]] = {}
        for row in reader.sequence():
            match row:
                case (str() as function, int() as pc, *names) if all(
                    isinstance(name, str) for name in names
                ):
                    values[function, pc] = (*names,)
                case _:
                    raise reader.error("expected names of values: function, pc and texts")
        named = [tuple(reader.sequence(Reader.text)) for _ in range(3)]
        for each, row in zip(named, (step.inputs, step.states, step.results), strict=True):
            if len(each) != len(row):
                raise EncodingError(f"expected {len(row)} names, got {len(each)}")
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


def op_program(
    captured: Captured[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    free: Sequence[int] = (),
) -> tuple[OpProgram, list[Array]]:
    """Trace a call of a captured function; return its program and the arrays of its inputs.

    The program has the present state. Python numbers at the positions `free` of the signature
    become states; all other numbers are constants of the program.

    Raises the errors of `capture`, and `CaptureError` for a function that reads a queue.
    """
    fn: Callable[..., Any] = captured.fn
    call, signature = _traced(fn, args, kwargs, free)
    if takes_from_queue(call):
        raise CaptureError(f"{captured!r} takes from a queue, which no file can hold")
    inputs = [values_of(x.root) for x in signature.inputs]
    return program_of_call(call, signature, names_in_call(fn, args, kwargs, call)), inputs


def names_in_call(fn: Any, args: Any, kwargs: Any, call: TracedCall) -> dict[int, str]:
    """Return the names of the tensors that a traced call reaches, by their ids."""
    names = names_of_tensors(fn, args, kwargs)
    names[id(random.prepare(call.record.vm).state.root)] = KEYS
    return names


def program_of_call(call: TracedCall, signature: Signature, names: Mapping[int, str]) -> OpProgram:
    """Return the program of a traced call, with the present state."""
    record, outcome = call.record, call.outcome
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
        names_of_values(planned.program, lines),
        tuple([names.get(id(x.root), "") for x in signature.inputs]),
        tuple([names.get(id(x.root), "") for x in record.outside.states]),
        tuple([returned.get(i) or rebound.get(i, "") for i in range(len(outcome.results))]),
    )


def _traced(
    fn: Callable[..., Any], args: Any, kwargs: Any, free: Sequence[int]
) -> tuple[TracedCall, Signature]:
    signatures, arena = Signatures(fn), current_arena()
    args, kwargs = as_tensors(signatures, arena.vm, args, kwargs)
    while True:
        signature, _ = signatures.of(arena.vm, args, kwargs)
        try:
            return trace(fn, args, kwargs, arena, signature, free), signature
        except RetryAfterCopy as error:
            make_exclusive(error.x)


def takes_from_queue(call: TracedCall) -> bool:
    """Return whether the call reads an element of a queue."""
    is_first = bool(call.record.outside.queues)
    return is_first or any(each.queue is not None for each in call.flow.calls)


def names_of_values(program: Program, lines: Mapping[Place, Line]) -> dict[Place, tuple[str, ...]]:
    """Return the names of the result of each instruction that has a name.

    Among consecutive calls of one statement, only the last call gets the names that the statement
    assigns.

    In a branch or loop of the statement, the last call of each side or of the body also has it. The
    condition of a loop has no name.
    """
    names: dict[Place, tuple[str, ...]] = {}
    for function in program.functions.values():
        spans = spans_of(function)
        last: tuple[tuple[str, int, tuple[str, ...]], list[Span]] | None = None
        latest: Place | None = None
        for each in decode(program)[function.name].instructions():
            pc = each.pc
            place = function.name, pc
            line = lines.get(place)
            if each.kind != "cfunc" or line is None:
                continue
            around = [span for span in spans if span.start <= pc < span.end]
            statement = statement_of(line)
            if latest is not None and last == (statement, around):
                names.pop(latest, None)
            last, latest, assigned = (statement, around), place, statement[2]
            is_test = any(span.kind == LOOP and pc < span.test for span in around)
            if len(assigned) == 1 and not is_test:
                names[place] = assigned
    return names
