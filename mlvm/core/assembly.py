"""The text form of programs. `disassemble` writes it; the assembler that reads it is to come.

.const two f32[] 2
.func main 0 *                  ; name, parameters, results
    load_arg 0
    push_str "mean"
    cfunc 1 1 {"axis": null, "keepdims": false}
    halt
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlvm.core.program import Function, Instruction, Opcode, Program
from mlvm.core.types import Array, TensorType


def disassemble(program: Program) -> str:
    """The program as assembly text, ending in a newline. Reading it back gives an equal one."""
    lines = [f".const {name} {format_constant(value)}" for name, value in program.constants.items()]
    for function in program.functions.values():
        lines += format_function(function)
    return "\n".join(lines) + "\n"


def format_constant(value: Array) -> str:
    """`f32[2] 1.5 nan`: the type, then the elements in row-major order."""
    elements = " ".join(_format_element(x) for x in value.ravel())
    return f"{TensorType.of(value)} {elements}".rstrip()


def format_function(function: Function) -> list[str]:
    """A `.func` line, then an instruction a line; jump targets get labels named by their pc."""
    targets = {
        instruction.immediates[0]
        for instruction in function.code
        if "label" in instruction.opcode.immediates
    }
    lines = [f".func {function.name} {function.nparams} {function.nresults}"]
    for pc, instruction in enumerate(function.code):
        if pc in targets:
            lines.append(f"L{pc}:")
        lines.append("    " + format_instruction(instruction))
    return lines


def format_instruction(instruction: Instruction) -> str:
    """An instruction on one line."""
    opcode, immediates = instruction
    words = [_format_immediate(opcode, value) for value in immediates]
    return " ".join([opcode.text, *words])


def _format_immediate(opcode: Opcode, value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), default=_format_attribute)
    if opcode is Opcode.push_str:
        return json.dumps(value)
    return f"L{value}" if "label" in opcode.immediates else str(value)


def _format_attribute(value: Any) -> Any:
    """What JSON has no text for: numpy scalars, and a `DType`, which goes by its name."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _format_element(x: np.generic) -> str:
    """The fewest digits that read back as the same element."""
    if isinstance(x, np.bool_):
        return "true" if x else "false"
    if not isinstance(x, np.floating):
        return str(x)
    text = np.format_float_positional(x, trim="-")
    return text if len(text) <= 24 else np.format_float_scientific(x, trim="-")
