"""Program of a captured call op by op: the calls as they were recorded, with names and lines.

In: a captured function and the arguments of a call. Out: an `OpProgram` and the arrays that are the
inputs of the call's program. The step of an `OpProgram` has one instruction for each recorded call,
before fusion, reordering, recomputation and layouts. The results have the bits of the captured
call. No program is launched: the function is traced once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mlvm.core.errors import CaptureError, brief
from mlvm.core.machine.callee import OUT
from mlvm.core.machine.decode import Code, decode
from mlvm.core.program.encoding import Kind, Reader, Writer, damaged, open_message
from mlvm.core.program.program import STAR, Instruction, Program
from mlvm.core.types import Array
from mlvm.eager.capture.call import as_tensors
from mlvm.eager.capture.capture import Captured
from mlvm.eager.capture.guards.signature import Signature, Signatures
from mlvm.eager.capture.trace import TracedCall, trace_call
from mlvm.eager.functions import random
from mlvm.eager.runs.names import KEYS, names_of_numbers, names_of_objects
from mlvm.eager.runs.nesting import BRANCH, LOOP, CodeSpan, spans_of
from mlvm.eager.runs.source import SourceLine, line_at, statement_of
from mlvm.eager.tensor.constants import scalar_array
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import values_of
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

        Lines are read from the files that the step names, if they exist.
        """
        lines = {place: line_at(str(line)) for place, line in step.planned.lines.items()}
        values = names_of_values(step.planned.program, lines)
        blank = [("",) * len(each) for each in (step.inputs, step.states, step.results)]
        return OpProgram(step, lines, values, *blank)

    def host_functions(self) -> set[str]:
        """Return the names of the host functions that the program calls."""
        codes = decode(self.step.planned.program).values()
        return {each.name for code in codes for each in code.instructions() if each.name}

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
    call, signature = trace_call(fn, args, kwargs, signatures)
    if takes_from_queue(call):
        raise CaptureError(
            f"{captured!r} reads from a queue, which cannot be saved; pass the batch as an argument"
        )
    inputs = [values_of(x.root) for x in signature.inputs]
    return program_of_call(
        call, signature, names_in_call(fn, args, kwargs, call, signature)
    ), inputs


def names_in_call(
    fn: Any, args: Any, kwargs: Any, call: TracedCall, signature: Signature
) -> dict[int, str]:
    """Return the names of the tensors that a traced call reaches, by id.

    A tensor that contains a Python number is named after the numbers that it is computed from."""
    names = names_of_objects(fn, args, kwargs)
    names[id(random.prepare(call.record.vm).state.root)] = KEYS
    numbers = call.numbers
    paths = [*names_of_numbers(fn, args, kwargs, signature.guards.numbers)] if call.free else []
    for (place, _), x in numbers.tensors.items():
        used = [paths[call.free[i]] for i in sorted(numbers.sources({place})) if i < len(call.free)]
        names[id(x)] = ", ".join(used) if place < len(call.free) else f"from {', '.join(used)}"
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


def takes_from_queue(call: TracedCall) -> bool:
    """Return whether the call reads an element of a queue."""
    is_first = bool(call.record.outside.queues)
    return is_first or any(each.queue is not None for each in call.flow.calls)


def names_of_values(
    program: Program, lines: Mapping[Place, SourceLine]
) -> dict[Place, tuple[str, ...]]:
    """Return the names of the result of each instruction that has a name.

    Among consecutive calls of a statement, only the last call gets the names that the statement
    assigns.

    If the last call of a statement is a loop or branch, this is the value that it returns: each
    write to the only variable gets the name. If it has several variables, there is no name. The
    condition of a loop also has no name. For a call of a function with one result, the call itself
    gets the name.
    """
    names: dict[Place, tuple[str, ...]] = {}
    namers = {name: _Namer(code, lines, names) for name, code in decode(program).items()}
    for each in namers.values():
        each.name(0, len(each.function.code), frozenset(), namers)
    return names


_Statement: TypeAlias = tuple[str, int, tuple[str, ...]]


class _Part(NamedTuple):
    """Call, loop or branch of a statement, and the pcs that write the value that it returns."""

    statement: _Statement
    writes: Sequence[int]


class _Namer:
    """Namer of the values that a function computes.

    results: the copies at the end of the function, to the results, by pc.
    """

    def __init__(
        self, decoded: Code, lines: Mapping[Place, SourceLine], names: dict[Place, tuple[str, ...]]
    ) -> None:
        function = self.function = decoded.function
        self._lines, self._names = lines, names
        calls = [each for each in decoded.instructions() if each.kind in ("call", "cfunc")]
        self._calls = {each.pc: each for each in calls}
        self._spans = spans_of(function)
        last = len(function.code) - 2  # before the return
        is_last = last >= 0 and (function.name, last) in lines and function.name != "main"
        self.results = self._copies(range(last + 1), self._statement(last)) if is_last else {}

    def name(
        self, start: int, end: int, around: frozenset[_Statement], namers: Mapping[str, _Namer]
    ) -> None:
        """Name values of the code `start` .. `end - 1`, which the statements `around` enclose.

        namers: the namers of all functions.
        """
        parts = [*self._parts(start, end, around, namers)]
        for i, part in enumerate(parts):
            assigned = part.statement[2]
            is_last = all(after.statement != part.statement for after in parts[i + 1 : i + 2])
            if is_last and len(assigned) == 1 and part.statement not in around:
                self._names.update({(self.function.name, pc): assigned for pc in part.writes})

    def _parts(
        self, start: int, end: int, around: frozenset[_Statement], namers: Mapping[str, _Namer]
    ) -> Iterator[_Part]:
        """Yield the parts of the code, and name the values inside of them."""
        pc = start
        while pc < end:
            spans = [x for x in self._spans if x.end <= end and pc in (x.start, x.test)]
            loop = next((x for x in spans if x.kind == LOOP and x.start == pc), None)
            sides = [x for x in spans if x.kind == BRANCH and x.test == pc]
            if loop is not None:
                statement = self._statement(loop.test)
                self.name(loop.test + 1, loop.end, around | {statement}, namers)
                yield _Part(statement, self._of_loop(start, loop, statement))
                pc = loop.end
            elif sides:
                statement = self._statement(pc)
                for side in sides:
                    self.name(side.start, side.end, around | {statement}, namers)
                yield _Part(statement, self._of_branch(sides, statement))
                pc = sides[-1].end
            else:
                if self._is_op(pc) and (self.function.name, pc) in self._lines:
                    yield _Part(self._statement(pc), [] if pc in self.results else [pc])
                elif pc in self._calls and not self._is_op(pc):
                    has_one = len(namers[self._calls[pc].callee].results) == 1
                    yield _Part(self._statement(pc), [pc] if has_one else [])
                pc += 1

    def _of_loop(self, start: int, loop: CodeSpan, statement: _Statement) -> list[int]:
        """Return the pcs that write the variable of a loop with one variable and a counter.

        The last call of the body increments the counter.
        """
        inside = self._written(range(loop.test + 1, loop.end))
        if not inside or not self._is_update([*inside][-1], "add"):
            return []
        _, counter = inside.popitem()
        before = self._copies(range(start, loop.start), statement)
        stacks = {key for pc, key in inside.items() if self._is_update(pc, "dynamic_update")}
        variables = {*before.values(), *stacks} - {counter}
        if len(variables) != 1:
            return []
        return [pc for pc, key in [*before.items(), *inside.items()] if key in variables]

    def _of_branch(self, sides: Sequence[CodeSpan], statement: _Statement) -> list[int]:
        """Return the pcs that write the variable of a branch with one variable."""
        ends = [self._copies(range(x.start, x.end), statement) for x in sides]
        variables = set.intersection(*[{*end.values()} for end in ends])
        if len(variables) != 1:
            return []
        return [pc for end in ends for pc, key in end.items() if key in variables]

    def _written(self, pcs: range) -> dict[int, Instruction]:
        """Return the instruction that pushes the first operand of each call, by pc."""
        code = self.function.code
        calls = [(pc, code[pc].immediates[0]) for pc in pcs if self._is_op(pc)]
        return {pc: code[pc - 1 - nparams] for pc, nparams in calls if nparams != STAR}

    def _copies(self, pcs: range, statement: _Statement) -> dict[int, Instruction]:
        """Return the copies that the statement makes at the end of the code, by pc."""
        copies: dict[int, Instruction] = {}
        for pc, key in reversed(self._written(pcs).items()):
            if self._callee(pc) != f"copy{OUT}" or self._statement(pc) != statement:
                break
            copies[pc] = key
        return copies

    def _is_update(self, pc: int, op: str) -> bool:
        """Return whether a call of the op writes the first operand in place."""
        code = self.function.code
        first = pc - 1 - code[pc].immediates[0]
        return bool(self._callee(pc) == f"{op}{OUT}" and code[first] == code[first + 1])

    def _is_op(self, pc: int) -> bool:
        return pc in self._calls and self._calls[pc].kind == "cfunc"

    def _callee(self, pc: int) -> str | None:
        return self._calls[pc].name

    def _statement(self, pc: int) -> _Statement:
        line = self._lines.get((self.function.name, pc))
        return ("", 0, ()) if line is None else statement_of(line)
