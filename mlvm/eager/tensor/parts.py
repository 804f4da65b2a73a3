"""Warnings about updates without effect: of parts of tensors, where NumPy would write to the whole.

In: the frame of an update, `a[i] = v` or `a += v`, of a tensor to which only the name `a` refers.
Out: a `NoEffectWarning`, or None. The source of an update is analysed once.
"""

from __future__ import annotations

import ast
import linecache
import sys
import weakref
from collections.abc import Iterable, Iterator
from opcode import opmap
from types import CodeType, FrameType
from typing import Any, Final

from mlvm.core.locks import new_lock
from mlvm.core.memo import Memo, memoized
from mlvm.eager.tensor.warn import NoEffectWarning, warn_at

_VIEWS: Final = frozenset(
    ("T", "mT", "real", "imag", "reshape", "ravel", "permute_dims", "transpose", "swapaxes"),
).union(
    ("moveaxis", "matrix_transpose", "squeeze", "expand_dims", "broadcast_to", "diagonal", "flip")
)
"""Attributes and functions with a result that shares elements with the operand in NumPy."""

_INNER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

_parsing: Final = new_lock()
"""Held while a source is parsed: in CPython 3.11 two threads cannot parse simultaneously."""

_sites: Final = Memo[tuple[int, int], tuple[CodeType, str | None]](4096, "eager.tensor.parts sites")
"""The code, and the part for which an update is lost or None, by code id and instruction offset."""

_unpacked: Final = Memo[int, tuple[weakref.ref[Any], weakref.ref[Any]]](
    256, "eager.tensor.parts unpacked"
)
"""The latest rows that `a, b = x` has unpacked, by id, each with the owner of the bytes of x."""


def unpacks(frame: FrameType) -> bool:
    """Return whether the frame's instruction unpacks values to names."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["UNPACK_SEQUENCE"]


def note_unpacked(row: Any, whole: Any) -> None:
    """Record a row of a tensor that is unpacked."""
    _unpacked[id(row)] = weakref.ref(row), weakref.ref(whole.root)


def _is_row_of_another(x: Any) -> bool:
    """Return whether x is an unpacked row of a tensor that is still referenced."""
    row, reference = _unpacked.entries.get(id(x), (None, None))
    whole = reference() if row is not None and reference is not None and row() is x else None
    # the references in this function
    return whole is not None and sys.getrefcount(whole) > len(whole.views()) + 2


def warn_of_part(frame: FrameType, x: Any) -> None:
    """Warn if the update of x at the frame's instruction has no effect.

    x is then an argument without other references, a row of a tensor that is still referenced, or
    a part of a tensor that is read later."""
    code, place = frame.f_code, frame.f_lasti
    _, text = _sites.get((id(code), place), lambda: (code, _lost(frame, type(x))))
    if text is None and len(_unpacked) and _is_row_of_another(x):
        text = "a row that was unpacked"
    if text is not None:
        warn_at(
            f"{code.co_filename}:{frame.f_lineno}",
            f"this {x.type} is {text}: its update changes no other tensor. Update the whole, as in "
            f"x[k, i] = v, or return the part and assign it, as in x[k] = f(x[k])",
            NoEffectWarning,
        )


def _lost(frame: FrameType, tensor: type) -> str | None:
    """Describe the part for which the update at the frame's instruction has no effect.

    Return None if the update has an effect, as far as the source shows."""
    code = frame.f_code
    body = _body_of(code, "".join(linecache.getlines(code.co_filename, frame.f_globals)))
    nodes = list(_own_nodes(body))
    line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
    for node in nodes:
        if (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) == (line, column):
            target = node.target if isinstance(node, ast.AugAssign) else node
            name = getattr(target.value if isinstance(target, ast.Subscript) else target, "id", "")
            if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                return None if _may_leave(nodes, name) else f"a temporary, the argument {name!r}"
            if name:
                places = {**frame.f_globals, **frame.f_locals}
                wholes = {each for each, value in places.items() if type(value) is tensor}
                return _part_read_later(nodes, name, wholes, frame.f_lineno)
    return None


@memoized(64)
def _body_of(code: CodeType, source: str) -> ast.AST:
    """Return the node of a function or module; an empty node if the source is not known."""
    try:
        with _parsing:
            tree = ast.parse(source)
    except (SyntaxError, SystemError):  # a cell with commands, or another thread that parses
        return ast.Module([], [])
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            if (node.name, first) == (code.co_name, code.co_firstlineno):
                return node
    return ast.Module([], [])


def _own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, except those in nested functions."""
    for child in ast.iter_child_nodes(body):
        yield child
        if not isinstance(child, _INNER):
            yield from _own_nodes(child)


def _may_leave(nodes: Iterable[ast.AST], name: str) -> bool:
    """Return whether the named value may be used after the function.

    The function then returns or yields a value, assigns a new value to the argument, stores it, or
    passes it to a statement or an inner function."""
    for node in nodes:
        stored: list[ast.AST | None] = []
        if isinstance(node, (ast.Yield, ast.YieldFrom)) or (
            isinstance(node, ast.Return) and getattr(node.value, "value", node.value) is not None
        ):
            return True
        if isinstance(node, ast.Assign):
            stored = [node.value, *node.targets]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            stored = [*node.value.args, *node.value.keywords]
        elif isinstance(node, _INNER) and name in _names(node):
            return True
        if any(name in _names(each, _BELOW) for each in stored):
            return True
    return False


def _names(node: ast.AST | None, but: tuple[type[ast.AST], ...] = ()) -> set[str]:
    """Return the names in an expression, except those below nodes of these classes."""
    if isinstance(node, ast.Name):
        return {node.id}
    if node is None or isinstance(node, but):
        return set()
    return {name for each in ast.iter_child_nodes(node) for name in _names(each, but)}


_BELOW: Final = (ast.Subscript, ast.Attribute, ast.BinOp, ast.Call)
"""Expressions with a value that is not an operand."""


def _part_read_later(
    nodes: Iterable[ast.AST], name: str, wholes: set[str], line: int
) -> str | None:
    """Describe the part that the name refers to, as in `t = x.T`, if x is read after the line."""
    nodes = list(nodes)
    for node in nodes:
        if isinstance(node, ast.Assign) and any(name == getattr(x, "id", "") for x in node.targets):
            function = getattr(node.value, "func", node.value)
            if getattr(function, "attr", getattr(function, "id", "")) in _VIEWS:
                wholes = wholes & _names(node.value) - {name}
                for each in nodes:
                    is_read = isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
                    if is_read and each.id in wholes and each.lineno > line:  # type: ignore[attr-defined]
                        return f"a part of {each.id!r}"  # type: ignore[attr-defined]
    return None
