"""Expressions of a debugger on tensors: `any(isnan(q))`, `max(abs(g)) > 1e3`, `q[0, :3] - %12`.

They are parsed by `ast`, and computed by mlvm's functions and operators on a separate VM: Python's
`eval` is not used.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any, Final

import mlvm.eager as ml
from mlvm.core.errors import ArgumentError, MlvmError, brief
from mlvm.core.types import Array, TensorType
from mlvm.eager.runs.cells import array_of
from mlvm.machines.local import LocalVM

Lookup = Callable[[str], Array]
"""Function that returns the array with a name such as `q`, `model.w[0]` or `%12`; raises
`LookupError`."""

_Evaluate = Callable[[Lookup], Any]

_REFERENCE: Final = re.compile(r"%(\d+)(?:\.(\d+))?(?![\w.])")

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(ml, name) for name in (
        "abs", "all", "any", "argmax", "argmin", "exp", "isfinite", "isinf", "isnan", "log", "max",
        "mean", "min", "sqrt", "std", "sum",
    )},
    "count": ml.count_nonzero, "norm": lambda x: ml.sqrt(ml.sum(ml.abs(x) ** 2)),
    "shape": lambda x: x.shape, "size": lambda x: x.size,
}  # fmt: skip

_OPERATORS: Final[Mapping[type, Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.MatMult: operator.matmul,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: ml.logical_not,
    ast.Invert: operator.invert, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Pow: lambda x, y: (float(x) if isinstance(x, int) else x) ** y,
}  # fmt: skip


@cache
def _arena() -> ml.Arena:
    return ml.Arena(LocalVM("expressions"), "expressions")


def _tensor(array: Array) -> ml.Tensor:
    """Return a tensor with the values of the array, which may be packed."""
    x = _arena().alloc(TensorType.of(array), ml.Tensor)
    x.prepare()
    x.tape = None
    x.arena.vm.write(x.handle, array)
    return x


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
            with _arena().allocating():
                return array_of(ml.copy(self._evaluate(lookup)))
        except MlvmError:
            raise
        except (TypeError, ValueError, IndexError, ArithmeticError) as error:
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
            return _tensor(lookup(name))
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
            return lambda _: number
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            apply, parts = _OPERATORS[type(op)], [left, right]
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            apply, parts = _OPERATORS[type(op)], [operand]
        case ast.BoolOp(op, parts):
            combine = all if isinstance(op, ast.And) else any
            apply = partial(_combined, combine)
        case ast.Compare(left, ops, others) if all(type(op) in _OPERATORS for op in ops):
            apply, parts = partial(_compared, ops), [left, *others]
        case ast.Call(ast.Name(function), parts, keywords) if function in _FUNCTIONS:
            options = {str(each.arg): _index_of(each.value) for each in keywords}
            apply = partial(_FUNCTIONS[function], **options)
        case ast.Call(ast.Name(function)):
            raise ArgumentError(f"expected one of {', '.join(_FUNCTIONS)}, got {function}")
        case ast.Subscript(value, index):
            apply, parts = partial(_item, _index_of(index)), [value]
        case _:
            got = brief(ast.unparse(node))
            raise ArgumentError(
                "expected names, numbers, functions, comparisons and the operators + - * / // % ** "
                f"@ ~ & | ^ not and or, got {got}"
            )
    operands = [_compiled(part, names, depth + 1) for part in parts]
    return lambda lookup: apply(*[operand(lookup) for operand in operands])


def _combined(combine: Callable[[list[bool]], bool], *values: Any) -> bool:
    return combine([bool(value) for value in values])


def _compared(ops: list[ast.cmpop], *values: Any) -> Any:
    pairs = zip(ops, values, values[1:], strict=False)
    results = [_OPERATORS[type(op)](x, y) for op, x, y in pairs]
    return reduce(ml.logical_and, results)


def _item(index: Any, value: Any) -> Any:
    return value[index]


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
        case ast.Constant(value) if value in (..., None):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.Slice(lower, upper, step):
            return slice(*[None if x is None else _index_of(x) for x in (lower, upper, step)])
    raise ArgumentError(f"expected integers and slices as an index, got {brief(ast.unparse(node))}")
