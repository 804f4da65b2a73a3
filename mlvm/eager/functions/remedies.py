"""Remedies for expressions that read a tensor's value while a function is traced.

In: the syntax tree nodes around the expression, innermost first. Out: the text of the expression,
such as `if x > 0`, and a remedy for this kind of expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import reduce
from inspect import signature
from itertools import pairwise
from pkgutil import resolve_name
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple, cast

from mlvm.core.errors import shortened
from mlvm.eager.tensor.values import module_of

GENERAL: Final = "Return the tensor, or branch with ml.where, ml.cond or ml.while_loop"
_OUTSIDE: Final = "Compute with the tensor, or return it and read its value outside"
_LENGTH: Final = (
    "No shape may depend on a tensor's value: write ml.dynamic_slice(x, start, 2) for a fixed "
    "length, or ml.where(ml.arange(len(x)) < n, x, 0) for a mask"
)
INDEX: Final = "Write ml.dynamic_slice(x, start, length) for a slice, or ml.stack(xs)[i]"
_NUMBER: Final = (
    "No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], "
    "or call it outside"
)
_PRINT: Final = 'Write ml.debug.print("{}", x), which prints at every call'
TEXT: Final = (
    "Compare the tensor itself, as in ml.all(x == y), or print it with "
    'ml.debug.print("{}", x), which prints at every call'
)
FROM_BODY: Final = (
    "Return the tensor from there. ml.scan stacks the second result of its body over all "
    "iterations: ml.scan(lambda s, i: (s * 2, s), x, ml.arange(3))"
)
_OF_BUILTIN: Final = {
    "float": "ml.astype({}, ml.float32)",
    "int": "ml.astype({}, ml.int64)",
    "bool": "ml.astype({}, bool)",
    "complex": "ml.astype({}, ml.complex64)",
    "sorted": "ml.sort({})",
    **{name: f"ml.{name}({{}})" for name in ("any", "all", "round", "max", "min")},
}
"""Replacements of builtin functions, in which {} stands for the arguments."""

_LANGUAGE: Final = __name__.rpartition(".functions.")[0]
_LIBRARIES: Final = frozenset({"math", "cmath", "numpy", "scipy", "torch", "jax"})
"""Libraries with functions that mlvm has as well."""

_READS: Final = frozenset({"item", "numpy", "tolist"})


class Read(NamedTuple):
    """Expression of the user that reads a value, a remedy, and the line if it is known."""

    code: str
    remedy: str
    where: str = ""


def of_test(nodes: Iterable[ast.AST]) -> Read | None:
    """Describe a condition, which is the innermost node."""
    test: ast.AST | None = None
    for node in nodes:
        if test is None:
            test = getattr(node, "test", node)  # Python 3.11 locates an assertion as a whole
        if node is test or isinstance(node, ast.BoolOp) or _is_not(node):
            test = node
            continue
        if isinstance(node, ast.Match) and _is_pattern(test, node):
            mask = f"{_text(node.subject)} == {_text(test)}"
            remedy = f"Select with ml.where({mask}, x, y), or branch with ml.cond"
            return Read(f"match {_text(node.subject)}", remedy)
        mask = _text(_Masks().mask(test))
        is_test = test is getattr(node, "test", None)
        if isinstance(node, ast.If) and is_test:
            remedy = f"Select with ml.where({mask}, x, y), or branch with ml.cond"
            return Read(f"if {_text(test)}", remedy)
        if isinstance(node, ast.IfExp) and is_test:
            remedy = f"Write ml.where({mask}, {_text(node.body)}, {_text(node.orelse)}), or ml.cond"
            return Read(_text(node), remedy)
        if isinstance(node, ast.While) and is_test:
            state = _changed(node) or "state"
            remedy = f"Write ml.while_loop(lambda {state}: {mask}, body, {state})"
            return Read(f"while {_text(test)}", remedy)
        if isinstance(node, ast.Assert) and is_test:
            return Read(f"assert {_text(test)}", f'Write ml.check({mask}, "message")')
        is_joined = _is_not(test) or isinstance(test, ast.BoolOp)
        is_joined = is_joined or (isinstance(test, ast.Compare) and len(test.ops) > 1)
        return Read(_text(test), f"Write {mask}" if is_joined else f"Write ml.where({mask}, x, y)")
    return None


def _is_pattern(test: ast.AST, node: ast.Match) -> bool:
    return any(test in ast.walk(case.pattern) for case in node.cases)


def _changed(loop: ast.While) -> str:
    """Return the variable of the condition that the body assigns, if it is only one."""
    within = [name for line in loop.body for name in ast.walk(line) if isinstance(name, ast.Name)]
    assigned = {name.id for name in within if isinstance(name.ctx, ast.Store)}
    names = {name.id for name in ast.walk(loop.test) if isinstance(name, ast.Name)} & assigned
    return names.pop() if len(names) == 1 else ""


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


class _Masks(ast.NodeTransformer):
    """Replace `and`, `or`, `not` and chained comparisons by operators of masks."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined([self.mask(each) for each in node.values], operator)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        is_not = _is_not(node)
        return ast.UnaryOp(ast.Invert(), self.mask(node.operand)) if is_not else node

    def mask(self, node: ast.AST) -> Any:
        """Return the operand, compared with 0 if it may be a number."""
        if _is_not(node) or isinstance(node, ast.Compare | ast.BoolOp):
            return self.visit(node)
        name = (
            node.func.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            else ""
        )
        is_mask = name in ("any", "all") or name.startswith(("is", "logical_"))
        return (
            node if is_mask else ast.Compare(cast(ast.expr, node), [ast.NotEq()], [ast.Constant(0)])
        )

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1:
            return node
        pairs = zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
        return _joined([ast.Compare(x, [op], [y]) for (x, y), op in pairs], ast.BitAnd())

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node


def _joined(parts: list[ast.expr], operator: ast.operator) -> ast.expr:
    return reduce(lambda x, y: ast.BinOp(x, operator, y), parts)


def of_value(nodes: Iterable[ast.AST], frame: FrameType) -> Read | None:
    """Describe the innermost call, index or text."""
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    printed = [call for call in calls if _text(call.func) == "print"]
    if printed and not texts:
        return Read(_text(printed[0]), _PRINT)
    for node in [*texts[-1:], *nodes]:
        remedy = ""
        if isinstance(node, ast.Call):
            remedy = _remedy_of_call(node, frame)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            rows = _rows_of(node.slice)
            remedy = f"Write ml.dynamic_slice({_text(node.value)}, {rows})" if rows else _LENGTH
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
    """Return the start and the length of a slice such as `i : i + 2`; "" of other slices."""
    end = rows.upper
    if rows.lower is None or not isinstance(end, ast.BinOp) or not isinstance(end.op, ast.Add):
        return ""
    start = _text(rows.lower)
    return f"{start}, {_text(end.right)}" if start == _text(end.left) else ""


def _remedy_of_call(call: ast.Call, frame: FrameType) -> str:
    arguments = ", ".join(map(_text, [*call.args, *call.keywords]))
    library, _, name = _path_of(call.func, frame).partition(".")
    if library in _LIBRARIES:
        return _in_language(name, call, arguments)
    if isinstance(call.func, ast.Name):
        other = _OF_BUILTIN.get(call.func.id)
        if call.func.id == "range" and len(call.args) < 3:
            start = "0, " if len(call.args) == 1 else ""
            other = f"ml.fori_loop({start}{{}}, body, state)"
        if call.func.id in ("max", "min") and len(call.args) > 1:
            other = f"ml.{call.func.id}imum({{}})"
        return f"Write {other.format(arguments)}" if other else _OUTSIDE
    if isinstance(call.func, ast.Attribute):
        if call.func.attr == "format":
            return _PRINT
        if call.func.attr not in _READS and library in ("", "mlvm"):
            return _NUMBER
    return _OUTSIDE


def _path_of(function: ast.AST, frame: FrameType) -> str:
    """Return the path of a function, such as "numpy.linalg.norm"; "" if it has no name."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.insert(0, function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    first = function.id
    value: Any = frame.f_locals.get(first, frame.f_globals.get(first))
    if isinstance(value, ModuleType):
        return ".".join([value.__name__, *names])
    return "" if names else f"{module_of(value)}.{getattr(value, '__name__', '')}"


def _in_language(path: str, call: ast.Call, arguments: str) -> str:
    """Return what replaces the call of a function of a different library, by its path there."""
    if path in ("array", "asarray") and call.args and isinstance(call.args[0], ast.List):
        nested = any(isinstance(each, ast.List) for each in call.args[0].elts)
        return f"Write ml.{'asarray' if nested else 'stack'}({_text(call.args[0])})"
    for name in (path, path.rpartition(".")[2]):
        try:
            resolve_name(f"{_LANGUAGE}:{name}")
        except AttributeError as error:  # it contains the hint for this name
            hint = str(error).partition("; ")[2]
            name = (re.fullmatch(r"use ml\.([\w.]+)", hint) or ("", ""))[1]
            if hint and not name:
                return _OUTSIDE if "numpy" in hint else hint[0].upper() + hint[1:]
        if name and name not in ("asarray", "save"):
            keywords = {each.arg: each for each in call.keywords if each.arg}
            is_same = name[:7] != "random."  # there the first argument is the shape
            try:
                signature(resolve_name(f"{_LANGUAGE}:{name}")).bind(*call.args, **keywords)
            except TypeError:
                is_same = False
            return f"Write ml.{name}({arguments})" if is_same else f"Use ml.{name}"
    return _OUTSIDE


def _text(node: ast.AST) -> str:
    return shortened(ast.unparse(node), 80)
