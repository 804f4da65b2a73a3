"""Lines of the user's source code, with function and text."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
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


def use_recorded(file: str, lines: Sequence[str]) -> None:
    """Display these lines of a source file instead of the present ones, which may have changed."""
    text = [f"{line}\n" for line in lines]
    linecache.cache[file] = sum(map(len, text)), None, text, file


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
