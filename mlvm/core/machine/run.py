"""Interpreter loop of the reference machine, which runs linked programs on a stack of frames.

The stack is a Python list. A Tensor is an array, an Int an int, a Str a str. A frame is the part of
the stack from base - nparams on: first the parameters, then the locals. The loop checks only
properties that the verifier could not prove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from mlvm.core import errors
from mlvm.core.machine import link
from mlvm.core.machine.callee import OpInto, UserFunction, Value, describe, is_tensor
from mlvm.core.machine.functions import Binding, FunctionTable
from mlvm.core.op import Attributes
from mlvm.core.ops.half import are_true
from mlvm.core.program.assembly import format_instruction
from mlvm.core.program.program import STAR
from mlvm.core.store import FreeStore
from mlvm.core.types import Array, TensorType

MAX_DEPTH: Final = 10_000
"""Maximum depth of nested calls."""

Call: TypeAlias = Callable[[Sequence[Value], Attributes], Sequence[Value]]
"""Function that runs a host function on parameters and attributes, and returns the results."""

_Return = tuple[link.LinkedCode, int, int, int]
"""Return address: the caller's code, next step, base and nparams."""


class Scheduler(Protocol):
    """Interface of a scheduler, which runs ops on workers; see `mlvm.machines.workers`."""

    def call(
        self,
        binding: Binding,
        params: Sequence[Value],
        attributes: Attributes,
        blame: Callable[[Exception], object],
    ) -> Sequence[Value]: ...
    def wait(self, arrays: Iterable[Array], *, writing: bool = False) -> None: ...
    def overwrite(self, array: Array) -> None: ...
    def drain(self) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class State(NamedTuple):
    """State of a machine during a launch, before step `pc` of `code`.

    `left` is the number of instructions that the launch may still execute, counted at the start of
    step `since`; None is unlimited.
    """

    stack: list[Any]
    frames: list[_Return]
    code: link.LinkedCode
    pc: int = 0
    base: int = 0
    nparams: int = 0
    steps_left: int | None = None
    since: int = 0


Run: TypeAlias = Callable[..., list[Value]]
"""Interpreter loop of a machine, with the signature of `run`."""


def run(
    main: link.LinkedCode,
    operands: tuple[Array, ...],
    store: FreeStore,
    functions: FunctionTable,
    max_steps: int | None = None,
    scheduler: Scheduler | None = None,
    state: State | None = None,
) -> list[Value]:
    """Run a linked program to `halt` and return the values above base, in order.

    With a `state`, continue at the position where a previous loop stopped. Raises the errors of
    functions, `OutOfMemoryError`, and `LimitExceededError` after `max_steps` instructions or for
    calls nested too deep. The error has a note of the location: function, pc, instruction, call
    stack, and the stack by types. An `OpError` names the function and operand types.
    """
    stack, frames, current, pc, base, nparams, steps_left, since = state or State(
        [], [], main, steps_left=max_steps
    )
    steps = current.steps
    value: Any = None
    line: str | None = None  # line of the user's Python code, which a worker may need later
    try:
        while True:
            code, value, number, rest = steps[pc]
            pc += 1
            if code == link.CALL_ON_ARGS:  # ( -- )
                if rest is None:
                    value.kernel(*number)
                else:
                    value.kernel(*number, **rest)
            elif code == link.HALT:  # ( ... -- )
                if steps_left is not None:
                    _spend(steps_left, current, since, pc)
                return stack[base:]
            elif code == link.LOAD_ARG:  # ( -- t )
                stack.append(operands[number])
            elif code == link.CALL:  # ( p1..pn -- r1..rm )
                at = base if number == link.ALL else len(stack) - number
                stack[at:] = call(value, stack[at:], rest, value.call)
            elif code == link.PUSH:  # ( -- v )
                stack.append(value)
            elif code == link.GET:  # ( -- v )
                stack.append(stack[base + number])
            elif code == link.SET:  # ( v -- )
                stack[base + number] = stack.pop()
            elif code == link.JUMP or code == link.JUMP_IF_FALSE:  # ( -- ) or ( c -- )
                if scheduler is not None and code == link.JUMP_IF_FALSE:
                    scheduler.wait(filter(is_tensor, stack[-1:]))
                if code == link.JUMP or not truth(stack.pop()):
                    if steps_left is not None:
                        steps_left = _spend(steps_left, current, since, pc)
                    since = pc = number
            elif code == link.CALL_FUNCTION:  # ( p1..pn -- p1..pn )
                if steps_left is not None:
                    steps_left = _spend(steps_left, current, since, pc)
                    store.hold_stack(len(stack), len(frames))
                if len(frames) >= MAX_DEPTH:
                    raise errors.LimitExceededError(
                        f"call depth exceeds the limit of {MAX_DEPTH}; the next call would be of "
                        f"{value.function.name!r}"
                    )
                frames.append((current, pc, base, nparams))
                current, steps, base, nparams, pc = value, value.steps, len(stack), number, 0
                since = 0
            elif code == link.RETURN:  # ( p1..pn ... r1..rm -- r1..rm )
                if steps_left is not None:
                    steps_left = _spend(steps_left, current, since, pc)
                stack[base - nparams :] = stack[len(stack) - number :]
                current, pc, base, nparams = frames.pop()
                steps, since = current.steps, pc
            elif code == link.CALL_DEFERRED or code == link.CALL_NAMED:
                # ( p1..pn [name] -- r1..rm )
                if code == link.CALL_NAMED:
                    value, rest = _look_up(functions, stack.pop(), rest)
                at = base if number == link.ALL else len(stack) - number
                proceed = value.call
                if scheduler is not None:
                    line = line or errors.user_line()
                    proceed = _deferred(scheduler, value, _Site(current, pc - 1, frames, line))
                stack[at:] = call(value, stack[at:], rest, proceed)
            elif code == link.POP:  # ( v1..vn -- )
                del stack[len(stack) - number :]
            elif code == link.LOAD_GLOBAL:  # ( h -- t )
                stack.append(store.entry(stack.pop()).array)
            elif code == link.STORE_GLOBAL:  # ( t h -- )
                handle, value = stack.pop(), stack.pop()
                if not is_tensor(value):
                    raise errors.MachineError(
                        f"store_global: expected a Tensor, got {describe([value])}"
                    )
                store.replace(handle, value)
            else:
                raise errors.MachineError(
                    "internal error: the verifier considered this instruction unreachable"
                )
    except Exception as error:
        # `value` is a Binding if the step calls a function of the table
        binding = value if isinstance(value, Binding) else None
        state = State(stack, frames, current, pc - 1, base, nparams)
        if isinstance(error, MemoryError) and not isinstance(error, errors.MlvmError):
            raise explain(error, state, binding) from None
        explain(error, state, binding)
        raise


def explain(
    error: Exception, state: State, binding: Binding | None = None, line: str | None = None
) -> Exception:
    """Return the error of the current step with a note of the location.

    A `MemoryError` becomes `OutOfMemoryError`. `binding` is the called function, if the step does
    not contain it. `line` is the user's line, if it is not the line that led here.
    """
    if getattr(error, "late", False):  # the error has the location of an earlier call
        return error
    stack, frames, current, pc, base = state[:5]
    code, value, number, _ = current.steps[pc]
    start = base if code == link.CALL_ON_ARGS or number == link.ALL else len(stack) - number
    params = list(number) if code == link.CALL_ON_ARGS else stack[start:]
    if binding is None and isinstance(value, Binding):
        binding = value
    if isinstance(error, MemoryError) and not isinstance(error, errors.MlvmError):
        error = errors.OutOfMemoryError(str(error) or "the process has no memory left")
    return _Site(current, pc, frames, line).blame(error, stack, binding, params)


def call(
    binding: Binding, params: list[Value], details: link.CallDetails, proceed: Call
) -> Sequence[Value]:
    """Call the function of the binding by `proceed`; check properties that are not verified."""
    if details.unproven or details.may_alias:
        binding.check(params, details.attributes, types=details.unproven)
    results = proceed(params, details.attributes)
    if details.nresults not in (STAR, len(results)):
        raise miscounted(binding, len(results), details)
    return results


def miscounted(binding: Binding, nresults: int, details: link.CallDetails) -> errors.MachineError:
    """Return the error of a call with a wrong number of results."""
    return errors.MachineError(
        f"{binding.name}: the call expects {errors.counted(int(details.nresults), 'result')}, "
        f"got {nresults}"
    )


def _look_up(
    functions: FunctionTable, name: Value, details: link.CallDetails
) -> tuple[Binding, link.CallDetails]:
    """Return the function of a computed name, and the call's details with bound attributes."""
    if not isinstance(name, str):
        raise errors.MachineError(f"expected a function's name as a Str, got {describe([name])}")
    binding = functions.binding(name)
    return binding, details._replace(attributes=dict(binding.callee.bind(details.attributes)))


def _deferred(scheduler: Scheduler, binding: Binding, site: _Site) -> Call:
    """Return a function that hands calls to the scheduler in place of `binding.call`."""

    def call(params: Sequence[Value], attributes: Attributes) -> Sequence[Value]:
        return scheduler.call(
            binding, params, attributes, lambda error: site.blame(error, params, binding, params)
        )

    return call


def truth(condition: Any) -> bool:
    """Return whether an Int or one-element Tensor is nonzero.

    Raises `MachineError` for other values.
    """
    if isinstance(condition, int):
        return condition != 0
    if is_tensor(condition) and condition.size == 1:
        value = condition if isinstance(condition, np.ndarray) else np.asarray(condition.item())
        return bool(are_true(value).item())  # a device has other arrays
    raise errors.MachineError(
        f"expected a condition as an Int or a Tensor of one element, got {describe([condition])}"
    )


def _spend(steps_left: int, code: link.LinkedCode, since: int, pc: int) -> int:
    """Return the remaining instructions after the steps `since` .. pc - 1."""
    steps_left -= code.ends[pc - 1] - code.starts[since] + 1
    if steps_left < 0:
        raise errors.LimitExceededError(
            "the launch exceeded its limit of instructions; raise max_steps="
        )
    return steps_left


class _Site:
    """Location in a running program, for an error that a deferred call may raise later."""

    def __init__(
        self, code: link.LinkedCode, step: int, frames: list[_Return], line: str | None = None
    ) -> None:
        self.code = code
        self.step = step
        self.calls = [caller.function.name for caller, _, _, _ in frames]
        self.line = line or errors.user_line()

    def blame(
        self, error: Exception, stack: Sequence[Any], binding: Binding | None, params: Sequence[Any]
    ) -> Exception:
        """Return the error with the location; an `OpError` also gets the op and operand types."""
        if isinstance(error, errors.OpError) and binding is not None:
            name = binding.name
            if isinstance(binding.callee, OpInto):  # users of the op see neither ".out" nor out
                name, params = binding.callee.op.name, params[1:]
            error.at(name, [TensorType.of(x) if is_tensor(x) else x for x in params])
        function, pc = self.code.function, self.code.ends[self.step]
        calls = " > ".join([*self.calls, function.name][-8:])
        is_user = binding is not None and isinstance(binding.callee, UserFunction)
        of = f" of {binding.name!r}" if binding is not None and is_user else ""
        text = (
            f"{calls}, pc {pc}: {format_instruction(function.code[pc]):.200}{of}; "
            f"stack: {describe(stack[-8:]) or 'empty'}"
        )
        errors.locate(error, text, function=function.name, pc=pc, step=self.step, line=self.line)
        return error
