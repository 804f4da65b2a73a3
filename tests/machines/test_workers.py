"""`VM(workers=n)`: the same values as without, in any order that the bytes allow."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import ArgumentError, HandleError, MachineError, OperandValueError
from mlvm.core.machine.frame import Frame
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM as VM
from tests.brief import Before, cases, refuses
from tests.core.programs import asm, put
from tests.threads import PATIENCE, start, waits

VECTOR = TensorType("f64", (4,))
ADD = Program.of_op("add.out", 3, {}, 0)
MULTIPLY = Program.of_op("multiply.out", 3, {}, 0)
COPY = Program.of_op("copy.out", 2, {}, 0)


@pytest.fixture
def vm() -> Iterator[VM]:
    vm = VM("futures", workers=2)
    yield vm
    vm.synchronize()


class Gates(Before):
    """An instrument that holds each `copy.out` back until its event is set, the last event's if
    there are more of them: a slow worker at will."""

    def __init__(self, *events: threading.Event) -> None:
        waited = itertools.chain(events, itertools.repeat(events[-1]))
        super().__init__(lambda name, _: name == "copy.out" and next(waited).wait(PATIENCE))


def slow_copies(vm: VM) -> threading.Event:
    """Make `copy.out` of this VM wait for the event."""
    event = threading.Event()
    vm.functions.watch(Gates(event))
    return event


def copy_slowly(vm: VM, out: int, x: int) -> None:
    """Launch a copy that ends after a while."""
    gate = slow_copies(vm)
    vm.launch(COPY, (out, x))
    threading.Timer(0.05, gate.set).start()


def vectors(vm: VM, *values: float) -> list[int]:
    return [put(vm, np.full(4, value)) for value in values]


@cases(
    "out, operands, expected",
    pytest.param(2, (1, 2), [3.0, 3.0, 8.0], id="a read waits for the write before it"),
    pytest.param(2, (2, 1), [3.0, 3.0, 8.0], id="so does one of the last operand"),
    pytest.param(0, (2, 2), [10.0, 3.0, 5.0], id="a write waits for the read before it"),
    pytest.param(1, (2, 2), [3.0, 10.0, 5.0], id="a write waits for the write before it"),
)
def test_the_order_of_launches(vm: VM, out: int, operands: Any, expected: list[float]) -> None:
    """Of a slow copy of the first vector into the second, and of a sum after it."""
    x, y, z = tensors = vectors(vm, 3.0, 0.0, 5.0)
    copy_slowly(vm, y, x)
    vm.launch(ADD, [tensors[each] for each in (out, *operands)])
    assert [vm.read(each).tolist() for each in (x, y, z)] == [[value] * 4 for value in expected]


def test_views_are_ordered_by_the_bytes_they_touch(vm: VM) -> None:
    storage = vm.alloc_storage(64)
    whole = vm.tensor_from_storage(storage, TensorType("f64", (8,)), 0)
    upper = vm.tensor_from_storage(storage, VECTOR, 32)
    [x] = vectors(vm, 7.0)
    gate = slow_copies(vm)
    vm.launch(COPY, (upper, x))
    read = start(vm.read, whole)
    assert waits(read)
    gate.set()
    np.testing.assert_array_equal(read.result(PATIENCE), [0, 0, 0, 0, 7, 7, 7, 7])


def test_the_host_writes_when_nobody_reads_any_more(vm: VM) -> None:
    x, y = vectors(vm, 3.0, 0.0)
    copy_slowly(vm, y, x)
    vm.write(x, np.full(4, 9.0))
    np.testing.assert_array_equal(vm.read(y), np.full(4, 3.0))


def test_an_error_surfaces_where_a_value_is_used_with_its_own_place(vm: VM) -> None:
    with Arena(vm, "batch"):
        logits, labels = ml.zeros((2, 3)), ml.asarray([0, 5])
        loss = ml.softmax_cross_entropy(logits, labels)  # does not raise here
        doubled = loss + loss
        fine = ml.sum(logits)
        assert float(fine) == 0.0
        caught = refuses(OperandValueError, "label 5", doubled.numpy)
        notes = "\n".join(caught.__notes__)
        assert 'push_str "softmax_cross_entropy.out"' in notes or "cfunc 3 0" in notes
        assert f"{__file__}:" in notes
        refuses(OperandValueError, "", loss.numpy)
    refuses(OperandValueError, "", vm.synchronize)
    vm.synchronize()  # the error has been met


def test_a_jump_waits_for_its_condition(vm: VM) -> None:
    halving = asm(
        ".const half f64[] 0.5 | .const one f64[] 1 | .func main 0 * | load_arg 0 | again: | "
        'push_const half | push_str "multiply" | cfunc 2 1 | get 0 | push_const one | '
        'push_str "greater" | cfunc 2 1 | jump_if_false done | jump again | done: | halt'
    )
    x = put(vm, np.array(100.0))
    [result] = vm.launch(halving, (x,))
    assert result == 100.0 / 2**7


def test_a_host_function_sees_finished_values(vm: VM) -> None:
    values: list[float] = []

    def look(frame: Frame) -> None:
        values.append(float(np.asarray(frame.param(0))[0]))

    vm.register("look", look, nparams=1, nresults=0)
    x, y = vectors(vm, 4.0, 0.0)
    copy_slowly(vm, y, x)
    vm.launch(Program.of_op("look", 1, {}, 0), (y,))
    assert values == [4.0]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.booleans()),
        max_size=40,
    )
)
def test_any_straight_program_of_overlapping_views_gives_the_same(
    steps: Sequence[tuple[int, int, int, bool]],
) -> None:
    def result(vm: VM) -> Any:
        storage = vm.alloc_storage(128)
        views = [vm.tensor_from_storage(storage, VECTOR, 16 * i) for i in range(6)]
        whole = vm.tensor_from_storage(storage, TensorType("f64", (16,)), 0)
        vm.write(whole, np.linspace(0, 1, 16))
        for out, x, y, add in steps:
            if abs(out - x) % 6 < 2 or abs(out - y) % 6 < 2:
                continue  # numpy itself has no order for a result that overlaps an operand askew
            vm.launch(ADD if add else MULTIPLY, (views[out], views[x], views[y]))
        return vm.read(whole)

    np.testing.assert_array_equal(result(VM()), result(VM(workers=3)))


def test_a_vm_says_which_options_it_takes() -> None:
    options: dict[str, Any] = {"num_threads": 2}
    number: Any = 2
    refuses(
        ArgumentError,
        r"num_threads= \(did you mean 'threads'\?\); expected one of .*threads",
        VM,
        **options,
    )
    refuses(MachineError, r"expected a name, got 2; .* VM\(threads=2\)", VM, number)
    refuses(MachineError, "expected workers >= 0, got -1", VM, workers=-1)


XENT = Program.of_op("softmax_cross_entropy", 2, {}, 1)


def failing(vm: VM) -> tuple[int, int]:
    logits = vm.alloc_tensor(TensorType("f64", (1, 3)))
    labels = put(vm, np.array([9]))
    return logits, labels


def test_a_failure_in_an_arena_does_not_outlast_what_is_written_there_next() -> None:
    vm = VM(workers=2)
    batch = Arena(vm, "batch")
    with batch:
        loss = ml.softmax_cross_entropy(ml.zeros((2, 3)), ml.asarray([0, 7]))
        refuses(OperandValueError, "", loss.numpy)
    for n in range(1, 20):
        with batch:
            x, y = ml.ones((n,)), ml.full((3, n), 2.0)
            assert float(ml.sum(x * y)) == 6.0 * n


def test_part_of_what_was_bad_is_whole_when_it_is_written(vm: VM) -> None:
    storage = vm.alloc_storage(16)
    logits, labels = failing(vm)
    out = vm.tensor_from_storage(storage, TensorType("f64", (1,)), 0)
    vm.launch(Program.of_op("softmax_cross_entropy.out", 3, {}, 0), (out, logits, labels))
    half_type = TensorType("f32", (1,))
    half = vm.tensor_from_storage(storage, half_type, 0)
    vm.write(half, np.ones(1, np.float32))
    assert vm.read(half)[0] == 1.0
    refuses(OperandValueError, "", vm.read, vm.tensor_from_storage(storage, half_type, 4))
    refuses(OperandValueError, "", vm.synchronize)


def test_a_failed_op_keeps_nothing_alive() -> None:
    vm = VM(workers=1)
    _, labels = failing(vm)
    big = vm.alloc_tensor(TensorType("f64", (1, 3)))
    for _ in range(5):
        refuses(OperandValueError, "", vm.launch, XENT, (big, labels))
    array = weakref.ref(vm.borrow(big).base)
    vm.dealloc_tensor(big)
    gc.collect()
    assert array() is None


def test_closing_finishes_what_was_given_and_ends_with_a_typed_error() -> None:
    def workers() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("ending_")]

    vm = VM("ending", workers=2)
    x, y = vectors(vm, 1.0, 1.0)
    for _ in range(50):
        vm.launch(ADD, (x, x, y))
    assert workers()
    view = vm.borrow(x)
    vm.close()
    vm.close()
    assert not workers()
    np.testing.assert_array_equal(view, np.full(4, 51.0))
    refuses(HandleError, "was closed", vm.launch, ADD, (x, x, y))
    refuses(HandleError, "was closed", vm.read, x)


def test_no_end_waits_for_what_another_thread_launches_meanwhile() -> None:
    vm = VM(workers=2)
    x, y, z = vectors(vm, 1.0, 2.0, 3.0)
    first, second = threading.Event(), threading.Event()
    vm.functions.watch(Gates(first, second))
    vm.launch(COPY, (y, x))
    quiet = start(vm.quiesce)
    assert waits(quiet)
    vm.launch(COPY, (z, x))
    first.set()
    quiet.result(PATIENCE)
    closed = start(vm.close)
    assert waits(closed)
    refuses(MachineError, "is closed", vm.launch, ADD, (x, y, y))
    second.set()
    closed.result(PATIENCE)


def test_even_an_exit_in_a_worker_is_an_error_of_its_result() -> None:
    vm = VM(workers=1)
    x, y = vectors(vm, 1.0, 1.0)
    with vm.instrumented(Before(lambda *_: sys.exit())):
        vm.launch(ADD, (x, x, y))
        refuses(SystemExit, "", vm.read, x)


def test_the_machine_waits_when_too_much_is_under_way(vm: VM) -> None:
    gate = slow_copies(vm)
    source, *into = vectors(vm, *map(float, range(100)))

    def launch_all() -> None:
        for handle in into:
            vm.launch(COPY, (handle, source))

    launched = start(launch_all)
    assert waits(launched, 0.1)
    gate.set()
    launched.result(PATIENCE)
    assert all(vm.read(handle)[0] == 0.0 for handle in into)
