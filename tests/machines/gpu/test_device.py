"""A VM on an OpenCL device, PoCL say: what it computes, what it counts, and what it refuses."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from bench.mlvm_training import Training
from bench.sizes import MixerSize
from mlvm.__main__ import main
from mlvm.core.errors import (
    HandleError,
    LinAlgError,
    MachineError,
    MissingExtraError,
    NonFiniteError,
    OperandValueError,
    OutOfMemoryError,
    PositionError,
    UnknownFunctionError,
)
from mlvm.core.machine.fused import Chain, Link
from mlvm.core.op import OPS
from mlvm.core.ops import half
from mlvm.core.program.program import Program
from mlvm.core.types import Array, DType, TensorType
from mlvm.machines.gpu import opencl
from mlvm.machines.gpu.elementwise import ELEMENTWISE
from mlvm.machines.gpu.kernels import KERNELS, Call
from mlvm.machines.gpu.memory import Lost
from mlvm.machines.gpu.vm import GpuVM
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel.group import Group
from tests.brief import ROOT, Patch, cases, refuses
from tests.cases import CASES
from tests.cases.evaluate import evaluate
from tests.core.machine.test_fused import mean_of_neighbours
from tests.core.programs import put
from tests.invariance.walk import Sample, reference
from tests.machines.gpu.against import compare, launched
from tests.machines.one_trace import assert_one_trace_serves_all_lengths
from tests.test_docs import shown
from tests.threads import PATIENCE, start

F4 = TensorType("f32", (4,))


def sent(vm: VM, *arrays: Any) -> list[int]:
    """Tensors of the VM with these values."""
    return [put(vm, np.asarray(array)) for array in arrays]


def counted(vm: GpuVM, work: Any) -> dict[str, int]:
    """Count what the work adds to the VM's counts."""
    before = vars(copy(vm.counts))
    work()
    return {name: now - before[name] for name, now in vars(vm.counts).items() if now > before[name]}


# --- ops -----------------------------------------------------------------------------

_SAMPLES: dict[str, Sequence[float]] = {
    "f": (0.0, -0.0, 0.25, -1.5, 2.5, -3.0, 1e-30, 88.0, np.inf, -np.inf, np.nan),
    "i": (0, 1, -1, 3, -7, 100, -128, 127),
    "u": (0, 1, 2, 3, 7, 100, 128, 255),
    "b": (False, True),
}


def _operands(dtype: DType) -> list[Array]:
    """Three operands that have all pairs of the samples, and all conditions."""
    kind = "f" if dtype.is_float else {"signed": "i", "unsigned": "u", "bool": "b"}[dtype.kind]
    values = np.asarray(_SAMPLES[kind])
    x, y = [each.ravel() for each in np.meshgrid(values, values)]
    arrays = [x, y, np.roll(x, 1)]
    tensors = []
    for each in arrays:
        out = np.empty(each.shape, dtype.numpy)
        with np.errstate(all="ignore"):
            OPS["astype"].kernel(out, np.ascontiguousarray(each), dtype=dtype.name)
        tensors.append(out)
    return tensors


def _samples(dtype: DType) -> Iterator[Sample]:
    """Calls of the elementwise ops on operands of a dtype."""
    operands = _operands(dtype)
    attributes: dict[str, dict[str, Any]] = {
        "gelu": {"approximate": True}, "gelu_slope": {"approximate": True},
        "astype": {"dtype": "i16"}, "broadcast_to": {"shape": operands[0].shape},
    }  # fmt: skip
    for name in sorted(ELEMENTWISE - {"where"}):  # which asks for a bool first
        sample = Sample(name, tuple(operands[: len(OPS[name].inputs)]), attributes.get(name, {}))
        if name == "pow" and not dtype.is_float:
            continue  # it may be refused
        if sample.type is not None and not (name == "nextafter" and dtype.is_half):
            yield sample  # the latter has no expression


@cases("dtype", "f32", "bf16", "i8", "bool")
def test_each_elementwise_op_is_that_of_the_reference(vm: GpuVM, dtype: str) -> None:
    """All of a dtype as chains of some each, which are one kernel each."""
    samples = [*_samples(DType.named(dtype))]
    assert len(samples) > 10
    before = vm.counts.host_ops
    operands = sent(vm, *_operands(DType.named(dtype)))
    for first in range(0, len(samples), 24):
        some = samples[first : first + 24]
        count = len(some)
        links = []
        for i, each in enumerate(some):
            op, sources = OPS[each.op], range(count, count + len(each.inputs))
            links.append(Link(op, i, (*sources,), op.bind(each.attributes)))
        outs = [vm.alloc_tensor(each.type) for each in some if each.type is not None]
        chain = Chain(links, count).attributes()
        vm.launch(Program.of_op("fused", count + 3, chain, 0), [*outs, *operands])
        for handle, each in zip(outs, some, strict=True):
            result, expected = vm.read(handle), reference(each)
            if half.is_half(result):
                result, expected = half.widened(result), half.widened(expected)
                unit = 2.0**-7 if dtype == "bf16" else 2.0**-10
                np.testing.assert_allclose(result, expected, unit, 1e-7, err_msg=each.op)
            else:
                compare(each.op, result, expected)
    assert vm.counts.host_ops == before


@pytest.mark.parametrize("name", sorted({*KERNELS} - ELEMENTWISE))
def test_an_op_gives_what_it_gives_on_the_reference_machine(vm: GpuVM, name: str) -> None:
    """One case each; `python -m tests.machines.gpu.against` has all of them."""
    case = CASES[name][0]
    before = vm.counts.host_ops
    compare(name, launched(vm, name, case), evaluate(name, *case.inputs, **case.attributes))
    assert vm.counts.host_ops == before or name in ("arange", "normal", "sort", "argsort")


def test_what_has_few_bits_goes_by_way_of_the_host(vm: GpuVM) -> None:
    x = np.asarray([[1.0, -2.0, 3.0, -4.0]], "f4")
    before = vm.counts.host_ops
    case = CASES["pack"][0]
    compare("pack", launched(vm, "pack", case), evaluate("pack", *case.inputs, **case.attributes))
    with ml.use(vm):
        packed = ml.astype(ml.asarray(x), "i4")
        np.testing.assert_array_equal(ml.astype(packed, "f32").numpy(), x)
    assert vm.counts.host_ops > before


def test_an_op_without_a_kernel_runs_on_the_host_and_is_counted(vm: GpuVM) -> None:
    x = np.asarray([[2.0, 0.0], [0.0, 4.0]])
    [handle] = sent(vm, x)

    def inverted() -> None:
        [result] = vm.launch(Program.of_op("inv", 1, {}, 1), [handle])
        np.testing.assert_array_equal(result, np.linalg.inv(x))

    counts = counted(vm, inverted)
    assert (counts["host_ops"], counts["fetched"], counts["sent"], counts["waits"]) == (1, 2, 1, 2)
    singular = sent(vm, np.zeros((2, 2)))
    caught = refuses(
        LinAlgError, r"inv\(f64\[2,2\]\)", vm.launch, Program.of_op("inv", 1, {}, 1), singular
    )
    assert caught.function == "main"


def test_operands_broadcast_and_strides_are_walked(vm: GpuVM) -> None:
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal(s).astype("f4") for s in ((2, 3, 1, 5), (4, 1), (3, 1, 1)))
    with ml.use(vm):
        result = (ml.asarray(x) + ml.asarray(y)) * ml.asarray(z)
    np.testing.assert_array_equal(result.numpy(), (x + y) * z)


# --- memory --------------------------------------------------------------------------


def test_values_cross_in_write_and_read_only(vm: GpuVM) -> None:
    values = np.arange(4, dtype=np.float32)
    x, y, z = sent(vm, values, values, values)

    def work() -> None:
        vm.launch(Program.of_op("add.out", 3, {}, 0), [z, x, y])
        vm.swap(x, z)

    assert counted(vm, work) == {"launches": 1}
    counts = counted(vm, lambda: np.testing.assert_array_equal(vm.read(x), 2 * values))
    assert counts == {"fetched": 1, "fetched_bytes": 16, "waits": 1}


def test_bytes_are_counted_exactly_and_given_back(vm: GpuVM) -> None:
    before = vm.consumed_size_in_mib()
    storage = vm.alloc_storage(1000)
    empty = [vm.alloc_tensor(TensorType("f32", (0, 3))) for _ in range(2)]
    tensor = vm.alloc_tensor(TensorType("i64", (3, 5)))
    view = vm.tensor_from_storage(storage, F4, 64)
    assert vm.consumed_size_in_mib() == before + (1000 + 120) / 2**20
    memory = vm.memory
    assert memory.peak >= memory.allocated >= 1120
    np.testing.assert_array_equal(vm.read(view), np.zeros(4, np.float32), strict=True)
    vm.write(view, np.arange(4, dtype="f4"))
    other = vm.tensor_from_storage(storage, TensorType("f32", (2,)), 72)
    np.testing.assert_array_equal(vm.read(other), np.asarray([2, 3], "f4"))
    assert [vm.read(each).shape for each in empty] == [(0, 3), (0, 3)]
    for handle in (tensor, *empty):
        vm.dealloc_tensor(handle)
    vm.dealloc_storage(storage)
    assert vm.consumed_size_in_mib() == before
    assert memory.allocated <= memory.peak - 1120
    refuses(HandleError, "freed with storage", vm.read, view)


def test_more_than_the_device_has_is_out_of_memory(vm: GpuVM) -> None:
    refuses(
        OutOfMemoryError, r"cannot allocate [\d,]+ bytes; the VM holds 0", vm.alloc_storage, 1 << 50
    )
    arena = ml.Arena(vm, "small", capacity=64)
    with arena.allocating():
        refuses(ml.errors.ArenaOverflowError, "needs 448 bytes; 64 of 64", ml.ones, 100)


def test_memory_of_a_device_is_not_lent(vm: GpuVM) -> None:
    [x] = sent(vm, np.ones(4, "f4"))
    refuses(HandleError, f"is on {vm.memory.device}; use read", vm.borrow, x)
    refuses(HandleError, "not in host memory", vm.storage_over, np.zeros(64, np.uint8))
    refuses(HandleError, "copy with read and write", vm.share, x, VM("host"))
    refuses(MachineError, "C functions access host memory", vm.register_library, "x.so")


def test_an_op_works_in_place_and_never_over_an_operand_it_reads(vm: GpuVM) -> None:
    x, y = np.arange(6, dtype="f4"), np.asarray([7, 8], "f4")
    a, b = sent(vm, x, y)
    attributes = {"start": (1,), "length": (2,), "step": (3,)}
    vm.launch(Program.of_op("slice_set.out", 3, attributes, 0), [a, a, b])
    np.testing.assert_array_equal(vm.read(a), [0, 7, 2, 3, 8, 5])
    program = Program.of_op("flip.out", 2, {"axis": 0}, 0)
    refuses(MachineError, "overlaps an operand that is still read", vm.launch, program, [a, a])


def test_a_chain_reads_and_writes_windows(vm: GpuVM) -> None:
    x, y = np.random.default_rng(0).random((2, 5, 6), "f4")
    expected = y.copy()
    expected[1:4, 1:5] = x[0:3, 1:5] + x[4:1:-1, 5:1:-1]
    chain, before = mean_of_neighbours().attributes(), vm.counts.host_ops
    for out in (np.empty_like(y), None):
        a, b = sent(vm, x, y)
        c = b if out is None else sent(vm, out)[0]
        vm.launch(Program.of_op("fused", 3, chain, 0), [c, a, b])
        np.testing.assert_array_equal(vm.read(c), expected)
    assert vm.counts.host_ops == before


# --- values that are refused, functions of the host, control flow --------------------


def test_a_refused_value_is_told_at_the_next_wait_with_its_place(vm: GpuVM) -> None:
    x, good, bad, out = sent(
        vm, np.arange(4, dtype="f4"), np.asarray([0, 3]), np.asarray([1, 9]), np.zeros(2, "f4")
    )
    take = Program.of_op("take.out", 3, {"axis": 0}, 0)
    for _ in range(3):
        vm.launch(take, [out, x, good])
    np.testing.assert_array_equal(vm.read(out), [0, 3])
    assert counted(vm, lambda: vm.launch(take, [out, x, bad])) == {"launches": 1}
    text = r"take\(f32\[4\], i64\[2\]\): index 9 at position \[1\] is out of range for length 4"
    caught = refuses(PositionError, text, vm.read, x)
    assert (caught.function, caught.pc) == ("main", 4)
    assert __file__ in "".join(caught.__notes__)
    np.testing.assert_array_equal(vm.read(x), np.arange(4))  # told once
    power, operands = Program.of_op("pow", 2, {}, 1), sent(vm, np.asarray([2]), np.asarray([-1]))
    refuses(OperandValueError, "got a negative exponent", vm.launch, power, operands)


def test_each_launch_that_refuses_a_value_is_told_once_and_to_its_own_thread(vm: GpuVM) -> None:
    x, out = sent(vm, np.arange(4, dtype="f4"), np.zeros(1, "f4"))
    take = Program.of_op("take.out", 3, {"axis": 0}, 0)

    def launch(index: int) -> None:
        vm.launch(take, [out, x, *sent(vm, np.asarray([index]))])

    for index in (7, 2, 8):
        launch(index)
    for index in (7, 8):
        refuses(PositionError, f"index {index} ", vm.read, out)
    vm.read(out)
    launch(9)
    start(refuses, PositionError, "index 9 ", vm.read, out).result(PATIENCE)
    refuses(PositionError, "index 9 ", vm.read, out)
    start(launch, 10).result(PATIENCE)
    refuses(PositionError, "index 10 ", vm.read, out)
    vm.read(out)


def test_an_error_on_the_host_does_not_hide_a_value_that_was_refused_before_it(vm: GpuVM) -> None:
    """The flag was left, and told of a later launch that had refused nothing."""
    with ml.use(vm):
        x, eye = ml.asarray([1.0, 2.0]), ml.eye(2, dtype="f64")

        @ml.capture
        def step(x: Any, places: Any, a: Any) -> Any:
            return x[places], ml.linalg.inv(a)  # here

        step(x, ml.asarray([0]), eye)[0].numpy()
        caught = refuses(PositionError, "index 5 ", step, x, ml.asarray([5]), ml.zeros_like(eye))
        assert "recorded at" in "".join(caught.__notes__)
        assert step(x, ml.asarray([1]), eye)[0].tolist() == [2.0]


def test_values_that_were_refused_are_told_as_they_were(vm: GpuVM) -> None:
    x, place = sent(vm, np.arange(4, dtype="f4"), np.asarray([7]))
    take = Program.of_op("take.out", 3, {"axis": 0}, 0)
    for out in sent(vm, np.zeros(1, "f4"), np.zeros(1, "f4")):
        vm.launch(take, [out, x, place])
    refuses(PositionError, "index 7 ", vm.read, out)
    vm.write(place, np.asarray([8]))
    refuses(PositionError, "index 7 ", vm.read, out)
    vm.read(out)


def test_what_was_refused_is_told_when_its_memory_has_another_use(vm: GpuVM) -> None:
    """It was read again when the flags were: another number, or an error of another class."""
    x = np.arange(10.0, dtype="f4")

    def gather(x: Any) -> Any:
        return ml.take(x, ml.asarray([3, -50]))

    def loss(x: Any) -> Any:
        return ml.softmax_cross_entropy(ml.zeros((2, 3)), ml.asarray([0, 7]))

    def power(x: Any) -> Any:
        return ml.asarray([2, 3]) ** ml.asarray([1, -2])

    def drawn(x: Any) -> Any:
        p = ml.asarray([0.5, 2.5], dtype=ml.bfloat16)
        return ml.random.bernoulli(2, p, key=ml.random.key(0))

    for error, text, fn in (
        (PositionError, r"index -50 at position \[1\]", gather),
        (PositionError, r"index -50 at position \[1\]", ml.capture(gather)),
        (PositionError, r"index 77 at .*\[1\]", lambda x: x.at[ml.asarray([3, 77])].add(1.0)),
        (
            PositionError,
            "index 18446744073709",
            lambda x: x[ml.asarray([2**64 - 1], dtype="u64")],
        ),
        (OperandValueError, r"label 7 at position \(1,\)", loss),
        (OperandValueError, "negative exponent", power),
        (OperandValueError, r"2\.5", drawn),
    ):
        with ml.use(vm):
            operand = ml.asarray(x)
            results = [fn(operand)]
            results += [operand + n for n in range(8)]  # where the temporaries were
            refuses(error, text, results[-1].numpy)


def test_nans_are_looked_for_on_the_device(vm: GpuVM) -> None:
    with ml.use(vm), ml.debug.nans():
        x = ml.asarray([4.0, -1.0])
        refuses(
            NonFiniteError, r"sqrt\(f32\[2\]\): the result, f32\[2\], is nan at \[1\]", ml.sqrt, x
        )
        assert (x + 1.0).tolist() == [5.0, 0.0]


def test_functions_in_python_get_copies_of_the_host(vm: GpuVM) -> None:
    def doubled(frame: Any) -> None:
        x, total = frame.param(0), frame.param(1)
        assert isinstance(x, np.ndarray)
        total += x.sum()
        frame.push(2 * x)

    vm.register("doubled", doubled, nparams=2, nresults=1)
    x, total = sent(vm, np.arange(3.0), np.zeros(()))
    counts = counted(vm, lambda: vm.launch(Program.of_op("doubled", 2, {}, 1), [x, total]))
    assert (counts["fetched"], counts["sent"]) == (3, 2)  # with the output, and the result
    np.testing.assert_array_equal(vm.read(total), 3.0)


def test_control_flow_reads_only_what_it_branches_on(vm: GpuVM) -> None:
    def loop(x: ml.Tensor) -> ml.Tensor:
        return ml.while_loop(lambda x: ml.max(x) > 1.0, lambda x: x / 2.0, x)

    halved = ml.capture(loop)
    with ml.use(vm):
        x = ml.asarray(np.asarray([5.0, 8.0], "f4"))
        np.testing.assert_array_equal(halved(x).numpy(), [0.625, 1.0])
        counts = counted(vm, lambda: halved(x))
        assert (counts["waits"], counts["fetched_bytes"]) == (4, 4)  # one bool each time round
        slope = ml.capture(ml.grad(lambda x: ml.sum(loop(x) ** 2)))(x)
        np.testing.assert_allclose(slope.numpy(), 2 * x.numpy() / 64)


# --- training, queues, groups --------------------------------------------------------


def test_a_mixer_trains_as_on_the_host_and_a_step_waits_once(vm: GpuVM) -> None:
    """From the second launch on nothing is sent, and the loss alone is read, and the flags of what
    may be refused."""
    size = MixerSize(4, (8, 8, 1), 3, 4, 8, 1, 4, 16)
    host, there = Training(size, ml.VM("host")), Training(size, vm)
    losses = []
    for i in range(4):
        loss = host.eager()
        counts = counted(vm, lambda: losses.append(there.replay()))
        assert losses[-1] == pytest.approx(loss, rel=1e-5)
        if i:
            assert {**counts, "launches": 0} == {
                "launches": 0, "fetched": 2, "fetched_bytes": counts["fetched_bytes"], "waits": 1,
            }  # fmt: skip
    for name, x in host.model.state().items():
        np.testing.assert_allclose(there.model.state()[name].numpy(), x.numpy(), 1e-3, 1e-5)


def test_one_trace_serves_all_lengths_there(vm: GpuVM) -> None:
    assert_one_trace_serves_all_lengths(vm)


def test_an_op_has_the_same_bits_in_each_chain(vm: GpuVM) -> None:
    """A processor computes some by vectors: whole ones, the rest of a row, and of single values."""
    values = np.random.default_rng(2).standard_normal((3, 53)).astype("f4")
    with ml.use(vm):
        x = ml.asarray(values)
        for f in (lambda x: ml.exp(x) * x, lambda x: ml.where(x > 0, ml.exp(x), x)):
            result = ml.capture(f)(x).numpy()
            assert result.tobytes() == f(x).numpy().tobytes()
            column = ml.capture(f)(ml.asarray(values[:, :1])).numpy()
            assert column.tobytes() == result[:, :1].tobytes()
            with ml.use(VM("host")):
                np.testing.assert_allclose(result, f(ml.asarray(values)).numpy(), 1e-6)


def test_a_queue_keeps_its_order_while_the_device_computes(vm: GpuVM) -> None:
    with ml.Arena(vm, "a").allocating():
        queue = ml.QueueTensor(vm, ["f32[4096]"], maxsize=2)
        total = ml.zeros(4096)
        for i in range(20):
            with queue.reserve() as (slot,):
                slot[...] = i
            [x] = queue.get()
            total = total * 2.0 + x
            del x
        expected = np.float32(0)
        for i in range(20):
            expected = expected * 2 + i
        np.testing.assert_array_equal(total.numpy(), np.full(4096, expected, "f4"))


def test_two_devices_are_a_group(device: str) -> None:
    pytest.importorskip("threadpoolctl")
    group = Group([ml.VM(f"gpu{i}", device=device) for i in range(2)])

    def work(rank: int, vm: VM) -> Array:
        x = ml.ones(3) * (1.0 + rank)
        ml.parallel.all_reduce(x)
        return x.numpy()

    for result in group.run(work):
        np.testing.assert_array_equal(result, np.full(3, 3.0, "f4"))


# --- which devices there are ---------------------------------------------------------


def test_a_vm_is_on_the_device_that_it_is_asked_for(vm: GpuVM, device: str, capsys: Any) -> None:
    assert repr(vm) == f"<VM 'gpu0' on {device}>"
    assert isinstance(vm, ml.VM)
    assert not isinstance(ml.VM(device="cpu"), GpuVM)
    assert device in [each.name for each in ml.devices()]
    assert main(["info"]) == 0
    assert f"{device} " in capsys.readouterr().out


@cases("name", "opencl:99", "opencl", "tpu", "opencl:-1", "CPU", "", None, 0)
def test_a_device_that_there_is_not_is_refused_by_name(device: str, name: Any) -> None:
    if str(name).startswith("opencl") and not device.startswith("opencl"):
        pytest.importorskip("pyopencl")
    refuses(
        MachineError, f"unknown device {name!r}; available are cpu, .*{device}", ml.VM, device=name
    )


@cases("kind", ("opencl", "pyopencl"), ("cuda", "cupy"))
def test_without_its_package_the_error_says_what_to_install(
    kind: tuple[str, str], monkeypatch: Patch, capsys: Any
) -> None:
    name, module = kind
    monkeypatch.setitem(sys.modules, module, None)
    refuses(MissingExtraError, rf'pip install "mlvm\[{name}\]"', ml.VM, device=f"{name}:0")
    assert main(["info"]) == 0
    assert f"no {name} ({module} is not installed" in capsys.readouterr().out


@cases("option", {"threads": 2}, {"workers": 1}, {"native": True}, {"pinned": True})
def test_options_of_the_processor_are_refused(device: str, option: dict[str, Any]) -> None:
    refuses(MachineError, "requires a VM on the processor", ml.VM, device=device, **option)
    refuses(UnknownFunctionError, "", ml.VM, device=device, kernels={"nothing": lambda: None})


def test_what_a_driver_refuses_is_a_machine_error(vm: GpuVM) -> None:
    """It was pyopencl's own error, which callers do not catch."""

    def broken() -> None:
        with vm.memory:
            vm.memory.driver.ready(Call("__kernel void broken( {", "broken", (1,), (1,), ()), ())

    refuses(MachineError, "(opencl.*: .*BUILD_PROGRAM_FAILURE|CUDA: NVRTC cannot compile)", broken)


@cases(
    "source, reason",
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    ("raise SystemExit('INVALID_KERNEL_NAME')", "INVALID_KERNEL_NAME"),
)
def test_a_driver_that_ends_the_process_is_refused_in_one_line(
    device: str, monkeypatch: Patch, tmp_path: Path, source: str, reason: str
) -> None:
    if not device.startswith("opencl"):
        pytest.skip("drivers of OpenCL are tried in a child process")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(opencl, "_shared", cache(opencl._shared.__wrapped__))
    working = opencl._PROBE
    monkeypatch.setattr(opencl, "_PROBE", source)
    text = rf"{device}: the driver .* \({reason}\); install .*`apt install pocl-opencl-icd`"
    error = refuses(MachineError, text, ml.VM, device=device)
    assert "\n" not in str(error)
    monkeypatch.setattr(opencl, "_PROBE", working)
    ml.VM(device=device)  # once it has passed, no child is started again
    monkeypatch.setattr(opencl, "_PROBE", source)
    opencl._shared.cache_clear()
    ml.VM(device=device)


def test_a_lost_device_closes_the_vm_and_says_so(vm: GpuVM, monkeypatch: Patch) -> None:
    x, y = sent(vm, np.ones(4, "f4"), np.ones(4, "f4"))

    def fail(*_: object) -> None:
        raise Lost("CL_DEVICE_NOT_AVAILABLE")

    with monkeypatch.context() as patch:
        patch.setattr(vm.memory.driver, "fetch", fail)
        refuses(MachineError, "and this VM are lost: CL_DEVICE", vm.read, x)
    add = Program.of_op("add", 2, {}, 1)
    for call in (
        lambda: vm.read(x), lambda: vm.launch(add, [x, y]), lambda: vm.write(x, np.ones(4, "f4")),
    ):  # fmt: skip
        refuses(MachineError, "and this VM are lost", call)
    vm.dealloc_tensor(x)


def test_a_trace_has_each_op_and_each_wait(vm: GpuVM, tmp_path: Path) -> None:
    x, y, z = sent(vm, *[np.ones(4, "f4")] * 3)
    program = Program.of_op("add.out", 3, {}, 0)
    vm.launch(program, [z, x, y])
    with vm.profile(tmp_path / "t.json"):
        vm.launch(program, [z, x, y])
        vm.read(z)
    names = [each["name"] for each in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert names.count("add.out") == names.count("wait: read") == 1


def test_a_vm_on_a_device_ends(device: str) -> None:
    vm = ml.VM("short", device=device)
    handles = sent(vm, np.arange(4), np.asarray([1, 2]))
    vm.launch(Program.of_op("take", 2, {"axis": 0}, 1), handles)
    reference = weakref.ref(vm)
    del vm
    gc.collect()
    assert reference() is None


def test_the_guide_runs(device: str, capsys: Any) -> None:
    if device != "opencl:0":
        pytest.skip(f"the guide is on opencl:0, and what works here is {device}")
    [(code, output)] = shown(ROOT / "docs" / "gpu.md", "python")
    exec(compile(code, "docs/gpu.md", "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out == output
