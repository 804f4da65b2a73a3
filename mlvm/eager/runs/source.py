"""Lines of the user's source code: function, text, and the name that a line assigns."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from typing import NamedTuple

from mlvm.core.memo import memoized
from mlvm.core.sizes import parse_count
from mlvm.eager.recording.reads import syntax_tree


class SourceLine(NamedTuple):
    """Line of source code.

    Attributes:
        file, number: the file and the line number.
        function: the qualified name of the enclosing function, "" at module level.
        text: the line without surrounding whitespace, "" if it cannot be read.
        layer: the path of the running layer of a Module, "" outside of a layer.
    """

    file: str
    number: int
    function: str = ""
    text: str = ""
    layer: str = ""

    def __str__(self) -> str:
        """Return `file:line`, relative to the current folder for a file in it."""
        folder = os.path.join(os.getcwd(), "")
        return f"{self.file.removeprefix(folder)}:{self.number}"


def line_at(place: str, layer: str | None = None) -> SourceLine:
    """Return the line at `file:number`, with the text if the file can be read."""
    file, _, number = place.rpartition(":")
    if (n := parse_count(number)) is None:
        return SourceLine(place, 0, layer=layer or "")
    functions = _functions(file)
    inside = [name for name, first, last in functions if first <= n <= last]
    text = linecache.getline(file, n).strip()
    return SourceLine(file, n, inside[-1] if inside else "", text, layer or "")


@memoized(256)
def _functions(file: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, first and last line of each function of a file, outer ones first."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                if not isinstance(child, ast.ClassDef):
                    yield name, child.lineno, child.end_lineno or child.lineno
            yield from within(child, name)

    tree = syntax_tree("".join(linecache.getlines(file)))
    return () if tree is None else tuple(within(tree, ""))


@memoized(256)
def _statements(file: str) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Return the first line and the names of the assignment that contains each line of a file.

    Only statements that assign names are included.

    `q = x @ w`, `q: Tensor = ...` and `q += ...` assign q, `self.h = ...` assigns self.h, and
    `q, r = ...` assigns both. On a line with several statements, only the last statement counts.
    """
    statements: dict[int, tuple[int, tuple[str, ...]]] = {}
    for node in ast.walk(syntax_tree("".join(linecache.getlines(file))) or ast.Module([], [])):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            target = node.target
        else:
            continue
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if all(isinstance(part, ast.Name | ast.Attribute) for part in parts):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            names = tuple(map(ast.unparse, parts))
            statements.update(dict.fromkeys(lines, (node.lineno, names)))
    return statements


def statement_of(line: SourceLine) -> tuple[str, int, tuple[str, ...]]:
    """Return the file and first line of the statement of a line, and the assigned names.

    A statement without an assignment has an empty tuple of names.
    """
    first, names = _statements(line.file).get(line.number, (line.number, ()))
    return line.file, first, names if line.number else ()
