"""Program of a step in a recording: op by op, with all state and inputs as operands.

In: a captured function and the match of a call. Out: the `OpProgram` as a function without state,
and the table that maps operands to the cells and the external inputs of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlvm.arena.arena import Allocation, scope
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.capture import Captured, ProgramMatch
from mlvm.eager.capture.guards.guard_set import Field
from mlvm.eager.capture.trace import TracedCall, always, trace
from mlvm.eager.recording.recorder import RetryAfterCopy
from mlvm.eager.runs.cells import Cells
from mlvm.eager.runs.log import digest_of, encoded
from mlvm.eager.runs.names import optimizers_of, unused_name
from mlvm.eager.runs.ops import OpProgram, names_in_call, program_of_call, takes_from_queue
from mlvm.eager.runs.steps import CELL, INPUT, Operand, StepTable, leaves_of
from mlvm.eager.runs.variables import Variables
from mlvm.eager.tensor.constants import prepare_constants, scalar_array
from mlvm.eager.tensor.context import default_arena
from mlvm.eager.tensor.copying import ResultLeaf
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import make_exclusive
from mlvm.step.flow import Location, Role


class TracedStep(NamedTuple):
    """Program of a step, None if it has none, with the table.

    `external` are the inputs of the program that are external inputs. A function computes the
    arrays of Python numbers from the numbers of a signature.
    """

    program: OpProgram | None
    table: StepTable
    external: Sequence[int]
    numbers: Callable[[Sequence[float]], list[Array]]


def traced_call(
    captured: Captured[..., Any], match: ProgramMatch
) -> tuple[TracedCall, ProgramMatch]:
    """Return the trace of a program, which is traced once more if it is older than the recording.

    The changes that this trace makes are undone."""
    while True:
        entry, _, signature, args, kwargs, _, _ = match
        call, entry.traced = entry.traced, None
        if call is not None:
            return call, match
        try:
            arena = scope() or default_arena()
            with Variables().collected() as variables:
                call = trace(captured.fn, args, kwargs, arena, signature, entry.free, (), always)
            return call._replace(notes=variables), match
        except RetryAfterCopy as error:
            make_exclusive(error.x)
            match = captured.match(args, kwargs)


def traced_step(
    captured: Captured[..., Any], match: ProgramMatch, call: TracedCall, cells: Cells
) -> TracedStep:
    """Return the program of a traced call. New state gets cells."""
    _, _, signature, args, kwargs, _, _ = match
    names = names_in_call(captured.fn, args, kwargs, call, signature)
    numbers_of_call = {  # the other numbers depend only on sizes, which are constant here
        place: x
        for place, x in call.numbers.tensors.items()
        if min(call.numbers.sources({place[0]})) < len(call.free)
    }
    places = [*numbers_of_call]
    by_tensor = {id(x): place for place, x in enumerate(numbers_of_call.values())}
    state: dict[int, str] = {}
    fields: dict[int, list[int]] = {}  # the cells of fields, by the id of the tensor

    def cell_of(x: Allocation) -> int:
        name = names.get(id(x), "")
        cell = cells.of_tensor(x, name)
        state.setdefault(cell, name)
        return cell

    def cell_of_field(field: Field, x: Allocation) -> int:
        item = "" if field.item is None else f"[{field.item}]"
        name = f"{names.get(id(field.owner), type(field.owner).__name__)}.{field.name}{item}"
        cell = cells.of_field(field, x, name)
        state.setdefault(cell, name)
        return cell

    for field, value in signature.fields:
        if value.base is None:  # otherwise the operand is the base
            fields.setdefault(id(value), []).append(cell_of_field(field, value))

    of_fields: dict[int, int] = {}  # of fields that this call is the first to rebind
    for field, _ in call.outcome.rebound:
        cell = cell_of_field(field, field.value)
        if names.get(id(field.value)) == state[cell]:
            of_fields[id(field.value)] = cell

    def operand_of(x: Allocation) -> Operand | None:
        """Return the cell or the number that a state is; None for a constant of the program."""
        if id(x) in by_tensor:
            return INPUT, len(external) + by_tensor[id(x)]
        if id(x) in of_fields:
            return CELL, of_fields[id(x)]
        return None if _is_constant(call, x) else (CELL, cell_of(x))

    operands: list[Operand] = []
    external: list[int] = []
    bases = {id(x.root) for _, x in signature.fields}
    inputs: list[Allocation] = [each.root for each in signature.inputs]
    for i, x in enumerate(inputs):
        if id(x) in fields:
            operands.append((CELL, fields[id(x)][0]))
        elif id(x) in bases:
            operands.append((CELL, cell_of(x)))
        else:
            operands.append((INPUT, len(external)))
            external.append(i)
    outside = call.record.outside.states
    states = [operand_of(x) for x in outside]
    homes: dict[str, Sequence[Operand | None]] = {"input": operands, "state": states}
    written: list[Any] = []
    writes: dict[int, int] = {}
    updated: list[tuple[int, int]] = []
    nresults = len(call.outcome.results)
    for home in _written(call):
        operand = homes[home.role][home.index]
        if operand is not None:
            number = nresults + len(written)
            written.append((home.role, home.index))
            x = (inputs if home.role == "input" else outside)[home.index]
            if operand[0] == INPUT:
                updated.append((operand[1], number))
            else:
                writes |= dict.fromkeys([operand[1], *fields.get(id(x), ())], number)
    for field, number in call.outcome.rebound:  # the old tensor of the field may also be updated
        writes[cell_of_field(field, field.value)] = number
    tensors = [inputs[i] for i in external]
    named = [names.get(id(x)) or f"input {i}" for i, x in enumerate(tensors)]
    types = [str(x.type) for x in tensors]
    named += [f"number {names[id(x)]}" for x in numbers_of_call.values()]
    types += [str(TensorType(dtype)) for _, dtype in places]
    homes_of: dict[int, tuple[Role, int]] = {id(x): ("input", i) for i, x in enumerate(inputs)}
    homes_of |= {id(x): ("state", i) for i, x in enumerate(outside) if states[i] is not None}
    returned = leaves_of(call.outcome.with_leaves(args, kwargs))
    passed = [x for _, x in returned if isinstance(x, Tensor)]
    numbers_of_passed = {id(x): i for i, x in enumerate(passed, nresults + len(written))}
    table = StepTable(
        captured.name,
        operands=[*operands, *[each for each in states if each is not None]],
        names=named,
        types=types,
        results=[path for path, _ in returned],
        returns=[
            x.value if isinstance(x, ResultLeaf) else numbers_of_passed.get(id(x), -1)
            for _, x in returned
        ],
        writes=[*writes.items()],
        updated=updated,
        state=_ordered(state),
        optimizers=optimizers_of(captured.fn, args, kwargs),
    )
    program = None
    if takes_from_queue(call):
        table = replace(table, reason="it takes from a queue, whose elements are not recorded")
    elif not all(id(x) in homes_of for x in passed):
        table = replace(table, reason="it returns a view that is stored in a container")
    else:
        variables = call.notes if isinstance(call.notes, Variables) else Variables()
        program = without_state(
            program_of_call(call, signature, names, variables),
            [x is None for x in states],
            [*written, *[homes_of[id(x)] for x in passed]],
        )
        table = replace(table, content=content_of(program).hex())

    formulas, free = call.numbers, call.free

    def numbers(values: Sequence[float]) -> list[Array]:
        now = formulas.again([values[i] for i in free])
        now = formulas.values if now is None else now
        return [scalar_array(now[place], dtype) for place, dtype in places]

    return TracedStep(program, table, external, numbers)


def _ordered(state: Mapping[int, str]) -> list[tuple[str, int]]:
    """Return the names of cells, made unique, with the cells, in the order of names."""
    names: dict[str, int] = {}
    for number, (cell, name) in enumerate(state.items()):
        names[unused_name(name or f"tensor {number}", names)] = cell
    return sorted(names.items())


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
