"""The machine's loop: it runs what the linker prepared, on a stack of frames.

The stack is a Python list; a Tensor on it is a numpy array, an Int an int, a Str a str. A
frame is the part of the stack from base - nparams on: its parameters, then its locals.
Nothing is checked here but what the verifier could not know.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlvm.core.assembly import format_instruction
from mlvm.core.errors import LimitExceeded, MachineError, OpError
from mlvm.core.functions import FunctionTable, Slot, Value, describe
from mlvm.core.link import (
    ALL,
    CALL,
    CALL_FUNCTION,
    CALL_NAMED,
    CALL_ON_ARGS,
    GET,
    HALT,
    JUMP,
    JUMP_IF_FALSE,
    LOAD_ARG,
    LOAD_GLOBAL,
    POP,
    PUSH,
    RETURN,
    SET,
    STORE_GLOBAL,
    CallDetails,
    Code,
)
from mlvm.core.program import STAR
from mlvm.core.store import FreeStore
from mlvm.core.types import Array

MAX_DEPTH: Final = 10_000
"""How many calls may lie within each other."""

_Return = tuple[Code, int, int, int]
"""A frame to come back to: its code, the next step, base and nparams."""


def run(
    main: Code,
    operands: tuple[Array, ...],
    store: FreeStore,
    functions: FunctionTable,
    max_steps: int | None = None,
) -> list[Value]:
    """Run a linked program to `halt` and return what is above base, in order.

    Raises what a function raises, and `LimitExceeded` after `max_steps` instructions or for
    calls too deep. The error carries a note of the place: function, pc, instruction, the calls
    that led there, and the stack by types; an `OpError` names the function and operand types.
    """
    stack: list[Any] = []
    frames: list[_Return] = []
    current, steps, base, nparams, pc = main, main.steps, 0, 0, 0
    left, since = max_steps, 0  # instructions left when step `since` began
    try:
        while True:
            code, value, number, rest = steps[pc]
            pc += 1
            if code == CALL_ON_ARGS:
                if rest is None:
                    value.kernel(*operands)
                else:
                    value.kernel(*operands, **rest)
            elif code == HALT:
                if left is not None:
                    _spend(left, current, since, pc)
                return stack[base:]
            elif code == LOAD_ARG:
                stack.append(operands[number])
            elif code == CALL or code == CALL_NAMED:
                if code == CALL_NAMED:
                    value = functions.slot(stack.pop())
                at = base if number == ALL else len(stack) - number
                stack[at:] = _call(value, stack[at:], rest)
            elif code == PUSH:
                stack.append(value)
            elif code == GET:
                stack.append(stack[base + number])
            elif code == SET:
                stack[base + number] = stack.pop()
            elif code == JUMP or code == JUMP_IF_FALSE:
                if code == JUMP or not _truth(stack.pop()):
                    if left is not None:
                        left = _spend(left, current, since, pc)
                    since = pc = number
            elif code == CALL_FUNCTION:
                if left is not None:
                    left = _spend(left, current, since, pc)
                if len(frames) >= MAX_DEPTH:
                    raise LimitExceeded(f"{MAX_DEPTH} calls lie within each other")
                frames.append((current, pc, base, nparams))
                current, steps, base, nparams, pc = value, value.steps, len(stack), number, 0
                since = 0
            elif code == RETURN:
                if left is not None:
                    left = _spend(left, current, since, pc)
                stack[base - nparams :] = stack[len(stack) - number :]
                current, pc, base, nparams = frames.pop()
                steps, since = current.steps, pc
            elif code == POP:
                del stack[len(stack) - number :]
            elif code == LOAD_GLOBAL:
                stack.append(store.entry(stack.pop()).array)
            elif code == STORE_GLOBAL:
                handle = stack.pop()
                store.replace(handle, stack.pop())
            else:
                raise MachineError("the verifier took this instruction for unreachable")
    except Exception as error:
        _note(error, current, pc - 1, frames, stack, operands)
        raise


def _call(slot: Slot, params: list[Value], details: CallDetails) -> Any:
    if details.unproven:
        slot.check(params, details.attributes)
    results = slot.call(params, details.attributes)
    if details.nresults not in (STAR, len(results)):
        raise MachineError(
            f"{slot.name} left {len(results)} results where {details.nresults} are announced"
        )
    return results


def _truth(condition: Any) -> bool:
    """Whether an Int or one-element Tensor is not zero. Raises `MachineError` for others."""
    if isinstance(condition, np.ndarray) and condition.size == 1:
        return bool(condition.item())
    if isinstance(condition, int):
        return condition != 0
    raise MachineError(
        f"a condition is an Int or a Tensor of one element, not {describe([condition])}"
    )


def _spend(left: int, code: Code, since: int, pc: int) -> int:
    """The instructions left after the steps `since` .. pc - 1."""
    left -= code.ends[pc - 1] - code.starts[since] + 1
    if left < 0:
        raise LimitExceeded("the launch takes more than the steps it is allowed")
    return left


def _note(
    error: Exception,
    code: Code,
    step: int,
    frames: list[_Return],
    stack: list[Any],
    operands: tuple[Array, ...],
) -> None:
    """Add the place to an error, and to an `OpError` the function and its operand types."""
    kind, value, number, _ = code.steps[step]
    if isinstance(error, OpError) and kind in (CALL, CALL_ON_ARGS):
        params = operands if kind == CALL_ON_ARGS else stack[-number:] if number > 0 else []
        error.at(value.name, [describe([x]) for x in params])
    instruction = code.function.code[code.ends[step]]
    calls = [caller.function.name for caller, _, _, _ in frames] + [code.function.name]
    error.add_note(
        f"at {' > '.join(calls[-8:])}, pc {code.ends[step]}: {format_instruction(instruction)}; "
        f"stack: {describe(stack[-8:]) or 'empty'}"
    )
