"""Write the table of `Opcode` into docs/machine.md: `python -m docs.instructions`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mlvm.core.program.program import Opcode

PAGE: Final = Path(__file__).parent / "machine.md"
BEGIN: Final = "<!-- written by python -m docs.instructions -->\n"
END: Final = "<!-- end -->\n"


def table() -> str:
    """Return the instruction set as a Markdown table."""
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
    """Return the page with the current table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
