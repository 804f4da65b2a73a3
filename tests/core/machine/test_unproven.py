"""Names, kinds and types that only running tells are looked at when they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlvm.core import errors
from mlvm.core.errors import DTypeError, MachineError, OperandValueError, ProgramError, ShapeError
from mlvm.core.machine.callee import Value
from mlvm.core.vm import VM
from tests.brief import refuses
from tests.core.programs import C, f32s, main_of, put


def vm_that_gives(value: Value) -> VM:
    """A VM with a function `any` that leaves the value."""
    vm = VM()
    vm.register("anything", lambda frame: frame.push(value), nparams=0, nresults=1)
    return vm


ANY = 'push_str "anything" | cfunc 0 1'
_TEXT = Path(__file__).with_name("refused_programs.txt").read_text("utf-8")
UNPROVEN = [line for line in _TEXT.splitlines() if line.count(" || ") == 3 and line[0] != "#"]


@pytest.mark.parametrize("text", UNPROVEN)
def test_what_was_not_known_is_looked_at(text: str) -> None:
    shown, body, name, pattern = text.split(" || ")
    value, error = eval(shown), getattr(errors, name)
    vm = vm_that_gives(value)
    x = put(vm, f32s(1, 2))
    program = main_of(f"push_int 0 | {ANY} | {body.replace('{x}', str(x))}")
    before = vm.consumed_size_in_mib()
    for _ in range(2):
        caught = refuses(error, pattern, vm.launch, program)
        assert caught.__notes__[0].startswith("at main, pc ")
    assert vm.consumed_size_in_mib() == before
    np.testing.assert_array_equal(vm.read(x), [1, 2])
    vm.register("anything", lambda frame: frame.push(x))
    assert vm.launch(main_of(f"{ANY} | load_global"))[0].tolist() == [1, 2]


def test_a_tensor_of_the_free_store_is_checked_before_an_op_writes_to_it(vm: VM) -> None:
    """No silent broadcast into or from a tensor whose type the verifier could not know."""
    x, y = put(vm, f32s(1, 2)), put(vm, f32s(5))
    adding = main_of(
        f"push_int {x} | load_global | push_int {y} | load_global | push_const zero"
        '| push_str "add.out" | cfunc 3 0'
    )
    refuses(ShapeError, r"of the result's type f32\[1\], got f32\[2\]", vm.launch, adding)
    vm.write(y, f32s(6))
    other = put(vm, np.array([1, 2]))
    adding = main_of(
        f"push_int {other} | load_global | push_const c | push_const c"
        '| push_str "add.out" | cfunc 3 0'
    )
    refuses(DTypeError, r"of the result's type f32\[2\], got i64\[2\]", vm.launch, adding)
    np.testing.assert_array_equal(vm.read(x), [1, 2])


def test_a_name_that_the_program_computes() -> None:
    for name, expected in (("sum", [3]), ("sum.out", [])):
        vm = vm_that_gives(name)
        x, out = put(vm, f32s(1, 2)), put(vm, f32s(0))
        loads = "load_arg 0" if name == "sum" else "load_arg 1 | load_arg 0"
        nparams = loads.count("load")
        program = main_of(f'{loads} | {ANY} | cfunc {nparams} * {{"axis": [0], "keepdims": true}}')
        assert vm.launch(program, [x, out]) == expected
        assert vm.read(out) == (0 if name == "sum" else 3)


def test_a_kernels_own_error_names_a_function_whose_name_was_computed() -> None:
    vm = vm_that_gives("pow")
    n = put(vm, np.array([-1]))
    program = main_of(f"load_arg 0 | load_arg 0 | {ANY} | cfunc 2 1")
    with pytest.raises(OperandValueError, match=r"pow\(i64\[1\], i64\[1\]\): expected exponents"):
        vm.launch(program, [n])


def test_constants_cannot_be_written_to_whatever_way_they_take(vm: VM) -> None:
    vm.register("same", lambda frame: frame.push(frame.param(0)))
    x = put(vm, f32s(1, 2))
    for operand in (
        "push_const c", 'push_const c | push_str "same" | cfunc 1 1', "push_const c | call f",
        "push_int 0 | push_const c | set 0 | get 0 | set 0",
    ):  # fmt: skip
        program = main_of(
            f'{operand} | load_arg 0 | push_str "negative.out" | cfunc 2 0',
            ".func f 1 1\n get -1\n return 1",
        )
        with pytest.raises(
            (ProgramError, MachineError), match=r"negative\.out: cannot write to a c"
        ):
            vm.launch(program, [x])
        np.testing.assert_array_equal(program.constants["c"], C)
