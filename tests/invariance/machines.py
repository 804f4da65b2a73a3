"""What computes an op: the native kernels of an instruction set, on so many threads, and numpy's."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

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
