"""CUDA graphs: kernels that a program calls in a row, launched by one call.

A stretch is such a row of kernels on arguments of the launch, whose arrays stay the same for as
long as the program is bound to its handles. The first time its kernels are launched one by one.
The second time they are recorded (`cudaStreamBeginCapture`, CUDA C++ Programming Guide, "Creating
a Graph Using Stream Capture"), from the third time on the graph is launched. A graph is forgotten
with the bound program: when a handle names another array, or a name another function.

Jumps, calls, user functions, ops whose result has no known shape, ops that wait for a value
(`gpu_kernels.WAITS`) and transforms (`TRANSFORMS`) are between stretches. What a library refuses to
have recorded is launched as it is, between the graphs of a stretch: CuPy 14 refuses products
(`cublas.pyx`, `setStream`), and what sends a table, as a join of more than 8 arrays does.

What kernels need for intermediates comes from a pool of its own: a graph uses that memory again
with each launch, and nobody else may have it meanwhile. All graphs of a VM share it, in the order
of its stream. Values that kernels refuse are noted on the device, and read once at a stretch's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from mlvm.core.errors import OpError
from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import Fused, OpInto
from mlvm.core.machine.functions import Binding, FunctionTable
from mlvm.core.machine.link import CALL_ON_ARGS, JUMP, JUMP_IF_FALSE, Code, Step
from mlvm.core.machine.run import State
from mlvm.core.op import NO_ATTRIBUTES, Attributes
from mlvm.core.types import Array
from mlvm.machines.gpu_checks import Note, noting, settle
from mlvm.machines.gpu_kernels import TRANSFORMS, WAITS

_LEAST: Final = 2
"""Kernels of a stretch, and of a graph: one alone is launched as fast as a graph."""

_APART: Final = WAITS | TRANSFORMS


class Call(NamedTuple):
    """A kernel's call by step `step` of a bound program."""

    step: int
    binding: Binding
    arrays: tuple[Array, ...]
    attributes: Attributes


class Failed(BaseException):
    """An error of a kernel in a stretch, on its way through the machine's loop, which knows
    neither the kernel nor its place."""

    def __init__(self, error: Exception, code: Code, step: int) -> None:
        super().__init__(error)
        self.error = error
        self.step = step
        self._code = code

    def explained(self) -> Exception:
        """The error, which now knows where it was raised, as the reference loop has it."""
        return reference.explain(self.error, State([], [], self._code, self.step))


Notes: TypeAlias = list[tuple[int, Note]]
"""Values that calls have had noted, each behind its step."""


def _settle(notes: Notes, code: Code) -> None:
    """Read them all. Raises `Failed` with the error of the first value that is refused."""
    try:
        settle([note for _, note in notes])
    except OpError:
        for step, note in notes:
            try:
                settle([note])
            except OpError as error:
                raise Failed(error, code, step) from None
        raise


class Piece(NamedTuple):
    """Calls of a stretch, as a graph if they could be recorded, and what they have had noted."""

    calls: Sequence[Call]
    graph: Any
    notes: Notes


class Graphs:
    """The CUDA graphs of one VM, recorded by CuPy from its stream, which has a lock: how many were
    recorded, and how many launches were of one."""

    def __init__(self, cupy: Any, stream: Any, lock: Any) -> None:
        self.recorded = self.replayed = 0
        self._cupy, self._stream, self._lock = cupy, stream, lock
        self._pool: Any = None

    def apart(self) -> Any:
        """A context in which kernels take memory from the pool of the graphs.

        It has its blocks from the pool of tensors and gives none back, as recorded graphs use them:
        a pool gives up its blocks at an error of CUDA, and that pool's error is another one."""
        if self._pool is None:
            outer = self._cupy.get_default_memory_pool()
            self._pool = self._cupy.cuda.MemoryPool(outer.malloc)
            self._pool.set_limit(0)  # at a limit of its own it would give up blocks, too
        return self._cupy.cuda.using_allocator(self._pool.malloc)

    def launch(self, graph: Any) -> None:
        graph.launch()
        self.replayed += 1

    def record(self, code: Code, calls: Sequence[Call]) -> Piece:
        """The longest beginning of the calls that can be one graph; the first call alone, and no
        graph, if there is none. Nothing runs."""
        done, graph = len(calls), None
        notes: Notes = []
        with self._lock:
            self._stream.begin_capture()
            try:
                perform(code, calls, notes)
            except Failed as failed:  # launched as it is, it will say what is wrong
                done = next(i for i, call in enumerate(calls) if call.step == failed.step)
            finally:
                with suppress(self._cupy.cuda.runtime.CUDARuntimeError):  # that has ended it
                    graph = self._stream.end_capture()
        if _LEAST <= done < len(calls):
            return self.record(code, calls[:done])
        if done < len(calls) or graph is None:
            return Piece(calls[: max(done, 1)], None, [])
        self.recorded += 1
        return Piece(calls, graph, notes)


def perform(code: Code, calls: Sequence[Call], notes: Notes) -> None:
    """Call the kernels one by one. Raises `Failed` for the error of one."""
    for step, binding, arrays, attributes in calls:
        try:
            with noting() as noted:
                binding.kernel(*arrays, **attributes)
        except Exception as error:
            raise Failed(error, code, step) from None
        notes += [(step, note) for note in noted]


class Stretch:
    """The kernels of steps `start` .. `end - 1` of a bound program. It is called as a binding's
    kernel is."""

    def __init__(
        self, code: Code, start: int, end: int, functions: FunctionTable, graphs: Graphs
    ) -> None:
        self._code = code
        steps = enumerate(code.steps[start:end], start)
        self._calls = [Call(i, does, xs, rest or NO_ATTRIBUTES) for i, (_, does, xs, rest) in steps]
        self._functions = functions
        self._version = int(functions.version)
        self._graphs = graphs
        self._pieces: list[Piece] | None = None
        self._launched = False

    def kernel(self) -> None:
        """Run the kernels, by graphs from the second time on. Raises `Failed`."""
        notes: Notes = []
        with self._graphs.apart():
            if int(self._functions.version) != self._version:  # since the program was bound
                perform(self._code, self._calls, notes)
            elif self._pieces is not None:
                self._replay(self._pieces, notes)
            elif self._launched:
                self._pieces = self._recorded(notes)
            else:
                perform(self._code, self._calls, notes)
                self._launched = True
            _settle(notes, self._code)

    def _recorded(self, notes: Notes) -> list[Piece]:
        """Record the calls piece by piece, and launch each."""
        pieces: list[Piece] = []
        done = 0
        while done < len(self._calls):
            piece = self._graphs.record(self._code, self._calls[done:])
            count = len(piece.calls)
            self._replay([piece], notes)
            if pieces and pieces[-1].graph is None and piece.graph is None:
                before = pieces.pop()
                piece = before._replace(calls=[*before.calls, *piece.calls])
            pieces.append(piece)
            done += count
        return pieces

    def _replay(self, pieces: Sequence[Piece], notes: Notes) -> None:
        for calls, graph, noted in pieces:
            if graph is None:
                perform(self._code, calls, notes)
            else:
                self._graphs.launch(graph)
                notes += noted


def _is_recordable(step: Step) -> bool:
    """Whether the step calls an op that can be part of a graph."""
    code, binding, _, rest = step
    if code != CALL_ON_ARGS or not isinstance(binding, Binding):
        return False
    callee = binding.callee
    if isinstance(callee, OpInto):
        return callee.op.name not in _APART
    if isinstance(callee, Fused):
        return all(link.op.name not in _APART for link in rest["chain"].links)
    return False


def stretched(code: Code, functions: FunctionTable, graphs: Graphs) -> Code:
    """The bound program with one step in the place of each stretch."""
    targets = {step[2] for step in code.steps if step[0] in (JUMP, JUMP_IF_FALSE)}
    steps: list[Step] = []
    starts: list[int] = []
    ends: list[int] = []
    place: dict[int, int] = {}
    at = 0
    while at < len(code.steps):
        end = at
        while end < len(code.steps) and _is_recordable(code.steps[end]):
            end += 1
            if end in targets:
                break
        place[at] = len(steps)
        starts.append(code.starts[at])
        if end - at < _LEAST:
            end = at + 1
            steps.append(code.steps[at])
        else:
            steps.append((CALL_ON_ARGS, Stretch(code, at, end, functions, graphs), (), None))
        ends.append(code.ends[end - 1])
        at = end
    if len(steps) == len(code.steps):
        return code
    for i, (kind, value, number, rest) in enumerate(steps):
        if kind in (JUMP, JUMP_IF_FALSE):
            steps[i] = kind, value, place[number], rest
    return Code(code.function, steps, starts, ends)
