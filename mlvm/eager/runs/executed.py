"""Ops of an execution as data: references to values, the path to an op, and the op itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from mlvm.core.machine.callee import Fused
from mlvm.core.op import Attributes
from mlvm.core.types import TensorType
from mlvm.eager.runs.nesting import LOOP
from mlvm.eager.runs.source import SourceLine
from mlvm.show.calls import label_of


class Ref(NamedTuple):
    """Reference to a value.

    Attributes:
        kind: `input`, `state` or `constant`, or `result` of an op; `scratch` for memory that was
            never written.
        number: the number of the input, state or constant, or the position of the op.
        output: the index among the results of the op.
    """

    kind: str
    number: int
    output: int = 0

    @property
    def is_outside(self) -> bool:
        """True if no op of the execution computes the value."""
        return self.kind not in ("result", "scratch")

    def __str__(self) -> str:
        if self.kind != "result":
            return f"{self.kind} {self.number}"
        return f"%{self.number}" + (f".{self.output}" if self.output else "")


class Named(NamedTuple):
    """Value of a variable, with the type of the variable; None for the type of the value."""

    ref: Ref
    type: TensorType | None = None


Key: TypeAlias = tuple[str, int, int]
"""Key of an address: role, number and bytes."""


class Address(NamedTuple):
    """Address of a tensor, and the type with which it is used.

    A location of the plan, a `constant` by number, or a tensor of a function's `frame` by number.
    """

    role: str
    place: int
    type: TensorType

    @property
    def key(self) -> Key:
        return self.role, self.place, self.type.nbytes


class Level(NamedTuple):
    """Part of the path to an op: a function, an iteration of a loop, or a branch.

    kind: `function`, `loop` or `branch`. line: the line that calls the function or begins the loop
    or branch, if it is known. name: the name of the function; `true` or `false` for a branch. turn:
    the iteration of the loop, from 0. pc: the position of the call, or the position of the loop's
    or branch's condition.
    """

    kind: str
    line: SourceLine | None
    name: str = ""
    turn: int = 0
    pc: int = 0

    def __str__(self) -> str:
        what = f"turn {self.turn}" if self.kind == LOOP else self.name
        return f"{self.kind} {what}" + (f" at {self.line}" if self.line else "")


class Executed(NamedTuple):
    """An op of an execution.

    Attributes:
        position: the number of ops executed before it.
        place: the function and pc of the instruction.
        name, attributes: the name and the attributes of the op.
        operands: the values that it reads, in order.
        results: the values that it writes.
        operand_types: the types of the operands.
        line: the line in the user's source.
        path: the functions, loops and branches around it, outermost first.
        names: the variables that get a result as value, those of the op's function first.
        addresses: the addresses of the results.
    """

    position: int
    place: tuple[str, int]
    name: str
    attributes: Attributes
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    operand_types: tuple[TensorType, ...]
    line: SourceLine | None
    path: tuple[Level, ...]
    names: tuple[str, ...]
    addresses: tuple[Address, ...]

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of the results."""
        return tuple([each.type for each in self.addresses])

    @property
    def turns(self) -> str:
        """The iterations of the loops around the op, "" outside of loops."""
        return ", ".join(str(level) for level in self.path if level.kind == LOOP)

    def text(self, name: Callable[[Ref], str]) -> str:
        """Return the call as text, with operands formatted by `name`."""
        call = f"{self.label}({', '.join(map(name, self.operands))})"
        if not self.results:
            return call
        results, types = ", ".join(map(str, self.results)), ", ".join(map(str, self.types))
        return f"{results} = {call}" + (f": {types}" if types else "")

    @property
    def label(self) -> str:
        """The name of the op; for a fused chain also the ops in it."""
        is_chain = self.name == Fused.name
        return f"fused[{label_of(self.name, self.attributes)}]" if is_chain else self.name
