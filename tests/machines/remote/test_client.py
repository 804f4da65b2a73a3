"""The client: posts in order, their errors late and with the right line, interrupts, threads."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.core.errors import (
    ConnectionLostError,
    HandleError,
    OperandValueError,
    ShapeError,
    user_place,
)
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import EXTENSION
from mlvm.machines.remote import client
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.limits import FIXED
from mlvm.machines.remote.outbox import PythonOutbox
from tests.alarms import interrupt_after
from tests.brief import Patch, cases, output_of, refuses, replace_op
from tests.core import programs
from tests.core.programs import ADD_INTO, f32s, straight
from tests.machines.libraries import MACHINES
from tests.machines.one_trace import assert_one_trace_serves_all_lengths
from tests.machines.remote.serving import SECRET, Served, vm_of
from tests.threads import in_threads, wait_for
from tests.wired import connect_to

PAIR, TRIPLE = TensorType(f32, (2,)), TensorType(f32, (3,))
MULTIPLY = Program.of_op("multiply.out", 3, {}, 0)
TAKE = Program.of_op("take.out", 3, {"axis": 0}, 0)
native = pytest.mark.skipif(EXTENSION is None, reason="the native machine was not built")


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> LocalVM:
    return LocalVM("there", native=request.param)


@pytest.fixture
def vm(machine: LocalVM) -> Iterator[RemoteVM]:
    """A client's VM at the other end of a socket."""
    vm = connect_to(machine)
    yield vm
    vm.close(wait=False)
    wait_for(lambda: machine.consumed_size_in_mib() == 0)


def line() -> int:
    """The line that this is called from."""
    return sys._getframe(1).f_lineno


def put(vm: RemoteVM, *values: float) -> int:
    return programs.put(vm, f32s(*values))


# --- posts ---------------------------------------------------------------------------


def test_posts_are_done_in_order(vm: RemoteVM) -> None:
    x, y = put(vm, 1, 2), put(vm, 10, 20)
    for _ in range(200):
        assert vm.launch(ADD_INTO, (y, x, y)) == []
    assert vm.read(y).tolist() == [210, 420]
    vm.swap(x, y)
    assert vm.read(x).tolist() == [210, 420]


def test_the_error_of_a_post_comes_with_the_next_answer_and_names_its_line(
    vm: RemoteVM, machine: LocalVM
) -> None:
    x, out = put(vm, 1, 2), vm.alloc_tensor(TensorType(f32, (1,)))
    vm.launch(ADD_INTO, (out, out, out))  # a new program is a call that waits
    index = programs.put(vm, np.array([0]))
    vm.launch(TAKE, (out, x, index))  # is known from now on
    vm.launch(TAKE, (out, x, index))
    assert vm.read(out).tolist() == [1]
    vm.write(index, np.array([7]))
    vm.launch(TAKE, (out, x, index))
    failed = line() - 1
    vm.write(x, f32s(5, 6))  # is passed over
    vm.launch(ADD_INTO, (x, x, x))
    vm.dealloc_tensor(index)  # is done
    caught = refuses(OperandValueError, "7", vm.alloc_storage, 64)
    assert caught.__notes__[-1] == f"called from {__file__}:{failed}"
    assert vm.read(x).tolist() == [1, 2]
    assert machine.consumed_size_in_mib() == 12 / 2**20


def test_a_write_that_fails_names_its_line(vm: RemoteVM) -> None:
    x = put(vm, 1, 2)
    for array in (f32s(1, 2, 3), np.zeros(100_000, np.float32)):
        vm.write(x, array)
        failed = line() - 1
        caught = refuses(ShapeError, "", vm.synchronize)
        assert caught.__notes__ == [f"called from {__file__}:{failed}"]
    assert vm.read(x).tolist() == [1, 2]


def test_no_line_is_kept_for_ever(vm: RemoteVM, monkeypatch: Patch) -> None:
    monkeypatch.setattr(client, "FIXED", FIXED._replace(posts=100))
    x = put(vm, 1)
    for _ in range(2000):
        vm.launch(ADD_INTO, (x, x, x))
        assert len(vm._stream.note.places) <= 200


def test_handles_of_others_are_refused_at_once(vm: RemoteVM) -> None:
    vm, other = vm, LocalVM()
    x = put(vm, 1)
    theirs = other.alloc_tensor(PAIR)
    for handle in (theirs, 0, -1, 2**70):
        refuses(HandleError, "", vm.launch, ADD_INTO, (x, x, handle))
    vm.dealloc_tensor(x)
    refuses(
        HandleError, "it was freed, or belongs to another client", vm.launch, ADD_INTO, (x, x, x)
    )
    storage = vm.alloc_storage(64)
    view = vm.tensor_from_storage(storage, PAIR, 0)
    vm.dealloc_storage(storage)
    refuses(HandleError, "", vm.launch, ADD_INTO, (view, view, view))
    vm.synchronize()


def test_a_number_may_name_another_program(vm: RemoteVM) -> None:
    out, x = vm.alloc_tensor(TRIPLE), put(vm, 3, 3, 3)
    loaded = vm.loaded(ADD_INTO)
    for program, value in ((ADD_INTO, 6), (MULTIPLY, 9)):
        vm._call("load_program", loaded.number, program)
        for _ in range(3):
            vm.launch(ADD_INTO, [out, x, x])
        assert vm.read(out).tolist() == [value] * 3
    vm._call("drop_program", loaded.number)
    vm.launch(ADD_INTO, [out, x, x])
    refuses(HandleError, "program 1 is not loaded", vm.synchronize)


# --- eager code, by the short way ----------------------------------------------------


@native
def test_cached_launches_are_forgotten_when_handles_name_others(
    vm: RemoteVM, machine: LocalVM
) -> None:
    """The table of launches that are run by the bytes of their messages."""
    x, y = put(vm, 1, 2), put(vm, 3, 4)
    out = put(vm, 0, 0)
    for _ in range(3):
        vm.launch(ADD_INTO, (out, x, y))
    vm.swap(x, out)  # x is 4 6, out is 1 2
    for _ in range(3):
        vm.launch(ADD_INTO, (out, x, y))
    assert vm.read(out).tolist() == [7, 10]
    calls: list[str] = []
    replace_op(machine, "add.out", lambda frame: calls.append("mine"), nresults=0)
    vm.launch(ADD_INTO, (out, x, y))
    vm.synchronize()
    assert calls == ["mine"]


@cases("kind", "remote", "workers")
def test_a_late_error_is_not_told_as_one_of_the_call_that_it_comes_up_in(kind: str) -> None:
    message = "pow(i64[3], i64[]): expected exponents >= 0 for integers, got a negative exponent"
    message += "; convert x to a float"
    with vm_of(kind) as vm, ml.Arena(vm, "a").allocating():
        x, minus = ml.asarray([1, 4, 9]), ml.asarray(-1)
        untyped: Any = ml
        calls: list[Callable[[ml.Tensor], object]] = [
            lambda y: x + 77,  # a literal that the VM has not seen: it waits for its memory
            lambda y: y[[0, 1]],
            lambda y: x.__setitem__(0, [5]),
            lambda y: ml.sum(y, 0).numpy(),
            lambda y: ml.where(y > 1, [1, 2, 3], y).numpy(),
            lambda y: untyped.concat([y, np.array([1])]).numpy(),
        ]
        for call in calls:
            y = x**minus
            failed = line() - 1

            def until_it_is_told(y: ml.Tensor = y, call: Any = call) -> None:
                call(y)
                y.numpy()

            caught = refuses(OperandValueError, "", until_it_is_told)
            assert str(caught) == message
            assert caught.__notes__[-1] == f"called from {__file__}:{failed}"


@native
def test_a_line_is_named_though_c_has_sent_the_launch(vm: RemoteVM) -> None:
    with ml.Arena(vm, "a").allocating():
        x, good, bad = ml.ones((3,)), ml.asarray(np.array([0])), ml.asarray(np.array([5]))
        for _ in range(3):
            ml.take(x, good) + x
        y = ml.take(x, bad)
        failed = line() - 1
        z = y + x
        caught = refuses(OperandValueError, "", z.numpy)
        assert caught.__notes__[-1] == f"called from {__file__}:{failed}"
        assert ml.take(x, good).numpy().tolist() == [1.0]
    del x, y, z, good, bad


# --- the end, interrupts, threads ----------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_interrupts_leave_the_vm_in_order_or_lost() -> None:
    vm, rng = connect_to(LocalVM()), np.random.default_rng(0)
    x = put(vm, *range(10))

    def work() -> None:
        for _ in range(20):
            storage = vm.alloc_storage(64)
            assert vm.read(x).tolist() == list(range(10))
            vm.dealloc_storage(storage)

    interrupted = 0
    with suppress(ConnectionLostError):
        for _ in range(400):
            interrupted += interrupt_after(rng.uniform(1e-5, 1e-3), work)
            assert vm.read(x).tolist() == list(range(10))
    assert interrupted > 50
    assert "lost" not in repr(vm)
    vm.close(wait=False)


def test_threads_share_a_vm(vm: RemoteVM) -> None:

    def work(seed: int) -> None:
        x, total = put(vm, seed, 1), put(vm, 0, 0)
        for n in range(100):
            vm.launch(ADD_INTO, (total, total, x))
            if not n % 10:
                program = straight(("push_int", n), ("pop", 1), ("load_arg", 0), "halt")
                assert vm.launch(program, [total])[0].tolist() == [seed * (n + 1), n + 1]
        vm.dealloc_tensor(x)
        vm.dealloc_tensor(total)

    in_threads(work, range(4))
    vm.synchronize()


def test_what_is_collected_is_freed_at_the_next_call(vm: RemoteVM) -> None:
    ml.ones((1,))
    arena = ml.Arena(vm, "short")
    with arena.allocating():
        x = ml.asarray(f32s(1, 2))
    assert vm.consumed_size_in_mib() > 0
    del x, arena
    gc.collect()
    assert vm.consumed_size_in_mib() == 0


# --- the outbox ----------------------------------------------------------------------

MESSAGES = st.lists(st.one_of(st.binary(max_size=50), st.booleans()), max_size=200)


@native
@given(MESSAGES)
def test_the_outbox_in_c_is_the_one_in_python(messages: list[bytes | bool]) -> None:
    """A message is added; or what is here is taken and done, or taken and left."""
    assert EXTENSION is not None
    boxes = [PythonOutbox(), EXTENSION.Outbox({}, user_place)]
    done = 0
    for n, message in enumerate(messages):
        if isinstance(message, bool):
            results = [box.take(done) for box in boxes]
            assert results[0] == results[1]
            done += len(results[0][1]) * message
        else:
            due = [box.add(message, (n,)) for box in boxes]
            assert due[0] == due[1] or len(boxes[0]) < 64  # the clocks differ
        assert len(boxes[0]) == len(boxes[1])
    for box in boxes:
        refuses(ValueError, "expected done >=", box.take, done + 10**6)


# --- close, and fork -----------------------------------------------------------------


@cases("by_with", True, False)
def test_what_was_posted_is_done_before_the_end(by_with: bool) -> None:
    with Served(shared=["s"]) as server:
        vm, other = server.vm(vm="s"), server.vm(vm="s")
        x = put(other, 0, 0)
        one = put(other, 1, 2)
        other.synchronize()
        with vm if by_with else nullcontext():
            for _ in range(620):
                vm.launch(ADD_INTO, (x, x, one))
        vm.close()
        assert other.read(x).tolist() == [620, 1240]


@cases("by_with", True, False)
def test_the_end_raises_the_error_of_a_post_and_ends(vm: RemoteVM, by_with: bool) -> None:
    handles = put(vm, 0, 0), put(vm, 1, 2), programs.put(vm, np.array([0, 9]))
    vm.loaded(TAKE)

    def work() -> None:
        with vm if by_with else nullcontext():
            vm.launch(TAKE, handles)
        vm.close()

    refuses(OperandValueError, "9", work)
    refuses(ConnectionLostError, "there: it was closed", vm.read, handles[0])
    assert repr(vm) == "<RemoteVM 'there', it was closed>"
    vm.close()


def test_an_error_in_the_block_stays_the_one_that_is_raised(vm: RemoteVM) -> None:
    out, x, index = put(vm, 1), put(vm, 1), programs.put(vm, np.array([9]))
    vm.loaded(TAKE)

    def work() -> None:
        with vm:
            vm.launch(TAKE, (out, x, index))
            raise KeyError("mine")

    caught = refuses(KeyError, "mine", work)
    assert re.match("and as there was closed: take.*index 9", caught.__notes__[0])


def test_a_known_launch_fails_at_once_after_the_end(vm: RemoteVM) -> None:
    x = put(vm, 1, 2)
    for _ in range(2):
        vm.launch(ADD_INTO, (x, x, x))
    vm.close(wait=False)
    refuses(ConnectionLostError, "it was closed", vm.launch, ADD_INTO, (x, x, x))


@native
def test_eager_calls_by_the_short_way_fail_at_once_after_the_end(vm: RemoteVM) -> None:
    with ml.Arena(vm, "a").allocating():
        x = ml.ones(3)
        for _ in range(3):
            x + x
        vm.close(wait=False)
        refuses(ConnectionLostError, "it was closed", lambda: x + x)


FORKED = """
import os, sys, numpy as np, mlvm.eager as ml
from mlvm.machines.remote.connect import connect
from mlvm.core.errors import ConnectionLostError
vm = connect(sys.argv[1], secret=sys.argv[2])
arena = ml.Arena(vm, "a")
with arena.allocating():
    x = ml.asarray([1.0, 2.0])
    for _ in range(5):
        y = x + x  # some of which is gathered and not sent
    child = os.fork()
    if not child:
        refused = 0
        for call in (lambda: x + x, y.numpy, vm.synchronize, lambda: vm.alloc_storage(1)):
            try:
                call()
            except ConnectionLostError as error:
                refused += "parent" in str(error)
        vm.close()
        del x, y, arena
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4, status
    for n in range(200):
        y += x
        assert vm.read(x.handle).tolist() == [1, 2]
    assert y.tolist() == [202, 404]
vm.alloc_storage(1 << 20)
print("good")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_no_connection() -> None:
    with Served() as server:
        assert output_of("-c", FORKED, str(server.address), SECRET) == "good\n"


def test_one_trace_serves_all_lengths_there(vm: RemoteVM) -> None:
    assert_one_trace_serves_all_lengths(vm)


POSTING = """
import sys, mlvm.eager as ml
from mlvm.core.program.program import Program
vm, add = ml.connect(sys.argv[1], secret=sys.argv[2], vm="s"), Program.of_op("add.out", 3, {}, 0)
for _ in range(20):
    vm.launch(add, [int(handle) for handle in sys.argv[3:]])
"""


def test_what_was_posted_is_done_before_the_process_ends() -> None:
    with Served(shared=["s"]) as server, server.vm(vm="s") as vm:
        x, one = put(vm, 0), put(vm, 1)
        vm.synchronize()
        output_of("-c", POSTING, str(server.address), SECRET, *map(str, (x, x, one)))
        assert vm.read(x).tolist() == [20]
