"""The places that the walks of docs/architecture.md name, and their lines.

A place in the page has the form "`file`, `name`". In Python a name is a function, a class or
`Class.method`, in C a function.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"

_PLACE = re.compile(r"`([\w/]+\.(?:py|c|h))`,\s+`([\w.]+)`")


class Place(NamedTuple):
    """Lines of a name in a file."""

    file: str
    name: str
    first: int
    last: int


def places(text: str) -> list[Place]:
    """Return the places that a text names."""
    return [Place(file, name, *lines_of(file, name)) for file, name in _PLACE.findall(text)]


def lines_of(file: str, name: str) -> tuple[int, int]:
    """Return the first and last line of a name in a file.

    Raises `LookupError` if the file does not define the name.
    """
    source = (ROOT / file).read_text()
    if not file.endswith(".py"):
        pattern = rf"^(?:\w[\w *]*\b|\w+ \*+){name}\([^;]*?\)\n\{{.*?^\}}"
        match = re.search(pattern, source, re.MULTILINE | re.DOTALL)
        if not match:
            raise LookupError(f"{file} has no function {name}")
        first = source.count("\n", 0, match.start()) + 1
        return first, first + match[0].count("\n")
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = _inside(node, part, file)
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    decorators = [each.lineno for each in node.decorator_list]
    return min([node.lineno, *decorators]), node.end_lineno or node.lineno


def _inside(node: ast.AST, name: str, file: str) -> ast.FunctionDef | ast.ClassDef:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name:
            return each
    raise LookupError(f"{file} has no {name}")


def with_lines(text: str) -> str:
    """Return the page with the line numbers of the places in its walks."""

    def place(match: re.Match[str]) -> str:
        first, last = lines_of(match[1], match[2])
        return f"{match[0]} (lines {first}–{last})"

    page, heading, walks = text.partition("## Three walks")
    return page + heading + _PLACE.sub(place, walks)
