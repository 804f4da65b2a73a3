"""Kernels on more elements than a step takes, as a processor and as a GPU gets them."""

from __future__ import annotations

import pytest

from mlvm.machines.gpu.vm import GpuVM
from tests.brief import cases
from tests.machines.gpu.against import check, launched
from tests.machines.gpu.larger import LARGER, as_gpu

_CHOSEN = {  # by name, of how many cases the first: each takes a kernel or a way of its own
    "sum": 3,
    "cumulative_sum": 1,
    "cumulative_prod": 1,
    "matmul": 4,
    "batch_contract": 2,
    "sort": 1,
    "argsort": 1,
    "softmax": 1,
    "layer_norm_vjp": 1,
    "scatter_add": 1,
    "index_set": 1,
    "mask_set": 1,
    "randint": 1,
    "normal": 1,
    "scatter_add_along_axis": 1,
    "conv_transpose2d": 1,
    "permute_dims": 1,
    "slice_add": 1,
}


@pytest.mark.parametrize("name", _CHOSEN)
def test_as_a_processor(vm: GpuVM, name: str) -> None:
    for case in [case for each, case in LARGER if each == name][: _CHOSEN[name]]:
        check(vm, name, case)
    assert vm.counts.host_ops == 0


@cases("name", "sum", "var", "argmin", "matmul", "conv2d", "softmax", "layer_norm_vjp")
def test_as_a_gpu(vm: GpuVM, name: str) -> None:
    as_gpu(vm)
    check(vm, name, next(case for each, case in LARGER if each == name))
    assert vm.counts.host_ops == 0


def test_the_same_bits_in_each_run(vm: GpuVM) -> None:
    """Sums by index as well, which other devices make by atomic additions."""
    for name in ("sum", "batch_contract", "scatter_add", "layer_norm_vjp"):
        case = next(case for each, case in LARGER if each == name)
        assert launched(vm, name, case).tobytes() == launched(vm, name, case).tobytes()
