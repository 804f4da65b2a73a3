"""The VM: values are copied at the border, mistakes are typed errors, nothing is kept alive."""

from __future__ import annotations

import contextvars
import gc
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlvm.core import vm as vm_module
from mlvm.core.errors import HandleError, MlvmError, OutOfMemoryError, ProgramError
from mlvm.core.machine.frame import Frame
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.op import OPS, Op
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType, f32
from mlvm.core.vm import VM
from tests.brief import Patch, cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import ADD_INTO, asm, f32s, put, straight
from tests.interrupting import interrupted
from tests.threads import PATIENCE, start, waits

VECTOR = TensorType(f32, (2,))
NEGATE = Program.of_op("negative", 1, {}, 1)
PROBE = Program.of_op("probe.out", 2, {}, 0)


def vm_with_probe(monkeypatch: Patch, body: Callable[[Array, Array], Any]) -> VM:
    """A VM with one more op, `probe(x)`, whose kernel is `body(out, x)`."""

    def probe(out: Array, x: Array) -> None:
        """A host function of this test."""
        body(out, x)

    monkeypatch.setitem(OPS, "probe", Op(probe, lambda x: x))
    return VM()


def assert_usable(vm: VM) -> None:
    """It takes tensors, launches, and gives the bytes back."""
    before = vm.consumed_size_in_mib()
    handles = [put(vm, f32s(0, 0)), put(vm, f32s(1, 2)), put(vm, f32s(3, 4))]
    assert vm.launch(ADD_INTO, handles) == []
    np.testing.assert_array_equal(vm.read(handles[0]), [4, 6])
    for handle in handles:
        vm.dealloc_tensor(handle)
    assert vm.consumed_size_in_mib() == before


def test_an_error_names_its_own_file_where_two_have_equal_text() -> None:
    """Code objects of equal text are equal, whatever their file."""
    program = straight(("push_int", 99), "load_global", "halt")
    for file in ("first.py", "second.py"):
        names: dict[str, Any] = {"vm": VM(), "program": program}
        exec(compile("def call():\n    vm.launch(program)", file, "exec"), names)
        error = refuses(HandleError, "99", names["call"])
        assert f"called from {file}:2" in error.__notes__


# --- tensors and storages -------------------------------------------------------------


class Collected(dict[Any, Any]):
    """Bound programs that a finalizer clears as soon as they are iterated over: from Python 3.12 on
    the garbage collector may run after any call."""

    def values(self) -> Any:
        return Walked(self)


class Walked:
    def __init__(self, walked: Collected) -> None:
        self.walked = walked

    def __reversed__(self) -> Any:
        walk = reversed(dict.values(self.walked))
        self.walked.clear()
        return walk


def test_a_finalizer_may_clear_what_a_launch_looks_through() -> None:
    vm = VM()
    x, y = put(vm, f32s(1, 2)), put(vm, f32s(3, 4))
    vm.launch(NEGATE, (x,))
    linked = vm._linked[id(NEGATE)]
    linked.bound = Collected(linked.bound)
    assert vm.launch(NEGATE, (y,))[0].tolist() == [-3, -4]


def test_values_are_copied_in_and_out(vm: VM) -> None:
    written = f32s(1, 2)
    handle = put(vm, written)
    written[:] = 0
    vm.read(handle)[:] = 0
    np.testing.assert_array_equal(vm.read(handle), [1, 2])


# --- launches -------------------------------------------------------------------------


def test_outputs_are_copies(vm: VM) -> None:
    x = put(vm, f32s(1, 2))
    main = straight(("load_arg", 0), ("push_const", "c"), ("load_arg", 0), "halt").main
    program = Program([main], {"c": f32s(3, 4)})
    for output in vm.launch(program, [x]):
        output[:] = 9
    assert [list(output) for output in vm.launch(program, [x])] == [[1, 2], [3, 4], [1, 2]]


NOTHING: tuple[Array, ...] = ()
ONE, TWO = (f32s(1, 2),), (f32s(1, 2), f32s(3, 4))


def test_a_result_that_no_machine_could_hold(vm: VM) -> None:
    zero = put(vm, np.array(0, np.float32))
    program = Program.of_op("full", 1, {"shape": (2**58,)}, 1)
    caught = refuses(OutOfMemoryError, "Unable to allocate", vm.launch, program, [zero])
    assert caught.__notes__[0].startswith("at main, pc 2: cfunc 1 1")
    assert_usable(vm)


def test_the_raw_machine_refuses_a_launch_with_too_few_arguments() -> None:
    vm = VM(checked=False)
    x = put(vm, f32s(1))
    for _ in range(2):
        refuses(
            ProgramError,
            "expected 3 arguments, which the program loads, got 1",
            vm.launch,
            ADD_INTO,
            [x],
        )
    assert_usable(vm)


def test_a_handle_of_another_vm_is_refused(vm: VM) -> None:
    refuses(HandleError, "does not exist in this VM", vm.launch, NEGATE, [put(VM(), f32s(1))])


def test_numpys_warnings_stay_inside_and_its_settings_stay_outside(vm: VM) -> None:
    x, zero = put(vm, f32s(1, -1, 0)), put(vm, f32s(0, 0, 0))
    with np.errstate(all="raise"):
        [quotient] = vm.launch(Program.of_op("divide", 2, {}, 1), [x, zero])
        vm.launch(Program.of_op("divide.out", 3, {}, 0), [x, x, zero])
        assert set(np.geterr().values()) == {"raise"}
        refuses(FloatingPointError, "", np.divide, f32s(1), f32s(0))
    np.testing.assert_array_equal(quotient, [np.inf, -np.inf, np.nan])


# --- verification ---------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch: Patch) -> Counter[Any]:
    """Count the verifications of each program for each tuple of types (None for any)."""
    counts: Counter[Any] = Counter()

    def counting(program: Program, functions: FunctionTable, types: Any = None) -> None:
        counts[id(program), types] += 1
        verify(program, functions, types)

    monkeypatch.setattr(vm_module, "verify", counting)
    return counts


def test_a_program_is_verified_once_for_each_combination_of_types(verified: Counter[Any]) -> None:
    vm, key = VM(), id(ADD_INTO)
    matrix = TensorType(f32, (2, 2))
    for type in (VECTOR, matrix, VECTOR, matrix):
        for _ in range(3):
            vm.launch(ADD_INTO, [vm.alloc_tensor(type) for _ in range(3)])
        assert verified[key, (type,) * 3] == 1
    vm.dealloc_tensor(vm.alloc_tensor(VECTOR))
    vm.launch(ADD_INTO, [vm.alloc_tensor(VECTOR) for _ in range(3)])
    assert set(verified.values()) == {1}
    assert {types for _, types in verified} <= {None, (VECTOR,) * 3, (matrix,) * 3}
    other = VM()
    other.launch(ADD_INTO, [other.alloc_tensor(VECTOR) for _ in range(3)])
    assert verified[key, (VECTOR,) * 3] == 2  # each VM has functions of its own


def test_the_raw_machine_verifies_nothing_and_computes_the_same(verified: Counter[Any]) -> None:
    vm = VM(checked=False)
    handles = [put(vm, f32s(0, 0)), put(vm, f32s(1, 2)), put(vm, f32s(3, 4))]
    vm.launch(ADD_INTO, handles)
    np.testing.assert_array_equal(vm.read(handles[0]), [4, 6])
    [total] = vm.launch(Program.of_op("sum", 1, {"axis": 0}, 1), handles[:1])
    assert total == 10
    vm.write(handles[0], np.array([5.0, 6.0]))  # numpy casts
    np.testing.assert_array_equal(vm.read(handles[0]), f32s(5, 6), strict=True)
    assert not verified


# --- nothing stale, nothing kept ------------------------------------------------------


def test_a_launch_after_a_swap_sees_the_swapped_tensors(vm: VM) -> None:
    x, y = put(vm, f32s(1)), put(vm, f32s(2))
    for _ in range(2):
        assert vm.launch(NEGATE, [x]) == [-1]
        vm.swap(x, y)
        assert vm.launch(NEGATE, [x]) == [-2]
        vm.swap(x, y)


@cases("position", 0, 1, 2)
def test_a_launch_after_a_dealloc_is_refused(position: int, vm: VM) -> None:
    handles = [vm.alloc_tensor(VECTOR) for _ in range(3)]
    vm.launch(ADD_INTO, handles)
    vm.dealloc_tensor(handles[position])
    expected = re.escape(f"{handles[position]} was a tensor f32[2], freed by dealloc_tensor")
    for _ in range(2):
        refuses(HandleError, expected, vm.launch, ADD_INTO, handles)
    assert_usable(vm)


def test_a_launch_after_the_end_of_the_storage_is_refused(vm: VM) -> None:
    storage = vm.alloc_storage(8)
    view = vm.tensor_from_storage(storage, VECTOR, 0)
    vm.launch(NEGATE, [view])
    vm.dealloc_storage(storage)
    refuses(HandleError, rf"f32\[2\], freed with storage {storage}", vm.launch, NEGATE, [view])


def test_more_launches_than_are_remembered(monkeypatch: Patch, vm: VM) -> None:
    monkeypatch.setattr(vm_module, "_MOST_BOUND", 8)
    handles = [put(vm, f32s(i)) for i in range(5)]
    for _ in range(2):
        assert [vm.launch(NEGATE, [h])[0].item() for h in handles] == [0, -1, -2, -3, -4]
    for handle in handles:
        vm.dealloc_tensor(handle)
        refuses(HandleError, "", vm.launch, NEGATE, [handle])


def test_of_ever_new_types_of_arguments_few_are_remembered() -> None:
    vm, alive = VM(), weakref.WeakSet[TensorType]()
    for n in range(4000):
        type = TensorType(f32, (n,))
        alive.add(type)
        handle = vm.alloc_tensor(type)
        vm.launch(NEGATE, [handle])
        vm.dealloc_tensor(handle)
    assert len(alive) < 2500


NEGATED = '{"chain": [["negative", 0, 1]], "outputs": 1}'
IN_CHAIN = f'get 0 | get 0 | push_str "fused" | cfunc 2 0 {NEGATED}'


@cases("body", "", IN_CHAIN, ids=["alone", "in a chain"])
def test_of_ever_new_types_of_results_few_are_remembered(body: str) -> None:
    vm, alive = VM(), weakref.WeakSet[TensorType]()
    program = asm(f'.func main 0 * | push_str "some" | cfunc 0 1 | {body} | halt')

    def some(frame: Frame) -> None:
        type = TensorType(f32, (len(calls),))
        calls.append(len(calls))
        alive.add(type)
        frame.push(np.ones(type.shape, np.float32))

    calls: list[int] = []
    vm.register("some", some)
    for _ in range(3000):
        vm.launch(program)
    assert len(alive) < 1500


@pytest.fixture
def no_gc() -> Any:
    """Only reference counts free anything."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_the_memory_of_what_has_ended_is_free_although_it_was_launched(vm: VM) -> None:
    storage = vm.alloc_storage(8)
    tensor, view = vm.alloc_tensor(VECTOR), vm.tensor_from_storage(storage, VECTOR, 0)
    memory = [weakref.ref(vm.borrow(handle).base) for handle in (tensor, view)]
    for program in (NEGATE, ADD_INTO):
        for handle in (tensor, view):
            vm.launch(program, [handle] * 3)
    assert all(reference() is not None for reference in memory)
    vm.dealloc_tensor(tensor)
    vm.dealloc_storage(storage)
    assert [reference() for reference in memory] == [None, None]


@pytest.mark.usefixtures("no_gc")
def test_what_was_swapped_is_free_when_its_new_name_ends(vm: VM) -> None:
    x, y = vm.alloc_tensor(VECTOR), vm.alloc_tensor(VECTOR)
    memory = weakref.ref(vm.borrow(x).base)
    vm.launch(NEGATE, [x])
    vm.swap(x, y)
    vm.launch(NEGATE, [y])
    vm.dealloc_tensor(x)
    assert memory() is not None
    vm.dealloc_tensor(y)
    assert memory() is None


@pytest.mark.usefixtures("no_gc")
def test_a_program_and_what_the_vm_keeps_of_it_end_with_its_last_reference(vm: VM) -> None:
    x = put(vm, f32s(1))
    body = straight(("push_const", "c"), ("load_arg", 0), "halt").main
    for _ in range(3):
        program = Program([body], {"c": f32s(3)})
        assert vm.launch(program, [x]) == [3, 1]
        constant = weakref.ref(program.constants["c"])
        del program
        assert constant() is None
    assert vm.launch(NEGATE, [x]) == [-1]


@pytest.mark.usefixtures("no_gc")
def test_a_vm_and_its_memory_end_although_the_program_lives_on() -> None:
    vm = VM()
    x = put(vm, f32s(1))
    vm.launch(NEGATE, [x])
    memory, reference = weakref.ref(vm.borrow(x).base), weakref.ref(vm)
    del vm
    assert (memory(), reference()) == (None, None)
    vm = VM()
    assert vm.launch(NEGATE, [put(vm, f32s(2))]) == [-2]


def test_a_vm_keeps_nothing_of_the_context_it_was_made_in() -> None:
    class Thing:
        pass

    variable: contextvars.ContextVar[Thing] = contextvars.ContextVar("variable")

    def make() -> tuple[VM, weakref.ref[Thing]]:
        thing = Thing()
        variable.set(thing)
        return VM(), weakref.ref(thing)

    vm, reference = contextvars.copy_context().run(make)
    gc.collect()
    assert reference() is None
    assert_usable(vm)


# --- host functions that raise, wait, or launch again ---------------------------------


@cases("error", KeyboardInterrupt, ZeroDivisionError, SystemExit)
def test_whatever_a_kernel_raises_comes_out_and_the_vm_goes_on(
    monkeypatch: Patch, error: type[BaseException]
) -> None:
    def fail(out: Array, x: Array) -> None:
        raise error

    vm = vm_with_probe(monkeypatch, fail)
    handles = [vm.alloc_tensor(VECTOR) for _ in range(2)]
    for _ in range(2):
        refuses(error, "", vm.launch, PROBE, handles)
    assert_usable(vm)
    start(assert_usable, vm).result(PATIENCE)  # the lock is free


def test_a_host_function_launches_on_its_own_vm_and_on_another(monkeypatch: Patch) -> None:
    other = VM()

    def launch(out: Array, x: Array) -> None:
        for vm in (home, other):
            handle = put(vm, x)
            [negated] = vm.launch(NEGATE, [handle])
            vm.dealloc_tensor(handle)
            out += negated / 0  # quiet: still inside the launch

    home = vm_with_probe(monkeypatch, launch)
    out, x = put(home, f32s(0, 0)), put(home, f32s(1, -1))
    with np.errstate(all="raise"):
        home.launch(PROBE, [out, x])
    np.testing.assert_array_equal(home.read(out), [-np.inf, np.inf])
    assert_usable(home)
    assert_usable(other)


def test_a_launch_on_a_busy_vm_waits_and_other_vms_do_not(monkeypatch: Patch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait(out: Array, x: Array) -> None:
        entered.set()
        assert leave.wait(10)

    busy = vm_with_probe(monkeypatch, wait)
    handles = [put(busy, f32s(1)) for _ in range(2)]
    first = start(busy.launch, PROBE, handles)
    assert entered.wait(10)
    second = start(busy.launch, NEGATE, handles)
    assert waits(second)
    assert_usable(VM())
    leave.set()
    first.result(PATIENCE)
    second.result(PATIENCE)


def test_a_vm_is_free_for_other_threads_wherever_a_launch_is_interrupted() -> None:
    vm, n = VM(), 1
    handle = put(vm, f32s(1))
    while interrupted(lambda: vm.launch(NEGATE, [handle]), n):
        assert start(vm.launch, NEGATE, [handle]).result(PATIENCE) == [-1]
        assert vm.depth == 0
        n += 1
    assert n > 5


def test_a_large_program_is_bound_once_for_each_of_some_arguments(monkeypatch: Patch) -> None:
    monkeypatch.setattr(vm_module, "_MOST_BOUND", 1)  # any program is large
    vm, program = VM(), Program.of_op("negative.out", 2, {}, 0)
    pairs = [[put(vm, f32s(i)), put(vm, f32s(i))] for i in range(7)]
    for pair in pairs:
        vm.launch(program, pair)
    monkeypatch.delattr(VM, "_bind")
    for pair in pairs:
        vm.launch(program, pair)


test_rows = claims("vm", globals())


def launched(program: Any, *arrays: Array) -> None:
    """Launch the program in vain, twice: the error is the same, and nothing has changed."""
    vm = VM()
    args = [put(vm, array) for array in arrays]
    before = vm.consumed_size_in_mib()
    error = refuses(MlvmError, "", vm.launch, program, args)
    assert vm.consumed_size_in_mib() == before
    for handle, array in zip(args, arrays, strict=True):
        np.testing.assert_array_equal(vm.read(handle), array)
    assert_usable(vm)
    refuses(type(error), re.escape(str(error)), vm.launch, program, args)
    raise error


def launched_on(args: Any) -> None:
    vm = VM()
    refuses(HandleError, "", vm.launch, NEGATE, args)
    assert_usable(vm)
    vm.launch(NEGATE, args)


def written(array: Any) -> None:
    vm = VM()
    handle = put(vm, f32s(7, 8))
    try:
        vm.write(handle, array)
    finally:
        np.testing.assert_array_equal(vm.read(handle), [7, 8])
