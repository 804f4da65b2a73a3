"""Devices of CUDA, such as `ml.VM(device="cuda:0")`, through the package CuPy.

The VM is the OpenCL VM with a different launcher. NVRTC compiles the sources as CUDA C, because
CuPy's compiler would flush subnormal numbers to zero. Machine code is stored on disk, in
`mlvm/cuda` of the user's cache, and shared by all VMs of a process.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.extras import extra
from mlvm.core.types import ALIGNMENT, Array
from mlvm.machines.files import write_file
from mlvm.machines.gpu import tiles
from mlvm.machines.gpu.kernels import Call, Facts
from mlvm.machines.gpu.memory import Lost

_LOST: Final = (
    "cudaErrorDevicesUnavailable",
    "cudaErrorECCUncorrectable",
    "cudaErrorIllegalAddress",
)
_NO_MEMORY: Final = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY")


@cache
def _module(text: str, number: int) -> Any:
    """Load a source on a device. Raises `MachineError` with the log of the compiler."""
    cupy = extra("cupy", "cuda")
    nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    architecture = f"--gpu-architecture=sm_{cupy.cuda.Device(number).compute_capability}"
    options = ("--std=c++14", "--fmad=false", architecture)
    digest = hashlib.sha256(repr((nvrtc.getVersion(), options, text)).encode()).hexdigest()
    path = tiles.path().with_name("cuda") / f"{digest}.cubin"
    if not path.exists():
        code = _compile(nvrtc, text, options)
        with suppress(OSError):  # a read-only home: the next process compiles again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, code)
    else:
        code = path.read_bytes()
    module = cupy.cuda.function.Module()
    module.load(code)
    return module


def _compile(nvrtc: Any, text: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        log = " ".join(nvrtc.getProgramLog(program).split())
        raise MachineError(f"CUDA: NVRTC cannot compile a kernel: {log}") from None
    finally:
        nvrtc.destroyProgram(program)
    return code


class Cuda:
    """CUDA device that runs everything in the order of a single stream.

    Copies of pinned memory use a second stream.
    """

    def __init__(self, name: str) -> None:
        self._cupy = cupy = extra("cupy", "cuda")
        self.device, number = name, int(name.partition(":")[2])
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        self.nbytes: int = properties["totalGlobalMem"]
        self.facts = Facts(
            name=properties["name"].decode(),
            has_f64=True,
            is_cpu=False,
            units=properties["multiProcessorCount"],
            local_bytes=properties["sharedMemPerBlock"],
            most_items=properties["maxThreadsPerBlock"],
        )
        self._number = number
        self._device = cupy.cuda.Device(number)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._copy_stream = cupy.cuda.Stream(non_blocking=True)
        self._on_its_way: deque[tuple[Any, Array]] = deque()  # values to keep until the event

    def typed(self, error: Exception) -> Exception | None:
        kinds = [kind.__module__.partition(".")[0] for kind in type(error).__mro__]
        if isinstance(error, MemoryError) or not {"cupy", "cupy_backends"} & {*kinds}:
            return None
        text = " ".join(str(error).split())
        if any(code in text for code in _NO_MEMORY):
            return MemoryError(text)
        lost = any(code in text for code in _LOST)
        return Lost(text) if lost else MachineError(f"{self.device}: {text}")

    def alloc(self, nbytes: int) -> Any:
        with self._device, self._stream:
            return self._cupy.cuda.alloc(max(nbytes, 1))

    def zero(self, memory: Any, offset: int, nbytes: int) -> None:
        (memory + offset).memset_async(0, nbytes, self._stream)

    def copy(self, memory: Any, offset: int, source: Any, start: int, nbytes: int) -> None:
        (memory + offset).copy_from_device_async(source + start, nbytes, self._stream)

    def send(self, memory: Any, offset: int, values: Array) -> None:
        self._send(memory + offset, values, self._stream)

    def send_beside(self, memory: Any, offset: int, values: Array, after: Any) -> Any:
        self._copy_stream.wait_event(after)
        sent = self._send(memory + offset, values, self._copy_stream)
        self._stream.wait_event(sent)
        return sent

    def _send(self, memory: Any, values: Array, stream: Any) -> Any:
        memory.copy_from_host_async(values.ctypes.data, values.nbytes, stream)
        self._on_its_way.append((stream.record(), values))
        while len(self._on_its_way) > 1 and self._on_its_way[0][0].done:
            self._on_its_way.popleft()
        return self._on_its_way[-1][0]

    def fetch(self, transfers: Sequence[tuple[Array, Any, int]]) -> None:
        for values, memory, offset in transfers:
            (memory + offset).copy_to_host_async(values.ctypes.data, values.nbytes, self._stream)
        self._stream.synchronize()

    def event(self) -> Any:
        return self._stream.record()

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def finish(self) -> None:
        self._stream.synchronize()

    def flush(self) -> None:
        """Do nothing: the stream has already started."""

    def pinned(self, nbytes: int) -> Array:
        size = nbytes + ALIGNMENT
        memory = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        skip = -memory.ctypes.data % ALIGNMENT
        return memory[skip : skip + nbytes]

    def compile(self, prelude: str, texts: Sequence[str]) -> None:
        """Do nothing: each source is compiled separately."""

    def ready(self, call: Call, args: tuple[Any, ...]) -> Callable[[], object]:
        with self._device:
            kernel = _module(call.source, self._number).get_function(call.entry)
        kernel_args = tuple([x if isinstance(x, np.generic) else np.uintp(x.ptr) for x in args])
        grid = tuple([-(-n // by) for n, by in zip(call.size, call.group, strict=True)])
        return partial(self._launch, kernel, grid, call.group, kernel_args)

    def _launch(self, kernel: Any, grid: Any, group: Any, args: Any) -> None:
        with self._device:
            kernel(grid, group, args, stream=self._stream)


def listed() -> list[tuple[str, str, int]]:
    """Return the GPUs by name, model and bytes of memory.

    Raises `MissingExtraError` without CuPy, and `MachineError` if CUDA finds no driver or no
    device.
    """
    runtime = extra("cupy", "cuda").cuda.runtime
    try:
        properties = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:
        raise MachineError(
            f"CUDA finds no device: {error}; check the driver with nvidia-smi"
        ) from None
    return [
        (f"cuda:{i}", each["name"].decode(), each["totalGlobalMem"])
        for i, each in enumerate(properties)
    ]
