"""The linker and the loop, without a VM around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlvm.core import machine
from mlvm.core.errors import HandleError, OperandValueError, ProgramError, UnknownFunction
from mlvm.core.functions import FunctionTable, Value
from mlvm.core.program import STAR, Function, Instruction, Opcode, Program
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType, f32
from mlvm.core.verify import EXECUTABLE, verify
from tests.core.programs import ADD_INTO, f32s, instruction, straight

TABLE = FunctionTable()
CONSTANT = f32s(10, 20)
KERNELS: dict[str, Any] = {"add": np.add, "multiply": np.multiply, "negative": np.negative}


def run(program: Program, *operands: Array, store: FreeStore | None = None) -> list[Value]:
    linked = machine.link(program, TABLE)
    return machine.run(linked.steps, operands[: linked.nargs], store or FreeStore())


@st.composite
def runs(draw: st.DrawFn) -> tuple[Program, list[Array], list[Array]]:
    """A straight program over two arguments, with what it leaves on the stack and in them."""
    args = [f32s(1, 2), f32s(3, 5)]
    code: list[Instruction] = []
    stack: list[Any] = []

    def call(form: str, nparams: int, nresults: int) -> None:
        count = draw(st.sampled_from([nparams, STAR])) if nparams == len(stack) else nparams
        code.append(instruction("push_str", form))
        code.append(instruction("cfunc", count, draw(st.sampled_from([nresults, STAR]))))

    for _ in range(draw(st.integers(0, 12))):
        match draw(st.sampled_from(["load", "load", "const", "int", "pop", "fresh", "into"])):
            case "load":
                i = draw(st.integers(0, 1))
                code.append(instruction("load_arg", i))
                stack.append(args[i])
            case "const":
                code.append(instruction("push_const", "c"))
                stack.append(CONSTANT)
            case "int":
                code.append(instruction("push_int", 7))
                stack.append(7)
            case "pop":
                n = draw(st.integers(0, len(stack)))
                code.append(instruction("pop", n))
                del stack[len(stack) - n :]
            case form:
                name = draw(st.sampled_from(sorted(KERNELS)))
                arity = KERNELS[name].nin
                params = stack[len(stack) - arity - (form == "into") :]
                if len(stack) < arity + (form == "into") or 7 in map(type_or_7, params):
                    continue
                if form == "fresh":
                    call(name, arity, 1)
                    stack[len(stack) - arity :] = [KERNELS[name](*params)]
                elif params[0] is not CONSTANT:
                    call(f"{name}.out", arity + 1, 0)
                    KERNELS[name](*params[1:], out=params[0])
                    del stack[len(stack) - arity - 1 :]
    code.append(instruction("halt"))
    program = Program([Function("main", 0, STAR, tuple(code))], {"c": CONSTANT})
    return program, stack, args


def type_or_7(value: Any) -> Any:
    return 7 if value.__class__ is int else None


@given(runs())
def test_a_straight_program_does_what_numpy_does(
    case: tuple[Program, list[Array], list[Array]],
) -> None:
    program, stack, args = case
    operands = [f32s(1, 2), f32s(3, 5)]
    verify(program, TABLE, [TensorType(f32, (2,))] * 2)
    np.testing.assert_equal(run(program, *operands), stack)
    np.testing.assert_equal(operands, args)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (0, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("count", [3, STAR])
def test_arguments_reach_a_kernel_in_the_order_they_are_loaded(
    order: tuple[int, int, int], count: Any
) -> None:
    program = straight(
        *(("load_arg", i) for i in order), ("push_str", "subtract.out"), ("cfunc", count, 0), "halt"
    )
    operands = [f32s(1), f32s(20), f32s(300)]
    expected = [x.copy() for x in operands]
    z, x, y = (expected[i] for i in order)
    np.subtract(x, y, z)
    assert run(program, *operands) == []
    np.testing.assert_array_equal(operands, expected)


def test_a_program_goes_on_after_a_call_on_all_arguments() -> None:
    program = straight(
        *((i.opcode.text, *i.immediates) for i in ADD_INTO.main.code[:-1]),
        ("load_arg", 0),
        ("load_arg", 2),
        "halt",
    )
    z, y = run(program, f32s(0), f32s(1), f32s(2))
    assert (z, y) == (f32s(3), f32s(2))


def test_a_call_on_more_than_the_arguments_takes_what_is_on_the_stack() -> None:
    program = straight(
        ("load_arg", 0),
        ("load_arg", 1),
        ("load_arg", 1),
        ("push_str", "add.out"),
        ("cfunc", 3, 0),
        "halt",
    )
    out = f32s(0)
    run(program, out, f32s(4))
    assert out == 8


def test_a_call_on_fewer_than_the_arguments_takes_the_last() -> None:
    program = straight(
        *(("load_arg", i) for i in range(3)), ("push_str", "negative.out"), ("cfunc", 2, 0), "halt"
    )
    operands = [f32s(1), f32s(2), f32s(3)]
    assert run(program, *operands) == [f32s(1)]
    np.testing.assert_array_equal(operands, [[1], [-3], [3]])


def test_nargs_counts_up_to_the_last_argument_used() -> None:
    assert machine.link(straight("halt"), TABLE).nargs == 0
    assert machine.link(straight(("load_arg", 2), "halt"), TABLE).nargs == 3


def test_attributes_reach_the_kernel() -> None:
    x = f32s(1, 2, 3).reshape(1, 3)
    for attributes, expected in (({"axis": [1]}, [6]), ({"axis": 0, "keepdims": True}, x)):
        program = Program.of_op("sum", 1, attributes, 1)
        np.testing.assert_array_equal(run(program, x), [expected])


def test_values_of_every_kind_are_left_in_order() -> None:
    x = f32s(1)
    program = straight(("push_int", -3), ("load_arg", 0), ("push_str", "s"), "halt")
    assert run(program, x) == [-3, x, "s"]


def test_nothing_after_halt_runs_or_is_looked_at() -> None:
    assert run(straight("halt", "push_int", ("load_arg", 5))) == []


def test_load_global_names_a_tensor_of_the_store() -> None:
    store = FreeStore()
    handle = store.alloc_tensor(TensorType(f32, (2,)))
    program = straight(("push_int", handle), "load_global", "halt")
    assert run(program, store=store)[0] is store.entry(handle).array
    store.dealloc_tensor(handle)
    with pytest.raises(HandleError, match=r"f32\[2\], ended by dealloc_tensor"):
        run(program, store=store)


@pytest.mark.parametrize(
    "program",
    [Program.of_op("pow", 2, {}, 1), Program.of_op("pow.out", 3, {}, 0)],
    ids=["fresh", "into"],
)
def test_a_kernels_own_error_names_the_function_and_its_operands(program: Program) -> None:
    nparams = program.main.code[-2].immediates[0]
    operands = [np.array([-1, -2]) for _ in range(nparams)]
    name = program.main.code[-3].immediates[0]
    with pytest.raises(OperandValueError) as caught:
        run(program, *operands)
    assert caught.value.op == name
    assert caught.value.operands == (TensorType("i64", (2,)),) * nparams


def test_linking_refuses_what_the_loop_does_not_run() -> None:
    with pytest.raises(UnknownFunction, match="no function 'no such'"):
        machine.link(straight(("push_str", "no such"), ("cfunc", 0, 0), "halt"), TABLE)
    for opcode in set(Opcode) - EXECUTABLE:
        code = (Instruction(opcode, (0,) * len(opcode.immediates)),)
        with pytest.raises(ProgramError, match=f"{opcode.text} is not run yet"):
            machine.link(Program([Function("main", 0, STAR, code)]), TABLE)


def test_a_far_argument_costs_nothing_to_link() -> None:
    assert machine.link(straight(("load_arg", 2**70), "halt"), TABLE).nargs == 2**70 + 1
