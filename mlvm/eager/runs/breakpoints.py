"""Breakpoints of a debugger: by line, op, name of a value, or condition."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from mlvm.core.errors import ArgumentError, did_you_mean
from mlvm.core.op import OPS
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
        before = execution.op_at(position - 1) if position else None
        if self.condition is not None:
            return before is not None and self._holds(execution, values, before)
        op = execution.op_at(position)
        if self.kind == "name":
            is_op = op is not None and op.name == self.text  # of a user's function
            return is_op or (before is not None and self.text in before.names)
        if op is None:
            return False
        if self.kind == "op":
            return op.name == self.text
        return self._is_at(op) and not (
            before is not None and self._is_at(before) and before.path == op.path
        )

    def _is_at(self, op: Executed) -> bool:
        return op.line is not None and self.is_line(op.line)

    def is_line(self, line: SourceLine) -> bool:
        """Return whether the breakpoint refers to a line."""
        return line.number == self.number and f"/{line.file}".endswith(f"/{self.text}")

    def _holds(self, execution: Execution, values: Values, before: Executed) -> bool:
        """Return whether the condition holds after an op; False unless it reads the op's result."""
        assert self.condition is not None  # the caller knows
        names = {*before.names, *map(str, before.results), RESULT}
        if names.isdisjoint(self.condition.names) or not before.results:
            return False
        try:
            value = self.condition.value(lambda name: values.lookup(name, before.position + 1))
        except (LookupError, ArgumentError):  # a name in the condition has no value yet
            return False
        return bool(value.all())

    def __str__(self) -> str:
        if self.kind == "line":
            return f"line {self.text}:{self.number}"
        return f"{self.kind} {self.text}"


def parse_breakpoint(text: str, file: str) -> Breakpoint:
    """Parse a breakpoint.

    A line without a file is a line of `file`. A name is the name of an op if such an op exists.
    Raises `ArgumentError`.
    """
    if (match := _LINE.fullmatch(text)) is not None:
        return Breakpoint("line", match[1] or file, int(match[2]))
    if text in OPS or text == "fused":
        return Breakpoint("op", text)
    if _NAME.fullmatch(text):
        return Breakpoint("name", text)
    return Breakpoint("condition", text, condition=Expression(text))


def require_known(point: Breakpoint, program: OpProgram) -> None:
    """Raise `ArgumentError` for a breakpoint with a line or name that the program does not have."""
    if point.kind == "line":
        if not any(point.is_line(line) for line in program.lines.values()):
            raise ArgumentError(f"no op has the line {point.text}:{point.number}; l shows lines")
        return
    values = {name for names in program.values.values() for name in names}
    values |= {RESULT, *program.inputs, *program.states}
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
            hint += "; parameters of inner functions have none" if point.condition else ""
            raise ArgumentError(f"no {what} is named {name}{hint}")
