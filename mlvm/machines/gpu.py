"""A VM whose tensors lie on a GPU, and whose kernels are CuPy's: `ml.VM("gpu0", device="cuda:0")`.

Each storage is one allocation of CuPy's pool. Values cross in `write` and `read` only; a program's
constants are sent once. All that a VM does is in the order of a stream of its own, and nobody
waits for it but who reads. Kernels that a program calls in a row become one CUDA graph, see
`mlvm.machines.gpu_graphs`; the kernels themselves are in `mlvm.machines.gpu_kernels`.

A queue's slots are pinned memory of the host. They are copied on a second stream, while the first
one computes: it waits for the copy by an event, and the copy for those who used the slot before.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from typing_extensions import TypeIs

from mlvm.core import errors
from mlvm.core.errors import HandleError, MachineError, MlvmError
from mlvm.core.extras import extra
from mlvm.core.machine import run as reference
from mlvm.core.machine.callee import NO_KERNELS, Fused, Kernels
from mlvm.core.machine.functions import Instrument
from mlvm.core.machine.fused import Chain, run_whole
from mlvm.core.machine.link import Code
from mlvm.core.memory import Memory
from mlvm.core.ops.half import is_half
from mlvm.core.program.program import Program
from mlvm.core.protocol import StorageHandle, TensorHandle
from mlvm.core.types import ALIGNMENT, Array, TensorType, check_array, root, u8
from mlvm.core.vm import VM
from mlvm.machines.gpu_graphs import Failed, Graphs, stretched
from mlvm.machines.gpu_kernels import gpu_kernels
from mlvm.machines.local import LocalVM

_NAME: Final = re.compile(r"cuda:(\d{1,4})")
_FIRST: Final = '; for the first GPU write "cuda:0"'
_CUPY: Final = "cupy", "cupy_backends"
"""Packages whose classes of errors are of the driver, the compiler and CUDA's libraries."""


def cupy_module() -> Any:
    """CuPy. Raises `MissingExtra` where it is not installed."""
    return extra("cupy", "cuda")


class Device(NamedTuple):
    """A GPU: the name that `ml.VM(device=)` takes, its maker's name, and its memory in bytes."""

    name: str
    model: str
    nbytes: int


def devices() -> list[Device]:
    """The GPUs of this machine. Raises `MissingExtra` without CuPy, and `MachineError` where CUDA
    finds no driver or no device."""
    cupy = cupy_module()
    runtime = cupy.cuda.runtime
    try:
        found = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        raise MachineError(f"CUDA has no device here: {error}") from None
    if not found:
        raise MachineError("CUDA has no device here")
    told = [(each["name"].decode(), each["totalGlobalMem"]) for each in found]
    return [Device(f"cuda:{i}", *each) for i, each in enumerate(told)]


def _number(device: object) -> int:
    """The number of the GPU with that name. Raises `MachineError` for what is none."""
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    try:
        names = [each.name for each in devices()]
    except (errors.MissingExtra, MachineError):
        if match is not None:
            raise
        here = f"there is cpu, and none of CUDA here{_FIRST}"
        raise MachineError(f"no device {device!r}; {here}") from None
    if match is None or device not in names:
        hint = _FIRST if match is None else ""
        raise MachineError(f"no device {device!r}; there are cpu, {', '.join(names)}{hint}")
    return int(match[1])


def refuse_halves(types: Iterable[TensorType], device: str) -> None:
    """Raise `DTypeError` for f16 and bf16: their conversions work in memory of the host."""
    for type in types:
        if is_half(type):
            raise errors.DTypeError(f"{type}: a VM on {device} has no {type.dtype} yet")


def _fused(*params: Array, chain: Chain) -> None:
    """The kernel of chains, without halves."""
    refuse_halves(chain.layout(params, whole=True).temporaries, "a GPU")
    run_whole(*params, chain=chain)


class GpuMemory(Memory):
    """The memory of one GPU, as one VM uses it: in the order of `stream`.

    As a context manager it makes device and stream current, and an error of CUDA a typed one."""

    def __init__(self, cupy: Any, number: int) -> None:
        self.cupy = cupy
        self.lock = threading.RLock()  # for what must not be issued while a graph is recorded
        self.device = f"cuda:{number}"
        self._device = cupy.cuda.Device(number)
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._copies = cupy.cuda.Stream(non_blocking=True)
        self._constants: dict[int, tuple[weakref.ref[Array], Array]] = {}
        self._constant_roots: set[int] = set()
        self._pinned: set[int] = set()  # ids of arrays
        self._sent: dict[int, Any] = {}  # by the place of a tensor: the event of the copy to it
        self._unused: dict[int, Any] = {}  # the event after which it may be written
        self._on_its_way: deque[tuple[Any, Array]] = deque()  # pinned memory, till that event

    def __enter__(self) -> GpuMemory:
        self._device.__enter__()
        self.stream.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.stream.__exit__(None, None, None)
        self._device.__exit__(None, None, None)
        if isinstance(error, Exception):
            self._raise_typed(error)

    def _raise_typed(self, error: Exception) -> None:
        typed: MlvmError
        if isinstance(error, MlvmError):
            return
        if isinstance(error, MemoryError):
            typed = errors.OutOfMemory(f"{self.device}: {error}")
        elif any(kind.__module__.partition(".")[0] in _CUPY for kind in type(error).__mro__):
            typed = MachineError(f"{self.device}: {error}")
        else:
            return
        for name in ("function", "pc", "step", "__notes__"):
            if hasattr(error, name):
                setattr(typed, name, getattr(error, name))
        raise typed from error

    def _empty(self, nbytes: int) -> Array:
        cupy = self.cupy
        memory: Array = cupy.ndarray((nbytes,), np.uint8, cupy.cuda.alloc(max(nbytes, 1)))
        return memory

    def zeros(self, nbytes: int) -> Array:
        with self:
            memory = self._empty(nbytes)
            memory.fill(0)
            return memory

    def new(self, type: TensorType) -> Array:
        refuse_halves([type], self.device)
        return self.zeros(type.nbytes).view(type.dtype.numpy).reshape(type.shape)

    def copy(self, array: Array) -> Array:
        type = TensorType.of(array)
        refuse_halves([type], self.device)
        with self:
            copy = self._empty(type.nbytes).view(type.dtype.numpy).reshape(type.shape)
            if isinstance(array, np.ndarray):
                self.write(copy, array)
            else:
                copy[...] = array
            return copy

    def constant(self, array: Array) -> Array:
        """The constant's one copy, which lives as long as the program that has it."""
        key = id(array)
        if key not in self._constants:
            copy = self.copy(array)
            self._constants[key] = weakref.ref(array, lambda _: self._drop(key)), copy
            self._constant_roots.add(self.root(copy))
        return self._constants[key][1]

    def _drop(self, key: int) -> None:
        _, copy = self._constants.pop(key)
        self._constant_roots.discard(self.root(copy))

    def read(self, array: Array) -> Array:
        with self.lock, self:
            values: Array = array.get()  # type: ignore[attr-defined]
            self._let_go()
            return values

    def write(self, array: Array, values: Array) -> None:
        """Copy values of the host. What is pinned is copied while the stream computes, and must
        stay as it is until `wait_for_copy`."""
        with self.lock, self:
            if self.is_pinned(values):
                self._send(array, values)
            else:
                values = np.broadcast_to(np.asarray(values, array.dtype), array.shape)
                array.set(values)  # type: ignore[attr-defined]

    def _send(self, array: Array, values: Array) -> None:
        """Copy pinned memory on the second stream, between those who use the tensor before and
        those who use it after."""
        place = array.data.ptr  # type: ignore[attr-defined]
        self._copies.wait_event(self._unused.pop(place, None) or self.stream.record())
        array.set(values, self._copies)  # type: ignore[attr-defined]
        self._sent[place] = sent = self._copies.record()
        self._on_its_way.append((sent, values))
        self.stream.wait_event(sent)

    def _let_go(self) -> None:
        """Let go of the pinned memory that is copied: CuPy hands it out again at once."""
        while self._on_its_way and self._on_its_way[0][0].done:
            self._on_its_way.popleft()

    def forget(self, memory: Array) -> None:
        """What comes to lie in that place has been sent nowhere."""
        first = memory.data.ptr  # type: ignore[attr-defined]
        for events in (self._sent, self._unused):
            for place in list(events):
                if first <= place < first + memory.nbytes:
                    events.pop(place, None)

    def wait_for_copy(self, array: Array) -> None:
        """Wait until the pinned memory that was last written to the tensor may change. The next
        write to the tensor waits for what uses it now, and for nothing that comes later."""
        place = array.data.ptr  # type: ignore[attr-defined]
        with self.lock, self:
            sent = self._sent.pop(place, None)
            if sent is not None:
                sent.synchronize()
                self._let_go()
            self._unused[place] = self.stream.record()

    def pinned_zeros(self, nbytes: int) -> Array:
        """A u8 array of zeros in pinned memory of the host, aligned to 64 bytes."""
        with self.lock, self:
            self._let_go()
            pinned = self.cupy.cuda.alloc_pinned_memory(nbytes + ALIGNMENT)
        memory = np.frombuffer(pinned, np.uint8, nbytes + ALIGNMENT)
        memory[:] = 0
        key = id(memory)
        self._pinned.add(key)
        weakref.finalize(memory, self._pinned.discard, key)
        skip = -memory.ctypes.data % ALIGNMENT
        return memory[skip : skip + nbytes]

    def is_pinned(self, array: Array) -> bool:
        """Whether the array lies in `pinned_zeros`."""
        return id(root(array)) in self._pinned

    def root(self, array: Array) -> int:
        return id(array.data.mem)  # type: ignore[attr-defined]

    def is_array(self, value: object) -> TypeIs[Array]:
        return isinstance(value, (np.ndarray, self.cupy.ndarray))

    def writable(self, array: Array) -> bool:
        return self.root(array) not in self._constant_roots

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        with self.lock, self:
            self.stream.synchronize()
            self._let_go()


class GpuVM(LocalVM):
    """A VM with its tensors on a GPU, which runs the kernels of `mlvm.machines.gpu_kernels`.

    `ml.VM(name, device="cuda:0")` makes it. Several GPUs are several VMs. It has no threads, no
    workers and no C functions, and lends no memory. A host function in Python gets CuPy's arrays.
    `graphs` counts the CUDA graphs that were recorded and replayed.

    Raises `MissingExtra` without CuPy, `MachineError` for a device that there is not and for
    options of the processor, `UnknownFunction` for a kernel of no op.
    """

    memory: GpuMemory

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
    ) -> None:
        options = ("workers", workers, 0), ("threads", threads, 1), ("pinned", pinned, False)
        for option, given, default in (*options, ("native", native, None)):
            if given != default:
                said = f"{option}={given!r} is for a VM on the processor"
                raise MachineError(f"{said}, and this one is on {device}")
        number = _number(device)
        cupy = cupy_module()
        memory = GpuMemory(cupy, number)
        with memory:
            kernels = {**gpu_kernels(cupy), Fused.name: _fused, **kernels}
        self.graphs = Graphs(cupy, memory.stream, memory.lock)
        VM.__init__(self, name, checked=checked, kernels=kernels, run=reference.run, memory=memory)
        self._equip(native=False, threads=1)

    def __repr__(self) -> str:
        return f"<VM {self.name!r} on {self.memory.device}>"

    def alloc_tensor(self, type: TensorType) -> TensorHandle:
        """As for any VM. Raises `DTypeError` for f16 and bf16."""
        refuse_halves([type] if isinstance(type, TensorType) else (), self.memory.device)
        return super().alloc_tensor(type)

    def tensor_from_storage(
        self, storage: StorageHandle, type: TensorType, offset: int
    ) -> TensorHandle:
        """As for any VM. Raises `DTypeError` for f16 and bf16."""
        refuse_halves([type] if isinstance(type, TensorType) else (), self.memory.device)
        return super().tensor_from_storage(storage, type, offset)

    def launch(
        self, program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        with self._lock, self.memory:
            try:
                return super().launch(program, args, max_steps=max_steps)
            except Failed as failed:
                raise failed.explained() from None

    def _bind(
        self, program: Program, args: tuple[TensorHandle, ...]
    ) -> tuple[Code, tuple[Array, ...]]:
        code, operands = super()._bind(program, args)
        bound = stretched(code, self.functions, self.graphs), operands
        self._linked[id(program)].bound[args] = bound
        return bound

    def _watch(self, instrument: Instrument | None) -> None:
        super()._watch(instrument)
        if instrument is None:
            self._forget_links()  # else graphs that were bound before would stay unused

    def write(self, handle: TensorHandle, array: Array) -> None:
        """As for any VM; pinned memory (`pinned_zeros`) is copied while the device computes, and no
        launch is waited for: a program may itself wait for who writes."""
        if not isinstance(array, np.ndarray) or not self.memory.is_pinned(array):
            super().write(handle, array)
            return
        entry = self._store.entry(handle)
        check_array(array, entry.type, f"write to {entry.type}")
        self.memory.write(entry.array, array)

    def make_writable(self, handles: Sequence[TensorHandle]) -> None:
        """Wait until the host's memory that was last written to the tensors is copied, and may
        change. Raises `HandleError`."""
        for handle in handles:
            self.memory.wait_for_copy(self._store.entry(handle).array)

    def pinned_zeros(self, nbytes: int) -> Array:
        """A u8 array of zeros of the host, which `write` copies while the device computes: it may
        change again after `make_writable` of the tensor."""
        return self.memory.pinned_zeros(nbytes)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self.memory.synchronize()

    def borrow(self, handle: TensorHandle) -> NoReturn:
        """Raises `HandleError`: memory of a device is no array of the host."""
        raise HandleError(f"{self._mine(self.type_of(handle))}; use read")

    def storage_over(self, memory: Array) -> NoReturn:
        """Raises `HandleError`: a storage lies on the device."""
        raise HandleError(f"{self._mine(TensorType(u8, (0,)))}, not in memory of the host")

    def share(self, handle: TensorHandle, other: VM) -> TensorHandle:
        """Raises `HandleError` for any other VM: each has a stream of its own, and neither waits
        for the other before it reads, writes or gives back memory."""
        if other is not self and isinstance(other, GpuVM):
            raise HandleError(
                f"{self._mine(self.type_of(handle))}, and not shared with {other.name}, "
                f"which does not wait for {self.name}: read it and write it there"
            )
        return super().share(handle, other)

    def _mine(self, type: TensorType) -> str:
        return f"{type} of {self.name} is on {self.memory.device}"

    def register_library(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raises `MachineError`: C functions work in memory of the host."""
        raise MachineError(
            f"C functions work in memory of the host, and {self.name} is on {self.memory.device}: "
            f"register Python functions, which get CuPy's arrays"
        )

    def known_launches(self) -> None:
        """None: each launch is Python's."""


LocalVM.on_device = GpuVM
