"""Program of a step in a recording: op by op, with all state and inputs as operands.

In: a captured function and the match of a call. Out: the `OpProgram` as a function without state,
and the table that maps operands to the cells and the external inputs of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlvm.arena.arena import Allocation, scope
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.capture import Captured, ProgramMatch
from mlvm.eager.capture.trace import TracedCall, always, trace
from mlvm.eager.recording.recorder import RetryAfterCopy
from mlvm.eager.runs.cells import Cells
from mlvm.eager.runs.log import digest_of, encoded
from mlvm.eager.runs.names import optimizers_of
from mlvm.eager.runs.ops import OpProgram, names_in_call, program_of_call, takes_from_queue
from mlvm.eager.runs.steps import CELL, INPUT, Operand, StepTable
from mlvm.eager.tensor.constants import prepare_constants, scalar_array
from mlvm.eager.tensor.context import default_arena
from mlvm.eager.tensor.update import make_exclusive
from mlvm.step.flow import Location, Role


class TracedStep(NamedTuple):
    """Program of a step, None if it has none, with the table.

    A function computes the arrays of Python numbers from the numbers of a signature.
    """

    program: OpProgram | None
    table: StepTable
    numbers: Callable[[Sequence[float]], list[Array]]


def traced_step(captured: Captured[..., Any], match: ProgramMatch, cells: Cells) -> TracedStep:
    """Trace a call once more. New state gets cells."""
    arena = scope() or default_arena()
    while True:
        _, _, signature, args, kwargs, _, _ = match
        try:
            free = match.entry.free
            call = trace(captured.fn, args, kwargs, arena, signature, free, (), always)
            break
        except RetryAfterCopy as error:
            make_exclusive(error.x)
            match = captured.match(args, kwargs)
    names = names_in_call(captured.fn, args, kwargs, call, signature)
    fields = {id(x.root): field for field, x in signature.fields}
    places = [*call.numbers.tensors]
    by_tensor = {id(x): place for place, x in enumerate(call.numbers.tensors.values())}

    def operand_of(x: Allocation) -> Operand | None:
        """Return the cell or the number that a state is; None for a constant of the program."""
        if id(x) in by_tensor:
            return INPUT, len(external) + by_tensor[id(x)]
        return None if _is_constant(call, x) else (CELL, cells.of_tensor(x, names.get(id(x), "")))

    operands: list[Operand] = []
    external: list[Allocation] = []
    for x in [each.root for each in signature.inputs]:
        field = fields.get(id(x))
        if field is None:
            operands.append((INPUT, len(external)))
            external.append(x)
        else:
            operands.append((CELL, cells.of_field(field, names.get(id(x)) or field.name)))
    states = [operand_of(x) for x in call.record.outside.states]
    homes: dict[str, Sequence[Operand | None]] = {"input": operands, "state": states}
    written = [
        ((home.role, home.index), operand)
        for home in _written(call)
        if (operand := homes[home.role][home.index]) is not None
    ]
    rebound = {cells.of_field(field, field.name): result for field, result in call.outcome.rebound}
    named = [names.get(id(x)) or f"input {i}" for i, x in enumerate(external)]
    types = [str(x.type) for x in external]
    named += [f"number {names[id(x)]}" for x in call.numbers.tensors.values()]
    types += [str(TensorType(dtype)) for _, dtype in places]
    nresults = len(call.outcome.results)
    after = [*enumerate([operand for _, operand in written], nresults)]
    returned = call.outcome.named_results()
    table = StepTable(
        captured.name,
        operands=[*operands, *[each for each in states if each is not None]],
        names=named,
        types=types,
        results=[path for path, _ in returned],
        returns=[number for _, number in returned],
        writes=[
            *rebound.items(),
            *[(n, i) for i, (kind, n) in after if kind == CELL],
        ],
        updated=[(n, i) for i, (kind, n) in after if kind == INPUT],
        optimizers=optimizers_of(captured.fn, args, kwargs),
    )
    program = None
    if takes_from_queue(call):
        table = replace(table, reason="it takes from a queue, whose elements are not recorded")
    else:
        program = without_state(
            program_of_call(call, signature, names),
            [x is None for x in states],
            [home for home, _ in written],
        )
        table = replace(table, content=content_of(program).hex())

    def numbers(values: Sequence[float]) -> list[Array]:
        now = call.numbers.again([values[i] for i in call.free])
        now = call.numbers.values if now is None else now
        return [scalar_array(now[place], dtype) for place, dtype in places]

    return TracedStep(program, table, numbers)


def _written(call: TracedCall) -> list[Any]:
    """Return the homes of inputs and states that a call updates, in order."""
    homes = {use.value.home: None for each in call.flow.calls for use in each.outs}
    outside = call.record.outside
    return [
        home
        for home in homes
        if home and home.role in ("input", "state") and home not in outside.queue_homes
    ]


def _is_constant(call: TracedCall, x: Allocation) -> bool:
    """Return whether a state is a constant of the program: a Python number, or an array."""
    constants = call.record.outside.constants.values()
    return x.arena is prepare_constants(call.record.vm).arena or any(x is c for c in constants)


def without_state(
    program: OpProgram, is_constant: Sequence[bool], updated: Sequence[tuple[Role, int]]
) -> OpProgram:
    """Return the program with the states as additional inputs, except for constants.

    The new contents of updated operands are additional results.
    """
    step = program.step
    moved: dict[tuple[str, int], tuple[Role, int]] = {}
    types, names = [*step.inputs], [*program.inputs]
    constants: list[Array] = []
    for i, (array, name) in enumerate(zip(step.states, program.states, strict=True)):
        if is_constant[i]:
            moved["state", i] = "state", len(constants)
            constants.append(array)
        else:
            moved["state", i] = "input", len(types)
            types.append(TensorType.of(array))
            names.append(name)

    def at(each: Location) -> Location:
        role, place = moved.get((each.role, each.place), (each.role, each.place))
        return Location(role, place, each.type)

    after = []
    for role, index in updated:
        role, index = moved.get((role, index), (role, index))
        after.append(Location(role, index, types[index]))
    planned = replace(step.planned, arguments=tuple(map(at, step.planned.arguments)))
    results = (*map(at, step.results), *after)
    pure = step._replace(
        planned=planned, inputs=tuple(types), results=results, states=tuple(constants)
    )
    return program._replace(
        step=pure,
        inputs=tuple(names),
        states=("",) * len(constants),
        results=(*program.results, *[names[each.place] for each in after]),
    )


def content_of(program: OpProgram) -> bytes:
    """Return the digest of a program, without names, lines and addresses."""
    step = program.step
    places = [(each.role, each.place, str(each.type)) for each in step.planned.arguments]
    results = [(each.role, each.place, str(each.type)) for each in step.results]
    constants = [x.tobytes() for x in step.states]
    texts = encoded((places, results, [str(type) for type in step.inputs]))
    return digest_of(step.planned.program.to_bytes(), texts, *constants)
