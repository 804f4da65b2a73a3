"""What the README shows; test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

from mlvm.core.program.program import Opcode
from tests.test_docs import shown

README = Path(__file__).parent.parent / "README.md"


def test_the_first_screen_trains() -> None:
    code, printed = next(shown(README, "python"))
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 18  # with the lines that print
    assert "@ml.capture" in code
    assert "value_and_grad" in code
    assert "optimizer.update" in code
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0] / 5


def test_it_counts_the_opcodes() -> None:
    assert re.search(rf"\b{len(Opcode)}\s+opcodes", README.read_text("utf-8"))


def test_it_is_read_in_five_minutes() -> None:
    code_and_tables = r"```.*?```|<!--[^\n]*-->|^(\||    )[^\n]*$"
    prose = re.sub(code_and_tables, "", README.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert 300 < len(prose.split()) <= 700


def test_the_commands_are_those_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^    make ([a-z]+)", README.read_text("utf-8"), re.MULTILINE))
    assert named
    assert named <= targets
