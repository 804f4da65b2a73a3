"""Replay of a recording: the state before a step, and the step itself, bit for bit.

A replay starts at the nearest checkpoint before the step. It computes the steps in between, and
compares each with the digests in the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import (
    ArgumentError,
    MachineError,
    UnknownFunctionError,
    brief,
    counted,
    listed,
)
from mlvm.core.ops.half import shown
from mlvm.core.program.encoding import damaged
from mlvm.core.types import Array, TensorType
from mlvm.eager.functions import random
from mlvm.eager.functions.creation import asarray
from mlvm.eager.nn.module import Module
from mlvm.eager.runs.execution import Execution, Ref, silent_vm
from mlvm.eager.runs.log import number_of
from mlvm.eager.runs.names import KEYS, tensors_below, unused_name
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.run import Checkpoint, RecordedStep, Run
from mlvm.eager.runs.steps import CELL, StepTable
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import load as load_tree
from mlvm.machines.digest import digest
from mlvm.machines.local import LocalVM
from mlvm.machines.versions import cause_of_other_bits
from mlvm.step.saved import LoadedStep

Inputs: TypeAlias = Callable[[int], Any]
"""Function that returns the external inputs of a step: a list of arrays, or a single array."""


class Moment(NamedTuple):
    """State and inputs that a step reads.

    step: the step.
    state: the state before the step, by the paths by which the function of the step reads it. Other
        state has the paths in the last steps of other functions.
    inputs: the external inputs by name.
    """

    step: RecordedStep
    state: Mapping[str, Array]
    inputs: Mapping[str, Array]

    def __repr__(self) -> str:
        inputs, state = [listed([*names], 4) or "none" for names in (self.inputs, self.state)]
        return f"<before {str(self.step)[1:-1]}: inputs {inputs}; state {state}>"

    def load(self, /, **objects: Any) -> None:
        """Write the state to objects by the names in the recorded function.

        An example is `run.at(7).load(model=model, optimizer=optimizer)`; an object may also be a
        tensor, as in `load(w=w)`. If the function is a method, the fields of its object have names
        such as `self.model`: `load(self=trainer)` and `load(model=trainer.model)` are equivalent.
        The random keys are also restored.

        Raises `ArgumentError` for an object without recorded state, and for a Module, dict or list
        with a tensor that the recording does not contain; `DTypeError` or `ShapeError` for a tensor
        with a different type. All objects are checked before the first write.
        """
        tensors: dict[str, Tensor] = {}
        roots = {re.split(r"[.[]", path)[0] for path in self.state}
        for keyword, value in objects.items():
            name = keyword if keyword in roots else f"self.{keyword}"
            paths = [x for x in self.state if re.match(rf"{re.escape(name)}([.[]|$)", x)]
            if not paths:
                names = {re.split(r"[.[]", x.removeprefix("self."))[0] for x in self.state}
                raise ArgumentError(
                    f"load: expected names in the recorded state ({', '.join(sorted(names))}), "
                    f"got {keyword!r}"
                )
            below = {p: x for p, x in tensors_below([(name, value)]) if isinstance(x, Tensor)}
            recorded = {path: x for path, x in below.items() if path in self.state}
            if not recorded:
                expected = listed(paths, 4)
                kind = "a tensor" if expected == name else f"an object with {expected}"
                raise ArgumentError(f"load: expected {name} as {kind}, got {brief(value)}")
            tensors |= recorded
            loaded = {id(x.root) for x in tensors.values()}
            missing = [p for p, x in below.items() if id(x.root) not in loaded and "._" not in p]
            if missing and isinstance(value, Module | dict | list | tuple):
                raise ArgumentError(
                    f"load: the recording has no state of {listed(missing, 4)}; load other objects"
                )
        load_tree(tensors, {path: self.state[path] for path in tensors}, "state")
        if KEYS in self.state:
            random.set_state(self.state[KEYS])


class Mismatch(NamedTuple):
    """Value of a step that a replay does not reproduce: `state` or the name of a result."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


class Replay:
    """Replay of a recording, which moves from step to step.

    Steps in order need only one checkpoint; for a step before the present one, the replay starts at
    an earlier checkpoint again. `inputs` returns the external inputs of a step that the recording
    has not stored. They are a list of arrays in the order of the arguments, or a single array.

    Raises `ArgumentError` unless the arguments are a run and a function.

    Invalid calls:
        ml.runs.Replay("folder")  # ArgumentError
    """

    def __init__(self, run: Run, *, inputs: Inputs | None = None) -> None:
        _require_run(run, Run, "Replay")
        if inputs is not None and not callable(inputs):
            raise ArgumentError(
                f"Replay: expected inputs as a function that returns the inputs of a step, "
                f"got {brief(inputs)}; write inputs=lambda n: batches[n]"
            )
        self.run = run
        self._inputs = inputs
        self._next: int | None = None  # the step before which `_cells` are valid
        self._cells: dict[int, Array] = {}
        self._values: dict[int, Array] = {}  # results that later steps use, by digest
        stored = {(s.number, each.number) for s in run.steps for each in s.stored_inputs}
        self._needed = {
            key for s in run.steps for i, key in enumerate(s.inputs) if (s.number, i) not in stored
        }
        self._loaded: tuple[StepTable, LoadedStep] | None = None

    def at(self, number: int) -> Moment:
        """Return the state and the inputs of a step.

        Raises `EncodingError` for a damaged recording, `MachineError` if an earlier step does not
        have the recorded digests on this machine. Raises `ArgumentError` for a step that does not
        exist, and for inputs that were not stored or that the caller does not provide unchanged.
        """
        step = self.run.step(number)
        self._go_to(step)
        state = {name: self._cells[cell] for name, cell in self.names(step).items()}
        inputs: dict[str, Array] = {}
        for name, array in zip(step.table.names, self._external(step), strict=True):
            inputs[unused_name(name, inputs)] = array
        return Moment(step, state, inputs)

    def names(self, step: RecordedStep) -> dict[str, int]:
        """Return the cells before a step by name. Raises the errors of `at`.

        Before a step without a program they are known only at a checkpoint."""
        self._go_to(step)
        if not step.table.file and self._checkpoint_before(step).step != step.number:
            return {}
        last: dict[str, StepTable] = {}
        functions = {table.function for table in self.run.tables}
        for number in range(step.number, -1, -1):
            table = self.run.steps[number].table
            last.setdefault(table.function, table)
            if len(last) == len(functions):
                break
        tables = reversed(last.values())
        named = {cell: name for table in tables for name, cell in table.state}
        rows = *[(name, cell) for cell, name in named.items()], *step.table.state
        return {name: cell for name, cell in rows if cell in self._cells}

    def cells(self, number: int) -> dict[int, Array]:
        """Return the contents of the cells before a step, by number."""
        self._go_to(self.run.step(number))
        return {**self._cells}

    def operands(self, number: int) -> list[Array]:
        """Return the operands of a step's program. Raises the errors of `at`."""
        step = self.run.step(number)
        self._go_to(step)
        external = self._external(step)
        return [
            self._cells[each] if kind == CELL else external[each]
            for kind, each in step.table.operands
        ]

    def execution(self, number: int) -> Execution:
        """Return the execution of a step, before the first op. Raises the errors of `at`."""
        operands = self.operands(number)
        program, vm = self._prepared(self.run.step(number))
        return Execution(program, operands, vm=vm)

    def _prepared(self, step: RecordedStep) -> tuple[OpProgram, LocalVM]:
        """Return the program of a step, and a VM; raise an error if the VM lacks a function."""
        program, vm = self.run.program(step.table), silent_vm()
        if missing := sorted(program.host_functions().difference(vm.functions)):
            raise UnknownFunctionError(
                f"step {step.number} cannot be replayed separately: it calls {listed(missing, 4)}, "
                f"to communicate with other members of the group, or as a function of the user"
            )
        return program, vm

    def origin(self, step: RecordedStep, execution: Execution, ref: Ref) -> str:
        """Describe where a value in the execution of a step comes from."""
        table = step.table
        if ref.kind == "result":
            op = execution.executed[ref.number]
            what = "random draw" if op.name.startswith("random") else f"result of {op.name}"
            name = f" {op.names[0]}" if op.names else ""
            return f"{what}{name}" + (f" at {op.line}" if op.line else "")
        if ref.kind == "scratch":
            return "memory without content"
        values = shown(execution.value(ref))
        if ref.kind != "input":
            return f"constant {values.item()!r}" if values.size == 1 else "constant"
        kind, number = table.operands[ref.number]
        if kind == CELL:
            return f"state {next(name for name, cell in table.state if cell == number)}"
        return f"input {table.names[number]!r}" + (
            f" = {values.item()!r}" if table.is_number(number) else ""
        )

    def replay(self, number: int) -> list[Mismatch]:
        """Compute a step again.

        Return the differences from the log; empty for equal bits."""
        step = self.run.step(number)
        return self._finish(step, self.compute(step, self.operands(number)))

    def results(self, number: int) -> list[Array]:
        """Return all results of a step's program: the returned values and the updates.

        Raises the errors of `at`, and `MachineError` unless the results have the recorded bits.
        """
        step = self.run.step(number)
        results = self.compute(step, self.operands(number))
        self._require(self._finish(step, results))
        return results

    def cells_after(self, number: int) -> dict[int, Array]:
        """Return the contents of the cells after a step. Raises the errors of `results`."""
        cells, results = self.cells(number), self.results(number)
        writes = self.run.step(number).table.writes
        return {**cells, **{cell: results[i] for cell, i in writes}}

    def compute(self, step: RecordedStep, operands: Sequence[Array]) -> list[Array]:
        """Return the results of a step's program on these operands.

        Raises `EncodingError` if the table of the step refers to results that the program lacks.
        """
        table = step.table
        if self._loaded is None or self._loaded[0] is not table:
            if self._loaded is not None:
                self._loaded[1].close()
            program, vm = self._prepared(step)
            self._loaded = table, LoadedStep(program.step, vm)
        results = self._loaded[1](*operands)
        places = [*table.returns, *[i for _, i in (*table.updated, *table.writes)]]
        if places and max(places) >= len(results):
            raise damaged(
                f"{self.run.folder}: step {step.number} refers to result {max(places)} of a "
                f"program with {len(results)} results"
            )
        return results

    # --- steps ------------------------------------------------------------------------------

    def _go_to(self, step: RecordedStep) -> None:
        """Move to the state before a step, and check the digest of the state."""
        start = self._checkpoint_before(step)
        if self._next is None or not start.step <= self._next <= step.number:
            self._values.clear()
            self._cells, self._next = {}, None
            self._write(self.run.steps[start.step])
            self._next = start.step
        while self._next < step.number:
            now = self.run.steps[self._next]
            if now.table.file and (now.table.writes or self._needed.intersection(now.results)):
                self._require(self.replay(now.number))
            else:
                self._skip(now)

    def _require(self, mismatches: Sequence[Mismatch]) -> None:
        """Raise `MachineError` if there are mismatches."""
        if mismatches:
            raise MachineError(
                f"replay: {mismatches[0]} does not have the recorded bits on this machine; "
                f"python -m mlvm verify names such steps{cause_of_other_bits(self.run.versions)}"
            )

    def _checkpoint_before(self, step: RecordedStep) -> Checkpoint:
        """Return the last checkpoint that is not after the step."""
        for each in reversed(self.run.checkpoints):
            if each.step <= step.number:
                return each
        if not step.table.state:
            return Checkpoint(step.number, "", 0, {})
        raise damaged(f"{self.run.folder}: no checkpoint has the state of step {step.number}")

    def _write(self, step: RecordedStep) -> None:
        """Apply the recorded writes to the state before a step, and compare the digest."""
        for number in step.ended:
            self._cells.pop(number, None)
        for checkpoint in self.run.checkpoints:
            if checkpoint.step == step.number:  # some state may have been written since
                self._cells.update(self.run.contents(checkpoint))
        for each in step.stored_cells:
            self._cells[each.number] = self.run.stored(each)
        if step.table.file and step.table.state and self._digest(step) != step.before:
            raise damaged(
                f"{self.run.folder}: the state before step {step.number} differs from the "
                f"recorded state"
            )

    def _digest(self, step: RecordedStep) -> int:
        cells = step.table.cells()
        if missing := len({*cells} - self._cells.keys()):
            raise damaged(
                f"{self.run.folder}: {missing} state tensors of step {step.number} are missing"
            )
        digests = {each: digest(self._cells[each]) for each in cells}
        return self.run.digest_of_state(step.table, digests)

    def _finish(self, step: RecordedStep, results: Sequence[Array]) -> list[Mismatch]:
        """Use the results of a step as state and values of later steps. Return mismatches."""
        table = step.table
        returned = [*table.returns, *[i for _, i in table.updated]]
        mismatches = []
        # in recordings of earlier releases, Python numbers have no entry in the table
        is_complete = len(returned) == len(step.results)
        for n, (i, name) in enumerate(zip(returned, table.digested(len(returned)), strict=True)):
            if i >= 0:
                key = number_of(digest(results[i]))
                is_equal = key in step.results[n : n + 1 if is_complete else None]
                if key in self._needed:
                    self._values[key] = results[i]
            else:
                is_equal = not is_complete or step.has_number(n)
            if not is_equal:
                mismatches.append(Mismatch(step.number, name))
        for cell, i in table.writes:
            self._cells[cell] = results[i]
        if table.state and self._digest(step) != step.after:
            mismatches.append(Mismatch(step.number, "the state after the step"))
        if mismatches:
            self._next = None  # a later step starts at a checkpoint again
        else:
            self._skip(step)
        return mismatches

    def _skip(self, step: RecordedStep) -> None:
        """Go to the next step; this step updates no state that a later step reads."""
        self._next = None  # if the state cannot be written, a later step starts at a checkpoint
        following = step.number + 1
        if following < len(self.run.steps):
            self._write(self.run.steps[following])
        self._next = following

    def _external(self, step: RecordedStep) -> list[Array]:
        """Return the external inputs of a step."""
        stored = {each.number: each for each in step.stored_inputs}
        arrays: list[Array] = []
        provided: Sequence[Any] | None = None
        for i, expected in enumerate(step.inputs):
            if i in stored:
                array = self.run.stored(stored[i])
            elif expected in self._values:
                array = self._values[expected]
            elif self._inputs is not None:
                provided = self._inputs_of_caller(step) if provided is None else provided
                array = self._checked(step, i, asarray(provided[i]).numpy())
            else:
                raise ArgumentError(
                    f"replay: input {step.table.names[i]!r} of step {step.number} was not stored; "
                    f'record with inputs="all", or pass a function that returns the inputs of a '
                    f"step: ml.runs.Replay(run, inputs=batch_of)"
                )
            arrays.append(self.run.confirmed(step, i, array))
        return arrays

    def _checked(self, step: RecordedStep, i: int, array: Array) -> Array:
        """Return an input from the caller. Raise `ArgumentError` if it has a different digest."""
        if number_of(digest(array)) != step.inputs[i]:
            type, expected = TensorType.of(array), step.table.types[i]
            got = f"got {type}" if str(type) != expected else "got different values"
            raise ArgumentError(
                f"replay: expected item {i} of inputs({step.number}) as the recorded input "
                f"{step.table.names[i]!r}, {expected}, {got}"
            )
        return array

    def _inputs_of_caller(self, step: RecordedStep) -> Sequence[Any]:
        """Return the inputs of a step from the caller, which may include more than tensors."""
        assert self._inputs is not None  # the caller has tested this
        inputs = self._inputs(step.number)
        ntensors = step.table.ntensors
        if ntensors == 1 and isinstance(inputs, Tensor | np.ndarray):
            return [inputs]
        if not isinstance(inputs, list | tuple) or len(inputs) < ntensors:
            raise ArgumentError(
                f"replay: expected inputs({step.number}) to return a list of "
                f"{counted(ntensors, 'array')} "
                f"({listed(step.table.names[:ntensors], 4)}), got {brief(inputs)}"
            )
        return inputs


def _require_run(run: object, kinds: Any, what: str) -> None:
    if not isinstance(run, kinds):
        raise ArgumentError(f"{what}: expected a run, got {brief(run)}; write ml.runs.open(folder)")


def replay_of(run: Run | Replay, what: str) -> Replay:
    """Return the replay of a run.

    Raises `ArgumentError` with the function for any other value."""
    _require_run(run, Run | Replay, what)
    return run if isinstance(run, Replay) else Replay(run)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Read a recording.

    Raises `EncodingError` for a damaged recording, `FileNotFoundError` for a folder without a
    recording, other `OSError`, and `ArgumentError` if `folder` is not a path.

    Invalid calls:
        ml.runs.open(5)  # ArgumentError
    """
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(f"open: expected the folder of a recording, got {brief(folder)}")
    return Run(Path(folder))


def _at(self: Run, number: int, *, inputs: Inputs | None = None) -> Moment:
    """Return the state before a step and the inputs of the step. See `Replay.at`."""
    return Replay(self, inputs=inputs).at(number)


Run.at = _at
