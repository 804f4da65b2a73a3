"""The code that reads a tensor's value while a function is traced, and what to write instead.

In: the present position in the user's code. Out: the expression, such as `if x > 0`, and a remedy
for this kind of expression. Both come from the syntax tree of the file. Without the file, the
expression is "" and the remedy is general.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterable
from functools import reduce
from itertools import islice, pairwise
from typing import Final, NamedTuple

from mlvm.core.errors import shortened, user_place
from mlvm.core.memo import memoized
from mlvm.core.op import OPS
from mlvm.eager.recording.lines import traced_line

_GENERAL: Final = "Return the tensor, or branch with ml.where, ml.cond or ml.while_loop"
_OUTSIDE: Final = "Compute with the tensor, or return it and read its value outside"
_INDEX: Final = "Write ml.dynamic_slice(x, start, length) for a slice, or ml.stack(xs)[i]"
_NUMBER: Final = "Pass a Python number, such as x.shape[0], or call it outside"
_PRINT: Final = 'Write ml.debug.print("{}", x), which prints at every call'
_OF_BUILTIN: Final = {
    "float": "ml.astype({}, ml.float32)",
    "int": "ml.astype({}, ml.int64)",
    "bool": "ml.astype({}, bool)",
    "complex": "ml.astype({}, ml.complex64)",
    "sorted": "ml.sort({})",
    "range": "ml.fori_loop(0, {}, body, state)",
    **{name: f"ml.{name}({{}})" for name in ("any", "all", "round", "max", "min")},
}
"""Replacements of builtin functions, in which {} stands for the arguments."""

_MATH: Final = frozenset({"math", "cmath", "np", "numpy"})
_READS: Final = frozenset({"item", "numpy", "tolist"})
_TESTS: Final = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""Instructions that read the truth value of an operand."""

_INDEXING: Final = frozenset({"BINARY_SUBSCR", "BINARY_SLICE", "BINARY_OP", "BUILD_SLICE"})


class Read(NamedTuple):
    """Expression of the user that reads a value, and a remedy."""

    code: str
    remedy: str


def read_here() -> Read:
    """Describe the innermost expression of the user's code that is being evaluated."""
    place = user_place() if traced_line() is None else None
    if place is None:
        return Read("", _GENERAL)
    code, offset = place
    first, last, column, end = next(islice(code.co_positions(), offset // 2, None))
    if first is None or last is None or column is None or end is None:
        return Read("", _GENERAL)
    source = "".join(linecache.getlines(code.co_filename))
    nodes = _around(source, (first, column), (last, end))
    instruction = dis.opname[code.co_code[offset]]
    read = (_of_test if instruction.startswith(_TESTS) else _of_value)(nodes)
    return read or Read("", _INDEX if instruction in _INDEXING else _GENERAL)


@memoized(256)
def syntax_tree(source: str) -> ast.Module | None:
    """Return the syntax tree of a file; None if it cannot be parsed."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _around(source: str, start: tuple[int, int], end: tuple[int, int]) -> list[ast.expr | ast.stmt]:
    """Return the nodes of a file that contain the text between two positions, innermost first."""
    return [
        node
        for node in ast.walk(syntax_tree(source) or ast.Module([], []))
        if isinstance(node, ast.expr | ast.stmt)
        and (node.lineno, node.col_offset) <= start
        and end <= (node.end_lineno or 0, node.end_col_offset or 0)
    ][::-1]


def _of_test(nodes: Iterable[ast.AST]) -> Read | None:
    """Describe a condition, which is the innermost node."""
    test: ast.AST | None = None
    for node in nodes:
        if test is None:
            test = getattr(node, "test", node)  # Python 3.11 locates an assertion as a whole
        if node is test or isinstance(node, ast.BoolOp) or _is_not(node):
            test = node
            continue
        mask = _text(_Masks().visit(test))
        is_test = test is getattr(node, "test", None)
        if isinstance(node, ast.If) and is_test:
            remedy = f"Select with ml.where({mask}, x, y), or branch with ml.cond"
            return Read(f"if {_text(test)}", remedy)
        if isinstance(node, ast.IfExp) and is_test:
            remedy = f"Write ml.where({mask}, {_text(node.body)}, {_text(node.orelse)}), or ml.cond"
            return Read(_text(node), remedy)
        if isinstance(node, ast.While) and is_test:
            remedy = f"Write ml.while_loop(lambda state: {mask}, body, state)"
            return Read(f"while {_text(test)}", remedy)
        if isinstance(node, ast.Assert) and is_test:
            return Read(f"assert {_text(test)}", f'Write ml.check({mask}, "message")')
        changes = mask != _text(test)
        return Read(_text(test), f"Write {mask}" if changes else f"Write ml.where({mask}, x, y)")
    return None


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


class _Masks(ast.NodeTransformer):
    """Replace `and`, `or`, `not` and chained comparisons by operators of masks."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined([self.visit(each) for each in node.values], operator)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        is_not = _is_not(node)
        return ast.UnaryOp(ast.Invert(), self.visit(node.operand)) if is_not else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1:
            return node
        pairs = zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
        return _joined([ast.Compare(x, [op], [y]) for (x, y), op in pairs], ast.BitAnd())

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node


def _joined(parts: list[ast.expr], operator: ast.operator) -> ast.expr:
    return reduce(lambda x, y: ast.BinOp(x, operator, y), parts)


def _of_value(nodes: Iterable[ast.AST]) -> Read | None:
    """Describe the innermost call, index or text."""
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    for node in [*texts[-1:], *nodes]:
        remedy = ""
        if isinstance(node, ast.Call):
            remedy = _remedy_of_call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            remedy = f"Write ml.dynamic_slice({_text(node.value)}, {_rows_of(node.slice)})"
        elif isinstance(node, ast.Subscript):
            remedy = f"Write ml.stack({_text(node.value)})[{_text(node.slice)}]"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            remedy = f"Write ml.isin({_text(node.left)}, {_text(node.comparators[0])})"
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        ):
            remedy = _PRINT
        if remedy:
            return Read(_text(node), remedy)
    return None


def _rows_of(rows: ast.Slice) -> str:
    """Return the start and the length of a slice such as `i : i + 2`."""
    end = rows.upper
    if rows.lower is None or not isinstance(end, ast.BinOp) or not isinstance(end.op, ast.Add):
        return "start, length"
    start = _text(rows.lower)
    return f"{start}, {_text(end.right)}" if start == _text(end.left) else "start, length"


def _remedy_of_call(call: ast.Call) -> str:
    arguments = ", ".join(map(_text, call.args))
    if isinstance(call.func, ast.Name):
        other = _OF_BUILTIN.get(call.func.id)
        if call.func.id in ("max", "min") and len(call.args) > 1:
            other = f"ml.{call.func.id}imum({{}})"
        return f"Write {other.format(arguments)}" if other else _OUTSIDE
    if isinstance(call.func, ast.Attribute):
        if call.func.attr == "format":
            return _PRINT
        if _text(call.func.value) in _MATH:
            name = call.func.attr
            return f"Write ml.{name}({arguments})" if name in OPS else _OUTSIDE
        if call.func.attr not in _READS:
            return _NUMBER
    return _OUTSIDE


def _text(node: ast.AST) -> str:
    return shortened(ast.unparse(node), 80)
