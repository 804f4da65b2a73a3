"""How long the project is: `python -m tests.lines` prints lines of code, a row a room.

A line of code has something on it besides a comment, and is not part of a docstring.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def of_code(source: str) -> int:
    """The lines of code of a file."""
    told: set[int] = set()
    for node in _statements(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            told.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(line.strip()) and line.lstrip()[0] != "#" and number not in told
        for number, line in lines
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node, and the statements in it, however deep; no expressions, of which there are many."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            yield from _statements(each)


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
    lines = by_room()
    for name, n in sorted(lines.items()):
        print(f"{n:7,} {name}")
    for under in ("mlvm/eager", "mlvm", "tests"):
        print(f"{total(lines, under):7,} {under} in all")
