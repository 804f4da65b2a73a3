"""Expressions of a debugger on tensors: `any(isnan(q))`, `max(abs(g)) > 1e3`, `q[0, :3] - %12`.

They are parsed by `ast`, and evaluated here with a fixed list of functions: Python's `eval` is not
used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ArgumentError, MlvmError, brief
from mlvm.core.ops.half import shown
from mlvm.core.types import Array

Lookup = Callable[[str], Array]
"""Function that returns the array with a name such as `q`, `model.w[0]` or `%12`; raises
`LookupError`."""

_Evaluate = Callable[[Lookup], Any]

_REFERENCE: Final = re.compile(r"%(\d+)(?:\.(\d+))?(?![\w.])")

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": np.abs, "all": np.all, "any": np.any, "argmax": np.argmax, "argmin": np.argmin,
    "count": np.count_nonzero, "exp": np.exp, "isfinite": np.isfinite, "isinf": np.isinf,
    "isnan": np.isnan, "log": np.log, "max": np.max, "mean": np.mean, "min": np.min,
    "norm": lambda x: np.sqrt(np.sum(np.square(np.abs(x)))), "shape": np.shape, "size": np.size,
    "sqrt": np.sqrt, "std": np.std, "sum": np.sum,
}  # fmt: skip

_OPERATORS: Final[Mapping[type, Callable[..., Any]]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide,
    ast.Pow: np.power, ast.USub: np.negative, ast.UAdd: np.positive, ast.Not: np.logical_not,
    ast.Invert: np.invert, ast.BitAnd: np.bitwise_and, ast.BitOr: np.bitwise_or,
    ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal,
    ast.Eq: np.equal, ast.NotEq: np.not_equal,
}  # fmt: skip


class Expression:
    """Expression of names, references, numbers, operators and functions.

    text: the original text. names: the names and references in it.

    Raises `ArgumentError` for any other text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(_REFERENCE.sub(r"_ref_\1_\2", text), mode="eval")
            names: dict[str, None] = {}
            self._evaluate = _compiled(tree.body, names)
        except ArgumentError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            is_deep = isinstance(error, RecursionError | MemoryError)
            reason = "too many levels" if is_deep else getattr(error, "msg", None) or str(error)
            raise ArgumentError(f"expected an expression, got {brief(text)}: {reason}") from None
        self.names = tuple(names)

    def value(self, lookup: Lookup) -> Array:
        """Return the value for the arrays that `lookup` returns.

        Raises `ArgumentError` for invalid operands, and the errors of `lookup`.
        """
        try:
            with np.errstate(all="ignore"):
                return np.asarray(self._evaluate(lookup))
        except MlvmError:
            raise
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise ArgumentError(f"{self.text}: {error}") from None


def _compiled(node: ast.expr, names: dict[str, None], depth: int = 0) -> _Evaluate:
    """Check a part of an expression, add the names in it, and return a function that computes it.

    The name of an item, such as `layers[0]`, is looked up before the index is applied.
    """
    if depth > 100:
        raise ArgumentError("expected an expression nested at most 100 deep, got a deeper one")
    name = _name_of(node)
    if name is None:
        return _of_parts(node, names, depth)
    names[name] = None
    item = _of_parts(node, names, depth) if isinstance(node, ast.Subscript) else None

    def evaluate(lookup: Lookup) -> Any:
        try:
            return shown(lookup(name))
        except LookupError:
            if item is None:
                raise
            return item(lookup)

    return evaluate


def _of_parts(node: ast.expr, names: dict[str, None], depth: int) -> _Evaluate:
    """Return the function that computes a number, or applies an operator to its operands."""
    apply: Callable[..., Any]
    match node:
        case ast.Constant(int() | float() as number):
            constant = np.asarray(number)
            return lambda _: constant
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            apply, parts = _OPERATORS[type(op)], [left, right]
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            apply, parts = _OPERATORS[type(op)], [operand]
        case ast.BoolOp(op, parts):
            combine = all if isinstance(op, ast.And) else any
            apply = partial(_combined, combine)
        case ast.Compare(left, ops, others) if all(type(op) in _OPERATORS for op in ops):
            apply, parts = partial(_compared, ops), [left, *others]
        case ast.Call(ast.Name(function), parts, []) if function in _FUNCTIONS:
            apply = _FUNCTIONS[function]
        case ast.Call(ast.Name(function)):
            functions = ", ".join(_FUNCTIONS)
            raise ArgumentError(f"expected one of {functions} without keywords, got {function}")
        case ast.Subscript(value, index):
            apply, parts = partial(_item, _index_of(index)), [value]
        case _:
            got = brief(ast.unparse(node))
            raise ArgumentError(f"expected names, numbers, operators, functions, got {got}")
    operands = [_compiled(part, names, depth + 1) for part in parts]
    return lambda lookup: apply(*[operand(lookup) for operand in operands])


def _combined(combine: Callable[[list[bool]], bool], *values: Any) -> bool:
    return combine([bool(value) for value in values])


def _compared(ops: list[ast.cmpop], *values: Any) -> Any:
    pairs = zip(ops, values, values[1:], strict=False)
    results = [_OPERATORS[type(op)](x, y) for op, x, y in pairs]
    return results[0] if len(results) == 1 else np.logical_and.reduce(results)


def _item(index: Any, value: Any) -> Any:
    return np.asarray(value)[index]


def _name_of(node: ast.expr) -> str | None:
    """Return the name in a part of an expression, such as `q`, `%12` or `net.layers[0].w`."""
    match node:
        case ast.Name(name):
            is_reference = name.startswith("_ref_")
            return f"%{name[5:].rstrip('_').replace('_', '.')}" if is_reference else name
        case ast.Attribute(value, attribute):
            inner = _name_of(value)
            return None if inner is None else f"{inner}.{attribute}"
        case ast.Subscript(value, ast.Constant(int() | str())):
            inner = _name_of(value)
            return None if inner is None else f"{inner}[{ast.unparse(node.slice)}]"
    return None


def _index_of(node: ast.expr) -> Any:
    """Return an index of integers and slices.

    Raises `ArgumentError` for any other index."""
    match node:
        case ast.Tuple(parts):
            return tuple([_index_of(part) for part in parts])
        case ast.Constant(int() as value):
            return value
        case ast.Constant(value) if value is ...:
            return ...
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.Slice(lower, upper, step):
            return slice(*[None if x is None else _index_of(x) for x in (lower, upper, step)])
    raise ArgumentError(f"expected integers and slices as an index, got {brief(ast.unparse(node))}")
