"""Machines that compute an op: numpy, and the native kernels of an instruction set on a number of
threads."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from mlvm.core.ops import half
from mlvm.core.types import Array
from mlvm.machines.native import extension
from tests.invariance.walk import Sample, ran, reference

THREADS: Final = (1, 2, 3, 5)


class Native(NamedTuple):
    """The native kernels."""

    simd: str
    threads: int

    def run(self, sample: Sample) -> Array:
        """The result by the op's native kernel; by the reference kernel if it has none."""
        choose(self.simd)
        kernel = _kernels(self).get(sample.op)
        return reference(sample) if kernel is None else ran(kernel, sample)

    def __str__(self) -> str:
        return f"{self.simd} on {self.threads} threads"


class Reference(NamedTuple):
    """numpy's kernels."""

    def run(self, sample: Sample) -> Array:
        return reference(sample)

    def __str__(self) -> str:
        return "numpy"


Machine = Native | Reference


def choose(simd: str) -> None:
    """Have calls made from now on run on that instruction set."""
    assert extension.EXTENSION is not None
    assert extension.EXTENSION.choose_simd(simd)


def outside(machine: Machine, sample: Sample) -> bool:
    """Return whether the contract does not hold there: numpy leaves products to BLAS, which
    computes each number of rows differently. It makes the native machine's too where they are
    complex, or of integers by floats."""
    if sample.op not in ("matmul", "batch_contract", "conv2d", "conv_transpose2d"):
        return False
    kinds = {"f" if half.is_half(x) else x.dtype.kind for x in sample.inputs}
    if isinstance(machine, Native) and "c" not in kinds:
        wide = {x.dtype.kind for x in sample.inputs if not half.is_half(x)}
        return "f" in wide and len(wide) > 1
    return not kinds <= {*"biu"}


def machines() -> list[Machine]:
    """All that are here."""
    sets = [name for name, here in extension.simd_sets().items() if here]
    return [Reference(), *[Native(name, threads) for name in sets for threads in THREADS]]


@cache
def _kernels(machine: Native) -> Any:
    """The kernels by name, all of which share their work however small it is."""
    from mlvm.machines.native._native import Pool
    from mlvm.machines.native.kernels import native_kernels

    return native_kernels(Pool(machine.threads, worth_sharing=0))
