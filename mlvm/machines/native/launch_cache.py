"""Cache of launches by message bytes; cached launches run without Python.

A server has one cache per client. An entry consists of a call and the arrays on which it runs. All
entries are dropped when a handle may refer to a different array, or the function table changes.
"""

from __future__ import annotations

from mlvm.core.machine.link import CALL_ON_ARGS, HALT, LinkedCode
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.types import TensorType
from mlvm.core.vm import VM
from mlvm.machines.native._native import MOST_HANDLES, Bound, Pool, run_launches
from mlvm.machines.native.loop import bound_code, call_of


class LaunchCache:
    """Cache of the launches of a client of a VM; kernels share the threads of `pool`."""

    def __init__(self, vm: VM, pool: Pool) -> None:
        self._vm = vm
        self._lock = vm._lock
        self._pool = pool
        self._bound: dict[bytes, Bound] = {}
        self._programs: set[bytes] = set()  # numbers of the programs in the cache
        self._version = -1

    def run(self, buffer: memoryview, start: int, end: int) -> tuple[int, int]:
        """Run launches that are in the cache, starting at `start`.

        Return the start of the next message, and the number of launches that ran.
        """
        functions = self._vm.functions
        if not self._bound or functions.instrument is not None or "launch" in vars(self._vm):
            return start, 0  # launches are observed, or the cache is empty
        with self._lock:
            if functions.version != self._version:
                self._clear()
            return run_launches(self._pool, buffer, start, end, self._bound)

    def add(self, body: bytes, program: Program, args: tuple[TensorHandle, ...]) -> None:
        """Add the launch with this body if it is a single call of a native kernel on arguments."""
        with self._lock:
            self._add(body, bound_code(self._vm, program, args, self._bound)[0])

    def forget(self, number: int) -> None:
        """Drop the launches of a program number that is no longer valid."""
        with self._lock:
            if 0 <= number < 1 << 64 and number.to_bytes(8, "little") in self._programs:
                self._clear()

    def _clear(self) -> None:
        self._bound.clear()
        self._programs.clear()

    def _add(self, body: bytes, code: LinkedCode | None) -> None:
        steps = code.steps if code is not None else ()
        if len(steps) != 2 or steps[0][0] != CALL_ON_ARGS or steps[1][0] != HALT:
            return
        _, binding, arrays, attributes = steps[0]
        types = [TensorType.of(x) for x in arrays]
        call = call_of(binding.callee.kernel, types, attributes or NO_ATTRIBUTES)
        if call is None or len(arrays) >= MOST_HANDLES:
            return
        if len(self._bound) >= 1 << 16 or self._vm.functions.version != self._version:
            self._clear()
        self._version = int(self._vm.functions.version)
        self._bound[body] = Bound(call, tuple(arrays))
        self._programs.add(body[:8])
