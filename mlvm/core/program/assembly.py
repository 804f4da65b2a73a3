"""The text form of programs: `disassemble` writes it, `assemble` reads it back as it was.

.const two f32[] 2
.func main 0 *                  ; name, parameters, results
    load_arg 0
    push_str "mean"
    cfunc 1 1 {"axis": null, "keepdims": false}
    halt
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.core.errors import (
    AssemblyError,
    OpError,
    ProgramError,
    brief,
    counted,
    did_you_mean,
    shortened,
)
from mlvm.core.op import canonical
from mlvm.core.ops import few, half
from mlvm.core.program.builder import Body
from mlvm.core.program.program import (
    NAME,
    OPCODES,
    STAR,
    Count,
    Function,
    Instruction,
    Opcode,
    Program,
    is_int,
)
from mlvm.core.types import Array, DType, TensorType, f64


def disassemble(program: Program) -> str:
    """Return the program as assembly text, which `assemble` converts to an equal program.

    The last character is a newline. Only integers of more than 64 bits, which the verifier rejects,
    are shortened. Raises `ProgramError` if `program` is not a `Program`.

        >>> ml.disassemble(ml.program_of(ml.sin, ml.zeros(2))).split()[-5:]
        ['"sin.out"', 'cfunc', '2', '0', 'halt']

    Invalid calls:
        ml.disassemble(5)  # ProgramError
    """
    if not isinstance(program, Program):
        raise ProgramError(f"disassemble: expected a Program, got {brief(program)}")
    lines = [f".const {name} {format_constant(value)}" for name, value in program.constants.items()]
    for function in program.functions.values():
        lines += format_function(function)
    return "\n".join(lines) + "\n"


def format_constant(value: Array) -> str:
    """Return the type, then the elements in row-major order, as in `f32[2] 1.5 nan`."""
    elements = " ".join(_format_element(x) for x in half.shown(value).ravel())
    return f"{TensorType.of(value)} {elements}".rstrip()


def format_function(function: Function) -> list[str]:
    """Return a `.func` line, then one line per instruction; labels are named by pc."""
    jumps = [immediates for opcode, immediates in function.code if "label" in opcode.immediates]
    targets = {label for immediates in jumps for label in immediates if isinstance(label, int)}
    counts = f"{_format_plain(function.nparams)} {_format_plain(function.nresults)}"
    lines = [f".func {function.name} {counts}"]
    for pc, instruction in enumerate(function.code):
        if pc in targets:
            lines.append(f"L{pc}:")
        lines.append("    " + format_instruction(instruction))
    return lines


def format_instruction(instruction: Instruction) -> str:
    """Return an instruction as one line."""
    opcode, immediates = instruction
    words = [_format_immediate(opcode, value) for value in immediates]
    return " ".join([opcode.text, *words])


def _format_immediate(opcode: Opcode, value: Any) -> str:
    if isinstance(value, Mapping):
        return _format_json(canonical(value))
    if opcode is Opcode.push_str:
        return _format_json(value)
    return ("L" if "label" in opcode.immediates else "") + _format_plain(value)


def _format_json(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except ValueError:  # Python raises for ints with thousands of digits
        return brief(value)


def _format_plain(value: Any) -> str:
    return brief(value) if isinstance(value, int) and not is_int(int(value)) else str(value)


def _format_element(x: np.generic) -> str:
    """Return the shortest text that converts to the same element."""
    if isinstance(x, np.bool_):
        return "true" if x else "false"
    if isinstance(x, np.complexfloating):
        imag = _format_element(x.imag)
        return f"{_format_element(x.real)}{'' if imag[0] == '-' else '+'}{imag}j"
    if not isinstance(x, np.floating):
        return str(x)
    text = np.format_float_positional(x, trim="-")
    return text if len(text) <= 24 else np.format_float_scientific(x, trim="-")


# --- reading -------------------------------------------------------------------------


class _Token(NamedTuple):
    """Word of a line. `value` is the text, or the value of a JSON string or object."""

    text: str
    value: Any
    line: int
    column: int

    def error(self, reason: str) -> AssemblyError:
        return AssemblyError(reason, self.line, self.column)


@contextmanager
def _at(word: _Token) -> Iterator[None]:
    """Convert errors of a program or type inside the block to an `AssemblyError` at the word."""
    try:
        yield
    except AssemblyError:
        raise
    except (ProgramError, OpError) as error:
        raise word.error(str(error)) from None


_WORD: Final = re.compile(r'[^\s;"{]+')
_DECODER: Final = json.JSONDecoder()


def _tokens(text: str, line: int) -> Iterator[_Token]:
    """Yield the words of a line: JSON strings and objects, and sequences of other characters."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] == ";":
            return
        elif text[at] in '"{':
            try:
                value, end = _DECODER.raw_decode(text, at)
            # raised also for too many digits and deep nesting
            except (ValueError, RecursionError) as error:
                text, column = getattr(error, "msg", str(error)), getattr(error, "colno", at + 1)
                raise AssemblyError(f"invalid JSON: {text}", line, column) from None
            yield _Token(text[at:end], value, line, at + 1)
            at = end
        else:
            match = _WORD.match(text, at)
            assert match is not None  # the pattern matches any text
            yield _Token(match.group(), match.group(), line, at + 1)
            at = match.end()


def assemble(text: str) -> Program:
    r"""Return the program that the text describes.

    Raises `AssemblyError` with line and column for invalid text. The verifier, not the assembler,
    checks the program.

        >>> from mlvm.core.program.assembly import assemble
        >>> program = assemble(".const two f32[] 2\n.func main 0 *\n    push_const two\n    halt")
        >>> ml.VM().launch(program)
        [array(2., dtype=float32)]
    """
    constants: dict[str, Array] = {}
    bodies: list[_Body] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = list(_tokens(line, number))
        if not words:
            continue
        first, rest = words[0], words[1:]
        if first.text == ".const":
            if len(rest) < 2:
                raise first.error(f"expected .const NAME TYPE ELEMENTS..., got {len(rest)} words")
            name, value = _name(rest[0]), _read_value(rest[1], rest[2:])
            if name in constants:
                raise first.error(f"constant {name!r} is defined twice; rename one")
            constants[name] = value
        elif first.text == ".func":
            bodies.append(_Body(first, rest))
        elif not bodies:
            raise first.error(f"{first.text} comes before the first .func; add one")
        else:
            bodies[-1].read(first, rest)
    if not bodies:
        raise AssemblyError("expected a .func, got none", len(text.splitlines()) + 1, 1)
    with _at(bodies[-1].head):
        return Program([body.function() for body in bodies], constants)


class _Body(Body):
    """Function during assembly, with the tokens for errors."""

    def __init__(self, head: _Token, words: list[_Token]) -> None:
        if len(words) != 3:
            raise head.error(f"expected .func NAME PARAMETERS RESULTS, got {len(words)} words")
        super().__init__(_name(words[0]), _int(words[1], least=0), _count(words[2]))
        self.head = head
        self.jumps: list[_Token] = []  # labels of the jumps

    def read(self, first: _Token, rest: list[_Token]) -> None:
        """Process a line, which is a label or an instruction."""
        if not first.text.endswith(":"):
            self.code.append(self._instruction(first, rest))
            return
        if rest:
            raise rest[0].error(f"expected a label on a separate line, got {rest[0].text}")
        with _at(first):
            self.label(first.text[:-1])

    def function(self) -> Function:
        for word in self.jumps:
            with _at(word):
                self.pc_of(word.text)
        return super().function()

    def _instruction(self, token: _Token, words: list[_Token]) -> Instruction:
        opcode = OPCODES.get(token.text)
        if opcode is None:
            hint = did_you_mean(token.text, OPCODES)
            raise token.error(f"unknown instruction {token.text!r}{hint}")
        if not opcode.takes(len(words)):
            syntax = " ".join([token.text, *opcode.immediates])
            raise token.error(f"expected {syntax}, got {counted(len(words), 'immediate')}")
        return Instruction(opcode, tuple(map(self._immediate, opcode.immediates, words)))

    def _immediate(self, kind: str, word: _Token) -> Any:
        match kind:
            case "n" | "i":
                return _int(word)
            case "s":
                if not word.text.startswith('"'):
                    raise word.error(f'expected a string such as "add", got {word.text}')
                return word.value
            case "name" | "func":
                return _name(word)
            case "nparams" | "nresults":
                return _count(word)
            case "label":
                self.jumps.append(word)
                return word.text
            case _:  # attrs?
                if not isinstance(word.value, dict):
                    raise word.error(
                        f'expected attributes as a JSON object such as {{"axis": 0}}, got '
                        f"{word.text}"
                    )
                return canonical(word.value)


def _name(word: _Token) -> str:
    if not NAME.fullmatch(word.text):
        raise word.error(f"expected a name, got {word.text}")
    return word.text


def _int(word: _Token, least: int | None = None) -> int:
    try:
        value = int(word.text)
    except ValueError:
        bits = " of 64 bits" if word.text.lstrip("+-").isdigit() else ""  # too many digits
        raise word.error(f"expected an integer{bits}, got {shortened(word.text, 40)}") from None
    if not is_int(value):
        raise word.error(f"expected an integer of 64 bits, got {shortened(word.text, 40)}")
    if least is not None and value < least:
        raise word.error(f"expected an integer >= {least}, got {value}")
    return value


def _count(word: _Token) -> Count:
    return STAR if word.text == STAR else _int(word, least=0)


def parse_constant(text: str) -> Array:
    """Return the array of a text in the format of `format_constant`. Raises `AssemblyError`."""
    words = list(_tokens(text, 1))
    if not words:
        raise AssemblyError("expected TYPE ELEMENTS..., such as f32[2] 1.5 nan", 1, 1)
    return _read_value(words[0], words[1:])


def _read_value(head: _Token, elements: list[_Token]) -> Array:
    with _at(head):
        type = TensorType.parse(head.text)
    if len(elements) != type.size:
        raise head.error(f"{type} expects {counted(type.size, 'element')}, got {len(elements)}")
    values = np.empty(type.size, _read_as(type.dtype).numpy)
    for i, word in enumerate(elements):
        values[i] = _read_element(word, type.dtype)
    return half.cast(values.reshape(type.shape), type.dtype)


def _read_as(dtype: DType) -> DType:
    """Return the dtype for parsing elements, which numpy supports: f64 for half precision."""
    return f64 if dtype.is_half else few.unpacked_dtype(dtype) if dtype.is_storage else dtype


def _read_element(word: _Token, dtype: DType) -> Any:
    try:
        if dtype.kind == "bool":
            return {"true": True, "false": False}[word.text]
        read_as = _read_as(dtype)
        if read_as.is_inexact:
            return read_as.numpy.type(word.text)
        number = int(word.text)
        if dtype.is_storage and number not in few.integers(dtype):
            raise ValueError
        return read_as.numpy.type(number)
    except (KeyError, ValueError, OverflowError):
        raise word.error(f"expected {dtype.name}, got {word.text}") from None
