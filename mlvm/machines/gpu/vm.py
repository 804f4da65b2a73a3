"""VM with tensors and kernels on a device: `ml.VM(device="opencl:0")`.

Each storage is a buffer of the device. The device executes all calls in order; only a read waits
for it. Consecutive calls of a program are prepared when the program is bound to arguments, so a
launch only enqueues them. Values are read if the program's control flow needs them, and for ops
that have no kernel on the device and run on the host.

Host functions in Python receive copies of the operands on the host. Written operands and results
are copied back to the device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from mlvm.core.errors import HandleError, MachineError
from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import (
    NO_KERNELS,
    Callee,
    Kernels,
    OpFresh,
    UserFunction,
    Value,
    is_tensor,
)
from mlvm.core.machine.frame import PythonFunction
from mlvm.core.machine.functions import FunctionTable, Instrument
from mlvm.core.machine.link import CALL_ON_ARGS, JUMP, JUMP_IF_FALSE, LinkedCode, Step
from mlvm.core.machine.run import State
from mlvm.core.memory import HOST
from mlvm.core.op import NO_ATTRIBUTES, OPS, Attributes
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.sizes import parse_size
from mlvm.core.types import Array, TensorType, check_array, u8
from mlvm.core.vm import VM
from mlvm.machines import residuals
from mlvm.machines.gpu.devices import driver_of
from mlvm.machines.gpu.memory import Counts, DeviceMemory
from mlvm.machines.gpu.queue import DeviceQueue, QueuedKernel, Ready
from mlvm.machines.local import LocalVM


class GpuVM(LocalVM):
    """VM with tensors on a device, created by `ml.VM(name, device="opencl:0")`.

    Each device needs a separate VM. It has no threads, workers or C functions, and does not lend
    memory. `counts` contains the number of launches, transfers and waits of the host.

    Raises `MissingExtraError` without the package that the device needs. Raises `MachineError` for
    a device that does not exist and for options of the processor. Raises `UnknownFunctionError` for
    a kernel of an unknown op.
    """

    memory: DeviceMemory

    def __init__(
        self,
        name: str | None = None,
        *,
        device: str,
        checked: bool = True,
        workers: int = 0,
        threads: int = 1,
        pinned: bool = False,
        native: bool | None = None,
        kernels: Kernels = NO_KERNELS,
        memory: int | str | None = None,
    ) -> None:
        options = ("workers", workers, 0), ("threads", threads, 1), ("pinned", pinned, False)
        for option, value, default in (*options, ("native", native, None)):
            if value != default:
                refusal = f"{option}={value!r} requires a VM on the processor"
                raise MachineError(f"{refusal}, got a VM on {device}")
        limit = None if memory is None else parse_size(memory, "VM(memory=)")
        of_device = DeviceMemory(driver_of(device))
        self._host = LocalVM(f"host of {device}")
        residuals.register(self._host)  # in Python: its functions accept any arrays
        callees = [self._host.functions.binding(name).callee for name in OPS]
        fills = {each.op.name: each.fill for each in callees if isinstance(each, OpFresh)}
        self.queue = DeviceQueue(of_device, fills)
        table = {**self.queue.kernels(), **kernels}
        VM.__init__(self, name, checked=checked, kernels=table, run=reference.run, memory=of_device)
        of_device.name = self.name
        self._store.limit = limit
        self._equip(native=False, threads=1)

    def _equip(self, *, native: bool, threads: int) -> None:
        """Register the functions of residuals, lanes and checks, which run on the host."""
        self.native, self.threads = native, threads
        self.fast_path = self._pool = None
        table = self._host.functions
        self.register_callees(
            {name: table.binding(name).callee for name in {*table} - {*self.functions}}
        )

    @property
    def counts(self) -> Counts:
        """Numbers of launches, transfers and waits since the VM was created."""
        return self.memory.counts

    def __repr__(self) -> str:
        return f"<VM {self.name!r} on {self.memory.device}>"

    def register_callees(self, callees: Mapping[str, Callee]) -> None:
        """Register a function as any VM does. Functions in Python receive copies on the host."""
        super().register_callees(
            {
                name: _HostFunction(callee, self) if isinstance(callee, PythonFunction) else callee
                for name, callee in callees.items()
            }
        )

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        with self._lock, self.memory:
            if self.depth == 0:
                self.memory.refusals.begin()
            try:
                return super().launch(program, args, max_steps=max_steps)
            except Failed as failed:
                raise failed.explained() from None
            finally:
                self.memory.driver.flush()

    def _outputs(self, stack: list[Value]) -> list[Array]:
        return self.memory.read_all(list(filter(is_tensor, stack)))

    def _bind(
        self, program: Program, args: tuple[TensorHandle, ...]
    ) -> tuple[LinkedCode, tuple[Array, ...]]:
        code, operands = super()._bind(program, args)
        if self.functions.instrument is not None:  # it must observe each call
            return code, operands
        bound = stretched(code, self.functions, self.queue), operands
        self._linked[id(program)].bound[args] = bound
        return bound

    def _watch(self, instrument: Instrument | None) -> None:
        super()._watch(instrument)
        if instrument is None:
            self._forget_links()  # otherwise, earlier prepared calls would stay unused

    def write(self, handle: TensorHandle, array: Array) -> None:
        """Write without waiting.

        The device copies pinned memory (`pinned_zeros`) directly while it computes. The copy does
        not wait for launches, because a launch may wait for the writer.
        """
        if not self.memory.is_pinned(array):
            super().write(handle, array)
            return
        entry = self._store.entry(handle)
        check_array(array, entry.type, f"write to {entry.type}")
        self.memory.write(entry.array, array)

    def make_writable(self, handles: Sequence[TensorHandle]) -> None:
        """Wait until the host memory that was last written to the tensors may change.

        Raises `HandleError`.
        """
        for handle in handles:
            self.memory.wait_for_copy(self._store.entry(handle).array)

    def pinned_zeros(self, nbytes: int) -> Array:
        """Return a u8 array of zeros on the host, which `write` copies asynchronously.

        The caller may change it again after `make_writable` of the tensor.
        """
        return self.memory.pinned_zeros(nbytes)

    def synchronize(self) -> None:
        """Wait until the device has finished all work.

        Raises the error of a value that a kernel has rejected.
        """
        self.memory.synchronize()
        with self._lock:  # launches in between would be recorded without reading their flags
            self.memory.settle()

    def borrow(self, handle: TensorHandle) -> NoReturn:
        """Raise `HandleError`: memory of a device is not an array of the host."""
        raise HandleError(f"{self._mine(self.type_of(handle))}; use read")

    def storage_over(self, memory: Array) -> NoReturn:
        """Raise `HandleError`: a storage is allocated on the device."""
        raise HandleError(f"{self._mine(TensorType(u8, (0,)))}, not in host memory")

    def share(self, handle: TensorHandle, other: VM) -> TensorHandle:
        """Raise `HandleError`: a different VM would not wait for the device."""
        if other is not self:
            raise HandleError(
                f"{self._mine(self.type_of(handle))}, and not shared with {other.name}, "
                f"which does not wait for {self.name}: copy with read and write"
            )
        return super().share(handle, other)

    def _mine(self, type: TensorType) -> str:
        return f"{type} of {self.name} is on {self.memory.device}"

    def register_library(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise `MachineError`: C functions access host memory."""
        raise MachineError(
            f"C functions access host memory, but {self.name} is on {self.memory.device}: "
            f"register Python functions, which receive copies"
        )

    def launch_cache(self) -> None:
        """Return None: Python performs each launch."""


class _HostFunction(UserFunction):
    """Function in Python that receives copies of the operands on the host."""

    def __init__(self, callee: PythonFunction, vm: GpuVM) -> None:
        super().__init__(callee.name, callee.nparams, callee.nresults, callee.reads)
        self._callee = callee
        self._vm: GpuVM = weakref.proxy(vm)
        callee.memory = HOST

    def call(self, params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        memory, self._vm._host.depth = self._vm.memory, self._vm.depth
        places = [i for i, x in enumerate(params) if is_tensor(x)]
        copies = memory.read_all([params[i] for i in places])
        host_params: list[Any] = list(params)
        for i, copy in zip(places, copies, strict=True):
            host_params[i] = copy
        written = [
            i for i in places if self.reads is None or i not in range(len(params))[self.reads]
        ]
        before = {i: host_params[i].copy() for i in written}
        results = self._callee.call(host_params, attributes)
        for i in written:
            if host_params[i].tobytes() != before[i].tobytes():
                memory.write(params[i], host_params[i])
        return [memory.copy(x) if is_tensor(x) else x for x in results]


class Failed(BaseException):
    """Error of a call in a stretch, in transit through the machine's loop.

    The loop does not know the location of the call.
    """

    def __init__(self, error: Exception, code: LinkedCode, step: int) -> None:
        super().__init__(error)
        self.error = error
        self._code, self._step = code, step

    def explained(self) -> Exception:
        """Return the error with the location that the reference loop adds."""
        return reference.explain(self.error, State([], [], self._code, self._step))


class Stretch:
    """Stretch of calls on arguments of the launch: steps `start` .. `end - 1` of a bound program.

    It has the signature of a bound kernel.
    """

    def __init__(
        self, code: LinkedCode, start: int, end: int, functions: FunctionTable, queue: DeviceQueue
    ) -> None:
        self._code = code
        self._start, self._end = start, end
        self._functions = functions
        self._version = int(functions.version)
        self._queue = queue
        self._ready: Ready | None = None
        self._steps: list[int] = []  # number of the step of each launch

    def kernel(self) -> None:
        """Launch the calls. Raises `Failed`."""
        if int(self._functions.version) != self._version:  # the function table has changed
            self._call_each()
            return
        ready = self._ready or self._made_ready()
        try:
            ready.launch(self._queue.memory)
        except Exception as error:
            raise Failed(error, self._code, self._steps[ready.at]) from None

    def _call_each(self) -> None:
        for at in range(self._start, self._end):
            _, binding, arrays, rest = self._code.steps[at]
            try:
                binding.kernel(*arrays, **(rest or NO_ATTRIBUTES))
            except Exception as error:
                raise Failed(error, self._code, at) from None

    def _made_ready(self) -> Ready:
        launches, keeps, plans = [], [], []
        at = self._start
        try:
            for at in range(self._start, self._end):
                _, binding, arrays, rest = self._code.steps[at]
                plans.append(binding.callee.kernel.plan(arrays, rest or NO_ATTRIBUTES))
            self._queue.compile(plans)
            for at, plan in enumerate(plans, self._start):
                ready = self._queue.ready(plan, self._code.steps[at][2])
                for note in ready.notes:
                    note.explained = partial(self._explained, at)
                launches += ready.launches
                keeps.append(ready)
                self._steps += [at] * len(ready.launches)
        except Exception as error:
            raise Failed(error, self._code, at) from None
        self._ready = Ready(launches, keeps)
        return self._ready

    def _explained(self, step: int, error: Exception, line: str | None) -> Exception:
        return reference.explain(error, State([], [], self._code, step), line=line)


def _is_ahead(step: Step) -> bool:
    """Return whether the step calls a kernel of the device."""
    code, binding, _, _ = step
    callee = getattr(binding, "callee", None)
    return code == CALL_ON_ARGS and isinstance(getattr(callee, "kernel", None), QueuedKernel)


def stretched(code: LinkedCode, functions: FunctionTable, queue: DeviceQueue) -> LinkedCode:
    """Return the bound program with each stretch replaced by one step."""
    targets = {step[2] for step in code.steps if step[0] in (JUMP, JUMP_IF_FALSE)}
    steps: list[Step] = []
    starts: list[int] = []
    ends: list[int] = []
    place: dict[int, int] = {}
    at = 0
    while at < len(code.steps):
        end = at
        while end < len(code.steps) and _is_ahead(code.steps[end]):
            end += 1
            if end in targets:
                break
        place[at] = len(steps)
        starts.append(code.starts[at])
        if end == at:
            end = at + 1
            steps.append(code.steps[at])
        else:
            steps.append((CALL_ON_ARGS, Stretch(code, at, end, functions, queue), (), None))
        ends.append(code.ends[end - 1])
        at = end
    for i, (kind, value, number, rest) in enumerate(steps):
        if kind in (JUMP, JUMP_IF_FALSE):
            steps[i] = kind, value, place[number], rest
    return LinkedCode(code.function, steps, starts, ends)


LocalVM.on_device = GpuVM
