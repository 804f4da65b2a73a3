"""Memory of a device: a buffer for each storage, and arrays with offsets in buffers.

Only `read` and `write` transfer values. A write copies the values asynchronously, or directly from
pinned memory. A read waits for all earlier work of the device.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from typing_extensions import TypeIs

from mlvm.core.errors import MachineError, MlvmError, OutOfMemoryError
from mlvm.core.memory import Memory
from mlvm.core.observe import on_wait
from mlvm.core.ops.half import shown
from mlvm.core.types import Array, Shape, TensorType, root
from mlvm.machines.gpu.checks import Refusals
from mlvm.machines.gpu.kernels import Call, Facts

_PLACES: Final = itertools.count(1)
_APART: Final = 1 << 64
"""Distance between the numbers of two buffers: more than the bytes of any buffer."""


class Lost(Exception):
    """Error of a device that no longer responds."""


class Driver(Protocol):
    """Protocol of a device's interface. It runs calls in order, except `send_beside`.

    Raises `MemoryError` without memory, `Lost` for a lost device, else `MachineError`.
    """

    device: str
    facts: Facts
    nbytes: int

    def alloc(self, nbytes: int) -> Any:
        """Allocate `nbytes` bytes, and at least one."""

    def zero(self, memory: Any, offset: int, nbytes: int) -> None: ...
    def copy(self, memory: Any, offset: int, source: Any, start: int, nbytes: int) -> None: ...
    def send(self, memory: Any, offset: int, values: Array) -> None:
        """Start to copy packed values, which must not change until the copy is finished."""

    def send_beside(self, memory: Any, offset: int, values: Array, after: Any) -> Any:
        """Send asynchronously, after the event; later commands wait for it.

        Returns the event for the end of the copy.
        """

    def fetch(self, transfers: Sequence[tuple[Array, Any, int]]) -> None:
        """Copy to packed host arrays from memory at the given offsets, and wait.

        It also waits for all earlier requests.
        """

    def typed(self, error: Exception) -> Exception | None:
        """Return the error as one of the classes above, if the driver raised it."""

    def event(self) -> Any:
        """Return an event for the completion of all requests so far."""

    def wait_for(self, event: Any) -> None: ...
    def finish(self) -> None: ...
    def flush(self) -> None:
        """Make the device start pending work."""

    def pinned(self, nbytes: int) -> Array:
        """Return a u8 array in pinned host memory."""

    def compile(self, prelude: str, texts: Sequence[str]) -> None:
        """Compile sources with the same start together, if this is faster."""

    def ready(self, call: Call, args: tuple[Any, ...]) -> Callable[[], object]:
        """Return a function that launches a call's kernel on arguments.

        The arguments are numpy scalars. A tensor is two arguments: the memory and an i64.
        """


@dataclass(eq=False, slots=True)
class DeviceBuffer:
    """Block of the device's memory. `place` represents its address."""

    raw: Any
    nbytes: int
    place: int
    memory: DeviceMemory
    is_constant: bool = False

    def __post_init__(self) -> None:
        self.memory.holds(self.nbytes)

    def __del__(self) -> None:
        self.memory.holds(-self.nbytes)


@dataclass(frozen=True, slots=True)
class _Flags:
    c_contiguous: bool = True


class DeviceArray:
    """Packed array in the memory of a device.

    It implements the part of the ndarray interface that the machine uses. `DeviceMemory.read`
    copies the elements to the host.
    """

    __slots__ = ("__weakref__", "buffer", "dtype", "offset", "shape", "size")

    flags: Final = _Flags()

    def __init__(
        self, buffer: DeviceBuffer, offset: int, dtype: np.dtype[Any], shape: Shape
    ) -> None:
        self.buffer = buffer
        self.offset = offset
        self.dtype = dtype
        self.shape = shape
        self.size = math.prod(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """The address of the first byte, unique among all devices of this process."""
        return self.buffer.place + self.offset

    def __getitem__(self, part: slice) -> DeviceArray:
        """Return a part of an array of bytes."""
        start, stop, _ = part.indices(self.size)
        return DeviceArray(
            self.buffer, self.offset + start * self.itemsize, self.dtype, (max(stop - start, 0),)
        )

    def view(self, dtype: Any = None) -> DeviceArray:
        """Return the same bytes; a one-dimensional array may have a different dtype."""
        if dtype is None or np.dtype(dtype) == self.dtype:
            return DeviceArray(self.buffer, self.offset, self.dtype, self.shape)
        dtype = np.dtype(dtype)
        return DeviceArray(self.buffer, self.offset, dtype, (self.nbytes // dtype.itemsize,))

    def reshape(self, *shape: Any) -> DeviceArray:
        lengths: Shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return DeviceArray(self.buffer, self.offset, self.dtype, lengths)

    def item(self) -> Any:
        """Return the value of the only element, after waiting for it."""
        return shown(self.buffer.memory.read(self)).item()

    def __array__(self, *_: object, **__: object) -> Array:
        raise MachineError(
            f"an array of {self.buffer.memory.device} is not in host memory; copy it with vm.read"
        )

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function is np.may_share_memory:
            return self._meets(*args)
        return NotImplemented

    @staticmethod
    def _meets(x: Any, y: Any) -> bool:
        return (
            isinstance(x, DeviceArray)
            and isinstance(y, DeviceArray)
            and x.buffer is y.buffer
            and x.offset < y.offset + y.nbytes
            and y.offset < x.offset + x.nbytes
        )

    def __repr__(self) -> str:
        return f"<{TensorType(self.dtype, self.shape)} on {self.buffer.memory.device}>"


@dataclass
class Counts:
    """Counters of a VM on a device.

    They count kernel launches, transfers and bytes in each direction, waits of the host, and ops
    that ran on the host.
    """

    launches: int = 0
    sent: int = 0
    sent_bytes: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    waits: int = 0
    host_ops: int = 0


class DeviceMemory(Memory):
    """Memory of a device, used by one VM.

    When the host waits, it checks whether kernels have rejected values. `held` is the number of
    bytes in all buffers, and `peak` is the maximum of `held`.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.device = driver.device
        self.name = driver.device
        self.counts = Counts()
        self.lost: str | None = None
        self.lock = threading.RLock()
        self.allocated = self.peak = 0
        self.refusals = Refusals(self)
        self._constants: dict[int, tuple[weakref.ref[Array], Any]] = {}
        self._pinned: set[int] = set()  # ids of arrays
        self._sent: dict[int, Any] = {}  # event of the copy, by the address of the tensor
        self._unused: dict[int, Any] = {}  # event after which a tensor may be written

    def __enter__(self) -> DeviceMemory:
        if self.lost is not None:
            raise MachineError(f"{self.device} and this VM are lost: {self.lost}; create a new VM")
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, MlvmError):
            return
        typed = error if isinstance(error, Lost) else self.driver.typed(error)
        if isinstance(typed, Lost):
            self.lost = str(typed)
            raise MachineError(
                f"{self.device} and this VM are lost: {typed}; create a new VM"
            ) from error
        if typed is not None:
            raise typed from error

    # --- buffers ---

    def holds(self, nbytes: int) -> None:
        """Count bytes that a buffer has allocated or, if negative, freed."""
        with self.lock:
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)

    def empty(self, nbytes: int) -> Array:
        """Return an uninitialized u8 array. Raises `MemoryError`."""
        with self:
            buffer = DeviceBuffer(self.driver.alloc(nbytes), nbytes, next(_PLACES) * _APART, self)
        return DeviceArray(buffer, 0, np.dtype(np.uint8), (nbytes,))  # type: ignore[return-value]

    def zeros(self, nbytes: int) -> Array:
        array: Any = self.empty(nbytes)
        if nbytes:
            with self:
                self.driver.zero(array.buffer.raw, 0, nbytes)
        return array  # type: ignore[no-any-return]

    def new(self, type: TensorType) -> Array:
        return self.zeros(type.nbytes).view(type.dtype.numpy).reshape(type.array_shape)

    def copy(self, array: Array) -> Array:
        type = TensorType.of(array)
        try:
            copy = self.empty(type.nbytes).view(type.dtype.numpy).reshape(type.array_shape)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"{type} needs {type.nbytes:,} bytes: {error}; free tensors"
            ) from None
        self.write(copy, array)
        return copy

    def constant(self, array: Array) -> Array:
        """Return the only copy of the constant, which is freed together with the program."""
        key = id(array)
        if key not in self._constants:
            copy: Any = self.copy(array)
            copy.buffer.is_constant = True
            self._constants[key] = weakref.ref(array, lambda _: self._drop(key)), copy
        return self._constants[key][1]  # type: ignore[no-any-return]

    def _drop(self, key: int) -> None:
        self._constants.pop(key, None)

    def root(self, array: Any) -> int:
        return id(array.buffer) if isinstance(array, DeviceArray) else super().root(array)

    def is_array(self, value: object) -> TypeIs[Array]:
        return isinstance(value, (np.ndarray, DeviceArray))

    def writable(self, array: Any) -> bool:
        return not (isinstance(array, DeviceArray) and array.buffer.is_constant)

    # --- transfers between host and device ---

    def read(self, array: Any) -> Array:
        return self.read_all([array])[0]

    def read_all(self, arrays: Sequence[Any]) -> list[Array]:
        """Return copies on the host, with one wait. Raises the error of a rejected value."""
        flags = self.refusals.flags
        here = [x for x in arrays if isinstance(x, DeviceArray) and x.size]
        copies = self.fetched([*flags, *here])
        self.refusals.settle(copies[: len(flags)])
        values = iter(copies[len(flags) :])
        return [
            np.array(x)
            if not isinstance(x, DeviceArray)
            else next(values)
            if x.size
            else np.empty(x.shape, x.dtype)
            for x in arrays
        ]

    def fetched(self, arrays: Sequence[Any]) -> list[Array]:
        """Return copies of arrays of the device, without a check for rejected values."""
        copies = [np.empty(x.shape, x.dtype) for x in arrays]
        if copies:
            transfers = [
                (values, x.buffer.raw, x.offset) for values, x in zip(copies, arrays, strict=True)
            ]
            with self:
                self._wait("read", lambda: self.driver.fetch(transfers))
            self.counts.fetched += len(copies)
            self.counts.fetched_bytes += sum([values.nbytes for values in copies])
        return copies

    def write(self, array: Any, values: Any) -> None:
        """Copy values of the host or the device.

        Pinned memory must not change until `wait_for_copy`.
        """
        if not array.size:
            return
        with self:
            if isinstance(values, DeviceArray):
                self.driver.copy(
                    array.buffer.raw, array.offset, values.buffer.raw, values.offset, array.nbytes
                )
                return
            self.counts.sent += 1
            self.counts.sent_bytes += array.nbytes
            if self.is_pinned(values):
                self._send_beside(array, values)
            else:
                packed = np.empty(array.shape, array.dtype)
                np.copyto(packed, np.asarray(values))
                self.driver.send(array.buffer.raw, array.offset, packed)

    def _send_beside(self, array: DeviceArray, values: Array) -> None:
        """Copy pinned memory after the last use and before the next use of the tensor."""
        with self.lock:
            place = array.address
            after = self._unused.pop(place, None) or self.driver.event()
            raw = array.buffer.raw
            self._sent[place] = self.driver.send_beside(raw, array.offset, values, after)

    def forget(self, memory: Any) -> None:
        """Drop the events of copies to memory that is allocated for other values."""
        first = memory.address
        with self.lock:
            for events in (self._sent, self._unused):
                for place in list(events):
                    if first <= place < first + max(memory.nbytes, 1):
                        events.pop(place, None)

    def wait_for_copy(self, array: Any) -> None:
        """Wait until the pinned memory that was last written to the tensor may change.

        The next write to the tensor waits for current uses of the tensor, but not for later work.
        """
        with self:
            with self.lock:
                sent = self._sent.pop(array.address, None)
            if sent is not None:
                self.driver.wait_for(sent)
            with self.lock:
                self._unused[array.address] = self.driver.event()

    def pinned_zeros(self, nbytes: int) -> Array:
        """Return a u8 array of zeros in pinned memory of the host."""
        with self:
            memory = self.driver.pinned(nbytes)
        memory[:] = 0
        key = id(root(memory))
        self._pinned.add(key)
        weakref.finalize(root(memory), self._pinned.discard, key)
        return memory

    def is_pinned(self, array: object) -> bool:
        """Return whether the array is in `pinned_zeros`."""
        return isinstance(array, np.ndarray) and id(root(array)) in self._pinned

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        with self:
            self._wait("synchronize", self.driver.finish)

    def settle(self) -> None:
        """Raise the error if a kernel has rejected a value."""
        self.refusals.settle(self.fetched(self.refusals.flags))

    def _wait(self, why: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self.counts.waits += 1
        for listener in on_wait.copy():
            listener(self.name, why, began)
