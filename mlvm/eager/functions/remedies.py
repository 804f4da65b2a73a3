"""Remedies for expressions that read a tensor's value while a function is traced.

In: the syntax tree nodes around the expression, innermost first. Out: the text of the expression,
such as `if x > 0`, and a remedy for this kind of expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from copy import copy
from functools import reduce
from itertools import pairwise
from pkgutil import resolve_name
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple, cast

import numpy as np

from mlvm.core.errors import CaptureError, OpError, shortened
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.values import module_of

GENERAL: Final = "Return the tensor, or branch with ml.where, ml.cond or ml.while_loop"
_OUTSIDE: Final = "Compute with the tensor, or return it and read its value outside"
_SELECT: Final = "Select with ml.where, or branch with ml.cond"
_LENGTH: Final = (
    "No shape may depend on a tensor's value: use ml.dynamic_slice for a fixed length, or ml.where "
    "with a mask of ml.arange"
)
INDEX: Final = (
    "Write ml.dynamic_slice(x, start, length) for a slice; index with ml.stack(xs)[i] if all items "
    "have one shape, or branch with ml.switch"
)
_STORED: Final = (
    "Select the new value with ml.where and a mask of ml.arange, or pass a Python number as index"
)
_OF_ARRAY: Final = "Make the array a tensor, for example with ml.asarray"
_MEMBER: Final = "Use ml.isin, with a tensor of all elements"
_NUMBER: Final = (
    "No shape or option may depend on a tensor's value: pass a Python number, such as x.shape[0], "
    "or int(n) for an argument n of NumPy, or call it outside"
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
}
"""Replacements of builtin functions, in which {} stands for the argument."""

_OF_ROWS: Final = {"sorted": "sort", **{name: name for name in ("any", "all", "max", "min")}}
_PURE: Final = frozenset({"len", "abs", "range", "min", "max", "sum", "list", "tuple", "float"})
"""Builtin functions without effects."""

_EFFECTS: Final = frozenset({"random", "debug", "check", "save", "load"})
"""Functions and modules of libraries with effects."""

_DIFFERENT: Final = {
    "math.isclose": "Use ml.isclose with rtol=1e-9 and atol=0, the defaults of math.isclose",
    "math.remainder": _OUTSIDE,
}
"""Functions of libraries whose namesakes in mlvm have different values."""

_LANGUAGE: Final = __name__.rpartition(".functions.")[0]
_LIBRARIES: Final = frozenset({"math", "cmath", "numpy", "scipy", "torch", "jax"})
"""Libraries with functions that mlvm has as well."""

_NUMERIC: Final = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_READS: Final = frozenset({"item", "numpy", "tolist"})


class Read(NamedTuple):
    """Expression of the user that reads a value, a remedy, and the line if it is known."""

    code: str
    remedy: str
    where: str = ""


def of_test(nodes: Iterable[ast.AST], frame: FrameType) -> Read | None:
    """Describe a condition, which is the innermost node."""
    test: ast.AST | None = None
    masks = _Masks(frame)
    for node in nodes:
        if test is None:
            test = getattr(node, "test", node)  # Python 3.11 locates an assertion as a whole
            masks.read = test.operand if isinstance(test, ast.UnaryOp) and _is_not(test) else test
        if node is test or isinstance(node, ast.BoolOp) or _is_not(node):
            test = node
            continue
        if isinstance(node, ast.Match) and test is not None and _is_pattern(test, node):
            subject = _text(node.subject)
            is_value = any(_is_literal(test, case.pattern) for case in node.cases)
            mask = f"{subject} == {_text(test)}" if is_value else ""
            return Read(f"match {subject}", _selected(mask))
        mask = masks.text(test)
        is_test = test is getattr(node, "test", None)
        if isinstance(node, ast.If) and is_test:
            return Read(f"if {_text(test)}", _selected(mask))
        if isinstance(node, ast.IfExp) and is_test:
            is_same = mask and _shape(node.body, frame) == _shape(node.orelse, frame) is not None
            code = f"ml.where({mask}, {ast.unparse(node.body)}, {ast.unparse(node.orelse)})"
            remedy = _written(code, frame, "") if is_same else ""
            return Read(_text(node), f"{remedy}, or ml.cond" if remedy else _selected(mask))
        if isinstance(node, ast.While) and is_test:
            return Read(f"while {_text(test)}", _remedy_of_loop(node, masks))
        if isinstance(node, ast.Assert) and is_test:
            return Read(f"assert {_text(test)}", f'Write ml.check({mask or "mask"}, "message")')
        is_joined = not isinstance(test, ast.Compare) or len(test.ops) > 1
        if masks.is_mask(test) and is_joined:
            return Read(_text(test), f"Write {mask}" if mask else _SELECT)
        if isinstance(test, ast.BoolOp):
            return Read(_text(test), _remedy_of_choice(test, masks))
        return Read(_text(test), _selected(mask))
    return None


def _selected(mask: str) -> str:
    return f"Select with ml.where({mask}, x, y), or branch with ml.cond" if mask else _SELECT


def _remedy_of_choice(node: ast.BoolOp, masks: _Masks) -> str:
    """Return what replaces `x or y` and `x and y`, whose value is one of the operands."""
    x, y = node.values[0], node.values[-1]
    mask, first = masks.text(x), _shape(x, masks.frame)
    if len(node.values) > 2 or not mask or first is None or first != _shape(y, masks.frame):
        return _SELECT
    either = (y, x) if isinstance(node.op, ast.And) else (x, y)
    code = f"ml.where({mask}, {', '.join(map(ast.unparse, either))})"
    return _written(code, masks.frame, _SELECT)


def _remedy_of_loop(loop: ast.While, masks: _Masks) -> str:
    """Return the call of `while_loop` with the variables that the body assigns as the state."""
    inner = [each for line in loop.body for each in ast.walk(line)]
    stored = [x.id for x in inner if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    state = [name for name in dict.fromkeys(stored) if name in masks.frame.f_locals]
    test = masks.mask(loop.test) if masks.text(loop.test) else loop.test
    used = [x for x in ast.walk(test) if isinstance(x, ast.Name) and x.id in state]
    if not masks.text(loop.test) or not used:
        return "Use ml.while_loop, with the variables that its body changes as the state"
    if len(state) == 1:
        return f"Write ml.while_loop(lambda {state[0]}: {_text(test)}, body, {state[0]})"
    code = ast.unparse(_Items(state).visit(ast.parse(ast.unparse(test))))
    return f"Write ml.while_loop(lambda state: {code}, body, ({', '.join(state)}))"


class _Items(ast.NodeTransformer):
    """Replace variables by the items of a state that contains them."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names:
            return node
        position = ast.Constant(self._names.index(node.id))
        return ast.Subscript(ast.Name("state", ast.Load()), position, ast.Load())


def _is_pattern(test: ast.AST, node: ast.Match) -> bool:
    return any(test in ast.walk(case.pattern) for case in node.cases)


def _is_literal(test: ast.AST, pattern: ast.pattern) -> bool:
    """Return whether the subject as a whole is compared with this expression."""
    either = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    return any(isinstance(each, ast.MatchValue) and each.value is test for each in either)


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


class _Masks(ast.NodeTransformer):
    """Replace `and`, `or`, `not` and chained comparisons by operators of masks."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.read: ast.AST | None = None
        """The expression whose truth value is read: a tensor of one element."""

    def text(self, node: ast.AST) -> str:
        """Return the mask of a condition as text, or "" if an operand may be no number."""
        try:
            code = ast.unparse(self.mask(node))
        except LookupError:
            return ""
        return code if len(code) <= 80 else ""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined([self.mask(each) for each in node.values], operator)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        inner = node.operand
        mask = self.mask(inner)
        if inner is self.read or isinstance(_value(ast.unparse(inner), self.frame), Tensor):
            return ast.UnaryOp(ast.Invert(), mask)
        return ast.Call(ast.Name("ml.logical_not"), [mask], [])  # ~ of a bool is an int

    def is_mask(self, node: ast.AST) -> bool:
        """Return whether a test has a mask as its value."""
        if isinstance(node, ast.BoolOp):
            return all(map(self.is_mask, node.values))
        return _is_not(node) or isinstance(node, ast.Compare)

    def mask(self, node: ast.AST) -> Any:
        """Return the operand, compared with 0 if it may be a number.

        Raises `LookupError` if it may be no number."""
        if _is_not(node) or isinstance(node, ast.Compare | ast.BoolOp):
            return self.visit(node)
        function = node.func if isinstance(node, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if name in ("any", "all") or name.startswith(("is", "logical_")):
            return node
        if node is not self.read and _shape(node, self.frame) != ():
            raise LookupError
        return ast.Compare(cast(ast.expr, node), [ast.NotEq()], [ast.Constant(0)])

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
            if (read := _of_number(node, nodes, frame)) is not None:
                return read
            remedy = _remedy_of_call(node, frame)
        elif isinstance(node, ast.Subscript):
            remedy = _remedy_of_index(node, frame)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            remedy = _remedy_of_member(node, frame)
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        ):
            remedy = _PRINT
        if remedy:
            return Read(_text(node), remedy)
    return None


def _of_number(call: ast.Call, nodes: Iterable[ast.AST], frame: FrameType) -> Read | None:
    """Describe the condition that reads a number, such as `if float(x) > 0`."""
    read: ast.AST = call
    tensor = call.args[0] if len(call.args) == 1 and _text(call.func) in _OF_BUILTIN else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "item":
        tensor = call.func.value
    if tensor is None:
        return None
    for node in nodes:
        if getattr(node, "test", None) is read:
            code = ast.unparse(read).replace(ast.unparse(call), f"({ast.unparse(tensor)})")
            test, changed = ast.parse(code, mode="eval").body, copy(node)
            vars(changed)["test"] = test
            whole, part = of_test([read, node], frame), of_test([test, changed], frame)
            return Read(whole.code, part.remedy) if whole and part else None
        is_comparison = isinstance(node, ast.Compare) and isinstance(node.ops[0], _NUMERIC)
        if is_comparison or isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp):
            read = node
    return None


def _value(code: str, frame: FrameType) -> Any:
    """Evaluate an expression again; return the error if it fails, or if it may have effects.

    The trace that contains the read fails anyway."""
    names = {**frame.f_globals, **frame.f_locals, "ml": resolve_name(_LANGUAGE)}
    try:
        tree = ast.parse(code, mode="eval")
        if any(_has_effects(each, frame) for each in ast.walk(tree)):
            return LookupError(code)
        return eval(compile(tree, "<remedy>", "eval"), names)
    except Exception as error:
        return error


def _has_effects(node: ast.AST, frame: FrameType) -> bool:
    """Return whether this node may call a function of the user, or have different effects."""
    if isinstance(node, ast.Name) and isinstance(_named(node.id, frame), FunctionType):
        return not _is_pure(node, frame)  # a call could call it
    if isinstance(node, ast.Call):
        writes = any(each.arg == "out" for each in node.keywords)
        return writes or not _is_pure(node.func, frame)
    return isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda)


def _is_pure(function: ast.AST, frame: FrameType) -> bool:
    if isinstance(function, ast.Name) and function.id in _PURE:
        return True
    owner = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(owner, ast.Name) and isinstance(_named(owner.id, frame), Tensor):
        return ast.unparse(function)[-1] != "_"
    names = _path_of(function, frame).split(".")
    has_namesake = hasattr(resolve_name(_LANGUAGE), names[-1])  # unlike numpy.copyto
    is_known = names[0] == "mlvm" or (names[0] in _LIBRARIES and has_namesake)
    return is_known and _EFFECTS.isdisjoint(names)


def _shape(node: ast.AST, frame: FrameType) -> tuple[int, ...] | None:
    """Return the shape of a tensor or number; None if the expression has a different value."""
    value = _value(ast.unparse(node), frame)
    if isinstance(value, Tensor):
        return value.shape
    return () if isinstance(value, int | float | complex) else None


def _written(code: str, frame: FrameType, otherwise: str) -> str:
    """Return the remedy to write this expression, if it runs here and is not long."""
    value = _value(code, frame)
    parts = value if isinstance(value, tuple | list) else (value,)
    is_result = all(isinstance(each, Tensor | int | float | complex) for each in parts)
    return f"Write {code}" if is_result and len(code) <= 100 else otherwise


def _remedy_of_index(node: ast.Subscript, frame: FrameType) -> str:
    owner = ast.unparse(node.value)
    value = _value(owner, frame)
    if not isinstance(node.ctx, ast.Load):
        return _OF_ARRAY if isinstance(value, np.ndarray) else _STORED
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if any(isinstance(each, ast.Slice) for each in parts):
        moved = [i for i, each in enumerate(parts) if ast.unparse(each) != ":"]
        is_last = ast.unparse(parts[0]) == "..."
        moved = moved[1:] if is_last else moved
        part = parts[moved[0]] if len(moved) == 1 else None
        rows = _rows_of(part) if isinstance(part, ast.Slice) else ""
        axis = moved[0] - len(parts) * is_last if rows else 0
        code = f"ml.dynamic_slice({owner}, {rows}{f', axis={axis}' if axis else ''})"
        return _written(code, frame, _LENGTH) if rows and isinstance(value, Tensor) else _LENGTH
    name = "asarray" if isinstance(value, np.ndarray) else "stack"
    if not isinstance(value, np.ndarray | list | tuple):
        return INDEX
    code = ast.unparse(ast.Subscript(ast.Name(f"ml.{name}({owner})"), node.slice))
    return _written(code, frame, INDEX)


def _remedy_of_member(node: ast.Compare, frame: FrameType) -> str:
    right = node.comparators[0]
    value = _value(ast.unparse(right), frame)
    if len(node.ops) > 1 or _shape(node.left, frame) is None:
        return _MEMBER
    code = f"ml.isin({ast.unparse(node.left)}, {ast.unparse(right)})"
    if isinstance(value, Tensor):
        code = f"ml.any({ast.unparse(ast.Compare(right, [ast.Eq()], [node.left]))})"
    elif not isinstance(value, list | tuple) or _shape(node.left, frame) != ():
        return _MEMBER
    is_not = isinstance(node.ops[0], ast.NotIn)
    return _written(f"~{code}" if is_not else code, frame, _MEMBER)


def _rows_of(rows: ast.Slice) -> str:
    """Return the start and the length of a slice such as `i : i + 2`; "" of other slices."""
    end = rows.upper
    if rows.lower is None or rows.step or not isinstance(end, ast.BinOp):
        return ""
    start = ast.unparse(rows.lower)
    is_sum = isinstance(end.op, ast.Add) and start == ast.unparse(end.left)
    return f"{start}, {ast.unparse(end.right)}" if is_sum else ""


def _remedy_of_call(call: ast.Call, frame: FrameType) -> str:
    path = _path_of(call.func, frame)
    library, _, name = path.partition(".")
    if library in _LIBRARIES:
        return _DIFFERENT.get(path) or _in_language(name, call, frame)
    if isinstance(call.func, ast.Name):
        return _remedy_of_builtin(call.func.id, call, frame)
    if isinstance(call.func, ast.Attribute):
        if call.func.attr == "format":
            return _PRINT
        if call.func.attr not in _READS and library in ("", "mlvm"):
            return _NUMBER
    return _OUTSIDE


def _remedy_of_builtin(name: str, call: ast.Call, frame: FrameType) -> str:
    texts = [ast.unparse(each) for each in call.args]
    is_plain = not call.keywords and not any(isinstance(x, ast.Starred) for x in call.args)
    if name == "range" and is_plain and len(texts) < 3:
        bounds = ", ".join(["0", *texts][-2:])
        return f"Write ml.fori_loop({bounds}, body, state)"
    if name == "round":
        return _written(f"ml.round({', '.join(texts)})", frame, "Use ml.round")
    if name in _OF_BUILTIN and is_plain and len(texts) == 1:
        return f"Write {_OF_BUILTIN[name].format(*texts)}"
    if name not in _OF_ROWS:
        return _OUTSIDE
    other = f"ml.{_OF_ROWS[name]}"
    if is_plain and len(texts) > 1 and name in ("max", "min"):
        return f"Write {reduce(lambda x, y: f'{other}imum({x}, {y})', texts)}"
    value = _value(texts[0], frame) if is_plain and len(texts) == 1 else None
    if isinstance(value, Tensor) and value.ndim == 1:
        return _written(f"{other}({texts[0]})", frame, f"Use {other}")
    if isinstance(value, list | tuple) and name != "sorted":
        return _written(f"{other}(ml.stack({texts[0]}))", frame, f"Use {other}")
    return f"Use {other}"


def _named(name: str, frame: FrameType) -> Any:
    if name == "ml":
        return resolve_name(_LANGUAGE)
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _path_of(function: ast.AST, frame: FrameType) -> str:
    """Return the path of a function, such as "numpy.linalg.norm"; "" if it has no name."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.insert(0, function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    value = _named(function.id, frame)
    if isinstance(value, ModuleType):
        return ".".join([value.__name__, *names])
    return "" if names else f"{module_of(value)}.{getattr(value, '__name__', '')}"


def _in_language(path: str, call: ast.Call, frame: FrameType) -> str:
    """Return what replaces the call of a function of a different library, by its path there."""
    arguments = ", ".join(map(ast.unparse, [*call.args, *call.keywords]))
    if path in ("array", "asarray") and call.args and isinstance(call.args[0], ast.List):
        nested = any(isinstance(each, ast.List) for each in call.args[0].elts)
        name = "asarray" if nested else "stack"
        return _written(f"ml.{name}({arguments})", frame, f"Use ml.{name}")
    for name in (path, path.rpartition(".")[2]):
        try:
            resolve_name(f"{_LANGUAGE}:{name}")
        except AttributeError as error:  # it contains the hint for this name
            hint = str(error).partition("; ")[2]
            name = (re.fullmatch(r"use ml\.([\w.]+)", hint) or ("", ""))[1]
            if hint and not name:
                if "numpy" in hint:
                    return _OUTSIDE
                adapted = re.sub("^(write|use) ", "adapt this: ", hint)
                return adapted[0].upper() + adapted[1:]
        if name and name not in ("asarray", "save"):
            if name[:7] == "random.":  # there the first argument is the shape
                return f"Use ml.{name}"
            code = f"ml.{name}({arguments})"
            value = _value(code, frame)
            if isinstance(value, CaptureError):
                return _NUMBER.replace("call it", f"call ml.{name}")
            reason = value.reason if isinstance(value, OpError) else ""
            reason = f": {reason}" if reason.startswith("expected") else ""
            return _written(code, frame, f"Use ml.{name}{reason}")
    return _OUTSIDE


def _text(node: ast.AST) -> str:
    return shortened(ast.unparse(node), 80)
