"""The stack machine: a linker that prepares a program once, and the loop that runs it.

Linking resolves each function name to its slot in the function table and folds two
sequences that nearly every program is made of into one step each:

    push_str name; cfunc ...                    ->  CALL slot
    load_arg 0; ...; load_arg n-1; CALL x.out   ->  CALL_ON_ARGS slot

The loop's stack is a Python list; a Tensor on it is a numpy array, an Int an int, a Str a str.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mlvm.core.errors import OpError
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


class Step(NamedTuple):
    """What the loop runs: a code from above, a value or slot, a count, and attributes."""

    code: int
    value: Any = None
    count: int = 0
    attributes: dict[str, Any] | None = None


class Linked:
    """A program prepared for one VM, and what that VM remembers of earlier launches.

    `admitted`: argument types it was verified for. `bound`: operands by argument handles,
    which the VM forgets as soon as any handle may name something else.
    """

    __slots__ = ("admitted", "bound", "steps")

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.admitted: set[tuple[TensorType, ...]] = set()
        self.bound: dict[tuple[int, ...], tuple[Array, ...]] = {}


def link(program: Program, functions: FunctionTable) -> Linked:
    """Prepare a verified program for the loop. Raises `UnknownFunction`."""
    steps: list[Step] = []
    for opcode, immediates in program.main.code:
        match opcode:
            case Opcode.halt:
                steps.append(Step(HALT))
            case Opcode.push_int | Opcode.push_str:
                steps.append(Step(PUSH, immediates[0]))
            case Opcode.push_const:
                steps.append(Step(PUSH, program.constants[immediates[0]]))
            case Opcode.load_arg:
                steps.append(Step(LOAD_ARG, count=immediates[0]))
            case Opcode.load_global:
                steps.append(Step(LOAD_GLOBAL))
            case Opcode.pop:
                steps.append(Step(POP, count=immediates[0]))
            case Opcode.cfunc:
                slot = functions.slot(steps.pop().value)
                attributes = slot.bind(immediates[2] if len(immediates) > 2 else NO_ATTRIBUTES)
                nparams = -1 if immediates[0] == STAR else immediates[0]
                steps.append(Step(CALL, slot, nparams, dict(attributes)))
            case _:
                raise NotImplementedError(opcode.text)
    return Linked(_fold_arguments(steps))


def _fold_arguments(steps: list[Step]) -> list[Step]:
    """Fold a leading run of load_arg 0, 1, ... and the call of a kernel on all of them."""
    n = 0
    while n < len(steps) and steps[n].code == LOAD_ARG and steps[n].count == n:
        n += 1
    if n == len(steps) or steps[n].code != CALL or steps[n].count not in (n, -1):
        return steps
    call = steps[n]
    if call.value.kernel is None:
        return steps
    return [Step(CALL_ON_ARGS, call.value, n, call.attributes or None), *steps[n + 1 :]]


def run(steps: list[Step], operands: Sequence[Array], store: FreeStore) -> list[Value]:
    """Run linked steps to `halt` and return the stack.

    Raises what a function raises; an `OpError` names the function and its operand types.
    """
    stack: list[Value] = []
    pc = 0
    while True:
        code, value, count, attributes = steps[pc]
        pc += 1
        if code == CALL_ON_ARGS:
            try:
                if attributes is None:
                    value.kernel(*operands[:count])
                else:
                    value.kernel(*operands[:count], **attributes)
            except OpError as error:
                raise value.refused(error, operands[:count]) from None
        elif code == HALT:
            return stack
        elif code == LOAD_ARG:
            stack.append(operands[count])
        elif code == CALL:
            base = len(stack) - count if count >= 0 else 0
            stack[base:] = _call(value, stack[base:], attributes or {})
        elif code == PUSH:
            stack.append(value)
        elif code == LOAD_GLOBAL:
            stack.append(store.entry(stack.pop()).array)  # type: ignore[arg-type]
        else:
            del stack[len(stack) - count :]


def _call(slot: Slot, params: list[Value], attributes: dict[str, Any]) -> Sequence[Value]:
    try:
        return slot.call(params, attributes)
    except OpError as error:
        raise slot.refused(error, params) from None
