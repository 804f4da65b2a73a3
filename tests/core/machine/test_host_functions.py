"""Host functions in Python: parameters, results, errors, replacing and removing them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import (
    DTypeError,
    HandleError,
    LimitExceededError,
    MachineError,
    ProgramError,
    UnknownFunctionError,
)
from mlvm.core.machine.frame import Frame, HostFunction
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.types import ALIGNMENT, TensorType, f32
from mlvm.core.vm import VM
from tests.brief import cases, refuses, replace_op
from tests.cases.claim_tests import claims
from tests.core.programs import asm, f32s, put, straight

VECTOR = TensorType(f32, (2,))


def host(fn: HostFunction, nparams: int | None = None, nresults: int | None = None) -> VM:
    """A VM with one more function, `f`."""
    vm = VM()
    vm.register("f", fn, nparams=nparams, nresults=nresults)
    return vm


def nothing(frame: Frame) -> None:
    """Leaves no results."""


def call_f(nparams: int = 0, nresults: int | str = "*", attributes: str = "") -> Program:
    """Load that many arguments, call `f` on them, and halt."""
    loads = "\n".join(f"load_arg {i}" for i in range(nparams))
    return asm(
        f'.func main 0 * | {loads} | push_str "f" | cfunc {nparams} {nresults} {attributes} | halt'
    )


def test_a_host_function_reads_its_parameters_and_leaves_results() -> None:
    calls: list[Any] = []

    def scale(frame: Frame) -> None:
        calls.append((frame.nparams, frame.param(0), frame.param(2), frame.attributes))
        x = frame.param(1)
        assert isinstance(x, np.ndarray)
        out = frame.new_tensor(TensorType.of(x))
        assert not out.any()
        np.multiply(x, frame.param(0), out)
        frame.push(out)
        frame.push(7)
        frame.push("s")

    vm = host(scale, 3, 3)
    program = asm(
        '.func main 0 * | push_int 3 | load_arg 0 | push_str "a string" | push_str "f" | '
        'cfunc 3 3 {"axis": [0, 1], "eps": 0.5, "more": {"deep": [true, null]}} | halt'
    )
    x = put(vm, f32s(1, 2))
    for _ in range(2):
        [out] = vm.launch(program, [x])
        np.testing.assert_array_equal(out, f32s(3, 6), strict=True)
    attributes = {"axis": (0, 1), "eps": 0.5, "more": {"deep": (True, None)}}
    assert calls == [(3, 3, "a string", attributes)] * 2


def test_results_of_every_kind_stay_on_the_stack() -> None:
    def f(frame: Frame) -> None:
        frame.push("add")
        frame.push(0)

    vm = host(f)
    program = asm(
        '.func main 0 * | load_arg 0 | load_arg 1 | push_str "f" | cfunc 0 2 | jump_if_false go | '
        "halt | go: | cfunc 2 1 | halt"
    )
    assert vm.launch(program, [put(vm, f32s(1)), put(vm, f32s(2))]) == [3]


def test_a_parameter_is_the_tensor_itself_and_may_be_a_result() -> None:
    def increment(frame: Frame) -> None:
        x = frame.param(0)
        assert isinstance(x, np.ndarray)
        x += 1
        frame.push(x)

    vm = host(increment)
    x, y = put(vm, f32s(1)), put(vm, f32s(5))
    program = asm(
        f'.func main 0 * | load_arg 0 | push_str "f" | cfunc 1 1 | push_int {y} | store_global | '
        f"halt"
    )
    vm.launch(program, [x])
    assert vm.read(x) == vm.read(y) == 2
    assert vm.consumed_size_in_mib() * 2**20 == 4  # one storage under two names
    vm.write(y, f32s(9))
    assert vm.read(x) == 9


@cases("array",
    np.arange(6, dtype=np.float32).reshape(2, 3).T, np.arange(99, dtype=np.float32)[1:],
    np.broadcast_to(f32s(1), (3, 2)), np.frombuffer(bytes(8), np.int32),
    np.ma.masked_array([1.0, 2.0], [False, True]), np.zeros((0, 3), np.int8), np.array(True),
    np.float32(2),
    ids=["transposed", "askew", "broadcast", "read-only", "masked", "empty", "0-d", "scalar"],
)  # fmt: skip
def test_any_array_can_be_a_result_and_is_copied(array: Any) -> None:
    """The result is packed, aligned and its own; nothing of the host's is counted or shared."""
    params: list[Any] = []
    vm = host(lambda frame: frame.push(array))
    vm.register("look", lambda frame: params.append(frame.param(0)))
    program = asm(
        '.func main 0 * | push_str "f" | cfunc 0 1 | get 0 | push_str "look" | cfunc 1 0 | halt'
    )
    [out] = vm.launch(program)
    np.testing.assert_array_equal(out, np.asarray(array), strict=True)
    [result] = params
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert not result.size or result.ctypes.data % ALIGNMENT == 0
    assert not np.shares_memory(result, array)


@cases("value", None, 1.5, True, [1], b"x")
def test_what_is_no_value_is_no_result(value: Any) -> None:
    vm = host(lambda frame: frame.push(value))
    kind = type(value).__name__
    text = f"f: expected a result as an array, an int or a str, got a {kind}"
    refuses(MachineError, text, vm.launch, call_f())


@cases("dtype", np.longdouble, ">f4", object, "U1")
def test_a_result_is_of_a_dtype_that_there_is(dtype: Any) -> None:
    vm = host(lambda frame: frame.push(np.zeros(2, dtype)))
    refuses(DTypeError, r"f\(\): no dtype for", vm.launch, call_f())


@cases("i", -1, 2, 100)
def test_a_parameter_that_there_is_not(i: int) -> None:
    vm = host(lambda frame: frame.push(frame.param(i)))
    with pytest.raises(MachineError, match=f"f: parameter {i} does not exist; the call has 2"):
        vm.launch(call_f(2), [put(vm, f32s(1))] * 2)


def test_announced_counts_are_held_before_and_after() -> None:
    vm = host(nothing, nparams=2, nresults=1)
    x = put(vm, f32s(1))
    refuses(MachineError, "f: expected 2 parameters, got 1", vm.launch, call_f(1), [x])
    with pytest.raises(
        ProgramError, match="main, pc 3: cfunc 2 2: f returns 1 result, the call expects 2"
    ):
        vm.launch(call_f(2, 2), [x, x])
    refuses(MachineError, "f: expected 1 result, got 0", vm.launch, call_f(2, 1), [x, x])


def test_the_programs_own_count_is_held_too() -> None:
    vm = host(lambda frame: frame.push(1))
    assert vm.launch(call_f(0, 1)) == vm.launch(call_f(0, "*")) == []
    for wrong in (0, 2):
        with pytest.raises(MachineError, match=f"f: the call expects {wrong} results, got 1"):
            vm.launch(call_f(0, wrong))


@cases("fn", None, 5, "f")
def test_what_cannot_be_called_is_not_registered(fn: Any, vm: VM) -> None:
    refuses(MachineError, "f: expected a function of a frame, got", vm.register, "f", fn)
    refuses(UnknownFunctionError, "", vm.launch, call_f())


@cases("counts", (-1, None), (None, 1.0), (True, 1))
def test_an_impossible_number_of_values_is_not_announced(counts: Any) -> None:
    refuses(MachineError, "f: expected a number of values or None, got", host, nothing, *counts)


def test_an_error_of_a_host_function_names_the_place_and_changes_nothing() -> None:
    error = ZeroDivisionError("its own")

    def fail(frame: Frame) -> None:
        frame.push(frame.new_tensor(VECTOR))
        raise error

    vm = host(fail)
    x = put(vm, f32s(1, 2))
    before = vm.consumed_size_in_mib()
    program = asm(
        '.func g 1 0 | push_int 3 | get -1 | push_str "f" | cfunc 1 1 | return 0 | '
        ".func main 0 * | load_arg 0 | call g | halt"
    )
    caught = refuses(ZeroDivisionError, "", vm.launch, program, [x])
    assert caught is error
    assert caught.__notes__[0] == (
        "at main > g, pc 3: cfunc 1 1 of 'f'; stack: f32[2], Int 3, f32[2]"
    )
    assert vm.consumed_size_in_mib() == before
    np.testing.assert_array_equal(vm.read(x), [1, 2])
    vm.register("f", lambda frame: frame.push(frame.param(0)))
    assert vm.launch(program, [x]) == []


# --- replacing and removing -----------------------------------------------------------


def test_a_program_sees_another_function_of_the_name_with_its_next_launch(vm: VM) -> None:
    program = call_f(0, 1)
    for i in range(3):
        vm.register("f", lambda frame, i=i: frame.push(f32s(i)))  # type: ignore[misc]
        assert vm.launch(program) == vm.launch(program) == [i]
    vm.remove("f")
    for _ in range(2):
        refuses(UnknownFunctionError, "no function 'f'", vm.launch, program)
    refuses(UnknownFunctionError, "no function 'f'", vm.remove, "f")
    vm.register("f", nothing, nresults=0)
    refuses(ProgramError, "f returns 0 results, the call expects 1", vm.launch, program)


def test_registering_over_an_op_is_for_that_vm_alone() -> None:
    vm, other = VM(), VM()
    args = [[put(each, f32s(1)), put(each, f32s(2))] for each in (vm, other)]
    program = Program.of_op("add", 2, {}, 1)
    assert vm.launch(program, args[0]) == [3]
    replace_op(vm, "add", lambda frame: frame.push(f32s(100)))
    assert vm.launch(program, args[0]) == [100]
    assert other.launch(program, args[1]) == [3]
    vm.remove("add")
    refuses(UnknownFunctionError, "", vm.launch, program, args[0])
    assert other.launch(program, args[1]) == [3]


def test_a_kernel_called_on_the_arguments_can_be_replaced(vm: VM) -> None:
    """The linker's shortest step, which calls a kernel and not a function, sees it too."""
    out, x = put(vm, f32s(0)), put(vm, f32s(5))
    program = Program.of_op("negative.out", 2, {}, 0)
    vm.launch(program, [out, x])
    assert vm.read(out) == -5
    counts: list[int] = []
    replace_op(vm, "negative.out", lambda frame: counts.append(frame.nparams))
    vm.launch(program, [out, x])
    assert counts == [2]


CHANGES_THE_TABLE = """
    .func main 0 *
        push_str "change"
        cfunc 0 0
        load_arg 0
        load_arg 1
        push_str "add"
        cfunc 2 *
        push_str "negative"
        cfunc 1 1
        halt
"""


@cases(
    "replacement, error",
    (lambda frame: frame.push("s"), "negative: expected Tensors, got [(]Str 's'[)]"),
    (nothing, "add: the call expects 1 result, got 0"),
    (lambda frame: (frame.push(1), frame.push(2)), "add: the call expects 1 result, got 2"),
    (None, "function 'add' was removed"),
    ids=["kind", "none", "two", "removed"],
)
def test_what_was_proven_is_checked_when_the_table_changes_under_a_running_program(
    replacement: HostFunction | None, error: str
) -> None:
    def change(frame: Frame) -> None:
        if replacement is None:
            vm.remove("add")
        else:
            replace_op(vm, "add", replacement)

    vm = VM()
    vm.register("change", change, nparams=0, nresults=0)
    args = [put(vm, f32s(1)), put(vm, f32s(2))]
    refuses(
        (MachineError, UnknownFunctionError), error, vm.launch, assemble(CHANGES_THE_TABLE), args
    )
    assert vm.launch(Program.of_op("negative", 1, {}, 1), args[:1]) == [-1]


def test_main_may_be_entered_again_after_its_kernel_is_gone(vm: VM) -> None:
    vm.register("change", lambda _: vm.remove("negative.out"))
    program = asm(
        '.func main 0 * | load_arg 0 | load_arg 1 | push_str "negative.out" | cfunc 2 0 | '
        'push_str "change" | cfunc 0 0 | call main | halt'
    )
    out, x = put(vm, f32s(0)), put(vm, f32s(5))
    refuses(UnknownFunctionError, r"'negative.out' was removed", vm.launch, program, [out, x])
    assert vm.read(out) == -5


# --- launching from within ------------------------------------------------------------


def test_a_host_function_launches_the_program_that_called_it() -> None:
    """Recursion through the host: a factorial."""

    def factorial(frame: Frame) -> None:
        n = frame.param(0)
        assert isinstance(n, np.ndarray)
        if n == 0:
            frame.push(np.array(1))
            return
        handle = put(vm, n - 1)
        [rest] = vm.launch(program, [handle])
        vm.dealloc_tensor(handle)
        frame.push(n * rest)

    vm, program = host(factorial), call_f(1, 1)
    n = put(vm, np.array(6))
    before = vm.consumed_size_in_mib()
    assert vm.launch(program, [n]) == [720]
    assert vm.consumed_size_in_mib() == before


def test_an_error_within_passes_both_launches_and_names_both_places(vm: VM) -> None:
    def outer(frame: Frame) -> None:
        vm.launch(call_f())

    vm.register("g", outer)
    vm.register("f", lambda frame: frame.push(frame.param(0)))
    caught = refuses(
        MachineError, "f: parameter 0 does not exist", vm.launch, Program.of_op("g", 0, {}, 0)
    )
    places = [note for note in caught.__notes__ if note.startswith("at ")]
    assert places == [
        "at main, pc 1: cfunc 0 * of 'f'; stack: empty",
        "at main, pc 1: cfunc 0 0 of 'g'; stack: empty",
    ]
    assert vm.launch(straight("halt")) == []


def test_a_tensor_that_ends_during_a_launch_stays_for_the_launch(vm: VM) -> None:
    vm.register("end", lambda _: vm.dealloc_tensor(x))
    x = put(vm, f32s(1, 2))
    program = asm('.func main 0 * | push_str "end" | cfunc 0 0 | load_arg 0 | halt')
    [out] = vm.launch(program, [x])
    np.testing.assert_array_equal(out, [1, 2])
    assert vm.consumed_size_in_mib() == 0
    refuses(HandleError, "freed by dealloc_tensor", vm.launch, program, [x])


def test_launches_within_each_other_end_in_a_typed_error(vm: VM) -> None:
    program = Program.of_op("again", 0, {}, 0)

    def again(frame: Frame) -> None:
        vm.launch(program)

    vm.register("again", again)
    refuses(LimitExceededError, "launches are nested", vm.launch, program)
    [two] = vm.launch(assemble(".const two i64[] 2\n.func main 0 *\npush_const two\nhalt\n"))
    assert two == 2


test_rows = claims("host_functions", globals())
