"""What an eager call launches, as one program that can be read, and launched again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlvm.arena.arena import Arena
from mlvm.core.errors import ProgramError
from mlvm.core.program.program import STAR, Instruction, Opcode, Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array
from mlvm.eager.context import current_arena

Launch = tuple[Program, tuple[TensorHandle, ...]]


@contextmanager
def launches(vm: VMProtocol) -> Iterator[list[Launch]]:
    """The list of what is launched on the VM inside the block, in order."""
    found: list[Launch] = []
    launch, outer = vm.launch, vars(vm).get("launch")

    def listed(
        program: Program, args: Sequence[TensorHandle] = (), *, max_steps: int | None = None
    ) -> list[Array]:
        found.append((program, tuple(args)))
        return launch(program, args, max_steps=max_steps)

    vm.launch = listed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        if outer is None:
            del vm.launch
        else:
            vm.launch = outer  # type: ignore[method-assign]


def concatenate(found: Sequence[Launch]) -> Program:
    """One program that does what the launches did: each argument is loaded by its handle.

    Raises `ProgramError` for a launched program that is more than a straight `main`, or whose
    `cfunc *` would take what other launches left on the stack.
    """
    code: list[Instruction] = []
    for program, args in found:
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


def program_of(fn: Callable[..., Any], *args: Any) -> Program:
    """Call `fn(*args)` on the current VM, and return what it launched as one program.

    The program names tensors by their handles. What `fn` makes lies in an arena of the
    program's own, and lives as long as the program; so launching it again, while the arguments
    live, computes the same again. Values that Python copied in meanwhile stay what they were.
    Raises `ProgramError` for a call whose result's shape depends on values.
    """
    arena = Arena(current_arena().vm, "program_of")
    with launches(arena.vm) as found, arena.allocating():
        fn(*args)
    program = concatenate(found)
    weakref.finalize(program, arena.close).atexit = False
    return program
