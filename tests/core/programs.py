"""Short ways to write programs, to run them and to fill tensors, for the tests of the machine."""

from __future__ import annotations

from pathlib import Path
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
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType

TABLE = FunctionTable()

ADD_INTO = Program.of_op("add.out", 3, {}, 0)
"""Arguments z, x, y: z = x + y."""

NEGATIVE = Program.of_op("negative", 1, {}, 1)

FACTORIAL, PARITY, SUM_TO, HALVE = (
    Path(__file__).with_name(f"{name}.mlasm").read_text("utf-8")
    for name in ("factorial", "parity", "sum_to", "halve")
)
"""Programs of one argument; `halve` writes to it."""


def instruction(opcode: str, *immediates: Any) -> Instruction:
    """`instruction("cfunc", 2, 1)`."""
    return Instruction(next(o for o in Opcode if o.text == opcode), immediates)


def code(*words: tuple[Any, ...] | str) -> tuple[Instruction, ...]:
    """`code(("load_arg", 0), "halt")`."""
    return tuple([instruction(*([x] if isinstance(x, str) else x)) for x in words])


def straight(*words: tuple[Any, ...] | str) -> Program:
    """`straight(("load_arg", 0), ("push_str", "negative"), ("cfunc", 1, 1), "halt")`."""
    return Program.straight(code(*words))


def asm(text: str) -> Program:
    """The program of an assembly in which `|` stands for the end of a line."""
    return assemble(text.replace("|", "\n"))


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
    return asm(text)


def f32s(*values: float) -> Array:
    return np.array(values, np.float32)


C = f32s(10, 20)
"""The constant c of `main_of`."""


def run(program: Program, *operands: Array, store: FreeStore | None = None) -> list[Value]:
    """Return the program's stack on a machine without a VM, which checks nothing."""
    code = bind(link(program, TABLE), operands, Workspace(), checked=False)
    return machine.run(code, operands, store or FreeStore(), TABLE)


def put(vm: VMProtocol, array: Array) -> TensorHandle:
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
