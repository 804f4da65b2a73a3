"""The verifier: what it refuses and how it says so; what it passes runs without surprise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import (
    DTypeError,
    LimitExceededError,
    MlvmError,
    ProgramError,
    ShapeError,
    UnknownFunctionError,
)
from mlvm.core.machine.frame import PythonFunction
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.types import TensorType, f32
from mlvm.core.vm import VM
from mlvm.machines.accesses import Uses, uses_of
from tests.brief import cases, refuses, traced_memory
from tests.cases.claim_tests import claims
from tests.core.programs import asm, f32s, instruction, main_of, put, straight

TABLE = FunctionTable()
TABLE.register("open", PythonFunction("open", lambda frame: None, None, None))
TABLE.register("one", PythonFunction("one", lambda frame: frame.push(1), None, 1))
VECTOR = TensorType(f32, (2,))

Code = tuple[tuple[Any, ...] | str, ...]
X: Code = (("load_arg", 0),)
NEGATIVE: Code = (("push_str", "negative"), ("cfunc", 1, 1))
_TEXT = Path(__file__).with_name("refused_programs.txt").read_text("utf-8")
_ROWS = [line.split("  # ") for line in _TEXT.splitlines() if "  # " in line]
REFUSED = [[row for row in _ROWS if (" || " in row[0]) == calls] for calls in (False, True)]


@pytest.mark.parametrize(("text", "error"), REFUSED[0], ids=str)
def test_a_malformed_program_is_refused_with_its_place(text: str, error: str) -> None:
    code: Code = eval(text, {"X": X})
    refuses(ProgramError, re.escape(error), verify, straight(*code), TABLE, [VECTOR])


def test_an_unknown_function_is_refused_with_its_place() -> None:
    program = straight(*X, ("push_str", "negativ"), ("cfunc", 1, 1), "halt")
    text = r"^no function 'negativ' \(did you mean 'negative'"
    error = refuses(UnknownFunctionError, text, verify, program, TABLE)
    assert error.__notes__ == ["at main, pc 2: cfunc 1 1"]


def test_operands_are_checked_where_their_types_are_known() -> None:
    """Through results, too: the second call's operand is what the first one leaves."""
    program = straight(*X, *NEGATIVE, ("load_arg", 1), ("push_str", "add"), ("cfunc", 2, 1), "halt")
    verify(program, TABLE)
    verify(program, TABLE, [VECTOR, VECTOR])
    caught = refuses(DTypeError, "", verify, program, TABLE, [TensorType("u64"), TensorType("i32")])
    assert (caught.op, caught.operands[0]) == ("add", TensorType("u64"))
    with pytest.raises(ShapeError, match=r"add\(f32\[2\], f32\[3\]\): shapes do not broadcast"):
        verify(program, TABLE, [VECTOR, TensorType(f32, (3,))])


def test_a_value_from_the_free_store_has_a_type_that_only_running_tells() -> None:
    verify(straight(("push_int", 5), "load_global", *NEGATIVE, "halt"), TABLE, [])


def test_a_result_whose_shape_only_running_tells() -> None:
    program = straight(*X, ("push_str", "nonzero_indices"), ("cfunc", 1, 1), *NEGATIVE, "halt")
    verify(program, TABLE, [VECTOR])


def test_constants_have_a_type_and_are_not_written_to() -> None:
    def program(*code: tuple[Any, ...] | str) -> Program:
        body = straight(("push_const", "c"), *code, "halt").main
        return Program([body], {"c": f32s(1, 2)})

    verify(program(*X, ("push_str", "add"), ("cfunc", 2, 1)), TABLE, [VECTOR])
    with pytest.raises(ShapeError, match=r"add\(f32\[2\], f32\[3\]\)"):
        verify(program(*X, ("push_str", "add"), ("cfunc", 2, 1)), TABLE, [TensorType(f32, (3,))])
    with pytest.raises(ProgramError, match=r"cfunc 2 0: negative.out: cannot write to a constant"):
        verify(program(*X, ("push_str", "negative.out"), ("cfunc", 2, 0)), TABLE, [VECTOR])


def test_what_is_reached_and_what_has_to_be_looked_at() -> None:
    program = asm(
        '.func main 0 * | load_arg 0 | push_str "negative" | cfunc 1 1 | push_str "one" | '
        'cfunc 0 1 | load_global | push_str "negative" | cfunc 1 1 | jump end | load_arg 7 | '
        "end: | halt | .func never 0 0 | return 0"
    )
    reached = {("main", pc) for pc in range(11) if pc != 9}
    assert verify(program, TABLE).reached == verify(program, TABLE, [VECTOR]).reached == reached
    assert verify(program, TABLE).unproven == {("main", 2), ("main", 5), ("main", 7)}
    assert verify(program, TABLE, [VECTOR]).unproven == {("main", 5), ("main", 7)}


def test_a_type_that_differs_between_paths_is_unknown() -> None:
    program = asm(
        '.func main 0 * | load_arg 0 | again: | get 0 | get 0 | push_str "concat" | cfunc 2 1 | '
        "set 0 | push_int 1 | jump_if_false again | halt"
    )
    assert verify(program, TABLE, [VECTOR]).unproven == {("main", 4)}


def test_a_name_that_differs_between_paths_is_computed() -> None:
    program = main_of(
        "push_const c | push_int 1 | jump_if_false other"
        '| push_str "negative" | jump go | other: | push_str "abs" | go: | cfunc 1 1'
    )
    assert verify(program, TABLE).unproven == {("main", 6)}


VARIES = (
    ".func f 1 * | get -1 | jump_if_false other | push_int 1 | push_int 2 | return 2"
    "| other: | push_int 3 | return 1"
)


def test_values_whose_number_only_running_tells_are_taken_together(vm: VM) -> None:
    program = main_of(
        'load_arg 0 | call parts | push_str "concat" | cfunc * 1',
        ".func parts 1 * | get -1 | jump_if_false few"
        "| push_const c | push_const c | push_const c | return 3"
        "| few: | push_const c | return 1",
    )
    for condition, times in ((0, 1), (1, 3)):
        [joined] = vm.launch(program, [put(vm, np.array(condition))])
        np.testing.assert_array_equal(joined, [10, 20] * times)


# --- functions ------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "error"), REFUSED[1], ids=str)
def test_a_function_is_followed_from_its_calls(text: str, error: str) -> None:
    refuses(ProgramError, re.escape(error), verify, main_of(*text.split(" || ")), TABLE)


def test_operands_are_checked_in_the_function_that_gets_them() -> None:
    program = main_of(
        "push_const c | load_arg 0 | call f",
        '.func f 2 1 | get -2 | get -1 | push_str "add" | cfunc 2 1 | return 1',
    )
    verify(program, TABLE, [VECTOR])
    types = [TensorType(f32, (3,))]
    caught = refuses(ShapeError, r"add\(f32\[2\], f32\[3\]\)", verify, program, TABLE, types)
    assert caught.__notes__ == ["at f, pc 3: cfunc 2 1"]


def test_recursion_ends_where_no_more_is_learnt() -> None:
    """The result's type is known from the last call, and unknown when the others are seen."""
    program = asm(
        ".const start f32[1] 1 | .func grow 1 1 | get -1 | jump_if_false last | get -1 | get -1 | "
        'push_str "concat" | cfunc 2 1 | call grow | return 1 | last: | get -1 | return 1 | '
        '.func main 0 * | push_const start | call grow | push_str "negative" | cfunc 1 1 | halt'
    )
    assert verify(program, TABLE).unproven == {("grow", 5), ("main", 3)}


def test_functions_that_call_each_other_in_a_long_chain(vm: VM) -> None:
    functions = "".join(
        f".func f{n} 1 1 | get -1 | call f{n + 1} | return 1 |" for n in range(2000)
    )
    last = '.func f2000 1 1 | get -1 | push_str "negative" | cfunc 1 1 | return 1'
    program = main_of("load_arg 0 | call f0", functions + last)
    assert vm.estimate(program, [VECTOR]) == (8, 2)
    [result] = vm.launch(program, [put(vm, f32s(1, 2))])
    assert result.tolist() == [-1, -2]


STEP = "push_int 1 | push_int 1 | jump_if_false L{0} | "
LABELS = "halt | " + "".join(f"L{n}: | halt | " for n in range(1000))
DEEP = "push_int 1 | " * 1000


@cases(
    "text",
    "".join(f"{STEP.format(n)}L{n}: | " for n in range(1000)),
    "".join(STEP.format(n) for n in range(1000)) + LABELS,
    "push_int 0 | jump_if_false again | "
    + "".join(STEP.format(n) for n in range(1000))
    + "halt | again: | "
    + "".join(STEP.format(n) for n in range(1000))
    + LABELS,
    DEEP + "".join(f"push_int 1 | set {n} | jump L{n} | L{n}: | " for n in range(1000)),
    "push_int 1 | call nothing | " * 1500,
)
def test_what_is_verified_takes_memory_in_proportion(text: str) -> None:
    """However many places are met by however high a stack."""
    program = main_of(text + "halt", ".func nothing 0 0 | return 0 |")
    with traced_memory() as peak:
        verify(program, TABLE, ())
        assert peak() < 700 * sum(len(function.code) for function in program.functions.values())


def doubling(depth: int) -> Program:
    """Functions of which each leaves twice as many values as the one before."""
    functions = "".join(
        f".func f{n} 0 {2 << n} | call f{n - 1} | call f{n - 1} | return {2 << n} |"
        for n in range(1, depth)
    )
    first = ".func f0 0 2 | push_int 1 | push_int 1 | return 2 |"
    return main_of(f"call f{depth - 1}", first + functions)


def unknown_results(count: int) -> Program:
    """Return a program that calls a function with `count` results, a number that only running
    shows."""
    return main_of(f'push_str "one" | cfunc 0 1 | cfunc 0 {count}')


@cases("program", doubling(30), unknown_results(10**15), unknown_results(10**6))
def test_results_of_calls_take_bounded_memory(program: Program) -> None:
    """Far fewer bytes than the values that a program of a kilobyte leaves on the stack."""
    table = FunctionTable()
    table.register("one", PythonFunction("one", lambda frame: frame.push(1), None, 1))
    table.max_results = 1 << 14
    with traced_memory() as peak:
        refuses(
            LimitExceededError, r"calls leave too many values .* 16,384", verify, program, table
        )
        assert uses_of(program, table, 2) == Uses(frozenset(), frozenset({0, 1}))
        assert peak() < 1 << 20
    verify(doubling(12), table)


def test_a_function_is_followed_for_few_combinations_of_kinds() -> None:
    """This one calls itself with its parameters in every order: there are 10**10 of them."""
    n = 24
    rotated = [*range(-n + 1, 0), -n]
    swapped = [-n + 1, -n, *range(-n + 2, 0)]

    def call(order: list[int]) -> str:
        return "|".join([*(f"get {i}" for i in order), "call f"])

    text = main_of(
        "|".join(["push_int 1"] * 8 + ["push_const c"] * 8 + ['push_str "s"'] * 8 + ["call f"]),
        f".func f {n} 0 | push_int 0 | jump_if_false end | {call(rotated)} | {call(swapped)}"
        "| end: | return 0",
    )
    started = time.perf_counter()
    verify(text, TABLE)
    assert time.perf_counter() - started < 5
    assert VM().launch(text) == []


# --- any program at all ---------------------------------------------------------------

ARGS = (f32s(1, 2), f32s(3, 4), f32s(1, 2, 3), np.array([1, 0], np.int32))
names = st.sampled_from(
    ["add", "add.out", "negative", "sum", "sum.out", "nonzero_indices", "take", "no such", ""]
)
attributes = st.sampled_from(
    [{}, {"axis": 0}, {"axis": (0,), "keepdims": True}, {"axis": 9}, {"axis": "x"}, {"colour": 1}]
)
counts = st.sampled_from([0, 1, 2, 3, STAR])
small = st.integers(-1, 4)
junk = st.one_of(small, st.none(), st.just("c"), st.just([1]), st.just(2**70), st.floats())

likely = st.one_of(
    st.builds(lambda i: [instruction("load_arg", i)], st.integers(0, 3)),
    st.just([instruction("push_const", "c")]),
    st.just([instruction("push_int", 2**70), instruction("load_global")]),
    st.builds(lambda n: [instruction("pop", n)], st.integers(0, 2)),
    st.builds(
        lambda name, n, m, a: [instruction("push_str", name), instruction("cfunc", n, m, a)],
        names,
        counts,
        counts,
        attributes,
    ),
)
unlikely = st.builds(
    lambda opcode, immediates: [Instruction(opcode, tuple(immediates))],
    st.sampled_from(list(Opcode)),
    st.lists(junk, max_size=3),
)
codes = st.lists(st.one_of(likely, likely, likely, unlikely), max_size=6)


@given(codes)
def test_a_program_is_refused_with_a_typed_error_or_runs(pieces: list[list[Instruction]]) -> None:
    """No error of numpy's or Python's own escapes, and no memory is lost."""
    code = [*[i for piece in pieces for i in piece], instruction("halt")]
    program = Program([Function("main", 0, STAR, tuple(code))], {"c": f32s(5, 6)})
    vm = VM()
    args = [put(vm, array) for array in ARGS]
    before = vm.consumed_size_in_mib()
    refused = refusal(verify, program, vm.functions, [vm.type_of(arg) for arg in args])
    failed = refusal(partial(vm.launch, program, args, max_steps=1000))
    if refused is None:
        assert not isinstance(failed, ProgramError)
    else:
        assert str(refused)
        assert failed is not None
    assert vm.consumed_size_in_mib() == before


def refusal(function: Callable[..., object], *args: Any) -> MlvmError | None:
    """The typed error the call raises, if any."""
    try:
        function(*args)
    except MlvmError as error:
        return error
    return None


test_rows = claims("verify", globals())


def accepted(body: str, functions: str = "") -> bool:
    verify(main_of(body, functions), TABLE)
    return True


def with_function(function: Function) -> None:
    verify(Program([straight("halt").main, function]), TABLE)
