"""Control flow: branches and loops whose course depends on values.

Names and meaning are JAX's (`jax.lax`). Eagerly they are what they look like: Python's own `if` and
`for` over eager calls. State, operands and results are trees of tensors; numbers and arrays among
them become tensors. What goes round in a loop keeps its structure and its types.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

from mlvm.core.errors import AttributeRefused, DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.types import TensorType
from mlvm.eager.creation import asarray, zeros
from mlvm.eager.functions import stack
from mlvm.eager.indexing import getitem
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import Tree, leaves, map_tree, replace

__all__ = ["cond", "fori_loop", "function", "map", "scan", "switch", "while_loop"]

P = ParamSpec("P")
R = TypeVar("R")

Body: TypeAlias = Callable[..., Any]

_NUMBERS: Final = (bool, int, float, np.ndarray, np.generic)


def cond(pred: Tensor | bool, true_fun: Body, false_fun: Body, *operands: Tree) -> Any:
    """`true_fun(*operands)` if `pred` is true, `false_fun(*operands)` if not.

    Raises `ShapeError` for a `pred` of more elements than one.
    """
    return true_fun(*operands) if bool(pred) else false_fun(*operands)


def switch(index: Tensor | int, branches: Sequence[Body], *operands: Tree) -> Any:
    """`branches[index](*operands)`; of an index out of range, the nearest branch.

    Raises `AttributeRefused` without branches, `DTypeError` for an index that is no integer.
    """
    if not branches:
        raise AttributeRefused("switch takes one branch or more")
    return branches[min(max(_integer("index", index), 0), len(branches) - 1)](*operands)


def while_loop(cond_fun: Body, body_fun: Body, init_val: Tree) -> Tree:
    """The state when `cond_fun(state)` is false for the first time: `init_val` at first, then
    `body_fun(state)` again and again.

    Raises `ShapeError` or `DTypeError` where the body changes a type, or the structure.
    """
    state = as_tree(init_val)
    while bool(cond_fun(state)):
        state = next_state(state, body_fun(state))
    return state


def fori_loop(lower: Tensor | int, upper: Tensor | int, body_fun: Body, init_val: Tree) -> Tree:
    """The state after `state = body_fun(i, state)` for each i of `lower` .. `upper - 1`, from
    `init_val` on. `i` is an i64[].

    Raises `DTypeError` for bounds that are no integers, and what `while_loop` raises.
    """
    state = as_tree(init_val)
    for i in range(_integer("lower", lower), _integer("upper", upper)):
        state = next_state(state, body_fun(asarray(i), state))
    return state


def scan(
    f: Body,
    init: Tree,
    xs: Tree = None,
    length: Tensor | int | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tree, Tree]:
    """Go through the rows of `xs` with a state: `state, y = f(state, x)` for each row x, from
    `init` on. Returns the last state, and all y, stacked along a new first axis.

    `xs` is a tree of tensors of equally many rows, and x the tree of one row of each. Without `xs`,
    x is None, and `length` says how many turns there are. Beside `xs` it says how many rows there
    are or, as a tensor, how many of them, from the first, to go through: that may be known at run
    time only. Rows of the result that no turn makes are zeros. With `reverse` the last turn's row
    comes first.

    Raises `ShapeError` for rows that are not equally many, or are not `length`, `OperandValueError`
    for a `length` that is no number of rows, and what `while_loop` raises.
    """
    state, rows = as_tree(init), as_tree(xs)
    total = _rows(rows, length)
    turns = _integer("length", length) if isinstance(length, Tensor) else total
    if turns < 0 or (xs is not None and turns > total):
        raise OperandValueError(f"length is 0 to {total}, the number of rows, not {turns}")
    made: dict[int, Tree] = {}
    for i in reversed(range(turns)) if reverse else range(turns):
        state, made[i] = _turn(f, state, map_tree(lambda x, i=i: getitem(x, i), rows))
    if not made:  # one turn, which counts for nothing, tells what the rows are
        _, y = _turn(f, state, map_tree(lambda x: zeros(x.shape[1:], dtype=x.dtype), rows))
        return state, map_tree(lambda x: zeros((total, *x.shape), dtype=x.dtype), y)
    [first, *others] = [made[i] for i in sorted(made)]
    if isinstance(length, Tensor) and xs is None and any(leaves(first)):
        raise ShapeError("a scan without xs, of a length known at run time, cannot stack results")

    def stacked(*each: Tensor) -> Tensor:
        return stack([*each, *[zeros(each[0].shape, dtype=each[0].dtype)] * (total - turns)])

    return state, map_tree(stacked, first, *others)


def map(f: Body, xs: Tree) -> Tree:
    """`f(x)` for each row x of `xs`, stacked: a `scan` without a state."""
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


class Function(Generic[P, R]):
    """A function of trees of tensors that `function` made."""

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: a method."""
        return self if instance is None else MethodType(self, instance)


def function(fn: Callable[P, R]) -> Function[P, R]:
    """A function that stays one in a captured program, where `call` runs it: so it may call itself,
    as deep as values say, with a `cond` that ends it. Eagerly it is the function itself."""
    return Function(fn)


# --- trees of tensors ----------------------------------------------------------------


def as_tree(tree: Any) -> Tree:
    """The tree with tensors for numbers and arrays."""
    return replace(asarray, tree, _NUMBERS)


def next_state(before: Tree, after: Any) -> Tree:
    """What a turn has made of the state. Raises `ShapeError` or `DTypeError` if it is of another
    structure, or other types."""
    after = as_tree(after)
    was, now = (
        {path: x.type for path, x in leaves(tree, buffers=True)} for tree in (before, after)
    )
    if was.keys() != now.keys():
        raise DTypeError(f"a body makes a state of {_listed(now)} out of one of {_listed(was)}")
    for path, type in was.items():
        if now[path] is not type:
            refused = DTypeError if now[path].dtype is not type.dtype else ShapeError
            where = f" at {path}" if path else ""
            raise refused(f"a body makes {now[path]} out of the state{where}, which is {type}")
    return after


def _turn(f: Body, state: Tree, x: Tree) -> tuple[Tree, Tree]:
    result = f(state, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DTypeError(f"the body of a scan returns a pair (state, y), not {brief(result)}")
    return next_state(state, result[0]), as_tree(result[1])


def _rows(xs: Tree, length: Tensor | int | None) -> int:
    """How many rows there are to stack."""
    lengths = {path: x.shape[:1] for path, x in leaves(xs)}
    if not lengths and length is None:
        raise ShapeError("a scan without xs takes a length")
    if len(set(lengths.values())) > 1 or () in lengths.values():
        named = ", ".join(f"{path or 'xs'} {list(rows)}" for path, rows in lengths.items())
        raise ShapeError(f"the tensors of xs have equally many rows, not {named}")
    [total] = next(iter(lengths.values()), (None,))
    if isinstance(length, Tensor):
        return total or 0
    given = total if length is None else _integer("length", length)
    if given is None or given < 0 or (total is not None and total != given):
        raise ShapeError(f"xs has {total} rows, and length is {given}")
    return given


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        given = value.type if isinstance(value, Tensor) else brief(value)
        raise DTypeError(f"{name} is an integer, not {given}") from None


def _listed(types: dict[str, TensorType]) -> str:
    return (
        ", ".join(f"{path} {type}" if path else str(type) for path, type in types.items())
        or "no tensors"
    )
