"""Several launches as one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mlvm.core.errors import ProgramError
from mlvm.core.program.program import STAR, Instruction, Opcode, Program

Launch: TypeAlias = tuple[Program, tuple[int, ...]]
"""A program, and the handles of the tensors it was launched on."""


def concatenate(launches: Sequence[Launch]) -> Program:
    """Return one program of several launches: each argument is loaded by its handle.

    Raises `ProgramError` for a launched program that is more than a straight `main`, or whose
    `cfunc *` would take values of other launches from the stack.
    """
    code: list[Instruction] = []
    for program, args in launches:
        if len(program.functions) > 1 or program.constants:
            raise ProgramError("only straight programs without constants are concatenated")
        for instruction in program.main.code:
            if instruction.opcode is Opcode.load_arg:
                handle = args[instruction.immediates[0]]
                code.append(Instruction(Opcode.push_int, (handle,)))
                code.append(Instruction(Opcode.load_global))
            elif instruction.opcode is Opcode.halt:
                break
            elif instruction.opcode is Opcode.cfunc and instruction.immediates[0] == STAR:
                raise ProgramError("a program with cfunc * is not concatenated")
            elif instruction.opcode is Opcode.cfunc and instruction.immediates[1] != 0:
                raise ProgramError("a program that returns values is not concatenated")
            else:
                code.append(instruction)
    return Program.straight([*code, Instruction(Opcode.halt)])
