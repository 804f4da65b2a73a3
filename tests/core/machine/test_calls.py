"""Calls, frames, recursion, loops, and the limits of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import LimitExceededError
from mlvm.core.machine.run import MAX_DEPTH
from mlvm.core.program.assembly import assemble
from mlvm.core.program.program import Function
from mlvm.core.types import Array
from mlvm.core.vm import VM
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import FACTORIAL, PARITY, SUM_TO, asm, put, straight

# --- frames ---------------------------------------------------------------------------


def both(text: str, array: Array, max_steps: int | None = None) -> list[Array]:
    """Return the program's results for one argument, bit for bit the same on a checked and a raw
    VM."""
    outputs = []
    for vm in (VM(), VM(checked=False)):
        x = put(vm, array)
        before = vm.consumed_size_in_mib()
        outputs.append([*vm.launch(assemble(text), [x], max_steps=max_steps), vm.read(x)])
        assert vm.consumed_size_in_mib() == before
    for ours, raw in zip(*outputs, strict=True):
        np.testing.assert_array_equal(ours, raw, strict=True)
    return outputs[0][:-1]


# --- limits ---------------------------------------------------------------------------


def test_calls_may_lie_as_deep_as_the_limit(vm: VM) -> None:
    program = assemble(FACTORIAL.replace("multiply", "add"))  # n + 1, without overflow
    n = put(vm, np.array(MAX_DEPTH - 1))
    assert vm.launch(program, [n]) == [np.arange(MAX_DEPTH).sum() + 1]
    vm.write(n, np.array(MAX_DEPTH))
    with pytest.raises(
        LimitExceededError, match=f"call depth exceeds the limit of {MAX_DEPTH}"
    ) as caught:
        vm.launch(program, [n])
    assert caught.value.__notes__[0].startswith(
        "at " + " > ".join(["factorial"] * 8) + ", pc 7: call factorial; stack: i64[], "
    )
    vm.write(n, np.array(3))
    assert vm.launch(program, [n]) == [7]


ENDLESS = asm(".func main 0 * | again: | jump again")


def test_an_endless_loop_ends_with_its_steps(vm: VM) -> None:
    with pytest.raises(LimitExceededError, match="exceeded its limit of instructions") as caught:
        vm.launch(ENDLESS, max_steps=1000)
    assert caught.value.__notes__[0] == "at main, pc 0: jump L0; stack: empty"
    assert vm.launch(straight("halt"), max_steps=1) == []


def counted_steps(text: str, n: int) -> int:
    """Count the program's instructions by hand: a reference for the machine."""
    program, x = assemble(text), np.array(n)
    function, pc, steps = program.main, 0, 0
    frames: list[tuple[Function, int, int]] = []
    stack: list[Any] = []
    base = 0
    while True:
        opcode, immediates = function.code[pc]
        pc += 1
        steps += 1
        match opcode.text:
            case "halt":
                return steps
            case "push_str":
                stack.append(immediates[0])
            case "push_const":
                stack.append(program.constants[immediates[0]])
            case "load_arg":
                stack.append(x)
            case "get":
                stack.append(stack[base + immediates[0]])
            case "set":
                stack[base + immediates[0]] = stack.pop()
            case "pop":
                del stack[len(stack) - immediates[0] :]
            case "cfunc":
                name, b, a = stack.pop(), stack.pop(), stack.pop()
                stack.append(getattr(np, name)(a, b))
            case "jump":
                pc = immediates[0]
            case "jump_if_false":
                if not stack.pop():
                    pc = immediates[0]
            case "call":
                frames.append((function, pc, base))
                function, pc, base = program.functions[immediates[0]], 0, len(stack)
            case "return":
                results = stack[len(stack) - immediates[0] :]
                del stack[base - function.nparams :]
                stack += results
                function, pc, base = frames.pop()
            case other:
                raise NotImplementedError(other)


@cases("text", FACTORIAL, PARITY, SUM_TO, ids=["factorial", "parity", "sum"])
@cases("n", 0, 1, 2, 5)
def test_the_limit_counts_instructions_exactly(text: str, n: int, vm: VM) -> None:
    """Across jumps taken and not, calls and returns: N pass with N and fail with N - 1."""
    steps = counted_steps(text, n)
    expected = both(text, np.array(n))
    assert both(text, np.array(n), max_steps=steps) == expected
    x = put(vm, np.array(n))
    for limit in (steps - 1, steps // 2, 1, 0):
        refuses(LimitExceededError, "", vm.launch, assemble(text), [x], max_steps=limit)
    assert vm.launch(assemble(text), [x]) == expected


test_rows = claims("calls", globals())
