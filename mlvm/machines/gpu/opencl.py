"""Devices of OpenCL, such as `ml.VM(device="opencl:0")`, through the package pyopencl.

One command queue runs everything in order, and a second queue copies pinned memory concurrently.
The arguments of a kernel are set once, when the kernel is prepared for a position in a program;
each launch is one call.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from platform import node as host
from typing import Any, Final

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.extras import extra
from mlvm.core.locks import new_lock
from mlvm.core.types import ALIGNMENT, Array
from mlvm.machines.gpu import tiles
from mlvm.machines.gpu.kernels import Call, Facts
from mlvm.machines.gpu.memory import Lost

_LOST: Final = frozenset(
    {"DEVICE_NOT_AVAILABLE", "INVALID_COMMAND_QUEUE", "INVALID_CONTEXT", "OUT_OF_RESOURCES"}
)
_NO_MEMORY: Final = frozenset(
    {"MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE"}
)


_PROBE: Final = """
import sys
import numpy as np
import pyopencl as cl

device = cl.get_platforms()[int(sys.argv[1])].get_devices()[int(sys.argv[2])]
context = cl.Context([device])
queue = cl.CommandQueue(context)
text = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2; }"
x = np.ones(4, np.float32)
memory = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=x)
cl.Program(context, text).build().twice(queue, x.shape, None, memory)
cl.enqueue_copy(queue, x, memory)
sys.exit(0 if (x == 2).all() else "a kernel computes wrong values")
"""
"""Program that compiles and runs one kernel, for a child process that the driver may crash."""
_PROBE_SECONDS: Final = 120.0


def opencl_module() -> Any:
    """Return pyopencl. Raises `MissingExtraError` if it is not installed."""
    return extra("pyopencl", "opencl")


def devices_by_name() -> list[tuple[str, Any]]:
    """Return the devices by name: `opencl:0` is the first device of the first platform.

    `opencl:0:1` is the second device of that platform. Raises `MissingExtraError` without pyopencl,
    and `MachineError` if no driver is installed.
    """
    cl = opencl_module()
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise MachineError(
            f"OpenCL finds no driver: {error}; for a processor, install pocl-opencl-icd"
        ) from None
    named = []
    for i, platform in enumerate(platforms):
        try:
            devices = platform.get_devices()
        except cl.Error:  # a driver without a device
            devices = []
        for k, device in enumerate(devices):
            named.append((f"opencl:{i}:{k}" if k else f"opencl:{i}", device))
    return named


class _Shared:
    """Context and compiled sources of a device, shared by all VMs of the process."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.context = opencl_module().Context([device])
        cl = opencl_module()
        exact = cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT & device.single_fp_config
        self._options = ["-w", *(["-cl-fp32-correctly-rounded-divide-sqrt"] if exact else [])]
        self._programs: dict[str, Any] = {}
        self._lock = new_lock()

    def program(self, text: str) -> Any:
        with self._lock:
            if text not in self._programs:
                program = opencl_module().Program(self.context, text)
                self._programs[text] = program.build(self._options)
            return self._programs[text]

    def compile(self, prelude: str, texts: Sequence[str]) -> None:
        """Compile sources with the same start together.

        Most of the compile time is spent on the start of a program.
        """
        new = [text for text in dict.fromkeys(texts) if text not in self._programs]
        whole = self.program("".join([prelude, *[text.removeprefix(prelude) for text in new]]))
        self._programs.update(dict.fromkeys(new, whole))


@cache
def _shared(name: str) -> _Shared:
    device = dict(devices_by_name())[name]
    _require_working(name, device)
    return _Shared(device)


def _require_working(name: str, device: Any) -> None:
    """Run a kernel in a child process, unless the driver passed this test before.

    The result is remembered for this machine. A driver that does not know the processor may abort
    or segfault. Raises `MachineError`.
    """
    facts = device.platform.version, device.driver_version, device.name, host()
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    passed = tiles.path().with_name(f"opencl-{digest}")
    if passed.exists() or not sys.executable:
        return
    numbers = [*name.split(":")[1:], "0"][:2]
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE, *numbers],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
        code, printed = child.returncode, child.stderr
    except subprocess.TimeoutExpired:
        code, printed = 1, f"no end after {_PROBE_SECONDS:g} s"
    if code:
        lines = printed.split("\n")
        reason = f"signal {-code}" if code < 0 else next(filter(None, reversed(lines)), f"{code}")
        raise MachineError(
            f"{name}: the driver {device.platform.version.strip()} cannot run a kernel on "
            f"{device.name.strip()} ({reason:.200}); install a newer driver: for a processor "
            "with `apt install pocl-opencl-icd`, for a GPU from the manufacturer"
        )
    with suppress(OSError):  # a read-only home: the next process probes again
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


class OpenCL:
    """Device with an OpenCL driver."""

    def __init__(self, name: str) -> None:
        self._cl = cl = opencl_module()
        self._shared = shared = _shared(name)
        device = shared.device
        self.device = name
        self.nbytes: int = device.global_mem_size
        self._most: int = device.max_mem_alloc_size
        self.facts = Facts(
            name=device.name.strip(),
            has_f64="cl_khr_fp64" in device.extensions,
            is_cpu=bool(device.type & cl.device_type.CPU),
            units=device.max_compute_units,
            local_bytes=device.local_mem_size,
            most_items=device.max_work_group_size,
        )
        self._context = shared.context
        self._queue = cl.CommandQueue(self._context)
        self._copy_queue = cl.CommandQueue(self._context)
        self._on_its_way: deque[tuple[Any, Array]] = deque()  # values to keep until the event

    def typed(self, error: Any) -> Exception | None:
        if not isinstance(error, self._cl.Error):
            return None
        code = self._cl.status_code.to_string(error.code) if hasattr(error, "code") else ""
        text = " ".join(str(error).split())
        if code in _NO_MEMORY or isinstance(error, self._cl.MemoryError):
            return MemoryError(text)
        if code in _LOST:
            return Lost(text)
        return MachineError(f"{self.device}: {text}")

    def alloc(self, nbytes: int) -> Any:
        if nbytes > self._most:
            raise MemoryError(
                f"{self.device} has {self.nbytes:,} and at most {self._most:,} per buffer; "
                "use smaller tensors"
            )
        flags = self._cl.mem_flags.READ_WRITE
        return self._cl.Buffer(self._context, flags, max(nbytes, 1))

    def zero(self, memory: Any, offset: int, nbytes: int) -> None:
        byte = np.zeros((), np.uint8)
        self._cl.enqueue_fill_buffer(self._queue, memory, byte, offset, nbytes)

    def copy(self, memory: Any, offset: int, source: Any, start: int, nbytes: int) -> None:
        self._cl.enqueue_copy(
            self._queue, memory, source, dst_offset=offset, src_offset=start, byte_count=nbytes
        )

    def send(self, memory: Any, offset: int, values: Array) -> None:
        event = self._cl.enqueue_copy(
            self._queue, memory, values, dst_offset=offset, is_blocking=False
        )
        self._keep(event, values)

    def send_beside(self, memory: Any, offset: int, values: Array, after: Any) -> Any:
        event = self._cl.enqueue_copy(
            self._copy_queue, memory, values, dst_offset=offset, is_blocking=False, wait_for=[after]
        )
        self._copy_queue.flush()
        self._keep(event, values)
        self._cl.enqueue_barrier(self._queue, wait_for=[event])
        return event

    def _keep(self, event: Any, values: Array) -> None:
        """Keep values until they are copied; deleting an event earlier would wait for it."""
        complete = self._cl.command_execution_status.COMPLETE
        self._on_its_way.append((event, values))
        while self._on_its_way and self._on_its_way[0][0].command_execution_status <= complete:
            self._on_its_way.popleft()

    def fetch(self, transfers: Sequence[tuple[Array, Any, int]]) -> None:
        events = [
            self._cl.enqueue_copy(
                self._queue, values, memory, src_offset=offset, is_blocking=i == len(transfers) - 1
            )
            for i, (values, memory, offset) in enumerate(transfers)
        ]
        del events  # the copy of each event is finished

    def event(self) -> Any:
        event = self._cl.enqueue_marker(self._queue)
        self._queue.flush()
        return event

    def wait_for(self, event: Any) -> None:
        event.wait()

    def finish(self) -> None:
        self._queue.finish()

    def flush(self) -> None:
        self._queue.flush()

    def pinned(self, nbytes: int) -> Array:
        cl = self._cl
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
        size = nbytes + ALIGNMENT
        buffer = cl.Buffer(self._context, flags, size)
        how = cl.map_flags.READ | cl.map_flags.WRITE
        mapped, _ = cl.enqueue_map_buffer(self._queue, buffer, how, 0, (size,), np.uint8)
        skip = -mapped.ctypes.data % ALIGNMENT
        memory: Array = mapped[skip : skip + nbytes]
        return memory

    def compile(self, prelude: str, texts: Sequence[str]) -> None:
        self._shared.compile(prelude, texts)

    def ready(self, call: Call, args: tuple[Any, ...]) -> Callable[[], object]:
        kernel = self._cl.Kernel(self._shared.program(call.source), call.entry)
        kernel.set_scalar_arg_dtypes([x.dtype if isinstance(x, np.generic) else None for x in args])
        kernel.set_args(*args)
        whole = tuple([-(-n // by) * by for n, by in zip(call.size, call.group, strict=True)])
        return partial(self._cl.enqueue_nd_range_kernel, self._queue, kernel, whole, call.group)


def listed() -> list[tuple[str, str, int]]:
    """Return the devices by name, model and bytes of memory. Raises what `found` raises."""
    return [
        (name, f"{device.name.strip()} ({device.platform.name.strip()})", device.global_mem_size)
        for name, device in devices_by_name()
    ]
