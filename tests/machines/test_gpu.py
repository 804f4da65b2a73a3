"""A VM for a GPU, on a CuPy that is none (see `fake_cupy`): what differs from a VM of the host."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    HandleError,
    MachineError,
    MissingExtra,
    OutOfMemory,
    ShapeError,
    UnknownFunction,
)
from mlvm.core.machine.frame import Frame
from mlvm.core.op import OPS
from mlvm.core.program.assembly import assemble
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType
from mlvm.machines import gpu
from mlvm.machines.gpu_kernels import WAITS
from mlvm.parallel.group import Group
from tests.core.ops.cases import CASES, Case
from tests.core.ops.evaluate import evaluate
from tests.core.ops.test_ops import TOLERANCE
from tests.machines.fake_cupy import Fake, install

F4 = TensorType("f32", (4,))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Two GPUs of 16 MiB."""
    return install(monkeypatch, devices=2, nbytes=1 << 24)


@pytest.fixture
def vm(fake: Fake) -> gpu.GpuVM:
    made = ml.VM("gpu0", device="cuda:0")
    assert isinstance(made, gpu.GpuVM)
    return made


def sent(vm: ml.VM, *arrays: Any) -> list[int]:
    """Tensors of the VM with these values."""
    handles = []
    for array in map(np.asarray, arrays):
        handles.append(vm.alloc_tensor(TensorType.of(array)))
        vm.write(handles[-1], array)
    return handles


# --- where there is a device, and where there is none -------------------------------


def test_a_vm_is_on_the_device_that_it_is_asked_for(vm: gpu.GpuVM) -> None:
    assert repr(vm) == "<VM 'gpu0' on cuda:0>"
    assert isinstance(vm, ml.VM)
    assert isinstance(ml.VM(device="cpu"), ml.VM)
    assert not isinstance(ml.VM(device="cpu"), gpu.GpuVM)
    other = ml.VM("gpu1", device="cuda:1")
    (handle,) = sent(other, np.ones(4, np.float32))
    assert other.array_of(handle).device.id == 1  # type: ignore[attr-defined]
    np.testing.assert_array_equal(other.read(handle), np.ones(4))


@pytest.mark.parametrize("device", ["cuda:2", "cuda", "tpu", "cuda:-1", "CPU", "", None, 0])
def test_a_device_that_there_is_not_is_refused_by_name(fake: Fake, device: Any) -> None:
    with pytest.raises(MachineError, match=r"there are cpu, cuda:0, cuda:1$"):
        ml.VM(device=device)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtra, match=r'pip install "mlvm\[cuda\]"'):
        ml.VM(device="cuda:0")
    with pytest.raises(MachineError, match=r"no device 'tpu'; there is cpu"):
        ml.VM(device="tpu")


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    monkeypatch.setattr(fake.cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(MachineError, match="CUDA has no device here"):
        ml.VM(device="cuda:0")

    def no_driver() -> int:
        raise fake.cupy.cuda.runtime.CUDARuntimeError(101)

    monkeypatch.setattr(fake.cupy.cuda.runtime, "getDeviceCount", no_driver)
    with pytest.raises(MachineError, match="CUDA has no device here: cudaError"):
        ml.VM(device="cuda:0")


@pytest.mark.parametrize(
    "option", [{"threads": 2}, {"workers": 1}, {"native": True}, {"native": False}, {"pinned": True}]
)
def test_options_of_the_processor_are_refused(fake: Fake, option: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match="is for a VM on the processor"):
        ml.VM(device="cuda:0", **option)


def test_other_vms_are_on_the_processor(fake: Fake) -> None:
    with pytest.raises(MachineError, match="a DryVM is on the cpu"):
        ml.DryVM("dry", device="cuda:0")
    with pytest.raises(UnknownFunction):
        ml.VM(device="cuda:0", kernels={"nothing": lambda: None})


# --- memory --------------------------------------------------------------------------


def test_values_cross_in_write_and_read_only(vm: gpu.GpuVM, fake: Fake) -> None:
    values = np.arange(4, dtype=np.float32)
    before = fake.counts.transfers
    x, y, z = sent(vm, values, values, values)
    assert fake.counts.transfers == before + 3
    vm.launch(Program.of_op("add.out", 3, {}, 0), [z, x, y])
    vm.swap(x, z)
    vm.synchronize()
    assert fake.counts.transfers == before + 3
    np.testing.assert_array_equal(vm.read(x), 2 * values, strict=True)
    assert fake.counts.transfers == before + 4


def test_bytes_are_counted_exactly_and_given_back(vm: gpu.GpuVM) -> None:
    before = vm.consumed_size_in_mib()
    storage = vm.alloc_storage(1000)
    empty = [vm.alloc_tensor(TensorType("f32", (0, 3))) for _ in range(2)]
    tensor = vm.alloc_tensor(TensorType("i64", (3, 5)))
    view = vm.tensor_from_storage(storage, F4, 64)
    assert vm.consumed_size_in_mib() == before + (1000 + 120) / 2**20
    np.testing.assert_array_equal(vm.read(view), np.zeros(4, np.float32), strict=True)
    assert [vm.read(each).shape for each in empty] == [(0, 3), (0, 3)]
    for handle in (tensor, *empty):
        vm.dealloc_tensor(handle)
    vm.dealloc_storage(storage)
    assert vm.consumed_size_in_mib() == before
    with pytest.raises(HandleError):
        vm.read(view)


def test_more_than_the_device_has_is_out_of_memory(vm: gpu.GpuVM) -> None:
    with pytest.raises(OutOfMemory):
        vm.alloc_storage(1 << 25)
    (x,) = sent(vm, np.ones((1, 2048), np.float32))
    program = assemble(
        ".func main 0 *\nload_arg 0\n"
        'push_str "broadcast_to"\ncfunc 1 1 {"shape": [4096, 2048]}\nhalt\n'
    )
    with pytest.raises(OutOfMemory) as caught:
        vm.launch(program, [x])
    assert (caught.value.function, caught.value.pc) == ("main", 2)
    np.testing.assert_array_equal(vm.read(x), np.ones((1, 2048)))


def test_the_host_cannot_reach_into_the_device(vm: gpu.GpuVM) -> None:
    (x,) = sent(vm, np.ones(4, np.float32))
    with pytest.raises(HandleError, match=r"f32\[4\] of gpu0 is on cuda:0; use read"):
        vm.borrow(x)
    with pytest.raises(HandleError, match="not in memory of the host"):
        vm.storage_over(np.zeros(64, np.uint8))
    with pytest.raises(MachineError, match="register Python functions"):
        vm.register_library("functions.so")


def test_a_tensor_is_shared_on_its_own_device_only(vm: gpu.GpuVM, fake: Fake) -> None:
    (x,) = sent(vm, np.ones(4, np.float32))
    (here,) = sent(ml.VM("host"), np.ones(4, np.float32))
    for other in (ml.VM("host"), ml.VM("gpu1", device="cuda:1")):
        with pytest.raises(HandleError, match=r"on cuda:0 is not shared with \w+ on (cpu|cuda:1)"):
            vm.share(x, other)
    host = ml.VM("host")
    (here,) = sent(host, np.ones(4, np.float32))
    with pytest.raises(HandleError, match="on cpu is not shared with gpu0 on cuda:0"):
        host.share(here, vm)
    beside = ml.VM("beside", device="cuda:0")
    shared = vm.share(x, beside)
    vm.write(x, np.full(4, 3, np.float32))
    vm.synchronize()
    np.testing.assert_array_equal(beside.read(shared), np.full(4, 3))


def test_writes_are_checked_unless_the_vm_is_raw(vm: gpu.GpuVM) -> None:
    (x,) = sent(vm, np.ones(4, np.float32))
    with pytest.raises(ShapeError, match=r"write to f32\[4\]"):
        vm.write(x, np.ones(3, np.float32))
    raw = ml.VM("raw", device="cuda:0", checked=False)
    (x,) = sent(raw, np.ones(4, np.float32))
    raw.write(x, np.arange(4))
    raw.launch(Program.of_op("add.out", 3, {}, 0), [x, x, x])
    np.testing.assert_array_equal(raw.read(x), [0, 2, 4, 6])


# --- programs ------------------------------------------------------------------------



def launched(vm: ml.VM, name: str, case: Case) -> list[Array]:
    """The op's result: fresh, written, and written twice by a program that is launched until it
    is a graph."""
    handles = sent(vm, *case.inputs)
    count = len(handles)
    results = vm.launch(Program.of_op(name, count, case.attributes, 1), handles)
    if OPS[name].dynamic:
        return results
    outs = [vm.alloc_tensor(TensorType.of(results[0])) for _ in range(2)]
    vm.launch(Program.of_op(f"{name}.out", count + 1, case.attributes, 0), [outs[0], *handles])
    results.append(vm.read(outs[0]))
    builder = ProgramBuilder()
    with builder.function("main"):
        for out in range(2):
            for i in (count + out, *range(count)):
                builder.load_arg(i)
            builder.host(f"{name}.out", count + 1, 0, **case.attributes)
        builder.halt()
    program = builder.build()
    for _ in range(3):
        for out in outs:
            vm.write(out, np.zeros_like(results[0]))
        vm.launch(program, [*handles, *outs])
        results += map(vm.read, outs)
    return results


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_gives_on_the_host(vm: gpu.GpuVM, name: str) -> None:
    for case in CASES[name]:
        expected = evaluate(name, *case.inputs, **case.attributes)
        close = TOLERANCE.get(expected.dtype.name, 0)
        for result in launched(vm, name, case):
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(result, expected, rtol=close, atol=close)
