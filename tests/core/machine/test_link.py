"""The linker: what it folds, what it leaves out, and that neither can be seen from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import ArgumentError, MachineError, UnknownFunctionError
from mlvm.core.machine import link as codes
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.fused import Workspace
from mlvm.core.machine.link import LinkedCode, bind, link
from mlvm.core.machine.verify import verify
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32
from mlvm.core.vm import VM
from tests.brief import refuses
from tests.cases.claim_tests import claims
from tests.core.programs import ADD_INTO, asm, f32s, put, straight

TABLE = FunctionTable()
VECTOR = TensorType(f32, (2,))
NAMES = {value: name for name, value in vars(codes).items() if isinstance(value, int)}


def kinds(code: LinkedCode) -> list[str]:
    """The names of a linked function's steps."""
    return [NAMES[step[0]] for step in code.steps]


def checked(program: Program, *types: TensorType) -> LinkedCode:
    return link(program, TABLE, verify(program, TABLE, types or None))


CALL_01 = 'load_arg 0\n load_arg 1\n push_str "negative.out"\n cfunc 2 0\n'


def test_bound_calls_hold_the_arrays_of_one_launch() -> None:
    code, arrays = link(ADD_INTO, TABLE), (f32s(0), f32s(1), f32s(2))
    assert all(
        x is y
        for x, y in zip(
            bind(code, arrays, Workspace(), checked=True).steps[0][2], arrays, strict=True
        )
    )
    assert code.steps[0][2] == (0, 1, 2)
    overlapping = np.arange(3, dtype=np.float32)
    with pytest.raises(MachineError, match="overlaps an operand"):
        bind(code, (overlapping[:2], overlapping[1:], f32s(1, 1)), Workspace(), checked=True)


def test_what_two_launches_have_in_common_is_bound_once() -> None:
    text = CALL_01 + CALL_01.replace("load_arg 1", "load_arg 2").replace("load_arg 0", "load_arg 3")
    code = link(assemble(f".func main 0 *\n{text} halt"), TABLE)
    had = f32s(0, 0), f32s(1, 0), f32s(2, 0), f32s(3, 0)
    first = bind(code, had, Workspace(), checked=True)
    operands = (*had[:3], f32s(4, 0))
    bound = bind(code, operands, Workspace(), checked=True, bound=(first, had))
    assert bound.steps[0] is first.steps[0]
    assert bound.steps[1][2][0] is operands[3]
    wide = f32s(0, 0, 0)
    with pytest.raises(MachineError, match="overlaps an operand"):
        bind(code, (had[0], had[1], wide[1:], wide[:2]), Workspace(), checked=True,
             bound=(first, had))  # fmt: skip
    other = link(assemble(f".func main 0 *\n{text} halt"), TABLE)
    assert bind(other, had, Workspace(), checked=True, bound=(first, had)).steps[0][2][0] is had[0]


def test_launches_on_other_operands_do_the_same(vm: VM) -> None:
    program = assemble(
        '.func twice 1 1\nget -1\nget -1\npush_str "add"\ncfunc 2 1\nreturn 1\n'
        f".func main 0 *\n{CALL_01} load_arg 2\ncall twice\nload_arg 3\ncall twice\nhalt"
    )
    outs, xs = [put(vm, f32s(0)) for _ in range(2)], [put(vm, f32s(i)) for i in range(4)]
    for i, x in enumerate(xs):
        outputs = vm.launch(program, [outs[i % 2], x, xs[0], xs[3 - i]])
        assert vm.read(outs[i % 2]) == -i
        assert [float(y[0]) for y in outputs] == [0, 2 * (3 - i)]


def test_a_jump_between_name_and_call_keeps_them_apart(vm: VM) -> None:
    program = asm(
        '.func main 0 * | load_arg 0 | load_arg 1 | jump_if_false other | push_str "negative" | '
        'jump go | other: | push_str "abs" | go: | cfunc 1 1 | halt'
    )
    code = checked(program, VECTOR, TensorType(f32))
    assert kinds(code).count("CALL_NAMED") == 1
    x, yes, no = put(vm, f32s(1, -2)), put(vm, f32s(1)), put(vm, f32s(0))
    assert [list(vm.launch(program, [x, c])[0]) for c in (yes, no)] == [[-1, 2], [1, 2]]


def test_what_is_never_reached_is_left_out() -> None:
    program = asm(
        '.func main 0 * | jump end | push_str "no such function" | cfunc 0 0 | load_arg 7 | '
        'end: | halt | .func never 1 1 | push_str "no such function" | cfunc 0 0 | return 0'
    )
    assert kinds(checked(program)) == ["JUMP", *["UNREACHED"] * 3, "HALT"]
    assert VM().launch(program) == []
    refuses(UnknownFunctionError, "", link, program, TABLE)


def test_functions_are_linked_to_each_other() -> None:
    program = asm(
        ".func odd 1 1 | get -1 | call even | return 1 | .func even 1 1 | get -1 | call odd | "
        "return 1 | .func main 0 * | halt"
    )
    main = link(program, TABLE)
    assert kinds(main) == ["HALT"]
    text = program.functions
    again = link(
        Program(
            [text["odd"], text["even"], straight(("load_arg", 0), ("call", "odd"), "halt").main]
        ),
        TABLE,
    )
    odd = again.steps[1][1]
    assert odd.steps[1][1].steps[1][1] is odd


def test_linking_refuses_names_and_attributes_that_there_are_not() -> None:
    with pytest.raises(UnknownFunctionError, match="no function 'no such'"):
        link(straight(("push_str", "no such"), ("cfunc", 0, 0), "halt"), TABLE)
    with pytest.raises(ArgumentError, match="no attribute 'colour'"):
        link(Program.of_op("sum", 1, {"colour": 1}, 1), TABLE)


test_rows = claims("link", globals())


def on_arguments(text: str) -> list[Any]:
    """The arguments of the calls that are on arguments alone."""
    steps = link(assemble(f".func main 0 *\n{text}"), TABLE).steps
    return [step[2] for step in steps if NAMES[step[0]] == "CALL_ON_ARGS"]
