"""Control flow: branches and loops whose course depends on values.

Names and meaning are JAX's (`jax.lax`). Eagerly they are what they look like: Python's own `if` and
`for` over eager calls. State, operands and results are trees of tensors; numbers and arrays among
them become tensors. What goes round in a loop keeps its structure and its types. Results have
memory of their own: an update in place of one changes nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

from mlvm.core.errors import AttributeRefused, DTypeError, OperandValueError, ShapeError, brief
from mlvm.core.types import TensorType, i64
from mlvm.eager.control import recorded
from mlvm.eager.control.checkpoint import checkpoint as again
from mlvm.eager.control.state import as_like, as_tree, tensors
from mlvm.eager.functions.creation import asarray, full, zeros
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import concat, expand_dims, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, named_leaves, replace, with_leaves

__all__ = ["cond", "fori_loop", "function", "map", "scan", "switch", "while_loop"]

P = ParamSpec("P")
R = TypeVar("R")

Body: TypeAlias = Callable[..., Any]
Tensors: TypeAlias = list[Tensor]


def cond(pred: Tensor | bool, true_fun: Body, false_fun: Body, *operands: Tree) -> Any:
    """`true_fun(*operands)` if `pred` is true, `false_fun(*operands)` if not.

    In a captured function both are recorded, and have results of the same structure and types.

    The operands and results: trees of tensors of any shapes. Raises `ShapeError` for a `pred` of
    more elements than one, `DTypeError` for a branch that is no function: `where` chooses between
    tensors.

        >>> ml.cond(ml.asarray(True), ml.negative, ml.abs, ml.asarray([1.0, -2.0]))
        Tensor([-1.,  2.], f32[2])
    """
    _require_functions("cond", (true_fun, false_fun))
    ways = _ways((true_fun, false_fun), operands)
    if isinstance(pred, Tensor) and recorded.is_recorded():
        return _branch(pred, ways)
    return _own(as_tree(ways[0 if bool(pred) else 1]()))


def switch(index: Tensor | int, branches: Sequence[Body], *operands: Tree) -> Any:
    """`branches[index](*operands)`; of an index out of range, the nearest branch.

    In a captured function all are recorded, as by `cond`.

    The index: i[]. Raises `AttributeRefused` without branches, `DTypeError` for an index that is no
    integer and a branch that is no function.

        >>> ml.switch(ml.asarray(1), [ml.sin, ml.negative], ml.asarray([1.0]))
        Tensor([-1.], f32[1])
    """
    if not branches:
        raise AttributeRefused("switch takes one branch or more")
    _require_functions("switch", branches)
    ways = _ways(branches, operands)
    if isinstance(index, Tensor) and recorded.is_recorded():
        _require_integer("index", index)
        return _switch(index, 0, ways)
    return _own(as_tree(ways[min(max(_integer("index", index), 0), len(ways) - 1)]()))


def _ways(branches: Sequence[Body], operands: Sequence[Tree]) -> list[Callable[[], Any]]:
    """The branches with their operands: other tensors for each, as it may update them."""
    given = [as_tree(each) for each in operands]

    def way(branch: Body) -> Any:
        return branch(*[_alias(each) for each in given])

    return [partial(way, branch) for branch in branches]


def _require_functions(name: str, branches: Sequence[Body]) -> None:
    for each in branches:
        if not callable(each):
            given = each.type if isinstance(each, Tensor) else brief(each)
            raise DTypeError(
                f"{name}: a branch is a function, not {given}; to choose between tensors take where"
            )


def _switch(index: Tensor, first: int, ways: Sequence[Callable[[], Any]]) -> Any:
    """The branches numbered from `first` on, by halves."""
    if len(ways) == 1:
        return _own(as_tree(ways[0]()))
    half = len(ways) // 2
    halves = [(first, ways[:half]), (first + half, ways[half:])]
    both = [partial(_switch, index, number, each) for number, each in halves]
    return _branch(index < first + half, both)


def _branch(pred: Tensor, ways: Sequence[Callable[[], Any]]) -> Any:
    """A branch of a captured function."""
    if pred.size != 1:
        raise ShapeError("a condition is one element").at("cond", (pred.type,))
    results: list[Tree] = []

    def run(way: Callable[[], Any]) -> Tensors:
        result = as_tree(way())
        results.append(result)
        what = "a branch makes another result than the first"
        return tensors(as_like(results[0], result, what))

    made = recorded.cond(alias_of(pred), [partial(run, way) for way in ways])
    return with_leaves(results[0], iter(made))


def while_loop(cond_fun: Body, body_fun: Body, init_val: Tree, *, checkpoint: bool = False) -> Tree:
    """The state when `cond_fun(state)` is false for the first time: `init_val` at first, then
    `body_fun(state)` again and again.

    Under a gradient, what the body needs for its way back is kept for each turn; with `checkpoint`
    only the state is, and the body runs again (see `mlvm.eager.control.checkpoint`).

    The state: a tree of tensors of any shapes, which stay as they are. Raises `ShapeError` or
    `DTypeError` where the body changes a type, or the structure, and for a condition of more
    elements than one.

        >>> ml.while_loop(lambda x: x < 100.0, lambda x: x * 3.0, ml.asarray(1.0))
        Tensor(243., f32[])
    """
    state = as_tree(init_val)
    body_fun = _checkpointed(body_fun, checkpoint)
    if recorded.is_recorded():
        final = recorded.while_loop(
            lambda xs: _condition(cond_fun(with_leaves(state, iter(xs)))),
            lambda xs: tensors(next_state(state, body_fun(with_leaves(state, iter(xs))))),
            tensors(state),
        )
        return with_leaves(state, iter(final))
    state = _own(state)
    while bool(_condition(cond_fun(state))):
        state = next_state(state, body_fun(state))
    return _own(state)


def fori_loop(
    lower: Tensor | int,
    upper: Tensor | int,
    body_fun: Body,
    init_val: Tree,
    *,
    checkpoint: bool = False,
) -> Tree:
    """The state after `state = body_fun(i, state)` for each i of `lower` .. `upper - 1`, from
    `init_val` on. `i` is an i64[]. For `checkpoint` see `while_loop`.

    Raises `DTypeError` for bounds that are no integers, and what `while_loop` raises.

        >>> ml.fori_loop(0, 3, lambda i, x: x * 2.0, ml.ones(2))
        Tensor([8., 8.], f32[2])
    """
    state = as_tree(init_val)
    body_fun = _checkpointed(body_fun, checkpoint)
    _require_integer("lower", lower)
    _require_integer("upper", upper)
    if recorded.is_recorded():
        first = None if isinstance(lower, int) and lower == 0 else _as_index(lower)
        turns: Tensor | int
        if isinstance(lower, Tensor) or isinstance(upper, Tensor):
            turns = _as_index(upper) if first is None else _as_index(upper) - first
        else:
            turns = max(int(upper) - int(lower), 0)

        def turn(i: Tensor, xs: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
            number = i if first is None else first + i
            after = body_fun(number, with_leaves(state, iter(xs)))
            return tensors(next_state(state, after)), []

        total = turns if isinstance(turns, int) else None
        final, _ = recorded.scan(turn, tensors(state), [], turns, total, stacked=False)
        return with_leaves(state, iter(final))
    state = _own(state)
    for i in range(_integer("lower", lower), _integer("upper", upper)):
        state = next_state(state, body_fun(asarray(i), state))
    return _own(state)


def scan(
    f: Body,
    init: Tree,
    xs: Tree = None,
    length: Tensor | int | None = None,
    *,
    reverse: bool = False,
    checkpoint: bool = False,
) -> tuple[Tree, Tree]:
    """Go through the rows of `xs` with a state: `state, y = f(state, x)` for each row x, from
    `init` on. Returns the last state, and all y, stacked along a new first axis.

    `xs` is a tree of tensors of equally many rows, and x the tree of one row of each. Without `xs`,
    x is None, and `length` says how many turns there are. Beside `xs` it says how many rows there
    are or, as a tensor, how many of them, from the first, to go through: that may be known at run
    time only. Rows of the result that no turn makes are zeros. With `reverse` the last row comes
    first. For `checkpoint` see `while_loop`.

    The rows: [n, ...] -> [n, ...], where `n` is the length. Raises `ShapeError` for rows that are
    not equally many, or are not `length`, `OperandValueError` for a `length` that is no number of
    rows, and what `while_loop` raises.

        >>> xs = ml.asarray([1.0, 2.0, 3.0])
        >>> ml.scan(lambda total, x: (total + x, total), ml.asarray(0.0), xs)
        (Tensor(6., f32[]), Tensor([0., 1., 3.], f32[3]))
    """
    state, rows = as_tree(init), as_tree(xs)
    f = _checkpointed(f, checkpoint)
    total = _rows(rows, length)
    if recorded.is_recorded():
        return _recorded_scan(f, state, rows, length, total, reverse)
    turns = total or 0
    if isinstance(length, Tensor):
        turns = max(_integer("length", length), 0)
        if total is not None and turns > total:
            raise OperandValueError(f"length is 0 to {total}, the number of rows, not {turns}")
    state, made = _own(state), list[Tree]()
    rows = _alias(rows)  # whose gradient is added up by itself, as it is in a captured function
    for i in reversed(range(turns)) if reverse else range(turns):
        row = with_leaves(rows, iter([getitem(x, i) for x in tensors(rows)]))
        state, y = _turn(f, state, row)
        made.append(_own(as_like(made[0], y, "a turn makes another row") if made else y))
    if reverse:
        made.reverse()

    def unrun() -> Tree:
        none = [zeros(x.shape[1:], dtype=x.dtype) for x in tensors(rows)]
        return _turn(f, state, with_leaves(rows, iter(none)))[1]

    like = made[0] if made else recorded.unrun(unrun)
    if total is None:
        _require_no_rows(like)

    def stacked(type: TensorType, parts: Tensors) -> Tensor:
        missing = zeros(((total or 0) - len(parts), *type.shape), dtype=type.dtype)
        return concat([*[expand_dims(x, axis=0) for x in parts], missing])

    columns = [tensors(y) for y in made]
    results = [stacked(x.type, [each[k] for each in columns]) for k, x in enumerate(tensors(like))]
    return _own(state), with_leaves(like, iter(results))


def _recorded_scan(
    f: Body, state: Tree, xs: Tree, length: Tensor | int | None, total: int | None, reverse: bool
) -> tuple[Tree, Tree]:
    """A scan of a captured function."""
    made: list[Tree] = []

    def turn(
        _: Tensor, flat: list[Tensor], rows: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        after, y = _turn(f, with_leaves(state, iter(flat)), with_leaves(xs, iter(rows)))
        if total is None:
            _require_no_rows(y)
        made.append(y)
        return tensors(after), tensors(y)

    turns = _as_index(length) if isinstance(length, Tensor) else total or 0
    final, rows = recorded.scan(turn, tensors(state), tensors(xs), turns, total, reverse=reverse)
    return with_leaves(state, iter(final)), with_leaves(made[0], iter(rows))


def map(f: Body, xs: Tree) -> Tree:
    """`f(x)` for each row x of `xs`, stacked: a `scan` without a state.

    The rows: [n, ...] -> [n, ...]. Raises what `scan` raises.

        >>> ml.map(lambda row: ml.sum(row), ml.asarray([[1.0, 2.0], [3.0, 4.0]]))
        Tensor([3., 7.], f32[2])
    """
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


class Function(Generic[P, R]):
    """A function of trees of tensors that `function` made."""

    __name__: str

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given = as_tree((args, kwargs))
        if not recorded.is_recorded():
            args, kwargs = _alias(given)
            return _own(as_tree(self.fn(*args, **kwargs)))  # type: ignore[no-any-return]
        return self._recorded(given)  # type: ignore[no-any-return]

    def _recorded(self, given: Any) -> Any:
        """A call in a captured function."""

        def run(params: Tensors) -> Tree:
            rest = iter(params)
            args, kwargs = replace(lambda _: next(rest), given)
            return as_tree(self.fn(*args, **kwargs))

        operands: Tensors = []
        replace(operands.append, given)
        return recorded.call((id(self), _spelled(given)), self.__name__, operands, run)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a function in a class: a method."""
        return self if instance is None else MethodType(self, instance)


def function(fn: Callable[P, R]) -> Function[P, R]:
    """A function that stays one in a captured program, where `call` runs it, with a frame of its
    own: so it may call itself, as deep as values say, with a `cond` that ends it. Eagerly it is
    the function itself.

    Tensors in dicts, lists and tuples among its arguments are the parameters; numbers and arrays
    become tensors. Modules and other arguments are what they are. It may use tensors from outside,
    such as weights, but not update them in place, nor draw from the global random keys: in a
    captured function that raises `CaptureError`. While it is recorded it is called twice if it
    calls itself: once to see what it makes.

        >>> half = ml.function(lambda n: ml.cond(n < 1.0, lambda n: n, lambda n: half(n / 2.0), n))
        >>> half(ml.asarray(5.0))
        Tensor(0.625, f32[])
    """
    return Function(fn)


def _spelled(tree: Any) -> Any:
    """Equal for arguments of one structure, with tensors of the same types and, besides, the same
    strings and objects."""
    if isinstance(tree, Tensor):
        return tree.type
    if isinstance(tree, dict):
        return type(tree), tuple([(name, _spelled(part)) for name, part in tree.items()])
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple([_spelled(part) for part in tree])
    return tree if isinstance(tree, (str, bytes)) else id(tree)


# --- pieces --------------------------------------------------------------------------


def _checkpointed(body: Body, checkpoint: bool) -> Body:
    return again(body) if checkpoint else body


def next_state(before: Tree, after: Any) -> Tree:
    """What a turn has made of the state. Raises `ShapeError` or `DTypeError` if it is of another
    structure, or other types."""
    return as_like(before, as_tree(after), "a body makes another state than it is given")


def _alias(tree: Tree) -> Tree:
    """The tree with other tensors over the same bytes: an update of one is none of the caller's."""
    return replace(alias_of, tree)


def _own(tree: Tree) -> Tree:
    """The tree with copies of its tensors."""
    return with_leaves(tree, iter([op.copy(x) for x in tensors(tree)]))


def _turn(f: Body, state: Tree, x: Tree) -> tuple[Tree, Tree]:
    result = f(state, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DTypeError(f"the body of a scan returns a pair (state, y), not {brief(result)}")
    return next_state(state, result[0]), as_tree(result[1])


def _rows(xs: Tree, length: Tensor | int | None) -> int | None:
    """How many rows there are to stack; None if only running tells."""
    lengths = {path: x.shape[:1] for path, x in named_leaves(xs, buffers=True)}
    if not lengths and length is None:
        raise ShapeError("a scan without xs takes a length")
    if len(set(lengths.values())) > 1 or () in lengths.values():
        named = ", ".join(f"{path or 'xs'} {list(rows)}" for path, rows in lengths.items())
        raise ShapeError(f"the tensors of xs have equally many rows, not {named}")
    [total] = next(iter(lengths.values()), (None,))
    if length is not None:
        _require_integer("length", length)
    if isinstance(length, Tensor) or length is None:
        return total
    given = _integer("length", length)
    if given < 0:
        raise ShapeError(f"length is 0 or more, not {given}")
    if total is not None and total != given:
        raise ShapeError(f"xs has {total} rows, and length is {given}")
    return given


def _require_no_rows(y: Tree) -> None:
    if any(named_leaves(y)):
        raise ShapeError("a scan without xs, of a length known at run time, cannot stack results")


def _condition(value: Any) -> Tensor:
    condition = as_tree(value)
    if not isinstance(condition, Tensor) or condition.size != 1:
        given = condition.type if isinstance(condition, Tensor) else brief(value)
        raise ShapeError(f"a condition is one element, not {given}")
    return condition


def _require_integer(name: str, value: Any) -> None:
    """Raise `DTypeError` unless it is an int, or a tensor of one."""
    if isinstance(value, Tensor):
        if not value.dtype.is_integer or value.size != 1:
            raise DTypeError(f"{name} is one integer, not {value.type}")
    elif not isinstance(value, (int, np.integer)):
        raise DTypeError(f"{name} is an integer, not {brief(value)}")


def _integer(name: str, value: Any) -> int:
    _require_integer(name, value)
    return operator.index(value)


def _as_index(value: Tensor | int) -> Tensor:
    """The integer as an i64[]."""
    if isinstance(value, Tensor):
        return reshape(value if value.dtype is i64 else op.astype(value, dtype=i64), ())
    return full((), value, dtype=i64)
