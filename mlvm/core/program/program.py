"""Programs: the instruction set as a table, and functions as lists of instructions.

A `Program` is immutable data and is compared by content. It is independent of VMs: names, handles
and arguments are looked up at launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mlvm.core.errors import ProgramError, brief
from mlvm.core.memo import bits_of
from mlvm.core.op import PLAIN, canonical
from mlvm.core.program.encoding import Allowance, Kind, Reader, Writer, open_message
from mlvm.core.types import Array, TensorType

STAR: Final = "*"
NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
"""Pattern of the names of functions and constants."""

Count = int | Literal["*"]
"""Number of parameters or results; `*` means any number."""


class Opcode(Enum):
    """Instruction set. New tensor ops need no new opcode.

    Each member has immediates, a stack effect (read left to right, top of stack last) and a
    description.
    """

    halt = (), "( ... -- )", "end; Tensors above base are the outputs, in order"
    push_int = ("n",), "( -- n )", "push an Int"
    push_str = ("s",), "( -- s )", "push a Str"
    push_const = ("name",), "( -- t )", "push a tensor of the constant pool"
    load_arg = ("i",), "( -- t )", "push the launch's i-th argument"
    load_global = (), "( h -- t )", "push the free-store tensor of handle h"
    store_global = (), "( t h -- )", "handle h now names t: a pointer swap, no copy"
    get = ("i",), "( -- v )", "push slot base+i; i < 0 reaches the parameters"
    set = ("i",), "( v -- )", "store into slot base+i"
    pop = ("n",), "( v1..vn -- )", "drop n values"
    cfunc = (
        ("nparams", "nresults", "attrs?"),
        "( p1..pn name -- r1..rm )",
        "call the host function named by the Str on top; nparams * takes all above base",
    )
    call = ("func",), "( p1..pn -- r1..rm )", "call a function of the same program"
    return_ = (
        ("n",),
        "( r1..rn -- )",
        "n results move down to base-nparams; the caller's frame is restored",
    )
    jump = ("label",), "( -- )", "go to the label"
    jump_if_false = ("label",), "( c -- )", "go there if c, an Int or one-element Tensor, is zero"

    def __init__(self, immediates: tuple[str, ...], effect: str, meaning: str) -> None:
        self.immediates = immediates
        self.effect = effect
        self.meaning = meaning

    # members are unique, and the hash of an Enum is a slow Python method
    __hash__ = object.__hash__

    def takes(self, count: int) -> bool:
        """Return whether the opcode accepts `count` immediates; those with a ? are optional."""
        least = sum(not name.endswith("?") for name in self.immediates)
        return least <= count <= len(self.immediates)

    @property
    def text(self) -> str:
        """The opcode's name in assembly."""
        return self.name.rstrip("_")


OPCODES: Final = {opcode.text: opcode for opcode in Opcode}
"""Opcodes by assembly name."""


class Instruction(NamedTuple):
    """Opcode with immediates, in the order of the table."""

    opcode: Opcode
    immediates: tuple[Any, ...] = ()

    @staticmethod
    def of(text: str, *immediates: Any) -> Instruction:
        """Return the instruction of the opcode with that name in assembly."""
        return Instruction(OPCODES[text], immediates)

    def jumping(self, target: Callable[[Any], int]) -> Instruction:
        """Return the instruction; the label of a jump is replaced by `target(label)`."""
        if "label" not in self.opcode.immediates:
            return self
        return Instruction(self.opcode, tuple(map(target, self.immediates)))


class Function(NamedTuple):
    """Named sequence of instructions, with the numbers of parameters and results."""

    name: str
    nparams: int
    nresults: Count
    code: tuple[Instruction, ...]

    @property
    def targets(self) -> set[int]:
        """Return the pcs of the jump targets."""
        return {i.immediates[0] for i in self.code if "label" in i.opcode.immediates}


class Program:
    """Program: functions, of which `main` is the entry point, and a pool of constants.

    Constants are copied and read-only. Raises `ProgramError` if there is no `main`, or for a name
    that is duplicate or invalid in assembly.

        >>> program = ml.program_of(ml.sin, ml.zeros(2))
        >>> list(program.functions), len(program.functions["main"].code)
        (['main'], 7)
    """

    __slots__ = ("__weakref__", "constants", "functions", "single", "written")

    # Caches that `mlvm.arena.writes` and a recorder use.
    written: frozenset[int] | None
    single: Any

    def __init__(
        self, functions: Iterable[Function], constants: Mapping[str, Array] | None = None
    ) -> None:
        self.functions: dict[str, Function] = {}
        copies: dict[int, tuple[object, object]] = {}
        for function in functions:
            _check_name("function", function.name)
            if function.name in self.functions:
                raise ProgramError(f"function {function.name!r} is defined twice; rename one")
            self.functions[function.name] = _frozen(function, copies)
        if "main" not in self.functions:
            raise ProgramError(
                f"expected a function 'main', got {', '.join(self.functions) or 'none'}"
            )
        self.constants: dict[str, Array] = {}
        for name, value in (constants or {}).items():
            _check_name("constant", name)
            array = np.array(value, order="C")
            TensorType.of(array)
            array.flags.writeable = False
            self.constants[name] = array

    @staticmethod
    def straight(code: Sequence[Instruction]) -> Program:
        """Return a program that consists of a `main` with that code, with any number of results."""
        return Program([Function("main", 0, STAR, tuple(code))])

    @staticmethod
    def of_op(name: str, nparams: int, attributes: Mapping[str, Any], nresults: Count) -> Program:
        """Return a one-op program: push the arguments, call the function of that name, halt."""
        immediates = (nparams, nresults, attributes) if attributes else (nparams, nresults)
        return Program.straight(
            [
                *(Instruction(Opcode.load_arg, (i,)) for i in range(nparams)),
                Instruction(Opcode.push_str, (name,)),
                Instruction(Opcode.cfunc, immediates),
                Instruction(Opcode.halt),
            ]
        )

    def to_bytes(self) -> bytes:
        """Encode the program as bytes, in the format of docs/wire.md; `from_bytes` decodes them.

        Raises `EncodingError` for an immediate that cannot be encoded.
        """
        writer = Writer()
        writer.sequence(self.functions.values(), _write_function)
        writer.mapping(self.constants, Writer.array)
        return writer.message(Kind.program)

    @staticmethod
    def from_bytes(
        data: bytes | bytearray | memoryview, allowance: Allowance | None = None
    ) -> Program:
        """Decode the program that `to_bytes` encoded, without verification.

        Raises `EncodingError` for bytes that are not a program, `ProgramError` as the constructor,
        `LimitExceededError` for one beyond the `allowance`.
        """
        _, reader = open_message(data, Kind.program, allowance=allowance)
        functions = reader.sequence(_read_function)
        constants = reader.mapping(Reader.array)
        reader.end()
        return Program(functions, constants)

    @property
    def main(self) -> Function:
        return self.functions["main"]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (
            list(self.functions.values()) == list(other.functions.values())
            and all(map(_are_alike, self.functions.values(), other.functions.values()))
            and self.constants.keys() == other.constants.keys()
            and all(_same(x, other.constants[name]) for name, x in self.constants.items())
        )

    def __hash__(self) -> int:
        return hash(tuple((f.name, len(f.code)) for f in self.functions.values()))

    def __repr__(self) -> str:
        lengths = ", ".join(f"{f.name}: {len(f.code)}" for f in self.functions.values())
        return f"<Program {lengths}; {len(self.constants)} constants>"


class Variant(Program):
    """Program that differs from an existing program only in integers.

    patched: prepared form on VMs with a loop in C, which needs no program.
    values: the integers, in the order of `patched`.
    types: types of the launch's arguments.
    """

    __slots__ = ("_full", "_make", "patched", "values")

    def __init__(
        self, make: Callable[[], tuple[Program, Sequence[TensorType]]], patched: Any, values: Any
    ) -> None:
        self._make, self.patched, self.values = make, patched, values
        self._full: tuple[Program, Sequence[TensorType]] | None = None
        self.written = patched.written

    def full(self) -> tuple[Program, Sequence[TensorType]]:
        """Return an ordinary program with these integers, and the argument types."""
        self._full = self._full or self._make()
        return self._full

    @property
    def functions(self) -> dict[str, Function]:  # type: ignore[override]
        return self.full()[0].functions

    @property
    def constants(self) -> dict[str, Array]:  # type: ignore[override]
        return self.full()[0].constants


def is_int(value: object) -> bool:
    """Return whether the value is an Int of the machine: a signed 64-bit integer, not a bool."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and -(2**63) <= value < 2**63  # type: ignore[operator]


def is_whole(value: object) -> bool:
    """Return whether the value is an Int >= 0, as required for counts."""
    return is_int(value) and value >= 0  # type: ignore[operator]


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ProgramError(
            f"expected a {kind} name of letters, digits, _ and . that starts with a letter or _, "
            f"got {name!r}"
        )


def _frozen(function: Function, copies: dict[int, tuple[object, object]]) -> Function:
    """Return the function with immutable attributes: copies, shared by equal attributes."""

    def frozen(value: Any) -> Any:
        if value.__class__ in PLAIN or not isinstance(value, Mapping):
            return value
        if id(value) not in copies:
            copies[id(value)] = value, MappingProxyType({k: canonical(x) for k, x in value.items()})
        return copies[id(value)][1]

    def instruction(each: Instruction) -> Instruction:
        plain = each[1].__class__ is tuple and PLAIN.issuperset(map(type, each[1]))
        if plain and each.__class__ is Instruction:
            return each
        return Instruction(each[0], tuple(map(frozen, each[1])))

    return function._replace(code=tuple(map(instruction, function.code)))


def _are_alike(x: Any, y: Any) -> bool:
    """Return whether equal values have the same encoding; 0.0 and -0.0 have not, nor 1 and True."""
    if isinstance(x, Mapping):
        return all(_are_alike(each, y[name]) for name, each in x.items())
    if isinstance(x, tuple):
        return all(map(_are_alike, x, y))
    return x is y or (type(x) is type(y) and (not isinstance(x, float) or bits_of(x) == bits_of(y)))


def _same(x: Array, y: Array) -> bool:
    return TensorType.of(x) is TensorType.of(y) and x.tobytes() == y.tobytes()


def _write_function(writer: Writer, function: Function) -> None:
    writer.text(function.name)
    writer.integer(function.nparams)
    writer.value(function.nresults)
    writer.sequence(function.code, _write_instruction)


def _read_function(reader: Reader) -> Function:
    name, nparams, nresults = reader.text(), reader.integer(), reader.value()
    if nparams < 0:
        raise reader.error(f"expected 0 or more parameters, got {nparams}")
    whole = isinstance(nresults, int) and not isinstance(nresults, bool)
    if nresults != STAR and not (whole and nresults >= 0):
        raise reader.error(f"expected 0 or more results, or *, got {nresults!r}")
    return Function(name, nparams, nresults, tuple(reader.sequence(_read_instruction)))


def _write_instruction(writer: Writer, instruction: Instruction) -> None:
    writer.text(instruction.opcode.text)
    writer.sequence(instruction.immediates)


def _read_instruction(reader: Reader) -> Instruction:
    text = reader.text()
    if text not in OPCODES:
        raise reader.error(f"unknown instruction {brief(text)}")
    return Instruction(OPCODES[text], tuple(reader.sequence()))
