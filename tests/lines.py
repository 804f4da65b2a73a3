"""Lines of code: `python -m tests.lines` prints a row for each room, of Python, C, JavaScript, and
the tables of tests.

A line of code has something on it besides a comment, and is not part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent

C_CEILING: Final = {"C": 22_500, "JavaScript": 1_000, "tables of tests": 8_500}
"""The most lines of C (with its tables and the device's sources), and of JavaScript, in mlvm/, and
of tables in tests/, which are text."""

_SUFFIXES: Final = {".c": "C", ".h": "C", ".def": "C", ".js": "JavaScript"}


def of_code(source: str) -> int:
    """The lines of code of a file."""
    in_docstrings: set[int] = set()
    for node in _statements(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            in_docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(line.strip()) and line.lstrip()[0] != "#" and number not in in_docstrings
        for number, line in lines
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node, and the statements in it, however deep; no expressions, of which there are many."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            yield from _statements(each)


def of_c(source: str) -> int:
    """Count the lines of C or JavaScript that have more than a comment."""
    without = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), source, flags=re.S)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in without.splitlines())


def by_language() -> Counter[str]:
    """Count the lines of C and of JavaScript in mlvm/, and of tables in tests/."""
    lines: Counter[str] = Counter()
    for table in (ROOT / "tests").rglob("*.txt"):
        rows = table.read_text("utf-8").splitlines()
        if "recordings" not in table.parts:  # these contain the sources of recorded programs
            lines["tables of tests"] += sum(bool(row.strip()) and row[0] != "#" for row in rows)
    for file in (ROOT / "mlvm").rglob("*"):
        if file.suffix in _SUFFIXES:
            lines[_SUFFIXES[file.suffix]] += of_c(file.read_text())
    return lines


def room(file: Path) -> str:
    """The room of the house a file belongs to: `mlvm/eager/control`, `mlvm/step`, `models`."""
    folders = file.relative_to(ROOT).parent.parts
    deep = 3 if folders[:2] in (("mlvm", "eager"), ("mlvm", "machines")) else 2
    return "/".join(folders[: deep if folders[0] == "mlvm" else 1])


def by_room() -> Counter[str]:
    """The lines of code of each room."""
    lines: Counter[str] = Counter()
    for top in ("mlvm", "models", "tests", "bench"):
        for file in sorted((ROOT / top).rglob("*.py")):
            lines[room(file)] += of_code(file.read_text())
    return lines


def total(lines: Counter[str], under: str) -> int:
    """The lines of all rooms under a folder."""
    return sum(n for name, n in lines.items() if f"{name}/".startswith(f"{under}/"))


if __name__ == "__main__":
    argparse.ArgumentParser("python -m tests.lines", description=__doc__).parse_args()
    lines = by_room()
    for name, n in sorted(lines.items()):
        print(f"{n:7,} {name}")
    for under in ("mlvm/eager", "mlvm", "tests"):
        print(f"{total(lines, under):7,} {under} in all")
    for language, n in by_language().items():
        print(f"{n:7,} {language}")
