"""Programs: immutable, compared by content."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mlvm.core.collecting import uncollected
from mlvm.core.errors import DTypeError, ProgramError
from mlvm.core.program.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.types import Array
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import f32s, instruction, straight

HALT = instruction("halt")


def with_constants(constants: Mapping[str, Array]) -> Program:
    return Program([Function("main", 0, STAR, (HALT,))], constants)


def test_the_instruction_set() -> None:
    assert " ".join(opcode.text for opcode in Opcode) == (
        "halt push_int push_str push_const load_arg load_global store_global get set pop cfunc"
        " call return jump jump_if_false"
    )
    assert len({(o.immediates, o.effect, o.meaning) for o in Opcode}) == len(Opcode)
    for opcode in Opcode:
        assert opcode.meaning
        assert " -- " in opcode.effect


def test_of_op_pushes_the_arguments_calls_and_halts() -> None:
    assert Program.of_op("add.out", 3, {}, 0) == straight(
        ("load_arg", 0),
        ("load_arg", 1),
        ("load_arg", 2),
        ("push_str", "add.out"),
        ("cfunc", 3, 0),
        "halt",
    )
    attributes = {"axis": 0}
    program = Program.of_op("sum", 1, attributes, 1)
    attributes["axis"] = 1
    assert program.main.code[-2] == instruction("cfunc", 1, 1, {"axis": 0})
    assert (program.main.nparams, program.main.nresults) == (0, "*")


@cases("name", "", "a b", "1st", ".x", "f;", 'f"', "main\n", 5, None)
def test_a_name_is_one_that_assembly_can_write(name: Any) -> None:
    body = straight("halt").main
    with pytest.raises(ProgramError, match="expected a function name of letters, digits, _ and"):
        Program([body, body._replace(name=name)])
    with pytest.raises(ProgramError, match="expected a constant name of letters, digits, _ and"):
        with_constants({name: f32s(1)})


def test_constants_are_copied_read_only_and_packed() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    program = with_constants({"c": array})
    array[...] = 0
    constant = program.constants["c"]
    np.testing.assert_array_equal(constant, [[0, 3], [1, 4], [2, 5]])
    assert constant.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        constant[0, 0] = 1


def test_a_constant_is_of_a_dtype_that_there_is() -> None:
    refuses(DTypeError, "no dtype for dtype", with_constants, {"c": np.zeros(2, np.longdouble)})


def test_a_program_is_freed_when_nobody_refers_to_it() -> None:
    program = straight("halt")
    reference = weakref.ref(program)
    with uncollected():
        del program
        assert reference() is None


def test_repr_shows_functions_and_constants() -> None:
    assert repr(with_constants({"c": f32s(1)})) == "<Program main: 1; 1 constants>"


@cases("part", Instruction(Opcode.halt), Function("f", 0, 0, ()))
def test_parts_are_immutable(part: Any) -> None:
    with pytest.raises(AttributeError):
        part.opcode = part.name = None


test_rows = claims("program", globals())


def same_constants(x: Array, y: Array) -> bool:
    """Return whether programs with these constants are equal; those with others are not."""
    first, second = with_constants({"c": x}), with_constants({"c": y})
    assert first != with_constants({"d": x})
    assert first != with_constants({"c": x, "d": x})
    assert first != second or hash(first) == hash(second)
    return first == second
