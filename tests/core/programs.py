"""Short ways to write programs, to run them and to fill tensors, for the tests of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlvm.core.machine import run as machine
from mlvm.core.machine.callee import Value
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.fused import Workspace
from mlvm.core.machine.link import bind, link
from mlvm.core.machine.verify import verify
from mlvm.core.program.assembly import assemble, format_instruction
from mlvm.core.program.program import Instruction, Opcode, Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM

TABLE = FunctionTable()

ADD_INTO = Program.of_op("add.out", 3, {}, 0)
"""Arguments z, x, y: z = x + y."""

NEGATIVE = Program.of_op("negative", 1, {}, 1)


FACTORIAL = """
    .const one i64[] 1
    .func factorial 1 1
        get -1
        jump_if_false last
        get -1
        get -1
        push_const one
        push_str "subtract"
        cfunc 2 1
        call factorial
        push_str "multiply"
        cfunc 2 1
        return 1
    last:
        push_const one
        return 1
    .func main 0 *
        load_arg 0
        call factorial
        halt
"""

PARITY = """
    .const one i64[] 1
    .const yes bool[] true
    .const no bool[] false
    .func less 1 1
        get -1
        push_const one
        push_str "subtract"
        cfunc 2 1
        return 1
    .func even 1 1
        get -1
        jump_if_false zero
        get -1
        call less
        call odd
        return 1
    zero:
        push_const yes
        return 1
    .func odd 1 1
        get -1
        jump_if_false zero
        get -1
        call less
        call even
        return 1
    zero:
        push_const no
        return 1
    .func main 0 *
        load_arg 0
        call even
        halt
"""

SUM_TO = """
    .const zero i64[] 0
    .const one i64[] 1
    .func main 0 *
        load_arg 0
        push_const zero
    again:
        get 0
        jump_if_false done
        get 0
        get 1
        push_str "add"
        cfunc 2 1
        set 1
        get 0
        push_const one
        push_str "subtract"
        cfunc 2 1
        set 0
        jump again
    done:
        get 1
        set 0
        pop 1
        halt
"""

HALVE = """
    .const half f32[] 0.5
    .const one f32[] 1
    .func main 0 *              ; the argument itself is halved until it is below 1
    again:
        load_arg 0
        push_const one
        push_str "greater_equal"
        cfunc 2 1
        jump_if_false done
        load_arg 0
        load_arg 0
        push_const half
        push_str "multiply.out"
        cfunc 3 0
        jump again
    done:
        halt
"""


def instruction(opcode: str, *immediates: Any) -> Instruction:
    """`instruction("cfunc", 2, 1)`."""
    return Instruction(next(o for o in Opcode if o.text == opcode), immediates)


def straight(*code: tuple[Any, ...] | str) -> Program:
    """`straight(("load_arg", 0), ("push_str", "negative"), ("cfunc", 1, 1), "halt")`."""
    return Program.straight([instruction(*([x] if isinstance(x, str) else x)) for x in code])


def main_of(body: str, functions: str = "") -> Program:
    """`main` of that assembly and a halt, and functions after it, with constants to use.

    In both `|` stands for the end of a line.
    """
    text = f"""
        .const c f32[2] 10 20
        .const zero f32[] 0
        .const one bool[1,1] true
        .const nan f64[1] nan
        .func main 0 *
        {body} | halt
        {functions}
    """
    return assemble(text.replace("|", "\n"))


def f32s(*values: float) -> Array:
    return np.array(values, np.float32)


C = f32s(10, 20)
"""The constant c of `main_of`."""


def run(program: Program, *operands: Array, store: FreeStore | None = None) -> list[Value]:
    """Return the program's stack on a machine without a VM, which checks nothing."""
    code = bind(link(program, TABLE), operands, Workspace(), checked=False)
    return machine.run(code, operands, store or FreeStore(), TABLE)


def put(vm: VM, array: Array) -> TensorHandle:
    """A new tensor of the VM with a copy of the array."""
    handle = vm.alloc_tensor(TensorType.of(array))
    vm.write(handle, array)
    return handle


def text_of(*words: Any) -> str:
    """The text of an instruction."""
    return format_instruction(instruction(*words))


def stack(body: str, functions: str = "") -> list[Value]:
    """The stack that a verified `main_of` leaves, on a machine without a VM."""
    program = main_of(body, functions)
    verify(program, TABLE, [])
    return run(program)
