"""Programs written with method calls: the same as from assembly."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import DTypeError, ProgramError
from mlvm.core.program import builder as module
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.program.program import Opcode, Program
from mlvm.core.types import Array
from mlvm.core.vm import VM
from tests.brief import refuses
from tests.cases.claim_tests import claims
from tests.core.programs import asm, f32s, put, straight


def built(*steps: Callable[[ProgramBuilder], object]) -> Program:
    """A program that is one `main` of what the steps write."""
    b = ProgramBuilder()
    with b.function("main"):
        for step in steps:
            step(b)
    return b.build()


def test_it_builds_what_the_assembler_reads() -> None:
    b = ProgramBuilder()
    b.constant("one", np.int64(1)).constant("limits", f32s(0, 1))
    with b.function("fib", 1, 1):
        b.get(-1).push_int(2).host("less", 2, 1).jump_if_false("recurse")
        b.get(-1).return_(1)
        b.label("recurse")
        b.get(-1).push_const("one").host("subtract", 2, 1).call("fib").return_(1)
    with b.function("main", nresults=2):
        b.label("again").load_arg(0).call("fib").set(0)
        b.push_str("sum").cfunc("*", "*", {"axis": [0, 1], "keepdims": True}).pop(1)
        b.push_int(7).load_global().push_int(7).store_global()
        b.jump("again").label("unreached").halt()
    assert b.build() == asm(
        ".const one i64[] 1 | .const limits f32[2] 0 1 | .func fib 1 1 | get -1 | push_int 2 | "
        'push_str "less" | cfunc 2 1 | jump_if_false recurse | get -1 | return 1 | recurse: | '
        'get -1 | push_const one | push_str "subtract" | cfunc 2 1 | call fib | return 1 | '
        '.func main 0 2 | again: | load_arg 0 | call fib | set 0 | push_str "sum" | '
        'cfunc * * {"axis": [0, 1], "keepdims": true} | pop 1 | push_int 7 | load_global | '
        "push_int 7 | store_global | jump again | halt"
    )


def test_every_instruction_has_a_method_with_its_immediates() -> None:
    for opcode in Opcode:
        method = getattr(ProgramBuilder, opcode.name)
        names = list(inspect.signature(method).parameters)[1:]
        expected = [name.replace("attrs?", "attributes") for name in opcode.immediates]
        assert names == expected, opcode


def test_the_example_of_the_module_counts_down(vm: VM) -> None:
    _, _, code = inspect.cleandoc(str(module.__doc__)).partition("\n\n")
    namespace: dict[str, Any] = {"np": np, "ProgramBuilder": ProgramBuilder}
    exec(textwrap.dedent(code), namespace)
    [output] = vm.launch(namespace["program"], [put(vm, np.array(3))])
    assert output.tolist() == 0


def test_a_constant_is_a_copy() -> None:
    array: Array = f32s(1, 2)
    b = ProgramBuilder().constant("c", array)
    array[...] = 0
    with b.function("main"):
        b.push_const("c").halt()
    [output] = VM().launch(b.build())
    np.testing.assert_array_equal(output, [1, 2])


def test_a_builder_can_go_on_after_build() -> None:
    b = ProgramBuilder()
    with b.function("main"):
        b.halt()
    first = b.build()
    with b.function("other"):
        b.halt()
    assert [*first.functions] == ["main"]
    assert [*b.build().functions] == ["main", "other"]


def nest(b: ProgramBuilder) -> None:
    with b.function("inner"):
        pass


def test_errors_outside_of_a_function() -> None:
    b = ProgramBuilder()
    refuses(ProgramError, "push_int is outside of a function", b.push_int, 1)
    refuses(ProgramError, "label 'x' is outside of a function", b.label, "x")
    refuses(ProgramError, "expected a function 'main', got none", b.build)
    with b.function("f"):
        b.halt()
    with pytest.raises(ProgramError, match="function 'f' is defined twice"), b.function("f"):
        pass


def test_a_label_belongs_to_its_function() -> None:
    b = ProgramBuilder()
    with b.function("f"):
        b.label("x").halt()
    with (
        pytest.raises(ProgramError, match=r"main: expected a label \(none\), got 'x'"),
        b.function("main"),
    ):
        b.jump("x")


def test_a_function_that_raises_is_not_there() -> None:
    b = ProgramBuilder()
    with pytest.raises(ZeroDivisionError), b.function("main"):
        b.push_int(1 // 0)
    with b.function("main"):
        b.halt()
    assert b.build() == straight("halt")


def test_constants_and_names_are_checked_by_the_program() -> None:
    with pytest.raises(DTypeError, match="no dtype for"):
        built(lambda b: b.constant("c", np.zeros(2, np.longdouble)))
    refuses(ProgramError, "expected a constant name", built, lambda b: b.constant("1", f32s(1)))


test_rows = claims("builder", globals())
