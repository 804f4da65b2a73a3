"""The verifier: what it refuses and how it says so; what it passes runs without surprise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import (
    AttributeRefused,
    DTypeError,
    MlvmError,
    ProgramError,
    ShapeError,
    UnknownFunction,
)
from mlvm.core.functions import FunctionTable
from mlvm.core.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.types import TensorType, f32
from mlvm.core.verify import EXECUTABLE, verify
from mlvm.core.vm import VM
from tests.core.programs import f32s, instruction, put, straight

TABLE = FunctionTable()
VECTOR = TensorType(f32, (2,))

Code = tuple[tuple[Any, ...] | str, ...]
X: Code = (("load_arg", 0),)
NEGATIVE: Code = (("push_str", "negative"), ("cfunc", 1, 1))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ((), "main: the end is reached without halt"),
        (X, "main: the end is reached without halt"),
        ((("halt", 1),), "main, pc 0: halt 1: takes no immediates"),
        ((("push_int",), "halt"), "main, pc 0: push_int: takes n"),
        ((("cfunc", 1),), "main, pc 0: cfunc 1: takes nparams nresults attrs?"),
        ((("cfunc", 1, 1, {}, 0),), "takes nparams nresults attrs?"),
        ((("push_int", "5"),), "main, pc 0: push_int 5: an Int is wanted, not '5'"),
        ((("push_int", True),), "an Int is wanted, not True"),
        ((("push_str", 5),), "a Str is wanted, not 5"),
        ((("push_const", "c"),), "pc 0: push_const c: no constant 'c'; there are: none"),
        ((("push_const", ["c"]),), "no constant ['c']; there are: none"),
        ((("load_arg", -1),), "an argument's number is an integer >= 0, not -1"),
        ((("load_arg", "x"),), "an argument's number is an integer >= 0, not 'x'"),
        ((*X, ("load_arg", 1)), "main, pc 1: load_arg 1: the launch has 1 arguments"),
        (("load_global",), "main, pc 0: load_global: needs 1 values on the stack; there are 0"),
        ((*X, "load_global"), "Int is wanted on top of the stack, not f32[2]"),
        ((("push_str", "5"), "load_global"), "Int is wanted on top of the stack, not Str"),
        ((("pop", -1),), "a count is an integer >= 0, not -1"),
        ((*X, ("pop", 2)), "pc 1: pop 2: needs 2 values on the stack; there are 1"),
        ((("cfunc", 0, 0),), "cfunc 0 0: needs 1 values on the stack; there are 0"),
        ((*X, ("cfunc", 0, 1)), "Str is wanted on top of the stack, not f32[2]"),
        ((*X, ("push_str", "add"), ("cfunc", 2, 1)), "needs 2 values on the stack; there are 1"),
        ((("push_str", "add"), ("cfunc", -1, 1)), "a count is an integer >= 0 or *, not -1"),
        ((("push_str", "add"), ("cfunc", 2, None)), "a count is an integer >= 0 or *, not None"),
        (
            (*X, ("push_str", "negative"), ("cfunc", 1, 2)),
            "main, pc 2: cfunc 1 2: negative leaves 1 results, not 2",
        ),
        (
            (*X, ("push_str", "negative"), ("cfunc", 1, 1, 5)),
            "attributes are a mapping, not 5",
        ),
        (
            (*X, ("push_int", 5), ("push_str", "add"), ("cfunc", 2, 1)),
            "add takes Tensors, not (f32[2], Int)",
        ),
        (
            (("push_str", "add"), ("push_str", "negative"), ("cfunc", "*", 1)),
            "negative takes Tensors, not (Str)",
        ),
        (
            (*X, ("push_str", "negative"), ("pop", 0), ("cfunc", 1, 1)),
            "the instruction before must push the function's name",
        ),
    ],
)
def test_a_malformed_program_is_refused_with_its_place(code: Code, error: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(error)):
        verify(straight(*code), TABLE, [VECTOR])


def test_an_unknown_function_is_refused_with_its_place() -> None:
    program = straight(*X, ("push_str", "negativ"), ("cfunc", 1, 1), "halt")
    with pytest.raises(UnknownFunction, match=r"did you mean negative.*\(main, pc 2: cfunc 1 1\)"):
        verify(program, TABLE)


def test_an_attribute_is_refused_whatever_the_types() -> None:
    program = straight(*X, ("push_str", "sum"), ("cfunc", 1, 1, {"axes": 0}), "halt")
    with pytest.raises(AttributeRefused, match=r"sum\(\): no attribute 'axes'"):
        verify(program, TABLE)


def test_operands_are_checked_where_their_types_are_known() -> None:
    """Through results, too: the second call's operand is what the first one leaves."""
    program = straight(*X, *NEGATIVE, ("load_arg", 1), ("push_str", "add"), ("cfunc", 2, 1), "halt")
    verify(program, TABLE)
    verify(program, TABLE, [VECTOR, VECTOR])
    with pytest.raises(DTypeError) as caught:
        verify(program, TABLE, [VECTOR, TensorType("i32", (2,))])
    assert (caught.value.op, caught.value.operands[0]) == ("add", VECTOR)
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
    with pytest.raises(ProgramError, match=r"cfunc 2 0: negative.out would write to a constant"):
        verify(program(*X, ("push_str", "negative.out"), ("cfunc", 2, 0)), TABLE, [VECTOR])


def test_star_takes_everything_and_accepts_any_number_of_results() -> None:
    program = straight(*X, *X, ("push_str", "add"), ("cfunc", "*", "*"), "halt")
    verify(program, TABLE, [VECTOR])
    program = straight(*X, *X, *X, ("push_str", "add"), ("cfunc", "*", "*"), "halt")
    with pytest.raises(ShapeError, match="takes 2 tensors, was given 3"):
        verify(program, TABLE, [VECTOR])


def test_nothing_after_halt_is_looked_at() -> None:
    verify(straight("halt", ("pop", 5)), TABLE)


@pytest.mark.parametrize("opcode", [o for o in Opcode if o not in EXECUTABLE])
def test_instructions_to_come_are_refused(opcode: Opcode) -> None:
    immediates = tuple(0 for _ in opcode.immediates)
    code = (Instruction(opcode, immediates), instruction("halt"))
    with pytest.raises(ProgramError, match=rf"main, pc 0: {opcode.text}.*: .* is not run yet"):
        verify(Program([Function("main", 0, STAR, code)]), TABLE)


def test_functions_beside_main_are_refused() -> None:
    main = straight("halt").main
    with pytest.raises(ProgramError, match="helper: functions beside main are not run yet"):
        verify(Program([main, main._replace(name="helper")]), TABLE)


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
    failed = refusal(vm.launch, program, args)
    if refused is None:
        assert not isinstance(failed, (ProgramError, UnknownFunction))
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
