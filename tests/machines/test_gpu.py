"""A VM for a GPU, on a CuPy that is none (see `fake_cupy`): what differs from a VM of the host."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.gpu
import mlvm.eager as ml
from bench.mlvm_training import Training
from bench.sizes import MixerSize
from mlvm.__main__ import main
from mlvm.core.errors import (
    ArenaError,
    CheckFailed,
    HandleError,
    LimitExceeded,
    MachineError,
    MissingExtra,
    NotFinite,
    OperandValueError,
    OutOfMemory,
    PositionRefused,
    ShapeError,
    UnknownFunction,
)
from mlvm.core.machine.frame import Frame
from mlvm.core.op import OPS
from mlvm.core.ops.half import have_halves
from mlvm.core.program.assembly import assemble
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType
from mlvm.machines import gpu
from mlvm.machines.gpu_kernels import WAITS
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.group import Group
from models.training.train import main as train_main
from tests.brief import Before, cases, refuses
from tests.core.ops.cases import CASES, Case
from tests.core.ops.evaluate import evaluate
from tests.core.ops.test_ops import TOLERANCE
from tests.machines.fake_cupy import Fake, install
from tests.parallel.members import call, tensor
from tests.test_docs import ROOT, shown

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


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


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
    refused = refuses(MachineError, r"there are cpu, cuda:0, cuda:1", ml.VM, device=device)
    assert str(refused).endswith('; for the first GPU write "cuda:0"') == (device != "cuda:2")


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    refuses(MissingExtra, r'pip install "mlvm\[cuda\]"', ml.VM, device="cuda:0")
    refuses(MachineError, r"no device 'tpu'; there is cpu", ml.VM, device="tpu")


def test_a_cupy_that_is_not_whole_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cupy.py").write_text(
        "try:\n    raise ImportError('libcudart.so.12: no such file')\n"
        "except ImportError as error:\n"
        "    raise ImportError('====\\nFailed to import CuPy.\\n====') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    told = "cupy is installed, but cannot be imported: libcudart.so.12: no such file"
    refuses(MissingExtra, told, ml.VM, device="cuda:0")
    assert main(["info"]) == 0
    assert f"devices: cpu; no GPU ({told})" in capsys.readouterr().out.splitlines()


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    monkeypatch.setattr(fake.cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    refuses(MachineError, "CUDA has no device here", ml.VM, device="cuda:0")

    def no_driver() -> int:
        raise fake.cupy.cuda.runtime.CUDARuntimeError(101)

    monkeypatch.setattr(fake.cupy.cuda.runtime, "getDeviceCount", no_driver)
    refuses(MachineError, "CUDA has no device here: cudaError", ml.VM, device="cuda:0")


@cases(
    "option", {"threads": 2}, {"workers": 1}, {"native": True}, {"native": False}, {"pinned": True}
)
def test_options_of_the_processor_are_refused(fake: Fake, option: dict[str, Any]) -> None:
    refuses(MachineError, "is for a VM on the processor", ml.VM, device="cuda:0", **option)


def test_other_vms_are_on_the_processor(fake: Fake) -> None:
    refuses(MachineError, "a DryVM is on the cpu", ml.DryVM, "dry", device="cuda:0")
    refuses(UnknownFunction, "", ml.VM, device="cuda:0", kernels={"nothing": lambda: None})


# --- memory --------------------------------------------------------------------------


def test_eigenvalues_of_a_matrix_with_inf_or_nan_are_nan(vm: gpu.GpuVM) -> None:
    x = np.stack([np.eye(2), np.diag([np.nan, 1]), np.diag([np.inf, 1])])
    with ml.use(vm):
        values, vectors = ml.linalg.eigh(ml.asarray(x))
        alone = ml.linalg.eigvalsh(ml.asarray(x))
    for found in (values.numpy(), alone.numpy(), vectors.numpy()):
        each = np.isnan(found).reshape(3, -1)
        assert (each.any(1).tolist(), each.all(1).tolist()) == ([False, True, True],) * 2


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
    refuses(HandleError, "", vm.read, view)


def test_more_than_the_device_has_is_out_of_memory(vm: gpu.GpuVM) -> None:
    refuses(OutOfMemory, "", vm.alloc_storage, 1 << 25)
    (x,) = sent(vm, np.ones((1, 2048), np.float32))
    program = assemble(
        ".func main 0 *\nload_arg 0\n"
        'push_str "broadcast_to"\ncfunc 1 1 {"shape": [4096, 2048]}\nhalt\n'
    )
    caught = refuses(OutOfMemory, "", vm.launch, program, [x])
    assert (caught.function, caught.pc) == ("main", 2)
    np.testing.assert_array_equal(vm.read(x), np.ones((1, 2048)))


def test_the_host_cannot_reach_into_the_device(vm: gpu.GpuVM) -> None:
    (x,) = sent(vm, np.ones(4, np.float32))
    refuses(HandleError, r"f32\[4\] of gpu0 is on cuda:0; use read", vm.borrow, x)
    refuses(HandleError, "not in memory of the host", vm.storage_over, np.zeros(64, np.uint8))
    refuses(MachineError, "register Python functions", vm.register_library, "functions.so")


def test_a_tensor_is_shared_with_no_other_vm(vm: gpu.GpuVM, fake: Fake) -> None:
    """Each VM of a device has a stream of its own, which waits for no other."""
    (x,) = sent(vm, np.ones(4, np.float32))
    (here,) = sent(ml.VM("host"), np.ones(4, np.float32))
    refuses(HandleError, "on cuda:0 is not shared with host on cpu", vm.share, x, ml.VM("host"))
    for other in (ml.VM("gpu1", device="cuda:1"), ml.VM("beside", device="cuda:0")):
        refuses(HandleError, f"{other.name}, which does not wait for gpu0", vm.share, x, other)
    host = ml.VM("host")
    (here,) = sent(host, np.ones(4, np.float32))
    refuses(HandleError, "on cpu is not shared with gpu0 on cuda:0", host.share, here, vm)
    shared = vm.share(x, vm)
    vm.write(x, np.full(4, 3, np.float32))
    np.testing.assert_array_equal(vm.read(shared), np.full(4, 3))


def test_writes_are_checked_unless_the_vm_is_raw(vm: gpu.GpuVM) -> None:
    (x,) = sent(vm, np.ones(4, np.float32))
    refuses(ShapeError, r"write to f32\[4\]", vm.write, x, np.ones(3, np.float32))
    raw = ml.VM("raw", device="cuda:0", checked=False)
    (x,) = sent(raw, np.ones(4, np.float32))
    raw.write(x, np.arange(4))
    raw.launch(Program.of_op("add.out", 3, {}, 0), [x, x, x])
    np.testing.assert_array_equal(raw.read(x), [0, 2, 4, 6])


# --- programs ------------------------------------------------------------------------


def straight(*calls: tuple[str, Sequence[int], Mapping[str, Any]]) -> Program:
    """A program of these calls of `name.out` on arguments of the launch."""
    builder = ProgramBuilder()
    with builder.function("main"):
        for name, arguments, attributes in calls:
            for i in arguments:
                builder.load_arg(i)
            builder.host(f"{name}.out", len(arguments), 0, **attributes)
        builder.halt()
    return builder.build()


def without_halves(name: str) -> list[Case]:
    """The op's cases that a GPU takes."""
    halves = {"f16", "bf16"}
    return [
        case
        for case in CASES[name]
        if not have_halves(case.inputs) and case.attributes.get("dtype") not in halves
    ]


def test_halves_are_refused(vm: gpu.GpuVM) -> None:
    storage = vm.alloc_storage(64)
    (x,) = sent(vm, f32(1, 2))
    to_half = Program.of_op("astype", 1, {"dtype": "f16"}, 1)
    for asked in (
        lambda: vm.alloc_tensor(TensorType("f16", (2,))),
        lambda: vm.tensor_from_storage(storage, TensorType("bf16", (2,)), 0),
        lambda: vm.launch(to_half, [x]),
    ):
        refuses(ml.errors.DTypeError, r"a VM on cuda:0 has no b?f16 yet", asked)


def launched(vm: ml.VM, name: str, case: Case, *, graph: bool) -> list[Array]:
    """The op's result: fresh, written, and maybe written twice by a program that is launched until
    it is a graph."""
    handles = sent(vm, *case.inputs)
    count = len(handles)
    results = vm.launch(Program.of_op(name, count, case.attributes, 1), handles)
    if OPS[name].dynamic:
        return results
    outs = [vm.alloc_tensor(TensorType.of(results[0])) for _ in range(2)]
    into = Program.of_op(f"{name}.out", count + 1, case.attributes, 0)
    vm.launch(into, [outs[0], *handles])
    results.append(vm.read(outs[0]))
    if graph:
        program = straight(*[(name, (count + i, *range(count)), case.attributes) for i in range(2)])
        for _ in range(3):
            for out in outs:
                vm.write(out, np.zeros_like(results[0]))
            vm.launch(program, [*handles, *outs])
            results += map(vm.read, outs)
    return results


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_it_gives_on_the_host(vm: gpu.GpuVM, name: str) -> None:
    for i, case in enumerate(without_halves(name)):
        expected = evaluate(name, *case.inputs, **case.attributes)
        close = TOLERANCE.get(expected.dtype.name, 0)
        for result in launched(vm, name, case, graph=i < 2):
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(result, expected, rtol=close, atol=close)


def test_what_waits_for_a_value() -> None:
    """The ops whose value, or shape, the host must know before the next kernel."""
    assert {
        *("nonzero_indices", "boolean_index"),  # shapes
        *("eig", "eigvals", "permutation"),  # what CuPy lacks
        *("gamma", "poisson", "binomial", "multinomial", "lu", "solve_triangular", "expm"),
        *("cholesky", "det_vjp", "eigh", "eigvalsh", "inv", "pinv", "solve", "svd", "svdvals"),
    } == WAITS


CONTROL = """
.const start i64[] -4
.const one i64[] 1
.const two f32[2] 2 3
.func twice 1 1
    get -1
    get -1
    push_str "add"
    cfunc 2 1
    return 1
.func main 0 *
    push_const start
    push_const two
loop:
    get 1
    call twice
    set 1
    get 0
    load_arg 0
    push_str "add"
    cfunc 2 1
    set 0
    get 0
    push_const one
    push_str "less"
    cfunc 2 1
    jump_if_false end
    jump loop
end:
    get 1
    push_int HANDLE
    store_global
    pop 2
    push_int HANDLE
    load_global
    push_str "mine"
    cfunc 1 3
    halt
"""


def test_loops_calls_conditions_globals_and_functions(vm: gpu.GpuVM, fake: Fake) -> None:
    def mine(frame: Frame) -> None:
        x: Any = frame.param(0)
        assert isinstance(x, fake.cupy.ndarray)
        out: Any = frame.new_tensor(TensorType("f32", (2,)))
        np.multiply(x, x, out)
        frame.push(out)
        frame.push(np.full(3, 7.0))
        frame.push(f32(2)[0])
        with pytest.raises(MachineError, match="a result is an array"):
            frame.push([1.0])  # type: ignore[arg-type]

    def mine_on_host(frame: Frame) -> None:
        x: Any = frame.param(0)
        frame.push(x * x)
        frame.push(np.full(3, 7.0))
        frame.push(f32(2)[0])

    for each in (ml.VM("host", native=False), vm):
        (turn, kept) = sent(each, np.asarray(1), np.zeros(2, np.float32))
        each.register("mine", mine if each is vm else mine_on_host, nparams=1)
        program = assemble(CONTROL.replace("HANDLE", str(kept)))
        for _ in range(3):
            square, seven, two = each.launch(program, [turn])
            np.testing.assert_array_equal(square, f32(64, 96) ** 2, strict=True)
            np.testing.assert_array_equal(seven, np.full(3, 7.0), strict=True)
            np.testing.assert_array_equal(two, np.float32(2), strict=True)
            np.testing.assert_array_equal(each.read(kept), f32(64, 96), strict=True)
        each.remove("mine")
        refuses(UnknownFunction, "", each.launch, program, [turn])


def test_a_constant_is_sent_once_and_never_written(vm: gpu.GpuVM, fake: Fake) -> None:
    program = assemble(
        ".const two f32[4] 2 3 4 5\n.func main 0 *\n"
        'push_const two\nload_arg 0\npush_str "multiply"\ncfunc 2 1\nhalt\n'
    )
    x, y = sent(vm, np.ones(4, np.float32), np.ones((2, 4), np.float32))
    before = fake.counts.to_device
    for handle in (x, y, x):
        vm.launch(program, [handle])
    assert fake.counts.to_device == before + 1
    writing = assemble(
        ".const two f32[4] 2 3 4 5\n.func main 0 *\nload_arg 0\n"
        'push_const two\npush_str "same"\ncfunc 1 1\nset 0\n'
        'get 0\nload_arg 0\nload_arg 0\npush_str "add.out"\ncfunc 3 0\npop 1\nhalt\n'
    )
    vm.register("same", lambda frame: frame.push(frame.param(0)), nparams=1, nresults=1)
    refuses(MachineError, r"add.out would write to a constant", vm.launch, writing, [x])


# --- graphs --------------------------------------------------------------------------

THREE = straight(("add", (2, 0, 1), {}), ("multiply", (2, 2, 1), {}), ("exp", (2, 2), {}))


def of_three(x: Any, y: Any) -> Any:
    return np.exp((x + y) * y)


def test_a_program_is_recorded_with_its_second_launch(vm: gpu.GpuVM, fake: Fake) -> None:
    x, y = f32(1, 2, 3, 4), f32(4, 3, 2, 1) / 4
    handles = sent(vm, x, y, np.zeros(4, np.float32))
    seen = []
    for i in range(4):
        vm.write(handles[0], x + i)
        before = fake.counts.launches
        vm.launch(THREE, handles)
        seen.append((vm.graphs.recorded, vm.graphs.replayed, fake.counts.launches - before))
        np.testing.assert_array_equal(vm.read(handles[2]), of_three(x + i, y))
    assert seen == [(0, 0, 3), (1, 1, 3), (1, 2, 0), (1, 3, 0)]


def test_a_graph_is_forgotten_when_what_it_stands_for_changes(vm: gpu.GpuVM) -> None:
    x, y = f32(1, 2, 3, 4), f32(4, 3, 2, 1) / 4
    first, second, out = sent(vm, x, y, np.zeros(4, np.float32))

    def check(x: Any, y: Any, *, records: bool) -> None:
        before = vm.graphs.recorded
        for _ in range(3):
            vm.launch(THREE, [first, second, out])
            np.testing.assert_array_equal(vm.read(out), of_three(x, y))
        assert (vm.graphs.recorded > before) == records

    check(x, y, records=True)
    check(x, y, records=False)
    vm.swap(first, second)
    check(y, x, records=True)
    (other,) = sent(vm, x)
    check(y, x, records=False)
    vm.dealloc_tensor(other)
    check(y, x, records=True)
    vm.register("mine", lambda frame: None)
    check(y, x, records=True)
    with vm.instrumented(Before(lambda *_: None)):
        check(y, x, records=False)
    check(y, x, records=True)
    vm.register("exp.out", copy)
    vm.launch(THREE, [first, second, out])
    np.testing.assert_array_equal(vm.read(out), (x + y) * x)


def copy(frame: Frame) -> None:
    out: Any = frame.param(0)
    np.copyto(out, frame.param(1))


def test_an_instrument_sees_each_kernel_of_a_graph(vm: gpu.GpuVM) -> None:
    handles = sent(vm, *[np.ones(4, np.float32)] * 3)
    for _ in range(3):
        vm.launch(THREE, handles)
    names: list[str] = []
    with vm.instrumented(Before(lambda name, _: names.append(name))):
        vm.launch(THREE, handles)
    assert len(names) == 3


def test_a_function_registered_by_a_program_counts_from_its_next_call_on(vm: gpu.GpuVM) -> None:
    """Also for a stretch of that very launch, which had a graph."""
    program = assemble(
        '.func main 0 *\npush_str "change"\ncfunc 0 0\n'
        + 'load_arg 1\nload_arg 0\npush_str "exp.out"\ncfunc 2 0\n' * 2
        + "halt\n"
    )
    x, out = sent(vm, np.ones(4, np.float32), np.zeros(4, np.float32))
    vm.register("change", lambda frame: None, nparams=0, nresults=0)
    for _ in range(3):
        vm.launch(program, [x, out])
    assert vm.graphs.recorded == 1

    def change(frame: Frame) -> None:
        vm.register("exp.out", copy)

    vm.functions.binding("change").callee.fn = change  # type: ignore[attr-defined]
    vm.launch(program, [x, out])
    np.testing.assert_array_equal(vm.read(out), np.ones(4))


def test_what_cannot_be_recorded_is_launched_between_graphs(vm: gpu.GpuVM, fake: Fake) -> None:
    """CuPy refuses to record products."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, 3)).astype(np.float32)
    program = straight(
        ("add", (2, 0, 1), {}),
        ("tanh", (3, 2), {}),
        ("matmul", (2, 3, 0), {}),
        ("add", (3, 2, 1), {}),
        ("matmul", (2, 3, 0), {}),
        ("matmul", (3, 2, 0), {}),
        ("tanh", (2, 3), {}),
        ("add", (2, 2, 1), {}),
    )
    handles = sent(vm, x, y, np.zeros((3, 3), "f4"), np.zeros((3, 3), "f4"))
    expected = np.tanh(((np.tanh(x + y) @ x + y) @ x) @ x) + y
    for _ in range(4):
        vm.write(handles[2], np.zeros((3, 3), "f4"))
        vm.launch(program, handles)
        np.testing.assert_array_equal(vm.read(handles[2]), expected)
    assert vm.graphs.recorded == 2  # of add tanh, of tanh add
    assert vm.graphs.replayed == 2 * 3


def test_a_graph_keeps_its_intermediates_apart(vm: gpu.GpuVM) -> None:
    """Tensors that are made later do not lie where a graph writes."""
    x = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
    attributes = OPS["gelu_vjp"].bind({"approximate": True})
    program = straight(("gelu_vjp", (1, 0, 0), attributes), ("gelu_vjp", (2, 1, 0), attributes))
    handles = sent(vm, x, x, x)
    for _ in range(2):
        vm.launch(program, handles)
    expected = vm.read(handles[2])
    others = sent(vm, *[np.full((64, 64), i, np.float32) for i in range(20)])
    for _ in range(3):
        vm.launch(program, handles)
    np.testing.assert_array_equal(vm.read(handles[2]), expected)
    assert (vm.graphs.recorded, vm.graphs.replayed) == (1, 4)
    for i, other in enumerate(others):
        np.testing.assert_array_equal(vm.read(other), np.full((64, 64), i))


def test_no_memory_of_a_graph_is_given_up_for_want_of_memory(vm: gpu.GpuVM) -> None:
    attributes = OPS["gelu_vjp"].bind({"approximate": True})
    program = straight(("gelu_vjp", (1, 0, 0), attributes), ("gelu_vjp", (2, 1, 0), attributes))
    small, large = np.ones(4096, np.float32), np.ones(1 << 20, np.float32)
    handles = sent(vm, small, small, small)
    for _ in range(2):
        vm.launch(program, handles)
    with vm.memory:
        held = vm.graphs._pool.total_bytes()
        assert held >= 2 * small.nbytes
        more = sent(vm, large, large, large)
        refuses(OutOfMemory, "", vm.launch, program, more)
        assert vm.graphs._pool.total_bytes() >= held


def test_an_error_in_a_graph_is_the_hosts(vm: gpu.GpuVM, fake: Fake) -> None:
    """Values are checked by a flag that is read after the launch: error, place and text are those
    of a VM of the host."""
    indices = np.asarray([0, 3, 1])
    program = straight(
        ("add", (2, 0, 0), {}),
        ("take", (3, 2, 1), {"axis": 0}),
        ("add", (3, 3, 3), {}),
    )
    x = np.arange(4, dtype=np.float32)
    told = []
    for each in (ml.VM("host", native=False), vm):
        handles = sent(each, x, indices, np.zeros(4, "f4"), np.zeros(3, "f4"))
        for launch in range(5):
            bad = launch in (1, 3)
            each.write(handles[1], indices + 4 if bad else indices)
            try:
                each.launch(program, handles)
                np.testing.assert_array_equal(each.read(handles[3]), 4 * x[indices])
            except PositionRefused as error:
                told.append((str(error), error.function, error.pc, error.step, error.__notes__))
    assert len(told) == 4
    assert len(set(map(str, told))) == 1
    assert vm.graphs.replayed == 4
    before = fake.counts.to_host
    vm.launch(program, handles)
    assert fake.counts.to_host == before + 1  # the flags of all kernels at once


def test_a_refused_index_is_told_though_it_was_written_over(vm: gpu.GpuVM) -> None:
    """By a later op of the same stretch, before anyone reads that it was refused."""
    program = straight(
        ("take", (2, 0, 1), {"axis": 0}),
        ("subtract", (1, 1, 1), {}),
    )
    x, indices, out = sent(vm, f32(1, 2, 3), np.asarray([0, 7]), f32(0, 0))
    for _ in range(4):
        vm.write(indices, np.asarray([0, 7]))
        with pytest.raises(PositionRefused, match=r"index 7 at position \[1\] is out of range"):
            vm.launch(program, [x, indices, out])
    assert vm.graphs.replayed == 3


def of_unsigned_indices(vm: ml.VM) -> list[str]:
    """What the VM says to indices that are no i64."""
    told = []

    def refused(run: Callable[[], object]) -> None:
        caught = refuses(OperandValueError, "", run)
        told.append(str(caught))

    def written(at: Any, add: bool) -> None:
        y = ml.asarray(f32(1, 2, 3))
        if add:
            y[at] += 9.0
        else:
            y[at] = 9.0

    with ml.Arena(vm, "a").allocating():
        x = ml.asarray(f32(1, 2, 3))
        far = ml.asarray(np.asarray([0, 2**64 - 1], np.uint64))
        near = ml.asarray(np.asarray([0, 2], np.uint64))
        one = ml.asarray(np.asarray(2**64 - 1, np.uint64))
        refused(lambda: ml.take(x, far, axis=0))
        refused(lambda: ml.take_along_axis(x, far, axis=0))
        refused(lambda: written(far, add=False))
        refused(lambda: written(far, add=True))
        refused(lambda: written(one, add=False))
        refused(lambda: x[one])
        refused(lambda: ml.one_hot(far, 3))
        taken = ml.capture(lambda x, i: ml.sqrt(ml.take(x, i, axis=0) ** 2))
        for _ in range(3):
            assert taken(x, near).numpy().tolist() == [1, 3]
        refused(lambda: taken(x, far))
    return told


def test_an_unsigned_index_beyond_all_signed_ones_is_refused(vm: gpu.GpuVM) -> None:
    """As it is on the host, in an eager op and in a program."""
    assert of_unsigned_indices(vm) == of_unsigned_indices(ml.VM("host", native=False))


def test_no_graph_has_a_transform(vm: gpu.GpuVM) -> None:
    """Its plan is CuPy's, which drops it when a thread has had 16 others."""
    x = np.arange(16, dtype=np.float32)

    def run(x: ml.Tensor) -> ml.Tensor:
        return ml.real(ml.fft.irfft(ml.fft.rfft(x * 2.0) * 1.5 + 1.0) * 2.0) + 1.0

    with ml.Arena(vm, "a").allocating():
        given, step = ml.asarray(x), ml.capture(run)
        expected = run(given).numpy()
        for _ in range(3):
            np.testing.assert_array_equal(step(given).numpy(), expected)
        assert vm.graphs.recorded > 0
        for n in range(2, 20):
            ml.fft.rfft(ml.ones(n))
        np.testing.assert_array_equal(step(given).numpy(), expected)


def test_an_error_of_a_kernel_in_a_stretch_has_its_place(vm: gpu.GpuVM) -> None:
    def refuse(out: Any, x: Any) -> None:
        raise OperandValueError("not this one")

    raw = gpu.GpuVM(device="cuda:0", kernels={"tanh": refuse})
    program = straight(("add", (1, 0, 0), {}), ("tanh", (1, 1), {}))
    handles = sent(raw, *[np.ones(4, np.float32)] * 2)
    for _ in range(3):
        with pytest.raises(OperandValueError, match=r"tanh\(f32\[4\]\): not this one") as caught:
            raw.launch(program, handles)
        assert (caught.value.function, caught.value.pc, caught.value.step) == ("main", 8, 1)


def test_an_error_of_cuda_is_a_machine_error_with_its_place(vm: gpu.GpuVM, fake: Fake) -> None:
    def broken(out: Any, x: Any) -> None:
        raise fake.cupy.cuda.runtime.CUDARuntimeError(101)

    raw = gpu.GpuVM(device="cuda:0", kernels={"tanh": broken})
    handles = sent(raw, f32(1), f32(1))
    for program in (
        Program.of_op("tanh.out", 2, {}, 0),
        straight(("exp", (0, 1), {}), ("tanh", (1, 1), {})),
    ):
        with pytest.raises(MachineError, match="cuda:0: cudaErrorInvalidDevice") as caught:
            raw.launch(program, handles)
        assert caught.value.function == "main"
        assert any("tanh.out" in note or "cfunc" in note for note in caught.value.__notes__)


@cases(
    "module, name",
    ("cupy_backends.cuda.api.driver", "CUDADriverError"),
    ("cupy_backends.cuda.libs.cublas", "CUBLASError"),
    ("cupy_backends.cuda.libs.cusolver", "CUSOLVERError"),
    ("cupy_backends.cuda.libs.nvrtc", "NVRTCError"),
    ("cupy.cuda.cufft", "CuFFTError"),
    ("cupy.cuda.compiler", "CompileException"),
)
def test_an_error_of_a_library_is_a_machine_error(fake: Fake, module: str, name: str) -> None:
    kind = type(name, (RuntimeError,), {"__module__": module})

    def broken(out: Any, x: Any) -> None:
        raise kind("its own text")

    raw = gpu.GpuVM(device="cuda:0", kernels={"tanh": broken})
    with pytest.raises(MachineError, match="cuda:0: its own text"):
        raw.launch(Program.of_op("tanh.out", 2, {}, 0), sent(raw, f32(1), f32(1)))


def test_limits_count_the_instructions_of_a_graph(vm: gpu.GpuVM) -> None:
    handles = sent(vm, *[np.ones(4, np.float32)] * 3)
    count = len(THREE.main.code)
    for _ in range(3):
        vm.launch(THREE, handles, max_steps=count)
        refuses(LimitExceeded, "", vm.launch, THREE, handles, max_steps=count - 1)
    assert vm.graphs.recorded == 1


# --- the language --------------------------------------------------------------------


def test_a_mixer_trains_as_on_the_host(vm: gpu.GpuVM, fake: Fake) -> None:
    """But for the order of sums; captured as eager, and nothing is sent from the second step on."""
    size = MixerSize(4, (8, 8, 1), 5, 4, 8, 1, 6, 12)
    host, eager = Training(size, ml.VM("host", native=False)), Training(size, vm)
    captured = Training(size, ml.VM("captured", device="cuda:0"))
    held = []
    for step in range(4):
        loss = eager.eager()
        assert loss == pytest.approx(host.eager(), rel=1e-6)
        before = fake.counts.to_device, fake.counts.to_host, fake.counts.allocations
        assert captured.replay() == loss
        if step:
            assert fake.counts.to_device == before[0]
            assert fake.counts.to_host == before[1] + 2  # that the labels are classes; the loss
            assert fake.counts.allocations == before[2]
        held.append(captured.vm.consumed_size_in_mib())
    for name, x in host.model.state().items():
        one, other = (each.model.state()[name].numpy() for each in (eager, captured))
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, x.numpy(), rtol=1e-5, atol=1e-8)
    assert len(set(held[1:])) == 1
    graphs = captured.vm.graphs  # type: ignore[attr-defined]
    assert graphs.recorded > 0
    assert graphs.replayed == 3 * graphs.recorded


def test_control_flow_and_its_gradient(vm: gpu.GpuVM) -> None:
    """A loop of the machine, whose way back reads residuals."""

    def body(x: ml.Tensor) -> ml.Tensor:
        return ml.tanh(x) * x + 1.0

    def run(x: ml.Tensor, n: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.fori_loop(0, n, lambda _, x: body(x), x))

    found = []
    for each in (ml.VM("host", native=False), vm):
        with ml.Arena(each, "a").allocating():
            x, n = ml.asarray(np.linspace(0, 1, 5, dtype=np.float32)), ml.asarray(3)
            step = ml.capture(ml.value_and_grad(run))
            found += [[each.numpy() for each in step(x, n)] for _ in range(3)]
    for value, gradient in found:
        np.testing.assert_array_equal(value, found[0][0])
        np.testing.assert_array_equal(gradient, found[0][1])


def test_arrays_of_the_host_are_operands_but_nothing_is_lent(vm: gpu.GpuVM) -> None:
    with ml.Arena(vm, "a").allocating():
        x = ml.asarray(np.ones(3, np.float32))
        np.testing.assert_array_equal((x + np.ones(3, np.float32)).numpy(), np.full(3, 2))
        refuses(ml.errors.CopyRefused, "", np.asarray, x, copy=False)
        np.testing.assert_array_equal(np.from_dlpack(x), np.ones(3))


# --- queues, groups, tools -----------------------------------------------------------


def test_a_queue_fills_pinned_slots(vm: gpu.GpuVM, fake: Fake) -> None:
    """A slot is filled again only after it was copied."""
    with ml.Arena(vm, "a").allocating():
        queue = ml.QueueTensor(vm, ["f32[4]"], maxsize=2)
        with pytest.raises(ArenaError, match="in this process's memory, and gpu0 has its own"):
            queue.emit(ProgramBuilder())
        doubled = ml.capture(lambda: queue.get()[0] * 2.0)
        for i in range(9):
            queue.put([np.full(4, i, np.float32)])
            if i % 2:
                np.testing.assert_array_equal(doubled().numpy(), np.full(4, 2.0 * (i - 1)))
                (x,) = queue.get()
                np.testing.assert_array_equal(x.numpy(), np.full(4, i))
                del x


def test_a_copy_waits_for_who_used_the_slot_and_is_waited_for(
    vm: gpu.GpuVM, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own. The producer waits for the copy, and not for the kernels."""
    log: list[Any] = []
    names: dict[int, str] = {}

    def logged(kind: Any, method: str) -> None:
        original = getattr(kind, method)

        def wrapper(stream: Any, event: Any = None) -> Any:
            result = original(stream) if event is None else original(stream, event)
            name = "compute" if stream == vm.memory.stream else "copies"
            if method == "record":
                names[id(result)] = f"{name} {sum('record' in each for each in log)}"
                kept.append(result)
            log.append((method, name if event is None else f"{name} for {names[id(event)]}"))
            return result

        monkeypatch.setattr(kind, method, wrapper)

    kept: list[Any] = []
    logged(fake.cupy.cuda.Stream, "record")
    logged(fake.cupy.cuda.Stream, "wait_event")
    queue = ml.QueueTensor(vm, ["f32[4]"], maxsize=1)
    for i in range(2):
        before = fake.counts.waits
        with queue.reserve() as (slot,):
            assert fake.counts.waits == before + i  # from the second time on there was a copy
            slot[...] = i
        (x,) = queue.get()
        del x
    assert log == [
        ("record", "compute"),  # when the slot is reserved: whoever used it comes before
        ("wait_event", "copies for compute 0"),
        ("record", "copies"),
        ("wait_event", "compute for copies 1"),
        ("record", "compute"),
        ("wait_event", "copies for compute 2"),
        ("record", "copies"),
        ("wait_event", "compute for copies 3"),
    ]


def test_pinned_memory_is_kept_until_it_was_copied(vm: gpu.GpuVM) -> None:
    """Also when its queue is gone, and another one has pinned memory of that size."""
    with ml.Arena(vm, "a").allocating():
        queue = ml.QueueTensor(vm, ["f32[4]"], maxsize=1)
        queue.put([np.full(4, 7, np.float32)])
        (x,) = queue.get()
        doubled = x * 2.0
        del x, queue
        gc.collect()
        ml.QueueTensor(vm, ["f32[4]"], maxsize=1)
        np.testing.assert_array_equal(doubled.numpy(), np.full(4, 14))
    assert not vm.memory._on_its_way


def test_a_tensor_in_the_place_of_another_is_not_written_before_its_time(
    vm: gpu.GpuVM, fake: Fake
) -> None:
    """That the old one was free to be written says nothing of the new one: it is zeroed first."""
    pinned = vm.pinned_zeros(F4.nbytes).view(np.float32)
    old = vm.alloc_tensor(F4)
    place = vm.array_of(old).data.ptr  # type: ignore[attr-defined]
    vm.write(old, pinned)
    vm.make_writable([old])
    vm.dealloc_tensor(old)
    new = vm.alloc_tensor(F4)
    assert vm.array_of(new).data.ptr == place  # type: ignore[attr-defined]
    pinned[...] = 5
    vm.write(new, pinned)
    vm.memory._copies.synchronize()
    np.testing.assert_array_equal(vm.read(new), np.full(4, 5))


def test_a_program_may_wait_for_who_fills_a_slot(vm: gpu.GpuVM) -> None:
    """A producer takes no lock that a launch holds."""
    queue = ml.QueueTensor(vm, ["f32[4]"], maxsize=1)
    waiting = threading.Event()

    def taken(frame: Frame) -> None:
        waiting.set()
        (x,) = queue.get(timeout=20)
        frame.push(vm.array_of(x.handle))

    def produce() -> None:
        waiting.wait(20)
        queue.put([f32(1, 2, 3, 4)])

    vm.register("taken", taken, nparams=0, nresults=1)
    producer = threading.Thread(target=produce)
    producer.start()
    (found,) = vm.launch(Program.of_op("taken", 0, {}, 1))
    producer.join()
    np.testing.assert_array_equal(found, f32(1, 2, 3, 4))


def test_two_devices_in_a_group(fake: Fake) -> None:
    pytest.importorskip("threadpoolctl")
    vms = [ml.VM(f"gpu{i}", device=f"cuda:{i}") for i in range(2)]
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)

    def member(rank: int, vm: VM) -> list[Array]:
        (total,) = call(vm, "all_reduce", rows[rank], op="sum")
        (all_rows,) = call(vm, "all_gather", rows[rank])
        (part,) = call(vm, "reduce_scatter", rows.reshape(-1) * (rank + 1), op="sum")
        (first,) = call(vm, "broadcast", rows[rank], root=1)
        x = tensor(vm, rows[rank])
        vm.launch(Program.of_op("all_reduce.start", 1, {"op": "max"}, 0), [x])
        vm.launch(Program.of_op("all_reduce.wait", 1, {}, 0), [x])
        return [total, all_rows, part, first, vm.read(x)]

    with Group(vms) as group:
        results = group.run(member)
    for rank, (total, all_rows, part, first, largest) in enumerate(results):
        np.testing.assert_array_equal(total, rows.sum(0))
        np.testing.assert_array_equal(all_rows, rows.reshape(-1))
        np.testing.assert_array_equal(part, 3 * rows[rank])
        np.testing.assert_array_equal(first, rows[1])
        np.testing.assert_array_equal(largest, rows[1])


def test_a_training_by_command(fake: Fake, tmp_path: Path) -> None:
    results = []
    for device in ("cpu", "cuda:0"):
        file = tmp_path / f"{device[:4]}.json"
        command = ["--model", "mlp", "--epochs", "1", "--batch-size", "256", "--quiet"]
        assert train_main([*command, "--device", device, "--json", str(file)]) == 0
        results.append(json.loads(file.read_text()))
    assert results[1]["train_loss"] == pytest.approx(results[0]["train_loss"], rel=1e-4)
    assert results[1]["growth_after_first_epoch_bytes"] == 0


def test_a_training_on_no_device(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    assert train_main(["--device", "cuda:7"]) == 1
    assert "there are cpu, cuda:0, cuda:1" in capsys.readouterr().err
    refuses(SystemExit, "", train_main, ["--device", "cuda:0", "--vm", "here:1"])
    refuses(SystemExit, "", train_main, ["--device", "cuda:0", "--group", "threads:2"])
    told = capsys.readouterr().err
    assert "--device is one VM, and --group threads:2 makes its own: give one" in told


def test_info_lists_the_devices(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    assert main(["info"]) == 0
    line = "devices: cpu; cuda:0 Fake of numpy, 0 GiB; cuda:1 Fake of numpy, 0 GiB"
    assert line in capsys.readouterr().out.splitlines()


def test_the_benchmark_runs_where_there_is_a_gpu(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = bench.gpu.prepare_mlvm(True, captured=False)
    assert set(rounds) == {"tiny", "add"}
    assert rounds["add"]()["us_per_op"] > 0
    assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cupy", None)
    for captured in (False, True):
        assert bench.gpu.prepare_mlvm(True, captured=captured) == {}
        assert "mlvm has no GPU, skipped: cupy is not installed" in capsys.readouterr().err


def test_the_page_prints_what_it_says(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    [(body, expected)] = shown(ROOT / "docs" / "gpu.md", "python")
    exec(compile(body, "docs/gpu.md", "exec"), {})
    assert capsys.readouterr().out == expected


def test_a_trace_has_each_kernel(vm: gpu.GpuVM, tmp_path: Path) -> None:
    handles = sent(vm, *[np.ones(4, np.float32)] * 3)
    with vm.trace(tmp_path / "trace.json"):
        vm.launch(THREE, handles)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"add.out", "multiply.out", "exp.out"} <= set(names)


def test_checks_raise_before_updates(fake: Fake) -> None:
    with ml.use(VM(device="cuda:0")):
        x, total = ml.asarray([1.0, -1.0]), ml.zeros(2)

        @ml.capture
        def step(x: ml.Tensor) -> None:
            ml.check(x > 0.0, "x is positive")
            ml.add(total, x, out=total)

        step(ml.ones(2))
        for each in (step, lambda x: ml.check(x > 0.0, "x is positive")):
            with pytest.raises(CheckFailed, match=r"1 of 2 are False, the first at \[1\]"):
                each(x)
        assert total.tolist() == [1.0, 1.0]


def test_where_a_nan_comes_from(fake: Fake) -> None:
    vm = VM(device="cuda:0")
    with ml.use(vm):
        x, total = ml.asarray([1.0, -1.0]), ml.zeros(2)

        @ml.capture
        def step(x: ml.Tensor) -> None:
            ml.add(total, 1.0, out=total)
            ml.add(total, ml.log(x), out=total)

        with ml.debug.nans(vm):
            step(ml.ones(2))
            for each in (step, ml.log):
                with pytest.raises(NotFinite, match=r"log\(f32\[2\]\): .* is nan at \[1\]"):
                    each(x)
            with pytest.raises(NotFinite, match="divide"):
                x /= 0.0
        assert x.tolist() == [1.0, -1.0]
        assert total.tolist() == [1.0, 1.0]
