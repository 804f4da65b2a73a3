"""Search for the fastest tiles of a device: `python -m mlvm tune opencl:0`."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from mlvm.core.errors import MachineError
from mlvm.core.program.program import Program
from mlvm.core.types import DType, TensorType, f32, f64
from mlvm.machines.gpu import tiles
from mlvm.machines.gpu.tiles import Tile
from mlvm.machines.gpu.vm import GpuVM

_TIMES: Final = 9


class Timed(NamedTuple):
    """Tile, and the measured speed of products of a dtype."""

    dtype: DType
    tile: Tile
    gflops: float


def tune(device: str, size: int | None = None) -> Iterator[Timed]:
    """Time products of square matrices with each possible tile, and keep the fastest per dtype.

    `size` is the size of the matrices (default: 512 on a processor, 2048 on a GPU). Raises what
    a VM on the device raises.
    """
    if device == "cpu":
        raise MachineError(
            "expected a GPU or OpenCL device to tune, got 'cpu', whose tiles are fixed"
        )
    facts = GpuVM(device=device).memory.driver.facts
    n = size or (512 if facts.is_cpu else 2048)
    for dtype in (f32, f64):
        if not facts.has(dtype):
            continue
        timed = []
        for tile in tiles.candidates(facts, dtype):
            tiles.keep(facts, dtype, tile)
            timed.append(Timed(dtype, tile, 2e-9 * n**3 / _seconds(device, dtype, n)))
            yield timed[-1]
        tiles.keep(facts, dtype, max(timed, key=lambda each: each.gflops).tile)


def _seconds(device: str, dtype: DType, n: int) -> float:
    """Return the minimum time of several products."""
    vm = GpuVM(device=device)
    type = TensorType(dtype, (n, n))
    handles = [vm.alloc_tensor(type) for _ in range(3)]
    rng = np.random.default_rng(0)
    for handle in handles[1:]:
        vm.write(handle, rng.standard_normal((n, n)).astype(dtype.numpy))
    times = {"transpose_x": False, "transpose_y": False}
    program = Program.of_op("matmul.out", 3, times, 0)

    def once() -> None:
        vm.launch(program, handles)
        vm.synchronize()

    once()  # compile the kernel
    return min(timeit.repeat(once, number=1, repeat=_TIMES))
