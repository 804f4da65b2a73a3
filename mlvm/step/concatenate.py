"""Concatenation of several launches to one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mlvm.core.errors import ProgramError
from mlvm.core.machine.decode import argument_of, decode
from mlvm.core.program.program import STAR, Instruction, Program

Launch: TypeAlias = tuple[Program, tuple[int, ...]]
"""Program, and the handles of the tensors it was launched on."""


def concatenate(launches: Sequence[Launch]) -> Program:
    """Return one program for several launches, which loads each argument by handle.

    Raises `ProgramError` if a program is more than a `main` without branches, or if a `cfunc *`
    would pop values of other launches from the stack.
    """
    code: list[Instruction] = []
    for program, args in launches:
        if len(program.functions) > 1 or program.constants:
            raise ProgramError(
                "expected programs that have one function and no constants, got "
                f"{len(program.functions)} functions and {len(program.constants)} constants"
            )
        for each in decode(program)["main"].instructions():
            if each.kind == "cfunc" and program.main.code[each.pc].immediates[0] == STAR:
                raise ProgramError(
                    "a program with cfunc * cannot be concatenated; use a number of results"
                )
            if each.kind == "cfunc" and each.at != 0:
                raise ProgramError(
                    "a program that returns values cannot be concatenated; "
                    "write to an operand instead"
                )
            end = each.pc
            if each.kind == "halt":
                break
        for instruction in program.main.code[:end]:
            number = argument_of(instruction)
            if number is None:
                code.append(instruction)
            else:
                code += [Instruction.of("push_int", args[number]), Instruction.of("load_global")]
    return Program.straight([*code, Instruction.of("halt")])
