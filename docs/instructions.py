"""`python -m docs.instructions`: write the table of `Opcode` into docs/machine.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mlvm.core.program.program import Opcode

PAGE: Final = Path(__file__).parent / "machine.md"
BEGIN: Final = "<!-- written by python -m docs.instructions -->\n"
END: Final = "<!-- end -->\n"


def table() -> str:
    """The instruction set as a Markdown table."""
    rows = [
        ("opcode", "immediates", "effect", "meaning"),
        ("---",) * 4,
        *(
            (f"`{opcode.text}`", " ".join(opcode.immediates), f"`{opcode.effect}`", opcode.meaning)
            for opcode in Opcode
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(page: str) -> str:
    """The page with the table between its two marks, in place of what stood there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
