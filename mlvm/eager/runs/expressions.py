"""Expressions of a debugger on tensors: `any(isnan(q))`, `max(abs(g)) > 1e3`, `q[0, :3] - %12`.

They are parsed by `ast`, and evaluated here with a fixed list of functions: Python's `eval` is not
used.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from mlvm.core.errors import ArgumentError, MlvmError, brief
from mlvm.core.ops.half import shown
from mlvm.core.types import Array

Lookup = Callable[[str], Array]
"""Function that returns the array with a name such as `q`, `model.w[0]` or `%12`; raises
`LookupError`."""

_REFERENCE: Final = re.compile(r"%(\d+)(?:\.(\d+))?(?![\w.])")
_MOST: Final = 10_000  # maximum number of characters

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
    ast.And: operator.and_, ast.Or: operator.or_,
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
        if len(text) > _MOST:
            raise ArgumentError(
                f"expected an expression of at most {_MOST:,} characters, got {len(text)}"
            )
        try:
            tree = ast.parse(_REFERENCE.sub(r"_ref_\1_\2", text), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or type(error).__name__
            raise ArgumentError(f"expected an expression, got {brief(text)}: {reason}") from None
        self._tree = tree.body
        self.names = tuple(dict.fromkeys(self._names(self._tree, 0)))

    def value(self, lookup: Lookup) -> Array:
        """Return the value for the arrays that `lookup` returns.

        Raises `ArgumentError` for invalid operands, and the errors of `lookup`.
        """
        try:
            with np.errstate(all="ignore"):
                return np.asarray(self._value(self._tree, lookup))
        except MlvmError:
            raise
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise ArgumentError(f"{self.text}: {error}") from None

    def _names(self, node: ast.expr, depth: int) -> Iterator[str]:
        """Yield the names in a part of the expression, and check the part."""
        if depth > 100:
            raise ArgumentError("expected an expression nested at most 100 deep, got a deeper one")
        if (name := _name_of(node)) is not None:
            yield name
            if not isinstance(node, ast.Subscript):
                return
        match node:
            case ast.Constant(int() | float()):
                parts: list[ast.expr] = []
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                parts = [left, right]
            case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
                parts = [operand]
            case ast.BoolOp(_, parts):
                pass
            case ast.Compare(left, ops, others) if all(type(op) in _OPERATORS for op in ops):
                parts = [left, *others]
            case ast.Call(ast.Name(function), parts, []) if function in _FUNCTIONS:
                pass
            case ast.Call(ast.Name(function)):
                names = ", ".join(_FUNCTIONS)
                raise ArgumentError(f"expected one of {names} without keywords, got {function}")
            case ast.Subscript(value, index):
                parts = [value]
                _index_of(index)
            case _:
                got = brief(ast.unparse(node))
                raise ArgumentError(f"expected names, numbers, operators, functions, got {got}")
        for part in parts:
            yield from self._names(part, depth + 1)

    def _value(self, node: ast.expr, lookup: Lookup) -> Any:
        if (name := _name_of(node)) is not None and (
            isinstance(node, ast.Name | ast.Attribute) or _is_found(name, lookup)
        ):
            return shown(lookup(name))
        match node:
            case ast.Constant(value):
                return np.asarray(value)
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)](self._value(left, lookup), self._value(right, lookup))
            case ast.UnaryOp(op, operand):
                return _OPERATORS[type(op)](self._value(operand, lookup))
            case ast.BoolOp(op, parts):
                values = [bool(self._value(part, lookup)) for part in parts]
                return all(values) if isinstance(op, ast.And) else any(values)
            case ast.Compare(left, ops, others):
                values = [self._value(each, lookup) for each in (left, *others)]
                pairs = zip(ops, values, values[1:], strict=False)
                results = [_OPERATORS[type(op)](x, y) for op, x, y in pairs]
                return results[0] if len(results) == 1 else np.logical_and.reduce(results)
            case ast.Call(ast.Name(function), parts):
                return _FUNCTIONS[function](*[self._value(part, lookup) for part in parts])
            case ast.Subscript(value, index):
                return np.asarray(self._value(value, lookup))[_index_of(index)]
        raise ArgumentError(f"expected an expression, got {brief(self.text)}")


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


def _is_found(name: str, lookup: Lookup) -> bool:
    try:
        lookup(name)
    except LookupError:
        return False
    return True


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
