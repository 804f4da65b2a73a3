"""The decoder: operands of calls, what a block leaves, and faults in the use of the stack."""

from __future__ import annotations

from hypothesis import given

from mlvm.core.errors import MlvmError
from mlvm.core.machine.decode import Decoded, Result, decode
from mlvm.core.machine.functions import FunctionTable
from mlvm.core.machine.verify import verify
from mlvm.core.program.program import STAR, Function, Instruction, Program
from tests.cases.claim_tests import claims
from tests.core.machine.test_verify import codes
from tests.core.programs import asm, instruction

test_rows = claims("decode", globals())


def decoded(text: str, function: str = "main") -> list[Decoded]:
    return [*decode(asm(text))[function].instructions()]


def operands(text: str, function: str = "main") -> list[str]:
    """Each decoded instruction and its operands, in short."""
    return [
        " ".join([each.name or each.kind, *map(shown, each.operands or ())])
        for each in decoded(text, function)
    ]


def shown(ref: object) -> str:
    if isinstance(ref, Instruction):
        return f"{ref.opcode.text.rpartition('_')[2][-3:]}:{ref.immediates[0]}"
    return f"{ref.pc}.{ref.number}" if isinstance(ref, Result) else f"slot:{ref}"


def faults(text: str) -> list[str | None]:
    return [each.fault for each in decoded(text) if each.fault]


def blocks(text: str) -> list[tuple[int, int, int]]:
    return [(block.start, block.end, block.height) for block in decode(asm(text))["main"]]


@given(codes)
def test_decoding_covers_all_code(pieces: list[list[Instruction]]) -> None:
    """Each instruction is in one block, also in code that no verifier passes."""
    code = (*[i for piece in pieces for i in piece], instruction("halt"))
    program = Program([Function("main", 0, STAR, code)])
    try:
        verify(program, FunctionTable())
    except MlvmError:
        return
    covered = [pc for block in decode(program)["main"] for pc in range(block.start, block.end)]
    assert covered == list(range(len(code)))
