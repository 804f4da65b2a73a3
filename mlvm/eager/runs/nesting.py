"""Spans of a function's code: loops and the sides of branches, derived from jumps."""

from __future__ import annotations

from typing import Final, NamedTuple

from mlvm.core.program.program import Function, Opcode

LOOP: Final = "loop"
BRANCH: Final = "branch"


class CodeSpan(NamedTuple):
    """Span of code: the instructions `start` .. `end - 1`.

    kind: `loop` or `branch`. test: the pc of the jump that leaves the loop or selects the side.
    side: `true` or `false` for a branch.
    """

    kind: str
    start: int
    end: int
    test: int
    side: str = ""


def spans_of(function: Function) -> list[CodeSpan]:
    """Return the spans of code that `mlvm.step.compile` writes, outer ones first.

    A loop is `start: condition; jump_if_false end; body; jump start; end:`, and a branch
    `jump_if_false other; body; jump end; other: body; end:`.
    """
    spans: list[CodeSpan] = []
    code = function.code
    for pc, (opcode, immediates) in enumerate(code):
        if opcode is not Opcode.jump_if_false:
            continue
        [target] = immediates
        last = code[target - 1]
        if target <= pc or last.opcode is not Opcode.jump:
            continue
        [end] = last.immediates
        if end <= pc:
            spans.append(CodeSpan(LOOP, end, target, pc))
        else:
            spans.append(CodeSpan(BRANCH, pc + 1, target, pc, "true"))
            spans.append(CodeSpan(BRANCH, target, end, pc, "false"))
    return sorted(spans, key=lambda each: (each.start, -each.end))
