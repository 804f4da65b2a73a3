"""The code that reads a tensor's value while a function is traced, at the present position.

The expression and the remedy come from the syntax tree of the file. Without the file, the
expression is "" and the remedy is general.

The text of a tensor contains its values. It is accepted where the program only prints, logs or
raises it.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from types import FrameType
from typing import Final

from mlvm.core.errors import is_ours, line_of
from mlvm.core.memo import memoized
from mlvm.eager.functions.remedies import GENERAL, INDEX, TEXT, Read, of_test, of_value
from mlvm.eager.recording.lines import traced_line
from mlvm.eager.tensor.refusing import is_standard_file

TEXTS: Final = frozenset({"__repr__", "__str__", "__format__"})
_LOGGING: Final = frozenset(
    {"print", "pprint", "log", "debug", "info", "warning", "warn", "error", "exception"}
)
"""Functions that show a text."""

_PRINTING: Final = frozenset({"print", "pprint"})
_STORING: Final = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "setdefault", "update", "put"}
)
"""Methods of containers that store an argument."""

_TESTS: Final = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""Instructions that read the truth value of an operand."""

_INDEXING: Final = frozenset({"BINARY_SUBSCR", "BINARY_SLICE", "BINARY_OP", "BUILD_SLICE"})


def read_here() -> Read:
    """Describe the innermost expression of the user's code that is being evaluated."""
    frame = _user_frame() if traced_line() is None else None
    if frame is None:
        return Read("", GENERAL)
    nodes = _nodes_at(frame)
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    is_test = instruction.startswith(_TESTS)
    read = of_test(nodes, frame) if is_test else of_value(nodes, frame)
    where = line_of((frame.f_code, frame.f_lasti))
    other = Read("", INDEX if instruction in _INDEXING else GENERAL)
    return (read or other)._replace(where=where)


def text_here() -> Read | None:
    """Describe the expression that makes the text of a tensor; None if the text is only shown."""
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_name in TEXTS:
        caller = caller.f_back
    frame = _user_frame(skipped=TEXTS)
    if caller is None or is_ours(caller.f_code.co_filename) or frame is None:
        return None
    nodes = _nodes_at(frame)
    if _is_shown(frame, nodes):
        return None
    read = of_value(nodes, frame) or Read("", TEXT)
    return Read(read.code, TEXT, line_of((frame.f_code, frame.f_lasti)))


def _user_frame(skipped: Container[str] = ()) -> FrameType | None:
    """Return the innermost frame of code outside of mlvm and the standard library, or None.

    Functions with `skipped` names are omitted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not (is_ours(file) or is_standard_file(file) or name in skipped):
            break
        frame = frame.f_back
    return frame


def _nodes_at(frame: FrameType) -> list[ast.expr | ast.stmt]:
    """Return the nodes around the instruction that a frame runs, innermost first."""
    positions = frame.f_code.co_positions()
    first, last, column, end = next(islice(positions, frame.f_lasti // 2, None))
    if first is None or last is None or column is None or end is None:
        return []
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    return [
        node
        for node in ast.walk(syntax_tree(source) or ast.Module([], []))
        if isinstance(node, ast.expr | ast.stmt)
        and (node.lineno, node.col_offset) <= (first, column)
        and (last, end) <= (node.end_lineno or 0, node.end_col_offset or 0)
    ][::-1]


def _is_shown(frame: FrameType, nodes: Sequence[ast.expr | ast.stmt]) -> bool:
    """Return whether the program only prints, logs or raises the text that these nodes make.

    Installed packages, such as debuggers and loggers, may make any text, and so may errors."""
    code = frame.f_code
    is_error = code.co_name == "__init__" and any(
        isinstance(each, BaseException) for each in frame.f_locals.values()
    )
    if is_error or "site-packages" in code.co_filename:
        return True
    if not nodes:
        later = {dis.opname[each] for each in code.co_code[frame.f_lasti :: 2]}
        return "RAISE_VARARGS" in later or not _LOGGING.isdisjoint(code.co_names)
    inner: ast.AST | None = None
    for node in nodes:
        if isinstance(node, ast.Assert):
            return inner is not node.test
        if isinstance(node, ast.Raise | ast.Expr):
            return True
        if _is_call_of(node, _STORING) or _is_call_of(node, _PRINTING):
            return _is_call_of(node, _PRINTING)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return _is_shown_later(node.targets[0].id, nodes)
        caller = frame.f_back
        if isinstance(node, ast.Return) and caller and not is_ours(caller.f_code.co_filename):
            return _is_shown(caller, _nodes_at(caller))
        is_key = isinstance(node, ast.Dict) and inner in node.keys
        if is_key or isinstance(node, ast.Compare | ast.Subscript | ast.Lambda | ast.stmt):
            return False
        inner = node
    return False


def _is_call_of(node: ast.AST, names: Container[str]) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    name = getattr(function, "attr", getattr(function, "id", None))
    return name in names


def _is_shown_later(name: str, nodes: Iterable[ast.AST]) -> bool:
    """Return whether the innermost function around the nodes only shows the variable."""
    function = next((each for each in nodes if isinstance(each, ast.FunctionDef)), None)
    uses, shown = set[ast.AST](), set[ast.AST]()
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return False
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            uses.add(node)
        if isinstance(node, ast.Raise | ast.Expr) or _is_call_of(node, _PRINTING):
            parts = [*ast.walk(node)]
            shown.update(() if any(_is_call_of(each, _STORING) for each in parts) else parts)
    return function is not None and uses <= shown


@memoized(256)
def syntax_tree(source: str) -> ast.Module | None:
    """Return the syntax tree of a file; None if it cannot be parsed."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
