"""The stack machine: a linker that prepares a program once, and the loop that runs it.

Linking resolves each function name to its slot in the function table and folds two
sequences that nearly every program is made of into one step each:

    push_str name; cfunc ...                    ->  CALL slot
    load_arg 0; ...; load_arg n-1; CALL x.out   ->  CALL_ON_ARGS slot

The loop's stack is a Python list; a Tensor on it is a numpy array, an Int an int, a Str a str.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from mlvm.core.errors import OpError, ProgramError
from mlvm.core.functions import FunctionTable, Slot, Value
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.program import STAR, Opcode, Program
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType

HALT: Final = 0
PUSH: Final = 1
LOAD_ARG: Final = 2
LOAD_GLOBAL: Final = 3
POP: Final = 4
CALL: Final = 5
CALL_ON_ARGS: Final = 6

ALL: Final = -1  # a call that takes everything on the stack


Step: TypeAlias = tuple[int, Any, int, dict[str, Any] | None]
"""What the loop runs: a code from above, a value or slot, a number, and attributes."""


class Linked:
    """A program prepared for one VM, and what that VM remembers of earlier launches.

    `nargs`: how many arguments it uses. `admitted`: argument types it was verified for.
    `bound`: operands by argument handles, forgotten as soon as a handle may name another array.
    `program`: refers to the program without keeping it; the VM forgets the link when it dies.
    """

    __slots__ = ("admitted", "bound", "nargs", "program", "steps")

    program: weakref.ref[Program]

    def __init__(self, steps: list[Step], nargs: int) -> None:
        self.steps = steps
        self.nargs = nargs
        self.admitted: set[tuple[TensorType, ...]] = set()
        self.bound: dict[tuple[int, ...], tuple[Array, ...]] = {}


def link(program: Program, functions: FunctionTable) -> Linked:
    """Prepare a verified program for the loop. Raises `UnknownFunction`."""
    steps: list[Step] = []
    nargs = 0
    for opcode, immediates in program.main.code:
        match opcode:
            case Opcode.halt:
                steps.append((HALT, None, 0, None))
                break  # nothing jumps, so what follows is never run
            case Opcode.push_int | Opcode.push_str:
                steps.append((PUSH, immediates[0], 0, None))
            case Opcode.push_const:
                steps.append((PUSH, program.constants[immediates[0]], 0, None))
            case Opcode.load_arg:
                steps.append((LOAD_ARG, None, immediates[0], None))
                nargs = max(nargs, immediates[0] + 1)
            case Opcode.load_global:
                steps.append((LOAD_GLOBAL, None, 0, None))
            case Opcode.pop:
                steps.append((POP, None, immediates[0], None))
            case Opcode.cfunc:
                _, name, _, _ = steps.pop()
                slot = functions.slot(name)
                given = immediates[2] if len(immediates) > 2 else NO_ATTRIBUTES
                count = ALL if immediates[0] == STAR else immediates[0]
                steps.append((CALL, slot, count, dict(slot.bind(given)) or None))
            case _:
                raise ProgramError(f"{opcode.text} is not run yet")
    return Linked(_fold_arguments(steps, nargs), nargs)


def _fold_arguments(steps: list[Step], nargs: int) -> list[Step]:
    """Fold load_arg 0, 1, ... of all arguments and the call of a kernel on them."""
    if len(steps) <= nargs or steps[:nargs] != [(LOAD_ARG, None, i, None) for i in range(nargs)]:
        return steps
    code, slot, count, attributes = steps[nargs]
    if code != CALL or count not in (nargs, ALL) or slot.kernel is None:
        return steps
    return [(CALL_ON_ARGS, slot, 0, attributes), *steps[nargs + 1 :]]


def run(steps: list[Step], operands: tuple[Array, ...], store: FreeStore) -> list[Value]:
    """Run linked steps to `halt` and return the stack.

    Raises what a function raises; an `OpError` names the function and its operand types.
    """
    stack: list[Value] = []
    pc = 0
    while True:
        code, value, number, attributes = steps[pc]
        pc += 1
        if code == CALL_ON_ARGS:
            try:
                if attributes is None:
                    value.kernel(*operands)
                else:
                    value.kernel(*operands, **attributes)
            except OpError as error:
                raise value.refused(error, operands) from None
        elif code == HALT:
            return stack
        elif code == LOAD_ARG:
            stack.append(operands[number])
        elif code == CALL:
            base = len(stack) - number if number != ALL else 0
            stack[base:] = _call(value, stack[base:], attributes or {})
        elif code == PUSH:
            stack.append(value)
        elif code == LOAD_GLOBAL:
            stack.append(store.entry(stack.pop()).array)  # type: ignore[arg-type]
        else:
            del stack[len(stack) - number :]


def _call(slot: Slot, params: list[Value], attributes: dict[str, Any]) -> Sequence[Value]:
    try:
        return slot.call(params, attributes)
    except OpError as error:
        raise slot.refused(error, params) from None
