"""Instruments around functions, and the trace that is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mlvm.core.errors import ArgumentError, HandleError, MachineError, ShapeError
from mlvm.core.machine.callee import Value
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.wire import WireVM
from mlvm.show.vm_trace import profile
from tests.brief import cases, refuses
from tests.core.programs import asm, f32s, put

VECTOR = TensorType("f32", (4,))
ADD_OUT = Program.of_op("add.out", 3, {}, 0)
ADD = Program.of_op("add", 2, {}, 1)


class Log:
    """An instrument that writes down its calls, and answers `fakes` by name."""

    def __init__(self, **fakes: Sequence[Value]) -> None:
        self.lines: list[str] = []
        self.fakes = fakes

    def before(self, name: str, params: Any, attributes: Any) -> Sequence[Value] | None:
        self.lines.append(f"before {name} {len(params)}")
        return self.fakes.get(name.replace(".", "_"))

    def after(self, name: str, params: Any, attributes: Any, results: Any) -> None:
        self.lines.append(f"after {name} {len(results)}")


def ones(vm: VMProtocol) -> int:
    return put(vm, f32s(1, 1, 1, 1))


@cases("workers", 0, 2)
def test_it_is_called_before_and_after_each_function(workers: int) -> None:
    vm, log = VM(workers=workers), Log()
    x = ones(vm)
    vm.launch(ADD_OUT, (x, x, x))  # linked before the instrument comes
    with vm.instrumented(log):
        vm.launch(ADD_OUT, (x, x, x))
        assert vm.launch(ADD, (x, x))[0][0] == 8.0
    vm.launch(ADD_OUT, (x, x, x))
    adds = [line for line in log.lines if ".out" in line]
    assert adds == ["before add.out 3", "after add.out 0"]
    assert len(log.lines) == 4


@cases("workers", 0, 2)
def test_it_may_skip_a_function(workers: int) -> None:
    vm = VM(workers=workers)
    x = ones(vm)
    with vm.instrumented(Log(add=[np.full(4, 7, np.float32)], add_out=())):
        assert vm.launch(ADD, (x, x))[0][0] == 7.0
        vm.launch(ADD_OUT, (x, x, x))
    assert vm.read(x)[0] == 1.0


@cases("workers", 0, 2)
@cases("wrong", [], [np.zeros(3, np.float32)], [1], [None])
def test_what_it_gives_must_be_of_the_results_type(workers: int, wrong: Any) -> None:
    vm = VM(workers=workers)
    x = ones(vm)
    with vm.instrumented(Log(add=wrong)), pytest.raises(MachineError):
        vm.launch(ADD, (x, x))


def test_there_is_one_at_a_time_and_none_after() -> None:
    vm = VM()
    with vm.instrumented(Log()):
        refuses(
            MachineError, "already has an instrument", lambda: vm.instrumented(Log()).__enter__()
        )
        vm.register("mine", lambda frame: None)
        assert vm.functions.binding("mine").instrument is not None
    assert vm.functions.binding("mine").instrument is None
    assert vm.functions.binding("add").instrument is None


@cases("workers", 0, 2)
def test_a_trace_has_a_row_for_the_vm_and_each_worker(tmp_path: Path, workers: int) -> None:
    vm = VM("traced", workers=workers)
    x = ones(vm)
    path = tmp_path / "trace.json"
    with profile(vm, path):
        for _ in range(5):
            vm.launch(ADD_OUT, (x, x, x))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["add.out"] * 5
    assert spans[0]["args"]["params"] == "f32[4], f32[4], f32[4]"
    assert spans[0]["args"]["bytes"] == 48
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    starts = [event["ts"] for event in spans]
    assert starts == sorted(starts)
    rows = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {event["tid"] for event in spans} == set(rows)
    expected = {"traced"} if not workers else {"traced_0", "traced_1"}
    assert set(rows.values()) <= expected


def test_a_trace_is_written_even_if_the_block_fails(tmp_path: Path) -> None:
    vm = VM()
    x, y = ones(vm), vm.alloc_tensor(TensorType("f32", (3,)))
    path = tmp_path / "trace.json"

    def add_and_fail() -> None:
        with profile(vm, path):
            vm.launch(ADD_OUT, (x, x, x))
            vm.launch(ADD_OUT, (x, x, y))

    refuses(ShapeError, "", add_and_fail)
    assert len([e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]) == 1
    with pytest.raises(OSError, match="nowhere"), profile(vm, tmp_path / "nowhere" / "trace.json"):
        pass
    refuses(ArgumentError, r'the file to write: with vm.profile\("trace.json"\)', profile, vm)
    refuses(ArgumentError, "the file to write, not 3: ", profile, vm, cast(Any, 3))


def test_an_estimate_counts_bytes_and_operations_without_running() -> None:
    vm = VM()
    x, y = TensorType("f32", (64, 32)), TensorType("f32", (32, 16))
    before = vm.consumed_size_in_mib()
    assert vm.estimate(Program.of_op("matmul", 2, {}, 1), (x, y)) == (4 * 64 * 16, 2 * 64 * 32 * 16)
    assert vm.estimate(Program.of_op("add.out", 3, {}, 0), (x, x, x)) == (0, 64 * 32)
    assert vm.estimate(Program.of_op("reshape", 1, {"shape": (32, 64)}, 1), (x,)).flops == 0
    refuses(ShapeError, "", vm.estimate, Program.of_op("matmul", 2, {}, 1), (x, x))
    assert vm.consumed_size_in_mib() == before


def test_an_estimate_counts_a_function_for_each_call() -> None:
    vm = VM()
    program = asm(
        '.func double 1 1 | get -1 | get -1 | push_str "add" | cfunc 2 1 | return 1 | '
        ".func main 0 * | load_arg 0 | call double | load_arg 1 | call double | halt"
    )
    large, small = TensorType("f32", (1000,)), TensorType("f32", (2,))
    for types in ((large, small), (small, large)):
        assert vm.estimate(program, types) == (4008, 1002)
    assert vm.estimate(program, (large, large)) == (8000, 2000)


def test_two_vms_share_a_storage_without_a_copy() -> None:
    """Its bytes count as a whole in both, until neither has a part of it."""
    first, second = VM(), VM()
    storage = first.alloc_storage(1024)
    parts = [
        first.tensor_from_storage(storage, TensorType("u8", (n,)), start)
        for n, start in ((4, 0), (1020, 4))
    ]
    shared = [first.share(part, second) for part in parts]
    first.write(parts[0], np.full(4, 5, np.uint8))
    first.dealloc_storage(storage)
    assert first.consumed_size_in_mib() == 0
    for each in shared:
        assert second.consumed_size_in_mib() * 2**20 == 1024
        assert second.read(each)[0] == (5 if each == shared[0] else 0)
        second.dealloc_tensor(each)
    assert second.consumed_size_in_mib() == 0


def test_a_chain_is_traced_by_the_names_of_its_ops(tmp_path: Path) -> None:
    vm = VM()
    chain = {"chain": [["add", -1, 1, 2], ["negative", 0, -1]], "outputs": 1}
    handles = [ones(vm) for _ in range(3)]
    with profile(vm, tmp_path / "trace.json"):
        vm.launch(Program.of_op("fused", 3, chain, 0), handles)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["attributes"] for e in events if e["name"] == "fused"] == [
        {"chain": "add negative"}
    ]
    np.testing.assert_array_equal(vm.read(handles[0]), np.full(4, -2))


def test_a_trace_of_a_vm_elsewhere_has_the_calls_of_this_side(tmp_path: Path) -> None:
    vm = WireVM(VM("far"))
    with profile(vm, tmp_path / "trace.json"):
        x = ones(vm)
        vm.launch(ADD_OUT, (x, x, x))
        refuses(HandleError, "", vm.read, -1)
        assert vm.launch(ADD, (x, x))[0][0] == 4.0
    vm.read(x)
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    calls = [(each["name"], each["args"]["bytes"]) for each in events if each["ph"] == "X"]
    expected = [("alloc_tensor", 0), ("write", 16), ("launch", 0), ("read", 0), ("launch", 16)]
    assert calls == expected
    assert all(each["dur"] > 0 for each in events if each["ph"] == "X")
