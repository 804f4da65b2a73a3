"""CUDA graphs: kernels that a program calls in a row, launched by one call.

A stretch is such a row of kernels on arguments of the launch, whose arrays stay the same for as
long as the program is bound to its handles. The first time its kernels are launched one by one.
The second time they are recorded (`cudaStreamBeginCapture`, CUDA C++ Programming Guide, "Creating
a Graph Using Stream Capture"), from the third time on the graph is launched. A graph is forgotten
with the bound program: when a handle names another array, or a name another function.

Jumps, calls, user functions, ops whose result has no known shape and ops that wait for a value are
launched as they are, between stretches. What waits cannot be recorded (`gpu_kernels.WAITS`).

What kernels need for intermediates comes from a pool of its own: a graph uses that memory again
with each launch, and nobody else may have it meanwhile. All graphs of a VM share it, in the order
of its stream.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import Fused, OpInto
from mlvm.core.machine.functions import Binding, FunctionTable
from mlvm.core.machine.link import CALL_ON_ARGS, JUMP, JUMP_IF_FALSE, Code, Step
from mlvm.core.machine.run import State
from mlvm.machines.gpu_kernels import WAITS

_LEAST: Final = 2
"""Kernels of a stretch: one alone is launched as fast as a graph."""


class Stream(Protocol):
    """What records: a memory's stream of CuPy."""

    cupy: Any
    stream: Any


class Graphs:
    """The CUDA graphs of one VM: how many were recorded, and how often one was replayed."""

    def __init__(self, memory: Stream) -> None:
        self.recorded = 0
        self.replayed = 0
        self._cupy = memory.cupy
        self._stream = memory.stream
        self._pool: Any = None

    def apart(self) -> Any:
        """A context in which kernels take memory from the pool of the graphs.

        That pool never gives a block back, as recorded graphs use it: it takes its blocks from the
        pool of tensors, which is out of memory by another error than the one at which a pool gives
        up its blocks."""
        if self._pool is None:
            outer = self._cupy.get_default_memory_pool()
            self._pool = self._cupy.cuda.MemoryPool(outer.malloc)
        return self._cupy.cuda.using_allocator(self._pool.malloc)

    def record(self, stretch: Stretch) -> Any:
        """The graph of the stretch, whose kernels do not run; None if one cannot be recorded."""
        stream = self._stream
        stream.begin_capture()
        try:
            try:
                stretch.launch()
            finally:
                graph = stream.end_capture()
        except (Failed, self._cupy.cuda.runtime.CUDARuntimeError):
            return None  # launched as it is, it will say what is wrong
        self.recorded += 1
        return graph


class Failed(BaseException):
    """An error of a kernel in a stretch, on its way through the machine's loop, which knows
    neither the kernel nor its place."""

    def __init__(self, error: Exception, code: Code, step: int) -> None:
        super().__init__(error)
        self.error = error
        self._state = State([], [], code, step)

    def explained(self) -> Exception:
        """The error, which now knows where it was raised, as the reference loop has it."""
        return reference.explain(self.error, self._state)


class Stretch:
    """The kernels of steps `start` .. `end - 1` of a bound program. It is called as a binding's
    kernel is."""

    def __init__(
        self, code: Code, start: int, end: int, functions: FunctionTable, graphs: Graphs
    ) -> None:
        self._code = code
        self._start = start
        self._calls = [
            (binding, arrays, rest or {}) for _, binding, arrays, rest in code.steps[start:end]
        ]
        self._functions = functions
        self._version = int(functions.version)
        self._graphs = graphs
        self._graph: Any = None
        self._launches = 0

    def kernel(self) -> None:
        """Run the kernels, by a graph from the second time on."""
        graphs, changed = self._graphs, int(self._functions.version) != self._version
        if changed or self._functions.instrument is not None or self._launches < 0:
            self.launch()
            return
        self._launches += 1
        if self._launches == 2:
            with graphs.apart():
                self._graph = graphs.record(self)
            if self._graph is None:
                self._launches = -1
        if self._graph is not None:
            self._graph.launch()
            graphs.replayed += 1
            return
        with graphs.apart():
            self.launch()

    def launch(self) -> None:
        """Call the kernels one by one. Raises `Failed` for the error of one."""
        for i, (binding, arrays, attributes) in enumerate(self._calls, self._start):
            try:
                binding.kernel(*arrays, **attributes)
            except Exception as error:
                raise Failed(error, self._code, i) from None


def _is_recordable(step: Step) -> bool:
    """Whether the step calls an op that can be part of a graph."""
    code, binding, _, rest = step
    if code != CALL_ON_ARGS or not isinstance(binding, Binding):
        return False
    callee = binding.callee
    if isinstance(callee, OpInto):
        return callee.op.name not in WAITS
    if isinstance(callee, Fused):
        return all(link.op.name not in WAITS for link in rest["chain"].links)
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
