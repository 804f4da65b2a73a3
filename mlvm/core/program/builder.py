"""Programs written in Python: the assembler's language as method calls.

b = ProgramBuilder()
b.constant("one", np.int64(1))
with b.function("countdown", 1, 1):
    b.label("again")
    b.get(-1).jump_if_false("done")
    b.get(-1).push_const("one").host("subtract", 2, 1).set(-1)
    b.jump("again")
    b.label("done").get(-1).return_(1)
with b.function("main"):
    b.load_arg(0).call("countdown").halt()
program = b.build()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from mlvm.core.errors import ProgramError, with_article
from mlvm.core.op import Attributes, canonical
from mlvm.core.program.program import STAR, Count, Function, Instruction, Opcode, Program
from mlvm.core.types import Array


class Body:
    """Function under construction; jumps may refer to later labels."""

    def __init__(self, name: str, nparams: int, nresults: Count) -> None:
        self.name = name
        self.nparams = nparams
        self.nresults = nresults
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        """Define a label at the next instruction. Raises `ProgramError` for a duplicate."""
        if name in self.labels:
            raise ProgramError(
                f"label {name!r} is defined twice in function {self.name!r}; rename one"
            )
        self.labels[name] = len(self.code)

    def pc_of(self, label: str) -> int:
        """Return the pc of the label. Raises `ProgramError` if it is missing."""
        if label not in self.labels:
            names = ", ".join(self.labels) or "none"
            raise ProgramError(f"{self.name}: expected a label ({names}), got {label!r}")
        return self.labels[label]

    def function(self) -> Function:
        """Return the function with pcs as jump targets.

        Raises `ProgramError` if a label is missing.
        """
        code = tuple([instruction.jumping(self.pc_of) for instruction in self.code])
        return Function(self.name, self.nparams, self.nresults, code)


class ProgramBuilder:
    """Builder of a program from functions and constants.

    Each opcode has a method of the same name, which appends an instruction to the function with the
    open `with` block, and returns the builder. `ProgramError` is raised for an instruction outside
    of a function, and for functions, labels and constants that are missing or duplicate. The
    verifier, not the builder, checks the program.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}
        self._constants: dict[str, Array] = {}
        self._body: Body | None = None

    def build(self) -> Program:
        """Return the program; one of the functions must be `main`."""
        if self._body is not None:
            raise ProgramError(
                f"function {self._body.name!r} is not finished; leave its `with` block first"
            )
        return Program(self._functions.values(), self._constants)

    @contextmanager
    def function(self, name: str, nparams: int = 0, nresults: Count = STAR) -> Iterator[None]:
        """Define the function of that name by the instructions emitted inside the block.

        If the block raises, the function is discarded.
        """
        if self._body is not None:
            raise ProgramError(
                f"function {name!r} is defined inside function {self._body.name!r}; finish that "
                "first"
            )
        if name in self._functions:
            raise ProgramError(f"function {name!r} is defined twice; rename one")
        body = self._body = Body(name, nparams, nresults)
        try:
            yield
            self._functions[name] = body.function()
        finally:
            self._body = None

    def constant(self, name: str, value: Array | np.generic) -> Self:
        """Define a constant for `push_const`, as a copy of the array."""
        if name in self._constants:
            raise ProgramError(f"constant {name!r} is defined twice; rename one")
        if not isinstance(value, (np.ndarray, np.generic)):
            raise ProgramError(
                f"constant {name!r}: expected an array, "
                f"got {with_article(value.__class__.__name__)}"
            )
        self._constants[name] = np.array(value)
        return self

    def label(self, name: str) -> Self:
        """Define a label at the next instruction, for jumps of this function."""
        self._open(f"label {name!r}").label(name)
        return self

    def host(self, name: str, nparams: Count, nresults: Count, **attributes: Any) -> Self:
        """Call the host function of that name by `push_str` and `cfunc`."""
        return self.push_str(name).cfunc(nparams, nresults, attributes)

    # --- an instruction each ---

    def halt(self) -> Self:
        return self._append(Opcode.halt)

    def push_int(self, n: int) -> Self:
        return self._append(Opcode.push_int, n)

    def push_str(self, s: str) -> Self:
        return self._append(Opcode.push_str, s)

    def push_const(self, name: str) -> Self:
        return self._append(Opcode.push_const, name)

    def load_arg(self, i: int) -> Self:
        return self._append(Opcode.load_arg, i)

    def load_global(self) -> Self:
        return self._append(Opcode.load_global)

    def store_global(self) -> Self:
        return self._append(Opcode.store_global)

    def get(self, i: int) -> Self:
        return self._append(Opcode.get, i)

    def set(self, i: int) -> Self:
        return self._append(Opcode.set, i)

    def pop(self, n: int) -> Self:
        return self._append(Opcode.pop, n)

    def cfunc(self, nparams: Count, nresults: Count, attributes: Attributes | None = None) -> Self:
        rest = (canonical(attributes),) if attributes else ()
        return self._append(Opcode.cfunc, nparams, nresults, *rest)

    def call(self, func: str) -> Self:
        return self._append(Opcode.call, func)

    def return_(self, n: int) -> Self:
        return self._append(Opcode.return_, n)

    def jump(self, label: str) -> Self:
        return self._append(Opcode.jump, label)

    def jump_if_false(self, label: str) -> Self:
        return self._append(Opcode.jump_if_false, label)

    def _append(self, opcode: Opcode, *immediates: Any) -> Self:
        self._open(opcode.text).code.append(Instruction(opcode, immediates))
        return self

    def _open(self, what: str) -> Body:
        """Return the function under construction. Raises `ProgramError` outside of a function."""
        if self._body is None:
            raise ProgramError(f"{what} is outside of a function; call builder.function first")
        return self._body
