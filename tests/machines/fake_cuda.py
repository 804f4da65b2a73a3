"""Devices that are none: memory, streams, events and graphs with the names of `cupy.cuda`.

Memory is numpy's, full of 0xFF bytes where CUDA gives none in particular, at addresses that no
pointer of this process reaches. A stream does what it was given as late as it may: once the host
waits for it, or for an event behind it. Pinned memory is read and written then, other memory of the
host is copied when the call is made; pinned memory that nobody has is handed out again at once.
While a stream is captured, what it is given is only noted, and `Graph.launch` does it on the same
memory. A wait then ends the capture with CUDA's own error, and so does an allocation that no pool
has at hand, but for the mode "relaxed" (CUDA Programming Guide, "Prohibited and Unhandled
Operations"). A transfer is a RuntimeError of CuPy's then, and the capture goes on.

`Machine` counts. The module `cuda` that programs see is made by `fake_cupy`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

Launch = Callable[[], object]
UNIT = 512  # bytes; a pool rounds up to these

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode


class CUDARuntimeError(RuntimeError):
    """An error of the driver, by CUDA's name and number."""

    __module__ = "cupy_backends.cuda.api.runtime"
    NAMES: Final = {
        2: ("cudaErrorMemoryAllocation", "out of memory"),
        101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
        700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
        900: (
            "cudaErrorStreamCaptureUnsupported",
            "operation not permitted when stream is capturing",
        ),
        901: (
            "cudaErrorStreamCaptureInvalidated",
            "operation failed due to a previous error during capture",
        ),
    }

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(": ".join(self.NAMES[status]))


class OutOfMemoryError(MemoryError):
    """No device memory of that size."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
            + (f", limit set to: {limit:,} bytes)." if limit else ").")
        )


@dataclass
class Counts:
    """What happened on all devices."""

    to_device: int = 0
    to_host: int = 0
    waits: int = 0
    launches: int = 0
    captures: int = 0
    replays: int = 0
    allocations: int = 0

    @property
    def transfers(self) -> int:
        return self.to_device + self.to_host


class Machine:
    """The host's devices, each with that many bytes, and what each thread has current."""

    def __init__(self, devices: int, nbytes: int) -> None:
        self.devices = devices
        self.nbytes = nbytes
        self.used = [0] * devices
        self.counts = Counts()
        self.local = threading.local()
        self.lock = threading.RLock()
        self.made: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.pinned: list[bytearray] = []
        self.pinned_free: dict[int, list[bytearray]] = {}
        self.top = 0x7F00_0000_0000
        self.null = [Stream.of(0, i) for i in range(devices)]
        self.pool = MemoryPool()
        self.allocator: Callable[[int], MemoryPointer] | None = self.pool.malloc

    @property
    def device(self) -> int:
        return getattr(self.local, "device", 0)

    @device.setter
    def device(self, number: int) -> None:
        if not 0 <= number < self.devices:
            raise CUDARuntimeError(101)
        self.local.device = number

    @property
    def streams(self) -> dict[int, Stream]:
        """The thread's current stream of each device."""
        streams: dict[int, Stream] = self.local.__dict__.setdefault("streams", {})
        return streams

    def stack(self, of: str) -> list[Any]:
        """The thread's "devices" or "streams" that were current before, of all `with` statements:
        they are not those of a Device or a Stream."""
        stack: list[Any] = self.local.__dict__.setdefault(f"before_{of}", [])
        return stack

    @property
    def stream(self) -> Stream:
        return self.streams.get(self.device, self.null[self.device])

    def launch(self, run: Launch) -> None:
        """The one door for all that computes."""
        self.counts.launches += 1
        if self.stream.nodes is None:
            self.stream.queue.append(run)
        else:
            self.stream.nodes.append(run)

    def wait(self, stream: Stream | None = None) -> None:
        """The host waits for a stream, or for all."""
        self.forbid_in_capture(stream)
        self.counts.waits += 1
        for each in [stream] if stream else [*self.null, *self.made]:
            each.run()

    def transfer(self, way: str, run: Launch, stream: Stream | None = None) -> None:
        """Bytes cross between host and device: "to_host" or "to_device"."""
        stream = stream or self.stream
        if stream.nodes is not None:
            raise RuntimeError(
                "the current stream is capturing, so synchronous API calls are disallowed"
            )
        setattr(self.counts, way, getattr(self.counts, way) + 1)
        stream.queue.append(run)

    def forbid_in_capture(self, stream: Stream | None = None) -> None:
        stream = stream or self.stream
        if stream.nodes is not None:
            stream.valid = False
            raise CUDARuntimeError(900)


machine: Machine


def start(devices: int, nbytes: int) -> Machine:
    """New devices in place of those there were."""
    global machine
    machine = Machine(devices, nbytes)
    return machine


# --- memory --------------------------------------------------------------------------


class Memory:
    """`cupy.cuda.Memory`: an allocation of the driver."""

    def __init__(self, size: int) -> None:
        stream = machine.stream
        if stream.nodes is not None and stream.mode != RELAXED:
            machine.forbid_in_capture()
        self.size = size
        self.device_id = machine.device
        if machine.used[self.device_id] + size > machine.nbytes:
            raise CUDARuntimeError(2)
        machine.used[self.device_id] += size
        machine.counts.allocations += 1
        self.ptr = machine.top
        machine.top += -(-(size + 1) // UNIT) * UNIT
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.owner = machine

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __del__(self) -> None:
        if hasattr(self, "owner"):
            self.owner.used[self.device_id] -= self.size


class PooledMemory:
    """A pool's memory while somebody has it."""

    def __init__(self, pool: MemoryPool, block: Memory, arena: list[Any]) -> None:
        self.block, self._pool, self._arena = block, pool, arena
        self.size, self.ptr, self.bytes = block.size, block.ptr, block.bytes
        self.device_id = block.device_id

    device = Memory.device

    def __del__(self) -> None:
        insort(self._arena, (self.size, self.ptr, self.block))


class MemoryPool:
    """`cupy.cuda.MemoryPool`: blocks are free for the stream that had them."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))
        self._arenas: dict[tuple[int, int], list[Any]] = {}
        self._total: dict[int, int] = {}
        self._limit: dict[int, int] = {}

    def malloc(self, size: int) -> MemoryPointer:
        size = -(-size // UNIT) * UNIT
        device = machine.device
        if not size:
            return MemoryPointer(Memory(0), 0)
        arena = self._arenas.setdefault((device, machine.stream.ptr), [])
        at = bisect_left(arena, (size, 0))
        if at < len(arena):
            block = arena.pop(at)[2]
        else:
            limit = self._limit.get(device, 0)
            if limit and self.total_bytes() + size > limit:
                raise OutOfMemoryError(size, self.total_bytes(), limit)
            try:
                block = self._allocator(size).mem
            except CUDARuntimeError as error:
                if error.status != 2:
                    raise
                self.free_all_blocks()
                try:
                    block = self._allocator(size).mem
                except CUDARuntimeError:
                    raise OutOfMemoryError(size, self.total_bytes()) from None
            self._total[device] = self.total_bytes() + size
        return MemoryPointer(PooledMemory(self, block, arena), 0)

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        for (device, _), arena in self._arenas.items():
            if device == machine.device:
                freed = sum(size for size, _, _ in arena)
                self._total[device] = self._total.get(device, 0) - freed
                arena.clear()

    def n_free_blocks(self) -> int:
        return sum(len(a) for (device, _), a in self._arenas.items() if device == machine.device)

    def free_bytes(self) -> int:
        return sum(
            size
            for (device, _), arena in self._arenas.items()
            if device == machine.device
            for size, _, _ in arena
        )

    def total_bytes(self) -> int:
        return self._total.get(machine.device, 0)

    def used_bytes(self) -> int:
        return self.total_bytes() - self.free_bytes()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size is None:
            size = int(machine.nbytes * (fraction or 0))
        self._limit[machine.device] = size

    def get_limit(self) -> int:
        return self._limit.get(machine.device, 0)


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`: a place in memory."""

    def __init__(self, mem: Memory | PooledMemory, offset: int) -> None:
        self.mem = mem
        self.offset = offset
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    def bytes(self, size: int) -> np.ndarray[Any, Any]:
        """The fake's own: the bytes behind."""
        if self.offset + size > self.mem.size:
            raise AssertionError(f"{size} bytes at {self.offset} of {self.mem.size}")
        return self.mem.bytes[self.offset : self.offset + size]

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        target = self.bytes(size)
        machine.launch(lambda: target.fill(value))

    def memset(self, value: int, size: int) -> None:
        self.memset_async(value, size)
        machine.wait()

    def copy_from_device_async(
        self, src: MemoryPointer, size: int, stream: Stream | None = None
    ) -> None:
        target, source = self.bytes(size), src.bytes(size)
        machine.launch(lambda: target.__setitem__(..., source.copy()))

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        self.copy_from_device_async(src, size)

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        target, source = self.bytes(size), sent(_host(mem, size))
        machine.transfer("to_device", lambda: target.__setitem__(..., source), stream)

    def copy_from_host(self, mem: Any, size: int) -> None:
        self.copy_from_host_async(mem, size)

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        target, source = _host(mem, size), self.bytes(size)
        machine.transfer("to_host", lambda: target.__setitem__(..., source), stream)

    def copy_to_host(self, mem: Any, size: int) -> None:
        self.copy_to_host_async(mem, size)
        machine.wait(machine.stream)

    def copy_from_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        if isinstance(mem, MemoryPointer):
            self.copy_from_device_async(mem, size, stream)
        else:
            self.copy_from_host_async(mem, size, stream)

    def copy_from(self, mem: Any, size: int) -> None:
        self.copy_from_async(mem, size)


def _host(mem: Any, size: int) -> np.ndarray[Any, Any]:
    """The bytes at an address of the host, or at a ctypes pointer."""
    address = mem.value if isinstance(mem, ctypes.c_void_p) else int(mem)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address or 0))


def alloc(size: int) -> MemoryPointer:
    """`cupy.cuda.alloc`: by the current allocator."""
    return (machine.local.__dict__.get("allocator") or machine.allocator or _malloc)(size)


def _malloc(size: int) -> MemoryPointer:
    try:
        return MemoryPointer(Memory(size), 0)
    except CUDARuntimeError as error:
        if error.status != 2:
            raise
        raise OutOfMemoryError(size, machine.used[machine.device]) from None


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    machine.allocator = allocator


def get_allocator() -> Callable[[int], MemoryPointer]:
    return machine.local.__dict__.get("allocator") or machine.allocator or _malloc


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """`cupy.cuda.using_allocator`: for this thread."""
    before = machine.local.__dict__.get("allocator")
    machine.local.allocator = allocator or _malloc
    try:
        yield
    finally:
        machine.local.allocator = before


class PinnedMemoryPointer:
    """`cupy.cuda.PinnedMemoryPointer`: host memory that numpy's `frombuffer` reads."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def size(self) -> int:
        return len(self)  # type: ignore[arg-type]


@cache
def _pinned_of(size: int) -> Any:
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_uint8 * size), {})


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    """`cupy.cuda.alloc_pinned_memory`: the memory that was given back last, if it is of the size,
    whatever a stream may still do with it."""
    size = max(UNIT, 1 << (size - 1).bit_length())
    free = machine.pinned_free.setdefault(size, [])
    if free:
        block = free.pop()
    else:
        block = bytearray(size)
        machine.pinned.append(block)
    pointer: PinnedMemoryPointer = _pinned_of(size).from_buffer(block)
    weakref.finalize(pointer, free.append, block)
    return pointer


def sent(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What a copy of the array to a device reads when it runs: pinned memory as it is then, other
    memory as it is now."""
    address = array.ctypes.data
    for block in machine.pinned if array.size else ():
        skip = address - np.frombuffer(block, np.uint8).ctypes.data
        if 0 <= skip < len(block):
            return np.ndarray(array.shape, array.dtype, block, skip, array.strides)
    return array.copy()


class PinnedMemoryPool:
    """`cupy.cuda.PinnedMemoryPool`, which keeps nothing."""

    def malloc(self, size: int) -> PinnedMemoryPointer:
        return alloc_pinned_memory(size)

    def free_all_blocks(self) -> None:
        pass

    def n_free_blocks(self) -> int:
        return 0


# --- devices, streams, events, graphs ------------------------------------------------


class Device:
    """`cupy.cuda.Device`"""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = machine.device if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        before = machine.device
        machine.device = self.id
        machine.stack("devices").append(before)
        return self

    def __exit__(self, *_: object) -> None:
        machine.device = machine.stack("devices").pop()

    def use(self) -> None:
        machine.device = self.id

    def synchronize(self) -> None:
        machine.wait()

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return runtime.memGetInfo()

    @property
    def compute_capability(self) -> str:
        return "80"


class _Null:
    """`Stream.null`: the first device's."""

    def __get__(self, stream: object, kind: object) -> Stream:
        return machine.null[0]


class Stream:
    """`cupy.cuda.Stream`"""

    null = _Null()

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: Any = None,
    ) -> None:
        self._set(0 if null else id(self) or 2, machine.device)
        self.is_non_blocking = non_blocking
        machine.made.add(self)

    @classmethod
    def of(cls, ptr: int, device_id: int) -> Stream:
        stream = cls.__new__(cls)
        stream._set(ptr, device_id)
        stream.is_non_blocking = False
        return stream

    def _set(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id
        self.nodes: list[Launch] | None = None
        self.mode = RELAXED
        self.valid = True
        self.queue: deque[Launch] = deque()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def run(self, until: _Mark | None = None) -> None:
        """The fake's own: do what it was given, all or up to the mark."""
        with machine.lock, np.errstate(all="ignore"):
            while self.queue and not (until and until.passed):
                self.queue.popleft()()

    def use(self) -> Stream:
        machine.streams[self.device_id] = self
        return self

    def __enter__(self) -> Stream:
        machine.stack("streams").append((self.device_id, machine.streams.get(self.device_id)))
        return self.use()

    def __exit__(self, *_: object) -> None:
        device_id, before = machine.stack("streams").pop()
        machine.streams[device_id] = before or machine.null[device_id]

    @property
    def done(self) -> bool:
        machine.forbid_in_capture(self)
        return not self.queue

    def synchronize(self) -> None:
        machine.wait(self)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue.append(event.mark.reach)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.nodes is not None:
            raise CUDARuntimeError(900)
        self.nodes, self.valid = [], True
        self.mode = RELAXED if mode is None else mode

    def end_capture(self) -> Graph:
        nodes, self.nodes = self.nodes, None
        if nodes is None or not self.valid:
            raise CUDARuntimeError(901)
        machine.counts.captures += 1
        return Graph.of(nodes)

    def is_capturing(self) -> bool:
        return self.nodes is not None


class _Mark:
    """A place in the row of what a stream was given."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.passed = False
        stream.queue.append(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def reach(self) -> None:
        self.stream.run(until=self)


class Event:
    """`cupy.cuda.Event`"""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = _Mark(stream or machine.stream)

    def synchronize(self) -> None:
        if self.mark is not None:
            machine.forbid_in_capture(self.mark.stream)
            machine.counts.waits += 1
            self.mark.reach()

    @property
    def done(self) -> bool:
        return self.mark is None or self.mark.passed


class Graph:
    """`cupy.cuda.Graph`: launches that were noted."""

    def __init__(self) -> None:
        raise NotImplementedError(
            "currently this class cannot be initiated by the user and must "
            "be created via stream capture"
        )

    nodes: list[Launch]

    @classmethod
    def of(cls, nodes: list[Launch]) -> Graph:
        graph = cls.__new__(cls)
        graph.nodes = nodes
        return graph

    def launch(self, stream: Stream | None = None) -> None:
        machine.forbid_in_capture(stream)
        machine.counts.replays += 1
        (stream or machine.stream).queue.extend(self.nodes)

    def upload(self, stream: Stream | None = None) -> None:
        pass


def get_current_stream(device_id: int = -1) -> Stream:
    if device_id < 0:
        return machine.stream
    return machine.streams.get(device_id, machine.null[device_id])


class runtime:
    """`cupy.cuda.runtime`"""

    CUDARuntimeError = CUDARuntimeError
    streamCaptureModeGlobal = GLOBAL
    streamCaptureModeThreadLocal = THREAD_LOCAL
    streamCaptureModeRelaxed = RELAXED

    @staticmethod
    def getDeviceCount() -> int:
        return machine.devices

    @staticmethod
    def getDevice() -> int:
        return machine.device

    @staticmethod
    def setDevice(device: int) -> None:
        machine.device = device

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, Any]:
        if not 0 <= device < machine.devices:
            raise CUDARuntimeError(101)
        return {
            "name": b"Fake of numpy",
            "totalGlobalMem": machine.nbytes,
            "major": 8,
            "minor": 0,
            "multiProcessorCount": 1,
            "warpSize": 32,
        }

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        return machine.nbytes - machine.used[machine.device], machine.nbytes

    @staticmethod
    def deviceSynchronize() -> None:
        machine.wait()

    @staticmethod
    def deviceCanAccessPeer(device: int, peer: int) -> bool:
        return False

    @staticmethod
    def runtimeGetVersion() -> int:
        return 12090

    @staticmethod
    def driverGetVersion() -> int:
        return 12090
