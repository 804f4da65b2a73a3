"""The code of the README runs and prints the output below it."""

from __future__ import annotations

import re
from pathlib import Path

from mlvm.core.program.program import Opcode
from mlvm.machines.native.extension import is_native
from tests.brief import output_of

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
SEPARATOR = "-- next block --"


def plainly(printed: str) -> str:
    """Return the output without plans where numpy kernels run, for which other chains are made than
    the pages show."""
    plan = r"^[\d,]+ bytes, lower bound .*$"
    return (printed if is_native(None) else re.sub(plan, "a plan", printed, flags=re.M)).strip()


def _examples() -> list[tuple[str, str | None]]:
    """Each Python block with the text block that follows it before the next one."""
    blocks = BLOCK.findall(README.read_text("utf-8"))
    examples: list[tuple[str, str | None]] = []
    for language, body in blocks:
        if language == "python":
            examples.append((body, None))
        elif examples and examples[-1][1] is None:
            examples[-1] = examples[-1][0], body
    return examples


def test_the_code_prints_what_the_readme_says() -> None:
    examples = _examples()
    script = f"\nprint({SEPARATOR!r})\n".join(code for code, _ in examples)
    printed = output_of("-W", "error", "-c", script).split(SEPARATOR + "\n")
    assert len(printed) == len(examples) >= 1
    for (code, text), output in zip(examples, printed, strict=True):
        if text is not None and "print" in code:
            assert plainly(output) == plainly(text)


def test_the_first_screen_trains() -> None:
    code, printed = _examples()[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 18  # with the lines that print
    assert "@ml.capture" in code
    assert "value_and_grad" in code
    assert "optimizer.update" in code
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed or "")]
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
