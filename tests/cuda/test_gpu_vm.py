"""The VM for a GPU, on a GPU: `python -m pytest -m cuda -rs`. Where there is none, all is skipped,
and `-rs` says why.

Values are those of a VM of the host but for rounding: CUDA's elementary functions and the order of
sums are others.
"""

from __future__ import annotations

import numpy as np
import pytest

import mlvm.eager as ml
from bench.mlvm_training import Training
from bench.sizes import MixerSize
from mlvm.core.errors import MlvmError, PositionRefused
from mlvm.core.op import OPS
from mlvm.machines import gpu
from tests.core.ops.evaluate import evaluate
from tests.machines.test_gpu import THREE, f32, launched, of_three, sent, straight, without_halves

pytestmark = pytest.mark.cuda

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "complex128": 1e-9, "complex64": 1e-4}


@pytest.fixture
def vm() -> gpu.GpuVM:
    try:
        found = gpu.devices()
    except MlvmError as error:
        pytest.skip(str(error))
    vm = ml.VM("gpu", device=found[0].name)
    assert isinstance(vm, gpu.GpuVM)
    return vm


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_gives_on_the_host(vm: gpu.GpuVM, name: str) -> None:
    for case in without_halves(name):
        expected = evaluate(name, *case.inputs, **case.attributes)
        close = TOLERANCE.get(expected.dtype.name, 0)
        for result in launched(vm, name, case, graph=True):
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(result, expected, rtol=close, atol=close)


def test_a_program_is_recorded_and_replayed(vm: gpu.GpuVM) -> None:
    x, y = f32(1, 2, 3, 4), f32(4, 3, 2, 1) / 4
    handles = sent(vm, x, y, np.zeros(4, np.float32))
    for i in range(4):
        vm.write(handles[0], x + i)
        vm.launch(THREE, handles)
        np.testing.assert_allclose(vm.read(handles[2]), of_three(x + i, y), rtol=1e-5)
    assert (vm.graphs.recorded, vm.graphs.replayed) == (1, 3)


def test_an_error_in_a_graph_is_told_after_the_launch(vm: gpu.GpuVM) -> None:
    program = straight(("add", (2, 0, 0), {}), ("take", (3, 2, 1), {"axis": 0}))
    handles = sent(vm, np.arange(4, dtype="f4"), np.asarray([0, 9]), np.zeros(4, "f4"), f32(0, 0))
    for _ in range(3):
        with pytest.raises(PositionRefused):
            vm.launch(program, handles)


def test_a_mixer_trains_as_on_the_host(vm: gpu.GpuVM) -> None:
    size = MixerSize(8, (16, 16, 3), 10, 4, 32, 2, 16, 64)
    host, eager = Training(size, ml.VM("host")), Training(size, vm)
    captured = Training(size, ml.VM("captured", device=vm.memory.device))
    for _ in range(5):
        loss = host.eager()
        assert eager.eager() == pytest.approx(loss, rel=1e-3)
        assert captured.replay() == pytest.approx(loss, rel=1e-3)
    for name, x in host.model.state().items():
        for each in (eager, captured):
            np.testing.assert_allclose(
                each.model.state()[name].numpy(), x.numpy(), rtol=1e-2, atol=1e-5
            )


def test_a_queue_keeps_its_order(vm: gpu.GpuVM) -> None:
    """Pinned slots are filled again while the device computes with those before."""
    with ml.Arena(vm, "a").allocating():
        queue = ml.QueueTensor(vm, ["f32[1048576]"], maxsize=2)
        total = ml.zeros(())
        for i in range(50):
            with queue.reserve() as (slot,):
                slot[...] = i
            (x,) = queue.get()
            total = total + ml.mean(x)
            del x
        assert float(total) == sum(range(50))
