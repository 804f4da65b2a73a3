"""Tables of expressions as text, beside the file that uses them: `test_x.txt` for `test_x.py`.

A table begins with `== title ==`. Its rows are `name  =>  expression`, or the expression alone;
the names in it are those of the file, and what imports at the head of the table bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(names: dict[str, Any], title: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a table; `names` are the globals of the file it is for."""
    file = Path(names["__file__"]).with_suffix(".txt")
    is_here = False
    for number, line in enumerate(file.read_text("utf-8").splitlines()):
        if line.startswith("== "):
            is_here = line == f"== {title} =="
        elif is_here and line.startswith(("import ", "from ")):
            exec(line, names)
        elif is_here and line and line[0] != "#":
            name, arrow, code = line.partition("  =>  ")
            text = "\n" * number + f"[{code if arrow else line}]"  # errors name the line of the row
            for value in eval(compile(text, file, "eval"), names):
                yield name if arrow else "", value


def table(names: dict[str, Any], title: str) -> dict[str, Any]:
    """Return the values of a table by their names."""
    return dict(rows(names, title))


def listed(names: dict[str, Any], title: str) -> list[Any]:
    """Return the values of a table without names."""
    return [value for _, value in rows(names, title)]


def grouped(names: dict[str, Any], title: str) -> dict[str, list[Any]]:
    """Return the values of each name, which stands in as many rows."""
    groups: dict[str, list[Any]] = {}
    for name, value in rows(names, title):
        groups.setdefault(name, []).append(value)
    return groups
