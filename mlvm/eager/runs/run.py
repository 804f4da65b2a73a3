"""A recording that was read from a folder: steps, programs, checkpoints and stored contents.

All data that is read is compared with the digests in the log, and the log with the digest chain. A
mismatch raises `EncodingError` with the name of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np

from mlvm.core.errors import ArgumentError, EncodingError, MlvmError, brief, counted
from mlvm.core.memo import Memo
from mlvm.core.program.encoding import Reader, damaged
from mlvm.core.types import Array, TensorType
from mlvm.eager.files.safetensors import WeightsFile
from mlvm.eager.runs.cells import StateCell, digest_of_cells
from mlvm.eager.runs.log import digest_of, fits, number_of, read_log
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.source import SourceLine
from mlvm.eager.runs.steps import StepTable, number_array
from mlvm.machines.digest import digest

LOG: Final = "log"
DATA: Final = "data"
CHECKPOINTS: Final = "checkpoints"
PROGRAMS: Final = "programs"
SOURCES: Final = "sources"

_STORED: Final = [(int, int, int)]
_FORMS: Final[dict[object, Any]] = {
    "run": ({"mlvm": str, "every": int},),
    "cells": ([(str, str)],),
    "program": (dict,),
    "checkpoint": (str, int, [int], [int]),
    "ended": ([int],),
    "step": (int, int, int, [int], [int], [(int, float)], _STORED, _STORED),
    "end": (int, bool),
}
"""Forms of the frames of a log by kind, the first item of a frame."""

T = TypeVar("T")


class Stored(NamedTuple):
    """Content in the data file: the number of the cell or input, the offset and the length."""

    number: int
    place: int
    length: int


class RecordedStep(NamedTuple):
    """A recorded step.

    Attributes:
        number: the number of the step, from 0.
        table: the operands and results of the program.
        before, after: the digests of the state that it reads and updates.
        inputs, results: the digests of the inputs and results; updated inputs are the last results.
        values: the scalars among the results, by number.
        stored_cells: state that was written since the previous step.
        stored_inputs: the inputs that were stored.
        ended: state whose tensor ended since the previous step.
    """

    number: int
    table: StepTable
    before: int
    after: int
    inputs: Sequence[int]
    results: Sequence[int]
    values: dict[int, float]
    stored_cells: Sequence[Stored]
    stored_inputs: Sequence[Stored]
    ended: Sequence[int] = ()

    def __repr__(self) -> str:
        result = "" if self.loss is None else f", result {self.loss}"
        return f"<step {self.number} of {self.table.function}{result}>"

    def has_number(self, i: int) -> bool:
        """Return whether a result has the digest of its number, which no program computes."""
        value = self.values.get(i, math.nan)
        numbers = [value, int(value)] if math.isfinite(value) else [value]
        is_rounded = abs(value) >= 1 << 53  # the value of an int was rounded
        return is_rounded or self.results[i] in [
            number_of(digest(number_array(x))) for x in numbers
        ]

    @property
    def loss(self) -> float | None:
        """The first scalar that the step returns; None if it returns none."""
        return min(self.values.items())[1] if self.values else None


class Checkpoint(NamedTuple):
    """All state before a step: the file and the digest of the file, and the cells with digests."""

    step: int
    name: str
    content: int
    cells: dict[int, int]


class Run:
    """A recording.

    Attributes:
        folder: the folder of the recording.
        version: the version of mlvm that wrote it.
        versions: all versions that determine the bits of results; "" in older recordings.
        cells: the tensors of state by number.
        tables: the operands and results of each program.
        steps, checkpoints: the steps and the checkpoints, in order.
        is_closed: whether the block of `record` was closed, so that no step is missing.
        has_failed: whether the block raised an error.
        torn: bytes of a torn frame that a killed process wrote.
        log_version: the version of the format.
        chain: the digest of the whole log.

        >>> step = ml.capture(lambda x: ml.sum(x * x))
        >>> with ml.runs.record("squares"): _ = step(ml.full(2, 3.0))
        >>> run = ml.runs.open("squares")
        >>> len(run.steps), run.losses, run.at(0).inputs["x"]
        (1, [18.0], array([3., 3.], dtype=float32))
    """

    at: ClassVar[Callable[..., Any]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = self.versions = ""
        self.every = 1
        self.cells: list[StateCell] = []
        self.tables: list[StepTable] = []
        self.steps: list[RecordedStep] = []
        self.checkpoints: list[Checkpoint] = []
        self.is_closed = self.has_failed = False
        if not (folder / LOG).exists():
            reason = "it is a file" if folder.is_file() else f"it has no file {LOG!r}"
            raise FileNotFoundError(
                f"{folder} is not a recording: {reason}; pass the folder of ml.runs.record"
            )
        log = read_log(folder / LOG)
        self.log_version = log.version
        self._ended: list[int] = []
        self.chain, self.torn = log.chain, log.torn
        for i, value in enumerate(log.values):
            try:
                self._add(i, value)
            except (MlvmError, LookupError) as error:
                raise EncodingError(f"{folder / LOG}: frame {i}: {error}") from None
        if self.torn and self.is_closed:
            raise damaged(
                f"{folder / LOG}: expected no bytes after the last frame, got {self.torn}"
            )
        self._programs = Memo[str, OpProgram](16, "eager.runs programs")

    def __repr__(self) -> str:
        return f"<run of {counted(len(self.steps), 'step')} in {self.folder}>"

    def _add(self, i: int, frame: Any) -> None:
        kind, *values = frame if isinstance(frame, tuple) and frame else (None,)
        if self.is_closed or (i == 0) != (kind == "run"):
            raise damaged(
                f"expected the frame 'run' first and no frame after 'end', got {brief(frame)}"
            )
        form = _FORMS.get(kind) if isinstance(kind, str) else None
        match frame if form is not None and fits(values, form) else None:
            case "run", about:
                self.version, self.every = about["mlvm"], about["every"]
                self.versions = str(about.get("versions", ""))
            case "cells", rows:
                for name, type in rows:
                    self.cells.append(StateCell(len(self.cells), name, TensorType.parse(type)))
            case "program", table:
                self.tables.append(self._checked(StepTable.of_value(table)))
            case "checkpoint", name, content, cells, digests if (
                len(cells) == len(digests)
                and all(map(self._is_cell, cells))
                and name == Path(name).name
            ):
                by_cell = dict(zip(cells, digests, strict=True))
                self.checkpoints.append(Checkpoint(len(self.steps), name, content, by_cell))
            case "ended", cells if all(map(self._is_cell, cells)):
                self._ended += cells
            case "step", program, before, after, inputs, results, scalars, cells, stored if (
                0 <= program < len(self.tables)
                and len(inputs) == len((table := self.tables[program]).names)
                and (
                    not table.file
                    or self.log_version == 1
                    or len(results) == len(table.results) + len(table.updated)
                )
                and all(0 <= number < len(results) for number, _ in scalars)
                and all(map(self._is_cell, [number for number, *_ in cells]))
                and all(0 <= number < len(inputs) for number, *_ in stored)
                and all(0 <= at < 1 << 60 and 0 <= n < 1 << 40 for _, at, n in (*cells, *stored))
            ):
                places = [*map(Stored._make, cells)], [*map(Stored._make, stored)]
                number = len(self.steps)
                at = number, table, before, after, inputs, results, dict(scalars)
                self.steps.append(RecordedStep(*at, *places, self._ended))
                self._ended = []
            case "end", count, finished:
                if count != len(self.steps):
                    raise damaged(f"expected {count} steps, got {len(self.steps)}")
                self.is_closed, self.has_failed = True, not finished
            case _:
                raise damaged(f"expected a frame of a recording, got {brief(frame)}")

    def _is_cell(self, number: int) -> bool:
        return 0 <= number < len(self.cells)

    def _checked(self, table: StepTable) -> StepTable:
        used = sorted(table.used_cells())
        if self.log_version == 1 and not table.state and all(map(self._is_cell, used)):
            table = replace(table, state=[(self.cells[number].name, number) for number in used])
        if not all(map(self._is_cell, {*used, *table.cells()})) or not {*used} <= {*table.cells()}:
            raise damaged(f"expected state cells below {len(self.cells)}, got {brief(used)}")
        for text in table.types:
            TensorType.parse(text)
        return table

    def digest_of_state(self, table: StepTable, digests: Mapping[int, bytes]) -> int:
        """Return the digest of the state of a step from the digests of the cells.

        Version 1 of the format ordered the digests by value."""
        ordered = [digests[number] for number in table.cells()]
        return digest_of_cells(sorted(ordered) if self.log_version == 1 else ordered)

    # --- steps ------------------------------------------------------------------------------

    @property
    def losses(self) -> list[float]:
        """The first scalar that each step returns, of the steps that return one."""
        return [step.loss for step in self.steps if step.loss is not None]

    def step(self, number: int, caller: str = "run") -> RecordedStep:
        """Return a step. Raises `ArgumentError`, which names the caller, if it does not exist."""
        if type(number) is not int or not 0 <= number < len(self.steps):
            if not self.steps:
                raise ArgumentError(
                    f"{caller}: {self.folder} has no steps; record calls of captured functions"
                )
            expected = f"expected a step from 0 to {len(self.steps) - 1}"
            raise ArgumentError(f"{caller}: {expected}, got {brief(number)}")
        return self.steps[number]

    # --- files ------------------------------------------------------------------------------

    def program(self, table: StepTable) -> OpProgram:
        """Return a program. Raises `EncodingError` for a table without one and a damaged file."""
        if not table.file:
            raise EncodingError(f"{table.function} has no program: {table.reason}")
        return self._programs.get(table.file, partial(self._read_program, table.file))

    def _read_program(self, file: str) -> OpProgram:
        name = f"{PROGRAMS}/{Path(file).name}.mlvm"
        data = self._read(name, file)
        return self._decoded(name, lambda: OpProgram.from_bytes(data))

    def source(self, file: str) -> list[str]:
        """Return the recorded lines of a source file; empty if it was not recorded."""
        for table in self.tables:
            if file in table.sources:
                name = f"{SOURCES}/{Path(table.sources[file]).name}.txt"
                data = self._read(name, table.sources[file])
                return data.decode("utf-8", "surrogatepass").splitlines()
        return []

    def text_at(self, line: SourceLine) -> str:
        """Return the text of a line as in the recorded file, or else as in the program."""
        lines = self.source(line.file)
        text = lines[line.number - 1].strip() if 0 < line.number <= len(lines) else ""
        return text or line.text

    def contents(self, checkpoint: Checkpoint) -> dict[int, Array]:
        """Return the contents of a checkpoint by cell."""
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        self._read(name, checkpoint.content)
        file = self._decoded(name, lambda: WeightsFile(self.folder / name))
        contents = {}
        for number, expected in checkpoint.cells.items():
            cell = self.cells[number]
            if cell.name not in file.entries:
                raise damaged(f"{self.folder / name}: {cell.name} is missing")
            array = self._decoded(name, partial(_cell_in, file, cell))
            if number_of(digest(array)) != expected:
                raise damaged(f"{self.folder / name}: {cell.name} was changed")
            contents[number] = array
        return contents

    def stored(self, each: Stored) -> Array:
        """Return a content of the data file."""
        with (self.folder / DATA).open("rb") as stream:
            stream.seek(each.place)
            data = stream.read(each.length)

        def decode() -> Array:
            reader = Reader(data, 0)
            array = reader.array()
            reader.end()
            return array

        return self._decoded(DATA, decode)

    def input(self, step: RecordedStep, each: Stored) -> Array:
        """Return a stored input of a step, after checking the digest."""
        return self.confirmed(step, each.number, self.stored(each))

    def confirmed(self, step: RecordedStep, number: int, array: Array) -> Array:
        """Return an input of a step.

        Raises `EncodingError` if the digest differs from the recorded digest."""
        if number_of(digest(array)) != step.inputs[number]:
            name = step.table.names[number]
            raise damaged(
                f"{self.folder}: input {name!r} of step {step.number} differs from the recorded "
                f"input"
            )
        return array

    def _read(self, name: str, expected: str | int) -> bytes:
        """Return the contents of a file with this digest, as hexadecimal digits or a number."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise damaged(f"{self.folder / name}: the file is missing") from None
        digest = digest_of(data)
        if expected not in (digest.hex(), number_of(digest)):
            raise damaged(f"{self.folder / name}: the file has changed since the recording")
        return data

    def _decoded(self, name: str, decode: Callable[[], T]) -> T:
        try:
            return decode()
        except (MlvmError, ValueError) as error:
            raise EncodingError(f"{self.folder / name}: {error}") from None


def _cell_in(file: WeightsFile, cell: StateCell) -> Array:
    """Return the content of a cell in a checkpoint, with the type."""
    array, type = file.read(cell.name, keep_halves=True), cell.type
    if type.dtype.name == "c128":
        array = array.view(np.complex128).reshape(type.shape)
    elif type.dtype.numpy.names and array.dtype == np.uint8:
        array = array.view(type.dtype.numpy)
    if TensorType.of(array) != type:
        raise damaged(f"expected {type}, got {TensorType.of(array)}")
    return array
