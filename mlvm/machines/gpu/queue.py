"""Queue of a device's calls.

An op is planned once per combination of types, prepared once per set of arrays, and launched
without a wait.

Ops share scratch memory, because all calls run in order. An op that has no kernel on the device
runs on the host: the operands are read, which waits, and the result is sent. `counts` contains the
number of these ops, and traces show them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlvm.core.errors import OutOfMemoryError
from mlvm.core.memo import Memo, exact_repr
from mlvm.core.op import OPS, Attributes, Kernel, Op
from mlvm.core.ops import half
from mlvm.core.types import ALIGNMENT, Array, TensorType
from mlvm.machines.gpu import (  # noqa: F401 (registers their kernels)
    elementwise,
    indexing,
    merge_sort,
    moves,
    norms_pools,
    products,
    random,
    reductions,
)
from mlvm.machines.gpu.chains import Judged, OnHost, Step, steps_of, steps_of_chain
from mlvm.machines.gpu.checks import Note
from mlvm.machines.gpu.kernels import REFUSED, Argument, Call, Scratch
from mlvm.machines.gpu.memory import DeviceArray, DeviceMemory

Launch: TypeAlias = Callable[[], object]


class DevicePlan(NamedTuple):
    """Plan for certain types: steps, offsets in scratch memory, and total size."""

    steps: list[Step]
    offsets: dict[str, int]
    nbytes: int


class Ready:
    """Calls bound to certain arrays, which can be launched repeatedly.

    The last of `launches` has the number `at`. `keeps` are objects that these calls keep alive.
    """

    def __init__(self, launches: list[Launch], keeps: Any) -> None:
        self.launches = launches
        self.at = 0
        self._kernels = sum([not isinstance(each, _HostCall | _Noted) for each in launches])
        self._keeps = keeps

    @property
    def notes(self) -> list[Note]:
        """Return the records of the calls that may reject values."""
        return [each.note for each in self.launches if isinstance(each, _Noted)]

    def launch(self, memory: DeviceMemory) -> None:
        """Launch the calls without a wait. Raises the errors of ops that run on the host."""
        with memory:
            for self.at, launch in enumerate(self.launches):  # noqa: B020
                launch()
        memory.counts.launches += self._kernels


class DeviceQueue:
    """Queue of the ops of a VM for its device.

    host: kernels for ops that have no kernel on the device
    """

    def __init__(self, memory: DeviceMemory, host: Mapping[str, Kernel]) -> None:
        self.memory = memory
        self._host = host
        self._plans: Memo[Any, DevicePlan] = Memo(4096, "machines.gpu plans")
        self._scratch: Any = None

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels by op name, and the kernel of chains."""
        of_ops = {name: QueuedKernel(self, op) for name, op in OPS.items()}
        return {"fused": QueuedKernel(self), **of_ops}

    # --- plans ---

    def plan(
        self, key: Any, arrays: Sequence[Any], steps: Callable[[list[TensorType]], list[Step]]
    ) -> DevicePlan:
        """Return the plan for a key, which includes the types."""

        def make() -> DevicePlan:
            new = steps([TensorType.of(x) for x in arrays])
            return DevicePlan(new, *_laid_out(new))

        return self._plans.get(key, make)

    def compile(self, plans: Sequence[DevicePlan]) -> None:
        """Compile the sources of these plans, together if possible."""
        prelude = elementwise.prelude(self.memory.driver.facts)
        calls = [each for plan in plans for each in plan.steps if isinstance(each, Call)]
        chains = [call.source for call in calls if call.source.startswith(prelude)]
        if len(chains) > 1:
            with self.memory:
                self.memory.driver.compile(prelude, chains)

    def scratch(self, nbytes: int) -> Any:
        """Return memory of at least `nbytes` bytes, which all ops share."""
        if self._scratch is None or self._scratch.size < nbytes:
            nbytes_now = max(
                nbytes, 2 * self._scratch.size if self._scratch is not None else 1 << 16
            )
            try:
                self._scratch = self.memory.empty(nbytes_now)
            except MemoryError as error:
                raise OutOfMemoryError(
                    f"{nbytes_now:,} bytes of scratch memory: {error}; free tensors"
                ) from None
        return self._scratch

    def ready(self, plan: DevicePlan, arrays: Sequence[Any]) -> Ready:
        """Return the plan bound to these arrays."""
        steps, offsets, size = plan
        scratch: Any = self.scratch(size) if size else None

        def place(x: Argument, type: TensorType | None = None) -> Any:
            if isinstance(x, int):
                return arrays[x]
            assert isinstance(x, Scratch)
            at = offsets[x.name]
            part = scratch[at : at + x.nbytes]
            return part if type is None else part.view(type.dtype.numpy).reshape(type.array_shape)

        launches: list[Launch] = []
        for step in steps:
            if isinstance(step, OnHost):
                operands = [place(x, type) for x, type in zip(step.args, step.types, strict=True)]
                launches.append(_HostCall(self, step, operands))
                continue
            flag = None
            call = step
            if isinstance(step, Judged):
                call = step.call
                slot, flag = self.memory.refusals.take()
                note = Note(step.op, step.attributes, step.types, step.judges, slot)
                weakref.finalize(note, self.memory.refusals.give_back, slot)
                launches.append(_Noted(self.memory, note))
            assert isinstance(call, Call)
            launch = self._launch(call, place, flag)
            if launch is not None:
                launches.append(launch)
        return Ready(launches, (list(arrays), scratch))

    def _launch(self, call: Call, place: Callable[[Any], Any], flag: Any) -> Launch | None:
        args: list[Any] = []
        tensors: list[DeviceArray] = []
        for x in call.args:
            if isinstance(x, np.generic):
                args.append(x)
                continue
            array = flag if x is REFUSED else place(x)
            tensors.append(array)
            args += [array.buffer.raw, np.int64(array.offset)]
        if call.begins and tensors[0].address == tensors[1].address:
            return None
        with self.memory:
            return self.memory.driver.ready(call, tuple(args))

    # --- launches ---

    def on_host(self, step: OnHost, arrays: Sequence[Any]) -> None:
        """Run the op's kernel on the host, on copies, and send the result."""
        result = np.empty(arrays[0].shape, arrays[0].dtype)
        operands = self.memory.read_all(arrays[1:])
        self._call_host(step.op, [result, *operands], step.attributes)
        self.memory.write(arrays[0], result)

    def dynamic(self, op: Op, arrays: Sequence[Any], attributes: Attributes) -> Array:
        """Run an op with a value-dependent result type on the host."""
        return self._call_host(op, self.memory.read_all(arrays), attributes)  # type: ignore[no-any-return]

    def _call_host(self, op: Op, arrays: list[Array], attributes: Attributes) -> Any:
        self.memory.counts.host_ops += 1
        kernel = self._host.get(op.name, op.kernel)
        with np.errstate(all="ignore"):
            return half.suited(op, kernel, arrays)(*arrays, **attributes)


class _Noted:
    """Marker among launches: the next call may reject values.

    A launch that fails later, or waits in between, must not drop it.
    """

    def __init__(self, memory: DeviceMemory, note: Note) -> None:
        self._memory, self.note = memory, note

    def __call__(self) -> None:
        self._memory.refusals.note(self.note)


class _HostCall:
    """Call of an op on the host, among launches."""

    def __init__(self, queue: DeviceQueue, step: OnHost, arrays: list[Any]) -> None:
        self._queue, self._step, self._arrays = queue, step, arrays

    def __call__(self) -> None:
        self._queue.on_host(self._step, self._arrays)


class QueuedKernel:
    """Kernel of an op (None: of chains) that launches the device's calls."""

    takes_halves = True

    def __init__(self, queue: DeviceQueue, op: Op | None = None) -> None:
        self._queue, self._op = queue, op

    def plan(self, arrays: Sequence[Any], attributes: Attributes) -> DevicePlan:
        queue, op = self._queue, self._op
        chain: Any = attributes.get("chain")
        what = chain.attributes() if op is None else (op.name, dict(attributes))

        def steps(types: list[TensorType]) -> list[Step]:
            facts = queue.memory.driver.facts
            if op is None:
                return steps_of_chain(facts, chain, types)
            return steps_of(facts, op, types, attributes, range(len(types)))

        key = exact_repr(what), tuple([(x.dtype, x.shape) for x in arrays])
        return queue.plan(key, arrays, steps)

    def __call__(self, *arrays: Any, **attributes: Any) -> Any:
        if self._op is not None and self._op.dynamic:
            return self._queue.dynamic(self._op, arrays, attributes)
        self._queue.ready(self.plan(arrays, attributes), arrays).launch(self._queue.memory)
        return None


def _laid_out(steps: Sequence[Step]) -> tuple[dict[str, int], int]:
    """Place the parts of steps in scratch memory; return offsets and the total size."""
    offsets: dict[str, int] = {}
    size = 0
    for step in steps:
        args = step.call.args + step.args if isinstance(step, Judged) else step.args
        for x in args:
            if isinstance(x, Scratch) and x.name not in offsets:
                offsets[x.name] = size
                size += -(-max(x.nbytes, 1) // ALIGNMENT) * ALIGNMENT
    return offsets, size
