"""`ml.runs.record`: record the steps of a run, to compare, replay and verify it later.

The folder contains the `log`, with a frame for each step with the digests of all values that it
reads and returns; `data`, contents that a replay cannot compute: inputs, and state that was written
between steps; `checkpoints`, the complete state before some steps; `programs` and `sources`, each
file once.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from mlvm.arena.arena import Allocation, scope
from mlvm.arena.context import current
from mlvm.core.errors import ArgumentError, CaptureError, MlvmError, brief
from mlvm.core.program.encoding import HEADER, Kind, Writer
from mlvm.core.sizes import parse_size
from mlvm.core.types import Array, TensorType
from mlvm.eager.capture.cache import CacheEntry
from mlvm.eager.capture.capture import (
    Captured,
    ProgramMatch,
    capture,
    step_observer,
    step_observers,
)
from mlvm.eager.files import safetensors
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.runs.cells import Cells, array_of, digest_of_cells, storable
from mlvm.eager.runs.execution import silent_vm
from mlvm.eager.runs.log import AppendedFile, LogEnd, LogWriter, digest_of, is_log, number_of
from mlvm.eager.runs.names import arguments_of, optimizers_of
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.run import CHECKPOINTS, DATA, LOG, PROGRAMS, SOURCES
from mlvm.eager.runs.steps import CELL, StepTable, leaves_of, number_array, scalar_of
from mlvm.eager.runs.traced import TracedStep, traced_call, traced_step
from mlvm.eager.runs.variables import Variables
from mlvm.eager.tensor.context import default_arena
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.digest import digest
from mlvm.machines.files import write_file
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
    group compute the same steps, so only the first member records. Steps of a forked child, steps
    that raise or are interrupted, and steps that run when the block ends are not recorded. A killed
    process loses at most the step that was running.

    Steps of several threads are recorded in the order in which they return. Launches of captured
    functions wait for each other. An eager step does not wait, because it may wait for the other
    threads. If another step is recorded meanwhile, the eager step is recorded without its program,
    and no replay computes it.

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
            self._folder = Path(os.path.abspath(folder))
            self._folder.exists()
        except (TypeError, ValueError):
            raise ArgumentError(f"record: expected a folder, got {brief(folder)}") from None
        self._every = every

    def __enter__(self) -> None:
        refuse_captured("start a recording")
        if step_observers:
            raise CaptureError("record: another recording is active; close it first")
        self._session = _Session(self._folder, self._every, self._limit)
        try:
            step_observers.append(self._session)
        except BaseException:  # an interrupt
            step_observers.clear()
            raise

    def __exit__(self, *error: Any) -> None:
        step_observers.remove(self._session)
        self._session.close(finished=error[0] is None)


def step(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that is not captured as a step of recordings; this is a decorator.

    Inside `ml.runs.record`, calls are recorded like calls of a captured function. The function is
    traced once, as by `ml.capture`, for a program to record, and then runs eagerly. Changes of
    Python state by this trace are undone, but not its output. The results have the same digests as
    in a captured run. If the function cannot be traced, for example because it reads a tensor's
    value, only inputs and results are recorded, and no replay can compute it. Outside of
    `ml.runs.record`, and inside an outer step, calls are not recorded.

    Raises `CaptureError` if `fn` is not a function, or is `async`.

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
    if inspect.iscoroutinefunction(fn):
        raise CaptureError(f"step: expected a function that returns results, got {fn!r}")

    @wraps(fn)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        observer = step_observer() if current().recorder is None else None
        if observer is None:
            return fn(*args, **kwargs)
        result: R = observer.observe(captured, args, kwargs, fn)
        return result

    return observed


_Bound: TypeAlias = tuple[CacheEntry, Sequence[Tensor], Sequence[float]]
"""The program of a call, the inputs and the Python numbers."""


@dataclass
class _Recorded:
    """Program of recorded steps, with a table of operands and results.

    Attributes:
        table: operands and results.
        external: which inputs of the program are external inputs.
        numbers: computes the arrays of Python numbers from the numbers of a signature.
        number: the number of the program in the log, if a step with it has been recorded.
        unchecked: the program before the first step, whose results are compared with its results.
        others: the tables of steps with this program that are recorded without it, by reason.
    """

    table: StepTable
    external: Sequence[int] = ()
    numbers: Callable[[Sequence[float]], list[Array]] = lambda _: []
    number: int | None = None
    unchecked: OpProgram | None = None
    others: dict[str, _Recorded] = field(default_factory=dict)


class _Progress(NamedTuple):
    """Everything that the recorded steps have added to a recording.

    The assignment of a new value adds a step. Contents of files and dicts beyond these sizes belong
    to a step that has failed or was interrupted, and are removed later.

    Attributes:
        log: the end of the log.
        data: the size of the data file.
        steps, checkpoints, programs, cells: the numbers of entries in the log.
        last_checkpoint: the step of the last checkpoint.
        spent: the bytes of stored inputs that count.
        stored: the number of inputs in the data file.
        replayed: the digests of the cells that a replay has after the last step.
    """

    log: LogEnd
    data: int = 0
    steps: int = 0
    checkpoints: int = 0
    programs: int = 0
    cells: int = 0
    last_checkpoint: int = -1
    spent: int = 0
    stored: int = 0
    replayed: Mapping[int, bytes] = MappingProxyType({})


@dataclass
class _RunningStep:
    """A step that runs, with everything that is added to the recording when it has returned.

    Attributes:
        begun: the recording before the step.
        program: the program.
        tensors: the tensors among the external inputs.
        inputs: the digests of the external inputs.
        state: the tensors of all state before the step, by cell.
        digests: the digests of this state; if no replay computes the step, only of what it reads.
        replayed: the digests of the cells that a replay has before the step.
        ended: cells that have ended since the previous step.
        checkpoint: the frame of the checkpoint before the step, if one was written.
        stored_cells, stored_inputs: numbers with the offsets and lengths in the data.
        data: the contents to append to the data file.
        contents: the offsets and lengths of new inputs by digest.
        spent: the bytes of these inputs that count.
        expected: the digests of all results that the program computes, if they are to be compared.
    """

    begun: _Progress
    program: _Recorded
    tensors: Sequence[Allocation]
    inputs: Sequence[bytes]
    state: dict[int, Allocation]
    digests: dict[int, bytes]
    replayed: Mapping[int, bytes]
    ended: Sequence[int] = ()
    checkpoint: tuple[Any, ...] | None = None
    stored_cells: list[tuple[int, int, int]] = field(default_factory=list)
    stored_inputs: list[tuple[int, int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    contents: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    spent: int = 0
    expected: list[bytes] | None = None

    def store(self, array: Array) -> tuple[int, int]:
        """Add an array to the data; return the offset and the length there."""
        writer = Writer()
        writer.array(array)
        data = writer.message(Kind.call)[HEADER.size :]
        place = self.begun.data + len(self.data)
        self.data += data
        return place, len(data)

    def copied(self, number: int, array: Array) -> Array:
        """Return a copy of a cell's content, with its digest: an eager step may write to it."""
        array = array.copy()
        self.digests[number] = digest(array)
        return array


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
        self._log, self._data = LogWriter(folder / LOG), AppendedFile(folder / DATA)
        self._process = os.getpid()
        self._is_closed = False
        self._cells = Cells()
        self._programs: WeakKeyDictionary[CacheEntry, _Recorded] = WeakKeyDictionary()
        self._eager: dict[object, _Recorded] = {}  # without a program, by function and types
        self._untraceable: dict[object, str] = {}  # functions without a program, with the reason
        self._stored: dict[bytes, tuple[int, int]] = {}  # offsets and lengths of inputs
        self._computed: set[bytes] = set()  # contents of tensors since the last checkpoint
        self._lock = threading.RLock()
        self._running = threading.local()
        version = sys.modules["mlvm"].__version__
        self._log.append(("run", {"mlvm": version, "every": every, "versions": versions()}))
        self._now = _Progress(self._log.end)

    def observe(self, captured: Captured[..., Any], args: Any, kwargs: Any, fn: Any = None) -> Any:
        """Run a captured function, or the eager function `fn` if it is given, and record the step.

        It is not recorded if it is nested, or if a different member records it. The steps of a
        forked child do not belong to the recorded run."""
        vm = (scope() or default_arena()).vm
        if self._process != os.getpid() or place_of(vm)[0] or self._is_nested():
            return captured.run(args, kwargs) if fn is None else fn(*args, **kwargs)
        try:
            self._running.is_on = True
            if fn is not None:
                return self._run(captured, args, kwargs, fn)
            around = partial(self._launched, captured, args, kwargs)
            return captured.run(args, kwargs, around=around)
        finally:
            self._running.is_on = False

    def noting(self) -> AbstractContextManager[Variables]:
        """Return a block that collects the names of tensors during a trace."""
        return Variables().collected()

    def _is_nested(self) -> bool:
        """Return whether this thread runs a step; an interrupt may have left the flag on."""
        frame = sys._getframe(2) if getattr(self._running, "is_on", False) else None
        while frame is not None and frame.f_code is not _Session.observe.__code__:
            frame = frame.f_back
        return frame is not None

    def _launched(
        self,
        captured: Captured[..., Any],
        args: Any,
        kwargs: Any,
        entry: CacheEntry,
        inputs: Sequence[Tensor],
        numbers: Sequence[float],
        match: ProgramMatch | None,
        launch: Callable[[], Any],
    ) -> Any:
        """Launch the program of a call of a captured function, and record the step."""
        bound: _Bound | None = (entry, inputs, numbers)
        if entry not in self._programs and not self._match(captured, args, kwargs, match):
            bound = None
        with self._lock:
            if self._is_closed:  # by another thread
                return launch()
            step, _ = self._begin(captured, args, kwargs, bound)
            result = launch()
            self._add(captured, step, result)
        return result

    def _run(self, captured: Captured[..., Any], args: Any, kwargs: Any, fn: Any) -> Any:
        """Run an eager function, and record the step.

        The lock is not held meanwhile, because the function may wait for other threads."""
        match = self._match(captured, args, kwargs)
        bound = match and (match.entry, match.signature.inputs, match.signature.numbers)
        with self._lock:
            begun = None if self._is_closed else self._begin(captured, args, kwargs, bound)
            if begun is not None:
                begun[0].expected = _computed_by(*begun)
        try:
            result = fn(*args, **kwargs)
        except BaseException:  # a later call may be traceable
            self._untraceable.pop(captured, None)
            raise
        with self._lock:
            if begun is not None:
                self._add(captured, begun[0], result)
        return result

    def _match(
        self,
        captured: Captured[..., Any],
        args: Any,
        kwargs: Any,
        match: ProgramMatch | None = None,
    ) -> ProgramMatch | None:
        """Return the match of a call, and describe the program; None if this is not possible."""
        if captured in self._untraceable:
            return None
        try:
            match = match or captured.match(args, kwargs)
            if match.entry not in self._programs:
                call, match = traced_call(captured, match)
                with self._lock:
                    program = self._described(traced_step(captured, match, call, self._cells))
                    self._programs.setdefault(match.entry, program)
        except Exception as error:
            self._untraceable[captured] = f"{type(error).__name__}: {error}"
            return None
        return match

    def _described(self, traced: TracedStep) -> _Recorded:
        """Store the program of a step and its source files."""
        table = traced.table
        if traced.program is not None:
            data = traced.program.to_bytes()
            name = digest_of(data).hex()
            self._write_once(f"{PROGRAMS}/{name}.mlvm", data)
            sources = self._store_sources({line.file for line in traced.program.lines.values()})
            table = replace(table, file=name, sources=sources)
        return _Recorded(table, traced.external, traced.numbers, unchecked=traced.program)

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
        if not (self._is_closed or (self._folder / name).exists()):
            write_file(self._folder / name, data)

    def _begin(
        self, captured: Captured[..., Any], args: Any, kwargs: Any, bound: _Bound | None
    ) -> tuple[_RunningStep, list[Array]]:
        """Return the step of a call, with the state that it reads, and the external inputs."""
        self._remove_failed()
        self._cells.forget_ended()
        now, tensors, state = self._now, list[Allocation](), self._cells.present()
        program = None if bound is None else self._programs[bound[0]]
        if bound is None or program is None or not state.keys() >= {*program.table.cells()}:
            program, arrays = self._without_program(captured, args, kwargs)
        else:
            tensors = [bound[1][i].root for i in program.external]
            arrays = [*map(array_of, tensors), *program.numbers(bound[2])]
        is_due = now.steps // self._every > now.last_checkpoint // self._every
        is_replayed = is_due or bool(program.table.file)
        read = state if is_replayed else {n: state[n] for n in program.table.cells()}
        digests = self._cells.digests(read)
        inputs = [*map(digest, arrays)]
        step = _RunningStep(now, program, tensors, inputs, state, digests, now.replayed)
        if is_replayed:
            step.replayed = digests
            step.ended = [number for number in now.replayed if number not in state]
        if is_due:
            self._checkpoint(step)
        self._store_inputs(step, arrays)
        for number, key in step.replayed.items():
            if not is_due and now.replayed.get(number) != key:
                array = step.copied(number, array_of(state[number]))
                step.stored_cells.append((number, *step.store(array)))
        return step, arrays

    def _without_program(
        self, captured: Captured[..., Any], args: Any, kwargs: Any
    ) -> tuple[_Recorded, list[Array]]:
        """Return the table and the inputs of a call that has no program: tensors and numbers."""
        named = leaves_of({**dict(arguments_of(captured.fn, args)), **kwargs})
        arrays = [_array_of_leaf(x) for _, x in named]
        kinds = tuple([str(TensorType.of(array)) for array in arrays])
        names = [name for name, _ in named]
        reason = self._untraceable.get(captured, "it reads state that was freed")
        table = StepTable(captured.name, names=names, types=kinds, reason=reason)
        table = replace(table, optimizers=optimizers_of(captured.fn, args, kwargs))
        return self._eager.setdefault((captured, kinds), _Recorded(table)), arrays

    def _checkpoint(self, step: _RunningStep) -> None:
        """Write the complete state before a step to a file."""
        cells = {self._cells.rows[number].name: number for number in step.state}
        arrays = {name: array_of(step.state[number]) for name, number in cells.items()}
        name = f"{step.begun.steps:09}-{step.begun.checkpoints}.safetensors"
        path = self._folder / CHECKPOINTS / name
        types = {each: safetensors.type_of(storable(array)) for each, array in arrays.items()}

        def read(name: str) -> Array:
            return storable(step.copied(cells[name], arrays[name]))

        safetensors.write(path, types, read, {"step": str(step.begun.steps)})
        digests = [*map(number_of, step.digests.values())]
        content = number_of(digest_of(path.read_bytes()))
        step.checkpoint = "checkpoint", name, content, [*step.digests], digests
        self._computed.clear()

    def _store_inputs(self, step: _RunningStep, arrays: Sequence[Array]) -> None:
        """Store the inputs of a step that no step since the last checkpoint has computed.

        Store them only up to the limit.
        """
        for i, (array, key) in enumerate(zip(arrays, step.inputs, strict=True)):
            place = self._stored.get(key) or step.contents.get(key)
            if place is None:
                cost = array.nbytes if array.nbytes > _ALWAYS else 0
                spent = step.begun.spent + step.spent + cost
                if key in self._computed or (cost and spent > self._limit):
                    continue
                step.spent += cost
                place = step.contents[key] = step.store(array)
            step.stored_inputs.append((i, *place))

    def _add(self, captured: Captured[..., Any], step: _RunningStep, result: Any) -> None:
        """Add a step that has returned to the recording."""
        if self._is_closed or self._process != os.getpid():
            return
        self._remove_failed()
        now, program = self._now, step.program
        leaves = leaves_of(result)
        returned = [_array_of_leaf(x) for _, x in leaves]
        results = [*map(digest, returned)]
        results += [digest(array_of(step.tensors[i])) for i, _ in program.table.updated]
        returns, updated = program.table.returns, program.table.updated
        computed = [*[i >= 0 for i in returns], *[True for _ in updated]]
        written = [cell for cell, _ in program.table.writes]
        updates = self._cells.digests(
            {cell: self._cells.tensor(cell, step.state[cell]) for cell in written}
        )
        reason = ""
        if now.steps != step.begun.steps:
            reason = "steps of other threads were recorded while it ran"
        elif program.table.file and [name for name, _ in leaves] != program.table.results:
            reason = "it returns other values than its trace"
        elif step.expected not in (None, [*compress(results, computed), *updates.values()]):
            reason = self._untraceable[captured] = "its trace has other results than the call"
        else:
            program.unchecked = None
        if reason:
            program, updates = self._dropped(step, reason), {}
        table, number, digests = program.table, program.number, {**step.digests, **updates}
        before, after = [
            digest_of_cells(map(each.__getitem__, table.cells()))
            for each in (step.digests, digests)
        ]
        values = [(i, x) for i, x in enumerate(map(scalar_of, returned)) if x is not None]
        cells, is_new = self._cells.rows[now.cells :], number is None
        number = now.programs if number is None else number
        frames: list[tuple[Any, ...]] = []
        if cells:
            frames.append(("cells", [(cell.name, str(cell.type)) for cell in cells]))
        if is_new:
            frames.append(("program", table.to_value()))
        if step.ended:
            frames.append(("ended", step.ended))
        if step.checkpoint is not None:
            frames.append(step.checkpoint)
        keys = [*map(number_of, step.inputs)], [*map(number_of, results)]
        stored = step.stored_cells, step.stored_inputs
        frames.append(("step", number, before, after, *keys, values, *stored))
        data = self._data.put(now.data, step.data)
        log = self._log.after(now.log, frames)
        is_checkpoint = step.checkpoint is not None
        if is_checkpoint:
            self._log.sync()
        for content, place in step.contents.items():
            self._stored.setdefault(content, place)
        self._now = _Progress(
            log,
            data,
            now.steps + 1,
            now.checkpoints + is_checkpoint,
            now.programs + is_new,
            now.cells + len(cells),
            now.steps if is_checkpoint else now.last_checkpoint,
            now.spent + step.spent,
            len(self._stored),
            {**step.replayed, **updates} if table.file else step.replayed,
        )
        program.number = number
        if table.file:
            self._computed.update(compress(results, computed))  # a replay computes only these

    def _dropped(self, step: _RunningStep, reason: str) -> _Recorded:
        """Record a step without its program and state; return the table that replaces it."""
        table = replace(step.program.table, content="", file="", operands=(), writes=(), state=())
        table = replace(table, results=(), returns=(), reason=reason)
        if self._now.steps != step.begun.steps:  # what it has stored precedes other steps
            begin = step.begun.data
            step.stored_inputs = [row for row in step.stored_inputs if row[1] < begin]
            step.stored_cells, step.data, step.contents, step.spent = [], bytearray(), {}, 0
            step.checkpoint, step.replayed, step.ended = None, self._now.replayed, ()
        return step.program.others.setdefault(reason, _Recorded(table))

    def _remove_failed(self) -> None:
        """Forget the inputs of a step that was interrupted while it was added."""
        while len(self._stored) > self._now.stored:
            self._stored.popitem()

    def close(self, *, finished: bool) -> None:
        """Close the recording, so that no data is lost if the process is killed later.

        A forked child returns immediately, because the parent closes the recording."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._is_closed, now = True, self._now
            try:
                self._data.put(now.data, b"")
                self._data.sync()
                self._log.after(now.log, [("end", now.steps, finished)])
                self._log.sync()
            finally:
                self._log.close()
                self._data.close()
                self._cells.close()


def _computed_by(step: _RunningStep, inputs: Sequence[Array]) -> list[bytes] | None:
    """Return the digests of all results that a new program computes for a step, if it can.

    The trace of an eager function may differ from the function, for example in the time."""
    program, table = step.program.unchecked, step.program.table
    if program is None:
        return None
    state = {number: array_of(x) for number, x in step.state.items()}
    operands = [state[n] if kind == CELL else inputs[n] for kind, n in table.operands]
    loaded = LoadedStep(program.step, silent_vm())
    try:
        results = loaded(*operands)
    except MlvmError:
        return None
    finally:
        loaded.close()
    returned = [i for i in table.returns if i >= 0]
    return [
        digest(results[i]) for i in (*returned, *[i for _, i in (*table.updated, *table.writes)])
    ]


def _array_of_leaf(x: Tensor | float) -> Array:
    return array_of(x) if isinstance(x, Tensor) else number_array(x)
