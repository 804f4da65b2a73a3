"""Values of an execution by name or reference, as displayed by a debugger."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import Final

import numpy as np

from mlvm.core.errors import ArgumentError, MlvmError
from mlvm.core.ops.half import shown
from mlvm.core.types import Array, TensorType
from mlvm.eager.runs.execution import Executed, Execution, Named, Ref

RESULT: Final = "result"
"""The name of the first result of the op that was executed last."""

_REFERENCE: Final = re.compile(r"%(\d{1,18})(?:\.(\d{1,9}))?")
_OUTSIDE: Final = re.compile(r"(input|state|constant) ?(\d{1,9})")


class Values:
    """Values of an execution by name."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        # by variable and function: the positions where it gets a value, and the values
        self._by_name: dict[str, dict[str, tuple[list[int], list[Named | None]]]] = {}
        self._outermost = ""  # the first function with a variable
        self._indexed = 0

    def find(self, text: str, position: int | None = None) -> Named | None:
        """Return the value for a name or a reference as text; None for any other text.

        A name refers to the value at the position, by default the present one, of a variable of the
        current function, or else of the variable that was assigned last.

        Raises `ArgumentError` for a name with a value that is not computed yet.
        """
        text = text.strip()
        if (match := _REFERENCE.fullmatch(text)) is not None:
            return Named(Ref("result", int(match[1]), int(match[2] or 0)))
        if (match := _OUTSIDE.fullmatch(text)) is not None:
            return Named(Ref(match[1], int(match[2])))
        position = self.execution.position if position is None else position
        if text == RESULT and position:
            return Named(Ref("result", position - 1))
        latest: dict[str, tuple[int, Named | None]] = {}
        for function, (positions, values) in self._index().get(text, {}).items():
            if at := bisect_right(positions, position):
                latest[function] = positions[at - 1], values[at - 1]
        here, function = self.execution.op_at(position), self._outermost
        if here is not None:
            function = "" if here.line is None else here.line.function
        own = latest.get(function) or (None if text.isidentifier() else latest.get(""))
        _, value = own or max(latest.values(), key=lambda each: each[0], default=(0, None))
        if value is None and not latest and text in self.execution.program.value_names:
            raise ArgumentError(
                f"{text} is computed after position {position}; b {text} stops there"
            )
        return value

    def array(self, value: Named) -> Array:
        """Return the array of a value, with the type of the variable."""
        array = self.execution.value(value.ref)
        return array if value.type is None else value.type.over(array)

    def lookup(self, name: str, position: int | None = None) -> Array:
        """Return the array of a name, as `find`. Raises `LookupError` for an unknown name."""
        value = self.find(name, position)
        if value is None:
            raise _NoValue(f"no value is named {name}; info and l show names")
        return self.array(value)

    def summary(self, ref: Ref) -> list[str]:
        """Describe a value: type, extrema, mean, nans, location, writer, and next reader."""
        array = self.execution.value(ref)
        lines = [f"{ref}: {TensorType.of(array)}", *filter(None, [statistics(array)])]
        if ref.kind == "result":
            op = self.execution.op_at(ref.number)
            assert op is not None  # the op has read the value
            role, place, type = op.addresses[ref.output]
            where = f"{role} at byte {place:,}" if role == "scratch" else f"{role} {place}"
            where += f", {type.nbytes:,} bytes"
            where = "a tensor of a function's frame" if role == "frame" else where
            remark = "" if self.execution.is_held(ref) else "; the memory has a different value now"
            lines += [f"memory: {where}{remark}", f"written by {self._with_line(op)}"]
        return [*lines, self._next_read(ref)]

    def _with_line(self, op: Executed) -> str:
        return self.text(op) + (f", {op.line}" if op.line else "")

    def text(self, op: Executed) -> str:
        """Return an op as text, with names of inputs and states, and the values of constants."""
        return op.text(self.name)

    def name(self, ref: Ref) -> str:
        """Return the name of an input or state; without a name, the number or the reference."""
        program = self.execution.program
        names = {"input": program.inputs, "state": program.states}.get(ref.kind, ())
        if ref.number < len(names) and names[ref.number]:
            return names[ref.number]
        if ref.kind == "state" and program.step.states[ref.number].size == 1:  # a number
            return str(shown(program.step.states[ref.number]).item())
        return str(ref)

    def moment(self) -> int:
        """Return the present moment of the plan: the number of the unit of main that runs next."""
        op = self.execution.op_at(self.execution.position)
        moments = self.execution.program.step.planned.moments
        if op is None:
            return max(len(moments) - 1, 0)
        function, pc = op.place
        if function != "main":
            calls = [level for level in op.path if level.kind == "function"]
            pc = calls[0].pc if calls else 0
        return min(bisect_left(moments, pc), max(len(moments) - 1, 0))

    def _next_read(self, ref: Ref) -> str:
        """Describe the next op that reads a value, or state the number of ops that do not."""
        is_ended, most = False, 10_000
        with suppress(MlvmError):  # if an op raises, the ops before it are known
            is_ended = self.execution.op_at(self.execution.position + most) is None
        for op in self.execution.executed[self.execution.position :]:
            if ref in op.operands:
                return f"next read by {self._with_line(op)}"
        return "read by no later op" if is_ended else f"read by none of the next {most:,} ops"

    def _index(self) -> dict[str, dict[str, tuple[list[int], list[Named | None]]]]:
        """Return the values by variable and function, in order."""
        end = len(self.execution.executed) + 1
        for position in range(self._indexed, end):
            for (function, name), value in self.execution.named(position).items():
                self._outermost = self._outermost or function
                functions = self._by_name.setdefault(name, {})
                positions, values = functions.setdefault(function, ([], []))
                positions.append(position)
                values.append(value)
        self._indexed = end
        return self._by_name


def statistics(array: Array) -> str:
    """Describe the elements: extrema and mean of the finite elements, and how many are not."""
    x = shown(array)
    if not x.size or x.dtype.kind == "c":
        return ""
    if x.dtype == bool:
        return f"true {np.count_nonzero(x)} of {x.size}"
    text = f"nans {np.count_nonzero(np.isnan(x))}, infinities {np.count_nonzero(np.isinf(x))}"
    if (finite := x[np.isfinite(x)]).size:
        mean = finite.astype(np.float64).mean()
        of = "" if finite.size == x.size else " of the finite elements"
        text = f"min {finite.min()!s}, max {finite.max()!s}, mean {mean:.6g}{of}, {text}"
    return text


class _NoValue(ArgumentError, LookupError):
    """Raised for a name that has no value."""
