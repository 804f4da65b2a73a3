"""Breakpoints of a debugger: by line, op, name of a value, or condition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from mlvm.core.errors import ArgumentError, MlvmError, did_you_mean, listed
from mlvm.core.ops.half import shown
from mlvm.eager.runs.execution import Executed, Execution
from mlvm.eager.runs.expressions import Expression
from mlvm.eager.runs.named_values import RESULT, Values
from mlvm.eager.runs.ops import OpProgram
from mlvm.eager.runs.source import SourceLine

_LINE: Final = re.compile(r"(?:(.+):)?(\d{1,9})")
_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Breakpoint(NamedTuple):
    """Breakpoint of a debugger.

    kind: `line`, `op`, `name` or `condition`. text: the name, or the file of a line. number: the
    line number. condition: the expression of a condition.
    """

    kind: str
    text: str
    number: int = 0
    condition: Expression | None = None

    def stops(self, execution: Execution, values: Values, position: int) -> bool:
        """Return whether the breakpoint stops the execution at a position."""
        op, before = execution.op_at(position), execution.op_at(position - 1) if position else None
        named = {name for (_, name), value in execution.named(position).items() if value}
        if self.condition is not None:
            return before is not None and self._holds(values, before, named)
        if self.kind == "name" and before is not None and self.text in named:
            return True
        if op is None:
            return False
        if self.kind == "name":
            return op.name == self.text or self._is_read(values, op)
        return self._is_at(op) and not (
            before is not None and self._is_at(before) and before.path == op.path
        )

    def _is_at(self, op: Executed) -> bool:
        return op.line is not None and self.is_line(op.line)

    def is_line(self, line: SourceLine) -> bool:
        """Return whether the breakpoint refers to a line."""
        return line.number == self.number and f"/{line.file}".endswith(f"/{self.text}")

    def _is_read(self, values: Values, op: Executed) -> bool:
        """Return whether an op reads the value of the name, and it is an input or state."""
        with suppress(ArgumentError):
            value = values.find(self.text, op.position)
            return value is not None and value.ref.is_outside and value.ref in op.operands
        return False

    def _holds(self, values: Values, before: Executed, named: set[str]) -> bool:
        """Return whether the condition holds after an op.

        Return False unless the condition reads the op's result, or a name with a new value."""
        assert self.condition is not None  # the caller knows
        names = named | ({*map(str, before.results), RESULT} if before.results else set())
        if names.isdisjoint(self.condition.names):
            return False
        try:
            value = self.condition.value(lambda name: values.lookup(name, before.position + 1))
        except (LookupError, MlvmError):  # such as a name without a value, or a wrong shape
            return False
        return bool(shown(value).all())

    def __str__(self) -> str:
        if self.kind == "line":
            return f"line {self.text}:{self.number}"
        return f"{self.kind} {self.text}"


def parse_breakpoint(text: str, file: str) -> Breakpoint:
    """Parse a breakpoint.

    A line without a file is a line of `file`. A name is a value or op with this name, or both.
    Raises `ArgumentError`.
    """
    if (match := _LINE.fullmatch(text)) is not None:
        return Breakpoint("line", match[1] or file, int(match[2]))
    if _NAME.fullmatch(text):
        return Breakpoint("name", text)
    return Breakpoint("condition", text, condition=Expression(text))


def require_known(point: Breakpoint, program: OpProgram) -> None:
    """Raise `ArgumentError` for a breakpoint with a line or name that the program does not have."""
    if point.kind == "line":
        if not any(point.is_line(line) for line in program.lines.values()):
            nearest = nearest_lines(program.lines.values(), point.text, point.number)
            raise ArgumentError(f"no op has the line {point.text}:{point.number}{nearest}")
        return
    values = program.value_names | {RESULT}
    if point.condition is None:
        allowed, what, names = values | program.op_names(), "value or op", [point.text]
    else:
        allowed, what = values, "value"
        names = [x for x in point.condition.names if x[:1] != "%" and x[-1:] != "]"]
        whole = [x for x in point.condition.names if x in values]  # such as `layers[0]`
        names = [x for x in names if not any(each.startswith(f"{x}[") for each in whole)]
    for name in names:
        if name not in allowed:
            hint = did_you_mean(name, allowed - {""}) or "; info and l show names"
            raise ArgumentError(f"no {what} is named {name}{hint}")


def nearest_lines(lines: Iterable[SourceLine], file: str, number: int) -> str:
    """Name the lines of ops that are nearest to a line, preferably of its file."""
    candidates = [each for each in lines if each.file.endswith(file)] or [*lines]
    nearest = sorted(candidates, key=lambda each: abs(each.number - number))
    texts = [*dict.fromkeys(map(str, nearest))]
    return f"; there are ops at {listed(texts, 5)}" if texts else ""
