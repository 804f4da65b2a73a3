"""Random captured steps op by op, forwards and backwards, beside the captured call.

    python -m tests.fuzz debugger --programs 500 --seed 0

Each program is one of the eager language (`tests.fuzz.language`) or a training step of random
layers (`tests.fuzz.budgets`). Its execution op by op must have the bits of the captured call, for
results and updated state, and raise the same error. Then the execution goes to random positions,
forwards and backwards. The result of the op before each position and all states must have the bits
that they had there at first. The program must be the same after it was written and read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import mlvm.eager as ml
from mlvm.core.errors import CaptureError, MlvmError
from mlvm.eager.runs.execution import Execution
from mlvm.eager.runs.ops import OpProgram, op_program
from mlvm.eager.tree import flatten
from mlvm.machines.digest import digest
from tests.fuzz.budgets import Training
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.language.making import make
from tests.fuzz.language.source import built_by

PROGRAMS: Final = 500
POSITIONS: Final = 20  # of each program


def drawn(seed: int, number: int) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return a step, its arguments, and an object that it reaches and that must live as long."""
    ml.random.seed(seed + number)
    if number % 3 == 0:
        training = Training(seed + number)
        return training.step, (training.x,), training
    world = built_by(make(seed, number).text())()
    return world.step, world.arguments(0), world


def attempt(seed: int, number: int) -> str:
    """Check a program; return its outcome. Raises `Wrong`."""
    fn, args, world = drawn(seed, number)
    step = ml.capture(fn)
    try:
        program, inputs = op_program(step, args, {})
    except MlvmError:
        return "refused"
    if OpProgram.from_bytes(program.to_bytes()).to_bytes() != program.to_bytes():
        raise Wrong("the program differs after it was written and read")
    execution = Execution(program, inputs)
    seen = [_seen(execution)]
    failed: Exception | None = None
    try:
        while execution.step() is not None:
            seen.append(_seen(execution))
    except MlvmError as error:
        failed = error
    try:
        value = step(*args)
    except MlvmError as error:
        if type(error) is not type(failed):
            raise Wrong(f"the call raises {error!r}, the execution {failed!r}") from None
        return "both raise"
    if failed is not None:
        raise Wrong(f"the execution raises {failed!r}, the call nothing")
    _require_same_end(execution, value, step, args)
    _require_same_positions(execution, seen, random.Random(number))
    del world
    return "the same bits"


def _require_same_end(execution: Execution, value: Any, step: Any, args: Any) -> None:
    """Raise `Wrong` unless results and states at the end are those after the call."""
    program = execution.program
    named = dict(zip(program.results, map(digest, execution.results()), strict=True))
    for path, x in flatten(value, ends=_ends)[0]:
        if path in named and digest(_array(x)) != named[path]:
            raise Wrong(f"result {path!r} has other bits than that of the call")
    try:
        after, _ = op_program(step, args, {})
    except CaptureError:  # the step has changed what it reaches
        return
    if after.states != program.states:
        return
    rebound = {field.name for field, _ in step._last.outcome.rebound}  # they have another tensor
    pairs = zip(program.states, execution.states(), after.step.states, strict=True)
    for i, (name, mine, now) in enumerate(pairs):
        is_same = name and name.rpartition(".")[2] not in rebound
        if is_same and digest(mine) != digest(now):
            raise Wrong(f"state {i}, {name!r}, has other bits than after the call")


def _require_same_positions(execution: Execution, seen: list[Any], draw: random.Random) -> None:
    """Go to random positions. Raise `Wrong` unless they are as at first."""
    for _ in range(POSITIONS):
        position = draw.randrange(len(seen))
        execution.run(position)
        if _seen(execution) != seen[position]:
            raise Wrong(f"position {position} of {len(seen) - 1} has other bits than at first")
        ref = draw.choice(execution.executed).results[:1] if execution.executed else ()
        for each in ref:
            if digest(execution.value(each)) != seen[each.number + 1][1][0]:
                raise Wrong(f"{each}, read at position {position}, has other bits than at first")


def _seen(execution: Execution) -> Any:
    """Return the op executed last with the digests of its results, and those of the states."""
    position = execution.position
    op = execution.op_at(position - 1) if position else None
    results = [] if op is None else [digest(execution.value(ref)) for ref in op.results]
    states = [digest(array) for array in execution.states()]
    return (op and (op.name, op.place, op.path), results, states)


def _ends(part: Any) -> bool | None:
    return isinstance(part, ml.Tensor) or (None if isinstance(part, (dict, list, tuple)) else False)


def _array(x: ml.Tensor) -> Any:
    return x.arena.vm.read(x.handle)


def fuzz(programs: int, seed: int, first: int = 0) -> tuple[Outcomes, str | None]:
    """Check programs; return their outcomes, and the text of those that failed."""
    return outcomes_of(range(first, first + programs), lambda number: attempt(seed, number))
