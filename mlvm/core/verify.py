"""The verifier: one walk over a program before it first runs.

It follows the stack by kind (Tensor, Int, Str), and by type where the arguments' types are
known, and refuses whatever would go wrong for these types: underflow, a wrong kind, an unknown
function, constant or attribute, operands an op refuses. What it has passed runs unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mlvm.core.assembly import format_instruction
from mlvm.core.errors import MlvmError, OpError, ProgramError
from mlvm.core.functions import FunctionTable
from mlvm.core.op import NO_ATTRIBUTES
from mlvm.core.program import STAR, Instruction, Opcode, Program
from mlvm.core.types import TensorType

EXECUTABLE: Final = frozenset(
    {
        Opcode.halt,
        Opcode.push_int,
        Opcode.push_str,
        Opcode.push_const,
        Opcode.load_arg,
        Opcode.load_global,
        Opcode.pop,
        Opcode.cfunc,
    }
)
"""The instructions the machine runs today; frames and control flow are to come."""


class Abstract(NamedTuple):
    """What is known of a stack slot: its kind; a Tensor's type or a Str's text where known;
    whether it is a constant, which nothing may write to."""

    kind: str
    type: TensorType | None = None
    text: str | None = None
    constant: bool = False

    def __str__(self) -> str:
        return str(self.type) if self.type else self.kind


def verify(
    program: Program, functions: FunctionTable, arg_types: Sequence[TensorType] | None = None
) -> None:
    """Pass the program, or raise.

    With `arg_types` (one for each launch argument) the operands of every op are checked too.
    Raises `ProgramError` for a malformed program, `UnknownFunction` for a name that the table
    lacks, and the op's own `OpError` for operands it refuses; each says where.
    """
    for function in program.functions.values():
        if function.name != "main":
            raise ProgramError(f"{function.name}: functions beside main are not run yet")
    _Walk(program, functions, arg_types).run()


class _Walk:
    def __init__(
        self,
        program: Program,
        functions: FunctionTable,
        arg_types: Sequence[TensorType] | None,
    ) -> None:
        self.program = program
        self.functions = functions
        self.arg_types = arg_types
        self.stack: list[Abstract] = []
        self.pc = 0
        self.instruction = Instruction(Opcode.halt)

    def run(self) -> None:
        for pc, instruction in enumerate(self.program.main.code):
            self.pc, self.instruction = pc, instruction
            opcode, immediates = instruction
            if opcode not in EXECUTABLE:
                raise self.error("this instruction is not run yet")
            few = sum(not name.endswith("?") for name in opcode.immediates)
            if not few <= len(immediates) <= len(opcode.immediates):
                raise self.error(f"takes {' '.join(opcode.immediates) or 'no immediates'}")
            if opcode is Opcode.halt:
                return
            getattr(self, opcode.name)(*immediates)
        raise ProgramError("main: the end is reached without halt")

    def push_int(self, n: Any) -> None:
        if not isinstance(n, int) or isinstance(n, bool):
            raise self.error(f"an Int is wanted, not {n!r}")
        self.stack.append(Abstract("Int"))

    def push_str(self, s: Any) -> None:
        if not isinstance(s, str):
            raise self.error(f"a Str is wanted, not {s!r}")
        self.stack.append(Abstract("Str", text=s))

    def push_const(self, name: Any) -> None:
        if not isinstance(name, str) or name not in self.program.constants:
            known = ", ".join(self.program.constants) or "none"
            raise self.error(f"no constant {name!r}; there are: {known}")
        type = TensorType.of(self.program.constants[name])
        self.stack.append(Abstract("Tensor", type, constant=True))

    def load_arg(self, i: Any) -> None:
        if not isinstance(i, int) or i < 0:
            raise self.error(f"an argument's number is an integer >= 0, not {i!r}")
        if self.arg_types is not None and i >= len(self.arg_types):
            raise self.error(f"the launch has {len(self.arg_types)} arguments")
        known = self.arg_types[i] if self.arg_types is not None else None
        self.stack.append(Abstract("Tensor", known))

    def load_global(self) -> None:
        self.take("Int")
        self.stack.append(Abstract("Tensor"))

    def pop(self, n: Any) -> None:
        if not isinstance(n, int) or n < 0:
            raise self.error(f"a count is an integer >= 0, not {n!r}")
        self.reach(n)
        del self.stack[len(self.stack) - n :]

    def cfunc(self, nparams: Any, nresults: Any, attributes: Any = NO_ATTRIBUTES) -> None:
        for count in (nparams, nresults):
            if count != STAR and (not isinstance(count, int) or count < 0):
                raise self.error(f"a count is an integer >= 0 or *, not {count!r}")
        if not isinstance(attributes, Mapping):
            raise self.error(f"attributes are a mapping, not {attributes!r}")
        name = self.take("Str").text
        if name is None or self.program.main.code[self.pc - 1].opcode is not Opcode.push_str:
            raise self.error("the instruction before must push the function's name")
        count = len(self.stack) if nparams == STAR else nparams
        self.reach(count)
        operands = self.stack[len(self.stack) - count :]
        try:
            slot = self.functions.slot(name)
            if nresults not in (STAR, slot.nresults):
                raise self.error(f"{name} leaves {slot.nresults} results, not {nresults}")
            if any(x.kind != "Tensor" for x in operands):
                raise self.error(f"{name} takes Tensors, not ({', '.join(map(str, operands))})")
            if slot.kernel is not None and operands and operands[0].constant:
                raise self.error(f"{name} would write to a constant")
            attributes = slot.bind(attributes)
            types = [x.type for x in operands if x.type is not None]
            known = len(types) == count
            results = slot.infer(types, attributes) if known else (None,) * slot.nresults
        except ProgramError:
            raise
        except MlvmError as error:
            if not isinstance(error, OpError):
                error.args = (f"{error} ({self.place()})",)
            raise
        del self.stack[len(self.stack) - count :]
        self.stack += [Abstract("Tensor", type) for type in results]

    def take(self, kind: str) -> Abstract:
        self.reach(1)
        value = self.stack.pop()
        if value.kind != kind:
            raise self.error(f"{kind} is wanted on top of the stack, not {value}")
        return value

    def reach(self, n: int) -> None:
        if n > len(self.stack):
            raise self.error(f"needs {n} values on the stack; there are {len(self.stack)}")

    def place(self) -> str:
        return f"main, pc {self.pc}: {format_instruction(self.instruction)}"

    def error(self, reason: str) -> ProgramError:
        return ProgramError(f"{self.place()}: {reason}")
