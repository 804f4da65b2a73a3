"""`ml.runs.record`: record the steps of a run, to compare, replay and verify it later.

The folder contains the `log`, with a frame for each step with the digests of all values that it
reads and returns; `data`, contents that a replay cannot compute: inputs, and state that was written
between steps; `checkpoints`, the complete state before some steps; `programs` and `sources`, each
file once.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from dataclasses import replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from mlvm.arena.arena import Allocation, scope
from mlvm.arena.context import current
from mlvm.core.errors import ArgumentError, CaptureError, MlvmError, brief
from mlvm.core.program.encoding import HEADER, Kind, Writer
from mlvm.core.sizes import parse_size
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.cache import CacheEntry
from mlvm.eager.capture.capture import Captured, ProgramMatch, capture, step_observers
from mlvm.eager.files import safetensors
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.runs.cells import Cells, array_of, digest_of_cells, storable
from mlvm.eager.runs.execution import silent_vm
from mlvm.eager.runs.log import LogWriter, digest_of, is_log, number_of
from mlvm.eager.runs.names import arguments_of, optimizers_of
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.run import CHECKPOINTS, DATA, LOG, PROGRAMS, SOURCES
from mlvm.eager.runs.steps import CELL, StepTable, leaves_of, number_array, scalar_of
from mlvm.eager.runs.traced import traced_step
from mlvm.eager.tensor.context import default_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.digest import digest
from mlvm.machines.files import open_to_append, write_file
from mlvm.machines.versions import versions
from mlvm.parallel.membership import place_of
from mlvm.step.saved import LoadedStep

P = ParamSpec("P")
R = TypeVar("R")

_ALWAYS: Final = 64
"""Maximum size of inputs that are stored with each step: keys, scalars and Python numbers."""


class record(ContextDecorator):
    """Record each step of the block in a new folder.

    A step is an outermost call of a captured function, or a function marked with `ml.runs.step`.

    Arguments:

    - `folder`: the folder to create; if it exists, it must be empty.

    - `every`: the number of steps between checkpoints of the complete state.

    - `inputs`: the number of bytes of inputs that may be stored, such as "1 GiB", or "all" or
      "none". Inputs of at most 64 bytes are always stored and do not count. Equal arrays are stored
      once. A step without stored inputs is replayed only from an earlier checkpoint, with inputs
      from the caller.

    The recording contains digests of the state, inputs and results of each step. All members of a
    group compute the same steps, so only the first member records. Steps of different threads wait
    for each other. Steps of a forked child are not recorded. A killed process loses at most the
    step that was running.

    Raises `ArgumentError` for an invalid option, `FileExistsError` and other `OSError` for the
    folder, and `CaptureError` inside a captured function or a recording.

        >>> step = ml.capture(lambda x: ml.sum(x * x))
        >>> with ml.runs.record("run"):
        ...     for i in range(3): loss = step(ml.full(2, float(i)))
        >>> ml.runs.open("run").losses
        [0.0, 2.0, 8.0]

    Invalid calls:
        ml.runs.record("run", every=0)  # ArgumentError
        ml.runs.record("run", inputs="some")  # ArgumentError
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: int = 100, inputs: str | int = "1 GiB"
    ) -> None:
        if type(every) is not int or every < 1:
            raise ArgumentError(f"record: expected every as an int of 1 or more, got {every!r}")
        limits = {"all": 1 << 62, "none": 0}
        is_word = isinstance(inputs, str) and inputs in limits
        self._limit = limits[str(inputs)] if is_word else parse_size(inputs, "record(inputs=)")
        try:
            self._folder = Path(folder)
        except TypeError:
            raise ArgumentError(f"record: expected a folder, got {brief(folder)}") from None
        self._every = every

    def __enter__(self) -> None:
        refuse_captured("start a recording")
        if step_observers:
            raise CaptureError("record: another recording is active; close it first")
        self._session = _Session(self._folder, self._every, self._limit)
        step_observers.append(self._session.observe)

    def __exit__(self, *error: Any) -> None:
        step_observers.remove(self._session.observe)
        self._session.close(finished=error[0] is None)


def step(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that is not captured as a step of recordings; this is a decorator.

    Inside `ml.runs.record`, calls are recorded like calls of a captured function. The function is
    traced once, as by `ml.capture`, for a program to record, and then runs eagerly. The results
    have the same digests as in a captured run. If the function cannot be traced, for example
    because it reads a tensor's value, only inputs and results are recorded, and no replay can
    compute it. Outside of `ml.runs.record`, and inside an outer step, calls are not recorded.

    Raises `CaptureError` if `fn` is not a function.

        >>> @ml.runs.step
        ... def double(x): return x + x
        >>> double(ml.ones(2))
        Tensor([2., 2.], f32[2])

    Invalid calls:
        ml.runs.step(3)  # CaptureError
    """
    if not callable(fn):
        raise CaptureError(f"ml.runs.step: expected a function, got {brief(fn)}")
    captured = capture(fn)

    @wraps(fn)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not step_observers or current().recorder is not None:
            return fn(*args, **kwargs)
        result: R = step_observers[-1](captured, lambda x, named: fn(*x, **named), args, kwargs)
        return result

    return observed


class _Recorded(NamedTuple):
    """Program of recorded steps, with a table of operands and results.

    Attributes:
        number: the number of the program in the log.
        table: operands and results.
        cells: the cells that a call reads or updates.
        numbers: computes the arrays of Python numbers from the numbers of a signature.
    """

    number: int
    table: StepTable
    cells: Sequence[int]
    numbers: Callable[[Sequence[float]], list[Array]]


_Inputs: TypeAlias = tuple[_Recorded, list[Allocation], list[Array]]
"""Program of a call, the tensors among the external inputs, and all external inputs as arrays."""


def _require_empty(folder: Path) -> None:
    """Raise `FileExistsError` unless the folder is empty or does not exist."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"record: expected a folder, got the file {folder}")
    if is_log(folder / LOG):
        raise FileExistsError(
            f"record: {folder} contains a recording; choose another folder, or delete it"
        )
    names = sorted(path.name for path in folder.iterdir())
    if names:
        raise FileExistsError(
            f"record: expected a new or empty folder, but {folder} contains {names[0]!r}; "
            f"choose another folder"
        )


class _Session:
    """An active recording."""

    def __init__(self, folder: Path, every: int, limit: int) -> None:
        self._folder, self._every, self._limit = folder, every, limit
        _require_empty(folder)
        for name in (CHECKPOINTS, PROGRAMS, SOURCES):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._log = LogWriter(folder / LOG)
        self._data: BinaryIO = open_to_append(folder / DATA)
        self._end = 0  # size of the data file
        self._process = os.getpid()
        self._steps = 0
        self._cells = Cells()
        self._ncells = self._ncheckpoints = 0  # numbers of entries in the log
        self._last_checkpoint, self._spent = -1, 0
        self._programs: WeakKeyDictionary[CacheEntry, _Recorded] = WeakKeyDictionary()
        self._eager: dict[object, _Recorded] = {}  # without a program, by function and types
        self._nprograms = 0
        self._unchecked: dict[int, OpProgram] = {}  # programs of new tables
        self._untraceable: dict[object, str] = {}  # functions without a program, with the reason
        self._stored: dict[bytes, tuple[int, int]] = {}  # offsets and lengths of contents
        self._computed: set[bytes] = set()  # contents of tensors since the last checkpoint
        self._lock = threading.RLock()
        self._running = threading.local()
        version = sys.modules["mlvm"].__version__
        self._log.append(("run", {"mlvm": version, "every": every, "versions": versions()}))

    def observe(
        self, captured: Captured[..., Any], call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call, and record it.

        It is not recorded if it is nested, or if a different member records it. The steps of a
        forked child do not belong to the recorded run."""
        if self._process != os.getpid():
            return call(args, kwargs)
        vm = (scope() or default_arena()).vm
        if getattr(self._running, "is_on", False) or place_of(vm)[0]:
            return call(args, kwargs)
        with self._lock:
            self._running.is_on = True
            try:
                return self._observed(captured, call, args, kwargs)
            finally:
                self._running.is_on = False

    def _observed(
        self, captured: Captured[..., Any], call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        program, tensors, arrays = self._match(captured, args, kwargs)
        table, cells = program.table, program.cells
        digests = [*map(digest, arrays)]
        end, spent, count = self._end, self._spent, len(self._stored)
        try:
            stored_cells = self._store_cells()
            end_of_cells = self._end
            traced = self._unchecked.pop(program.number, None)
            is_eager = getattr(call, "__self__", None) is not captured
            expected = self._computed_by(traced, table, arrays) if traced and is_eager else None
            leaves = _leaves_of_call(captured, args, kwargs) if expected is not None else []
            arguments = [_array_of_leaf(x).copy() for _, x in leaves]
            before = digest_of_cells(map(self._cells.digests.__getitem__, cells))
            stored = self._store_inputs(arrays, digests)
            result = call(args, kwargs)
            self._cells.note([cell for cell, _ in table.writes])
        except BaseException:
            self._cells.forget(cells)
            self._drop_data(end)
            self._spent = spent
            self._stored = dict(islice(self._stored.items(), count))
            raise
        after = digest_of_cells(map(self._cells.digests.__getitem__, cells))
        returned = [_array_of_leaf(x) for _, x in leaves_of(result)]
        results = [*map(digest, returned)]
        results += [digest(array_of(tensors[i])) for i, _ in table.updated]
        if expected is not None and expected != [
            *[key for key, i in zip(results, table.returns, strict=False) if i >= 0],
            *results[len(returned) :],
            *[self._cells.digests[cell] for cell, _ in table.writes],
        ]:
            self._untraceable[captured] = "the traced program has other results than the call"
            self._drop_data(end_of_cells)
            self._spent, self._stored = spent, dict(islice(self._stored.items(), count))
            program = self._without_program(captured, args, kwargs)[0]
            table, digests = program.table, [*map(digest, arguments)]
            stored, results = self._store_inputs(arguments, digests), results[: len(returned)]
            before = after = digest_of_cells([])
        if table.file:  # otherwise no replay computes them
            self._computed.update(results)
        values = [(i, x) for i, x in enumerate(map(scalar_of, returned)) if x is not None]
        keys = [*map(number_of, digests)], [*map(number_of, results)]
        self._log.append(
            ("step", program.number, before, after, *keys, values, stored_cells, stored)
        )
        self._steps += 1
        if table.file:
            self._cells.begin_watch((scope() or default_arena()).vm)
        else:  # the step may have written to any cell
            self._cells.forget(())
        return result

    def _match(self, captured: Captured[..., Any], args: Any, kwargs: Any) -> _Inputs:
        """Return the program of a call. The first call is traced once more."""
        known_call = captured.match_known(args, kwargs)
        if known_call is not None and known_call[0] in self._programs:
            entry, inputs, numbers = known_call
            return self._with_arrays(self._programs[entry], inputs, numbers)
        if captured in self._untraceable:
            return self._without_program(captured, args, kwargs)
        try:
            match = captured.match(args, kwargs)
            if not match.is_known:  # fields that the trace has rebound are treated as arguments now
                match = captured.match(match.args, match.kwargs)
            program = self._programs.get(match.entry) or self._added(captured, match)
        except Exception as error:
            self._untraceable[captured] = f"{type(error).__name__}: {error}"
            return self._without_program(captured, args, kwargs)
        fields = {id(x.root) for x in match.signature.in_fields}
        inputs = [x for x in match.signature.inputs if id(x.root) not in fields]
        return self._with_arrays(program, inputs, match.signature.numbers)

    def _with_arrays(
        self, program: _Recorded, inputs: Sequence[Tensor], numbers: Sequence[float]
    ) -> _Inputs:
        tensors = [x.root for x in inputs]
        return program, tensors, [*map(array_of, tensors), *program.numbers(numbers)]

    def _without_program(self, captured: Captured[..., Any], args: Any, kwargs: Any) -> _Inputs:
        """Return the inputs of a call that has no program: tensors and numbers."""
        named = _leaves_of_call(captured, args, kwargs)
        arrays = [_array_of_leaf(x) for _, x in named]
        kinds = tuple([str(TensorType.of(array)) for array in arrays])
        key = captured, kinds
        if key not in self._eager:
            names = [name for name, _ in named]
            reason = self._untraceable[captured]
            table = StepTable(captured.name, names=names, types=kinds, reason=reason)
            table = replace(table, optimizers=optimizers_of(captured.fn, args, kwargs))
            self._eager[key] = self._declared(table, lambda _: [])
        return self._eager[key], [], arrays

    def _added(self, captured: Captured[..., Any], match: ProgramMatch) -> _Recorded:
        """Trace a call once more, and store the program."""
        traced = traced_step(captured, match, self._cells)
        table = traced.table
        if traced.program is not None:
            data = traced.program.to_bytes()
            name = digest_of(data).hex()
            self._write_once(f"{PROGRAMS}/{name}.mlvm", data)
            sources = self._store_sources({line.file for line in traced.program.lines.values()})
            table = replace(table, file=name, sources=sources)
            self._unchecked[self._nprograms] = traced.program
        program = self._programs[match.entry] = self._declared(table, traced.numbers)
        return program

    def _computed_by(
        self, program: OpProgram, table: StepTable, inputs: Sequence[Array]
    ) -> list[bytes] | None:
        """Return the digests of all results that a program computes for a step; None if it cannot.

        The trace of an eager function may differ from the function, for example in the time."""
        operands = [
            self._cells.array(number) if kind == CELL else inputs[number]
            for kind, number in table.operands
        ]
        step = LoadedStep(program.step, silent_vm())
        try:
            results = step(*operands)
        except MlvmError:
            return None
        finally:
            step.close()
        returned = [number for number in table.returns if number >= 0]
        updates = [number for _, number in (*table.updated, *table.writes)]
        return [digest(results[number]) for number in (*returned, *updates)]

    def _declared(
        self, table: StepTable, numbers: Callable[[Sequence[float]], list[Array]]
    ) -> _Recorded:
        """Append the table of a program, and the cells that are new in it."""
        rows = self._cells.rows[self._ncells :]
        self._ncells += len(rows)
        self._log.append(("cells", [(cell.name, str(cell.type)) for cell in rows]))
        self._log.append(("program", table.to_value()))
        self._nprograms += 1
        return _Recorded(self._nprograms - 1, table, table.cells(), numbers)

    def _store_sources(self, files: Iterable[str]) -> dict[str, str]:
        """Store the source files of at most 4 MiB that can be read; return the digests by path."""
        sources = {}
        for file in sorted(files):
            data = "".join(linecache.getlines(file)).encode("utf-8", "surrogatepass")
            if 0 < len(data) <= 4 << 20:
                sources[file] = digest_of(data).hex()
                self._write_once(f"{SOURCES}/{sources[file]}.txt", data)
        return sources

    def _write_once(self, name: str, data: bytes) -> None:
        if not (self._folder / name).exists():
            write_file(self._folder / name, data)

    def _store_cells(self) -> list[tuple[int, int, int]]:
        """Store the contents of cells that no step has computed; return the offsets in the data.

        If a checkpoint is due, it stores all cells instead.
        """
        ended = self._cells.ended()
        if ended:
            self._log.append(("ended", ended))
        changed = self._cells.changed()
        if self._steps % self._every or self._steps == self._last_checkpoint:
            return [(number, *self._store(array)) for number, array in changed.items()]
        self._checkpoint()
        return []

    def _checkpoint(self) -> None:
        """Write the complete state before the next step to a file."""
        numbers = [*self._cells.present()]
        rows = {self._cells.rows[number].name: number for number in numbers}
        arrays = {name: storable(self._cells.array(number)) for name, number in rows.items()}
        name = f"{self._steps:09}-{self._ncheckpoints}.safetensors"
        path = self._folder / CHECKPOINTS / name
        types = {each: safetensors.type_of(array) for each, array in arrays.items()}
        safetensors.write(path, types, arrays.__getitem__, {"step": str(self._steps)})
        digests = [number_of(self._cells.digests[number]) for number in numbers]
        content = number_of(digest_of(path.read_bytes()))
        self._log.append(("checkpoint", name, content, numbers, digests))
        self._log.sync()
        self._computed.clear()
        self._ncheckpoints += 1
        self._last_checkpoint = self._steps

    def _store_inputs(
        self, arrays: Sequence[Array], digests: Sequence[bytes]
    ) -> list[tuple[int, int, int]]:
        """Store the inputs of a step that no step since the last checkpoint has computed.

        Store them only up to the limit. Return the numbers with the offsets in the data.
        """
        places = []
        for i, (array, key) in enumerate(zip(arrays, digests, strict=True)):
            if key not in self._stored:
                cost = array.nbytes if array.nbytes > _ALWAYS else 0
                if key in self._computed or (cost and self._spent + cost > self._limit):
                    continue
                self._spent += cost
                self._stored[key] = self._store(array)
            places.append((i, *self._stored[key]))
        return places

    def _store(self, array: Array) -> tuple[int, int]:
        """Append an array to the data; return the offset and the length there."""
        writer = Writer()
        writer.array(array)
        data = writer.message(Kind.call)[HEADER.size :]
        self._data.write(data)
        place, self._end = self._end, self._end + len(data)
        return place, len(data)

    def _drop_data(self, end: int) -> None:
        """Remove the data that a failed step has stored, because no frame refers to them."""
        if self._process == os.getpid():
            self._data.seek(end)
            self._data.truncate()
        self._end = end

    def close(self, *, finished: bool) -> None:
        """Close the recording, so that no data is lost if the process is killed later.

        A forked child returns immediately, because the parent closes the recording."""
        if self._process != os.getpid():
            return
        self._log.append(("end", self._steps, finished))
        os.fsync(self._data.fileno())
        self._log.sync()
        self._log.close()
        self._data.close()


def _array_of_leaf(x: Tensor | float) -> Array:
    return array_of(x) if isinstance(x, Tensor) else number_array(x)


def _leaves_of_call(captured: Captured[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return the tensors and numbers among the arguments, named after the parameters."""
    return leaves_of({**dict(arguments_of(captured.fn, args)), **kwargs})
