"""Loops: `while_loop`, `fori_loop`, `scan` and `map`.

Eagerly they are Python loops over eager calls. In a captured function, the condition and the body
are recorded once, each as a block.

In: a body, the initial state, and `xs`; each iteration reads a row of `xs`. Out: a `while` of the
flow, the final state, and results stacked along a new first axis.

Backward pass: a loop in reverse order (`_vjp`). If the trip count is bounded, residuals are stored
in stacks with one row per iteration. Otherwise they are stored in records, each with the number of
the previous record.

Invariant: a part of the state without a cotangent gets no cotangent, not zeros (`_activity`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from mlvm.arena.context import context
from mlvm.core.errors import (
    CaptureError,
    DTypeError,
    MlvmError,
    OperandValueError,
    PositionError,
    ShapeError,
    brief,
)
from mlvm.core.types import DType, TensorType, bool_, i64
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, or_zeros, seed
from mlvm.eager.autodiff.tape import Begun, Conditional, CotangentAccumulator, taping
from mlvm.eager.control import blocks, records
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.branches import present
from mlvm.eager.control.checkpoint import checkpoint as checkpointed
from mlvm.eager.control.state import (
    Body,
    aliased,
    as_index,
    as_like,
    as_tree,
    copied,
    integer,
    require_functions,
    require_integer,
    tensors,
)
from mlvm.eager.functions.creation import arange, asarray, full, zeros
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.functions.shapes import concat, expand_dims
from mlvm.eager.recording.recorder import Recorder
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY, alias_of, one_op, untracked
from mlvm.eager.tensor.constants import constant, dtype_beside
from mlvm.eager.tensor.number import index_of, is_free, is_length
from mlvm.eager.tensor.positions import numbers_in, rewording
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.update import overwrite
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, named_leaves, replace, with_leaves
from mlvm.step.flow import LoopInfo

R = TypeVar("R")

LoopBody: TypeAlias = Callable[[Tensor, Tensors, Tensors], tuple[Tensors, Tensors]]
"""Loop body: (iteration number, state, a row of each of xs) -> (state, a row of each result)."""

_ADD: Final = one_op("add")
_SET_ROW: Final = one_op("dynamic_update", axis=0)


@hinted
def while_loop(cond_fun: Body, body_fun: Body, init_val: Tree, *, checkpoint: bool = False) -> Tree:
    """Apply `body_fun` while `cond_fun(state)` is true; return the final state.

    Arguments:

    - `cond_fun`: maps the state to a condition with one element.

    - `body_fun`: maps the state to the next state.

    - `init_val`: the initial state: a tree of tensors of any shapes. Structure and types stay
      fixed. A Python number in it gets the dtype that the body assigns, if that is wider; eagerly,
      the first iteration is then computed again.

    - `checkpoint`: under a gradient, save only the state of each iteration, and run the body again
      in the backward pass. Default: False, which saves the residuals of the body.

    Raises `ShapeError` or `DTypeError` if the body changes a type or the structure, and for a
    condition with more than one element.

        >>> ml.while_loop(lambda x: x < 100.0, lambda x: x * x + 1.0, ml.asarray(1.0))
        Tensor(677., f32[])

    Invalid calls:
        ml.while_loop(lambda x: True, lambda x: x > 0.0, v)  # DTypeError
        ml.while_loop(lambda x: x > 0.0, lambda x: x, v)  # ShapeError
    """
    require_functions("cond_fun, body_fun, init_val", cond_fun=cond_fun, body_fun=body_fun)
    numbers = _WeakNumbers(init_val)
    body_fun = _not_a_condition(body_fun, init_val)
    body_fun = checkpointed(body_fun) if checkpoint else body_fun
    if blocks.is_recorded():

        def record(state: Tree) -> Tree:
            def more(_: Tensor, xs: Tensors) -> Tensor:
                return _condition(cond_fun(with_leaves(state, iter(xs))))

            def iterate(_: Tensor, xs: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
                return tensors(numbers.after(body_fun(with_leaves(state, iter(xs))))), []

            final, _ = _record([], [], _Loop(more, iterate, constant(0, i64)), tensors(state), [])
            return with_leaves(state, iter(final))

        return numbers.recorded(record)
    loop = _EagerLoop(numbers)

    def goes_on() -> bool:
        with context(tape=None):
            return bool(_condition(cond_fun(aliased(loop.state))))

    while goes_on():
        loop.iterate(body_fun)
    return copied(loop.state)


@hinted
def fori_loop(
    lower: Tensor | int,
    upper: Tensor | int,
    body_fun: Body,
    init_val: Tree,
    *,
    checkpoint: bool = False,
) -> Tree:
    """Apply `state = body_fun(i, state)` for i in `lower` .. `upper - 1`; return the final state.

    The initial state is `init_val`; `i` is an i64[]. For `checkpoint` and for Python numbers in the
    state see `while_loop`.

    Raises `DTypeError` for bounds that are not integers, and the errors of `while_loop`.

        >>> ml.fori_loop(0, 3, lambda i, x: x * 2.0, ml.ones(2))
        Tensor([8., 8.], f32[2])

    Invalid calls:
        ml.fori_loop(0.0, 3, lambda i, x: x, v)  # DTypeError
        ml.fori_loop(0, 3, lambda i, x: ml.sum(x), v)  # ShapeError
    """
    require_functions("lower, upper, body_fun, init_val", body_fun=body_fun)
    require_integer("lower", lower)
    require_integer("upper", upper)
    numbers = _WeakNumbers(init_val)
    body_fun = checkpointed(body_fun) if checkpoint else body_fun
    if blocks.is_recorded():
        first = None if type(lower) is int and lower == 0 else as_index(lower)
        trip_count: Tensor | int
        if any(isinstance(x, Tensor) or (is_free(x) and not is_length(x)) for x in (lower, upper)):
            trip_count = as_index(upper) if first is None else as_index(upper) - first
        else:
            trip_count = max(index_of(upper) - index_of(lower), 0)

        total = trip_count if isinstance(trip_count, int) else None

        def record(state: Tree) -> Tree:
            def iterate(i: Tensor, xs: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
                number = i if first is None else first + i
                after = body_fun(number, with_leaves(state, iter(xs)))
                return tensors(numbers.after(after)), []

            final, _ = _scan(iterate, tensors(state), [], trip_count, total, stacked=False)
            return with_leaves(state, iter(final))

        return numbers.recorded(record)
    loop = _EagerLoop(numbers)

    def numbered(i: int, state: Tree) -> Any:
        return body_fun(asarray(i), state)

    for i in range(integer("lower", lower), integer("upper", upper)):
        loop.iterate(partial(numbered, i))
    return copied(loop.state)


@hinted
def scan(
    f: Body,
    init: Tree,
    xs: Tree = None,
    length: Tensor | int | None = None,
    *,
    reverse: bool = False,
    checkpoint: bool = False,
) -> tuple[Tree, Tree]:
    """Loop over the rows of `xs` with a state: `state, y = f(state, x)`.

    Returns the final state, and all y, stacked along a new first axis.

    Arguments:

    - `f`: maps the state and one row to the next state and one row of the result.

    - `init`: the initial state: a tree of tensors of any shapes. For Python numbers in it see
      `while_loop`.

    - `xs`: a tree of tensors with the same number of rows: [n, ...] -> [n, ...]. x is the tree of
      one row of each tensor. Without `xs`, x is None.

    - `length`: the number of iterations. It is required without `xs`; with `xs`, an int must equal
      the number of rows. A tensor is the number of rows to visit, starting from the first; the
      value may be known only at run time. Rows of the result that no iteration computes are zeros.

    - `reverse`: visit the last row first. Default: False.

    - `checkpoint`: recompute the body in the backward pass, see `while_loop`. Default: False.

    With zero iterations, `f` is traced to determine the result types.

    Raises `ShapeError` if the numbers of rows differ from each other or from `length`, and
    `OperandValueError` for an invalid `length`. Raises `CaptureError` with zero iterations if `f`
    cannot be traced, and the errors of `while_loop`.

        >>> xs = ml.asarray([1.0, 2.0, 3.0])
        >>> ml.scan(lambda total, x: (total + x, total), ml.asarray(0.0), xs)
        (Tensor(6., f32[]), Tensor([0., 1., 3.], f32[3]))

    Invalid calls:
        ml.scan(lambda s, x: (s, x * float(x)), v, v[:0])  # CaptureError
        ml.scan(lambda s, x: (s > 0, x), v, v)  # DTypeError
        ml.scan(lambda s, x: (s, x), v, v, length=ml.asarray(9))  # OperandValueError
        ml.scan(lambda s, x: (s, x), v, v, length=3)  # ShapeError
    """
    require_functions("f, init, xs", f=f)
    rows = as_tree(xs)
    numbers = _WeakNumbers(init)
    f = checkpointed(f) if checkpoint else f
    total = _rows(rows, length)
    if blocks.is_recorded():
        return numbers.recorded(
            lambda state: _recorded_scan(f, numbers, state, rows, length, total, reverse)
        )
    trip_count = total or 0
    if isinstance(length, Tensor):
        trip_count = max(integer("length", length), 0)
        if total is not None and trip_count > total:
            raise OperandValueError(
                f"scan: expected a length of 0 to {total}, the number of rows, got {trip_count}"
            )
    rows = aliased(rows)  # gradients of rows are summed separately, as in a captured function
    loop = _EagerLoop(numbers)
    ys: list[Tree] = []
    for i in reversed(range(trip_count)) if reverse else range(trip_count):
        row = with_leaves(rows, iter([getitem(x, i) for x in tensors(rows)]))
        _, y = loop.iterate(partial(_call_with_row, f, row), lambda pair: pair[0])
        ys.append(
            copied(
                as_like(ys[0], y, "an iteration returns a different row type: expected")
                if ys
                else y
            )
        )
    if reverse:
        ys.reverse()

    def of_zeros() -> Tree:
        zeros_of_rows = [zeros(x.shape[1:], dtype=x.dtype) for x in tensors(rows)]
        zero_row = with_leaves(rows, iter(zeros_of_rows))
        try:
            result, y = _call_with_row(f, zero_row, aliased(loop.state))
            next_state(loop.state, result)
            return y
        except CaptureError as error:
            message = "a scan of no rows records its body to find the types of its results"
            raise CaptureError(f"{message}, as capture does: {error}") from None

    like = ys[0] if ys else blocks.abstract_eval(of_zeros)
    if total is None:
        _require_no_rows(like)

    def stacked(type: TensorType, parts: Tensors) -> Tensor:
        missing = zeros(((total or 0) - len(parts), *type.shape), dtype=type.dtype)
        return concat([*[expand_dims(x, axis=0) for x in parts], missing])

    columns = [tensors(y) for y in ys]
    results = [stacked(x.type, [each[k] for each in columns]) for k, x in enumerate(tensors(like))]
    return copied(loop.state), with_leaves(like, iter(results))


@hinted
def map(f: Body, xs: Tree) -> Tree:
    """Apply `f` to each row of `xs`, and stack the results: a `scan` without a state.

    The rows: [n, ...] -> [n, ...]. Raises the errors of `scan`.

        >>> ml.map(lambda row: ml.sum(row), ml.asarray([[1.0, 2.0], [3.0, 4.0]]))
        Tensor([3., 7.], f32[2])
    """
    require_functions("f, xs", f=f)
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def counted_loop(
    body: LoopBody,
    init: Tensors,
    xs: Tensors,
    trip_count: Tensor | int,
    total: int | None,
    *,
    reverse: bool = False,
) -> tuple[Tensors, Tensors]:
    """Run `trip_count` iterations of a body; return the final state and stacks of `total` rows."""
    if blocks.is_recorded():
        stacked, continued = total is not None, len(xs)
        # to sum the gradients of the rows separately, as outside a captured function
        xs = tensors(aliased(xs))
        return _scan(
            body, init, xs, trip_count, total, reverse=reverse, stacked=stacked, continued=continued
        )
    if total is None:
        count = integer("length", trip_count)

        def iterate(i: Tensor, state: Tensors) -> Tensors:
            return body(count - 1 - i if reverse else i, state, [])[0]

        return fori_loop(0, count, iterate, init), []

    def f(state: Tensors, row: tuple[Tensor, Tensors]) -> tuple[Tensors, Tensors]:
        return body(row[0], state, row[1])

    return scan(f, init, (arange(total), xs), trip_count, reverse=reverse)


class _Widened(Exception):
    """Raised when a number of the state has become wider, to record the loop again."""


class _WeakNumbers:
    """Python numbers in the initial state of a loop.

    Each gets the dtype that the body assigns, if the number's kind promotes to that dtype, like a
    weak type of JAX: `0.0` becomes f64 if the body adds f64. If a number becomes wider, a captured
    loop is recorded again. An eager loop computes the first iteration again, unless the body has
    effects.

    state: the state, with the numbers as tensors.
    """

    def __init__(self, init: Tree) -> None:
        values: dict[int, Any] = {}

        def convert(value: Any) -> Tensor:
            x: Tensor = as_tree(value)
            if type(value) in (int, float):
                values[id(x)] = value
            return x

        self.state = replace(convert, init, (bool, int, float, np.ndarray, np.generic))
        leaves = enumerate(tensors(self.state))
        self._values = {i: values[id(x)] for i, x in leaves if id(x) in values}
        self._dtypes: dict[int, DType] = {}
        self._widenings = len(values)

    def recorded(self, record: Callable[[Tree], R]) -> R:
        """Return the result of `record` for the state of a captured loop."""
        return blocks.retry_blocks(lambda: record(self.widened()), _Widened)()

    def after(self, result: Any) -> Tree:
        """Return the state after a recorded iteration."""
        if self.widen(result):
            raise _Widened
        return next_state(self.state, result)

    def widen(self, result: Any) -> bool:
        """Record the dtypes that the body assigns to the numbers; return whether one changed."""
        if not self._widenings:  # numbers may depend on each other, so any may change
            return False
        try:
            after = as_like(self.state, as_tree(result), "a body", lambda *_: True)
        except MlvmError:  # the structure differs, which `next_state` rejects
            return False
        xs, ys = tensors(self.state), tensors(after)
        wider = {i: ys[i].dtype for i in self._values if self._is_wider(i, xs[i], ys[i])}
        self._dtypes |= wider
        self._widenings -= bool(wider)
        return bool(wider)

    def _is_wider(self, i: int, x: Tensor, y: Tensor) -> bool:
        """Return whether number i, now x, becomes y by the promotion rules of Python numbers."""
        is_other = y.ndim == 0 and y.dtype is not x.dtype
        return is_other and dtype_beside(type(self._values[i]), y.dtype) is y.dtype

    def widened(self) -> Tree:
        """Return the state as new tensors, with numbers in the dtypes that `widen` has recorded."""
        leaves = tensors(self.state)
        for i, dtype in self._dtypes.items():
            leaves[i] = full((), self._values[i], dtype=dtype)
        self.state = with_leaves(self.state, iter(leaves))
        return self.state


class _EagerLoop:
    """State of a loop that runs eagerly.

    state: the state after the last iteration; no other object refers to the tensors in it.
    """

    def __init__(self, numbers: _WeakNumbers) -> None:
        self._numbers: _WeakNumbers | None = numbers
        self.state = self._before = copied(numbers.state)

    def iterate(
        self, body: Callable[[Tree], Any], state_of: Callable[[Any], Any] = lambda result: result
    ) -> Any:
        """Run an iteration; return the result of the body."""
        self._before = _isolate_state(self.state, self._before)
        result = body(self._before)
        numbers, self._numbers = self._numbers, None
        while numbers is not None and numbers.widen(state_of(result)):
            if blocks.has_effects(partial(body, aliased(self.state))):
                break
            self.state = copied(numbers.widened())
            self._before = _isolate_state(self.state, self.state)
            result = body(self._before)
        self.state = next_state(self.state, state_of(result))
        return result


def next_state(before: Tree, after: Any) -> Tree:
    """Return the state after an iteration.

    Raises `ShapeError` or `DTypeError` if the structure or types have changed.
    """
    return as_like(before, as_tree(after), "the body changes the type of its state: expected")


def _isolate_state(state: Tree, previous: Tree) -> Tree:
    """Return the state for an iteration, with aliases for tensors that other objects may own.

    Tensors that the previous iteration did not receive, such as weights, may belong to other
    objects: an update must change only the state. Under a gradient all tensors are aliased, so that
    cotangents are summed as in a captured function.
    """
    own = {id(x) for x in tensors(previous)} if taping() is None else set[int]()

    def part(x: Tensor) -> Tensor:
        if id(x) not in own:
            return alias_of(x)
        own.remove(id(x))  # the state may contain it twice
        return x

    return replace(part, state)


def _call_with_row(f: Body, x: Tree, state: Tree) -> tuple[Any, Tree]:
    """Call the body of a scan with one row; return the next state and the row of the results."""
    result = f(state, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise DTypeError(
            f"scan: expected a pair from the body, got {described(result)}; return (state, y)"
        )
    return result[0], as_tree(result[1])


def _rows(xs: Tree, length: Tensor | int | None) -> int | None:
    """Return the number of rows to stack; None if it is only known at run time."""
    lengths = {path: x.shape[:1] for path, x in named_leaves(xs, buffers=True)}
    if not lengths and length is None:
        raise ShapeError("expected xs or length, got neither")
    counts = [*lengths.values()]
    if any(each != counts[0] or not each for each in counts):
        named = ", ".join(f"{path or 'xs'} {list(rows)}" for path, rows in lengths.items())
        raise ShapeError(f"expected xs with equal numbers of rows, got {named}")
    [total] = next(iter(lengths.values()), (None,))
    if length is not None:
        require_integer("length", length)
    if isinstance(length, Tensor) or length is None:
        return total
    count = integer("length", length)
    if count < 0:
        raise ShapeError(f"scan: expected a length of 0 or more, got {count}")
    if total is not None and total != count:
        raise ShapeError(f"scan: expected length={total}, the number of rows of xs, got {count}")
    return count


def _require_no_rows(y: Tree) -> None:
    if any(named_leaves(y)):
        raise ShapeError(
            "scan: cannot stack results without xs if the length is a tensor; pass an int as length"
        )


def _not_a_condition(body: Body, init_val: Tree) -> Body:
    """Return a body that refuses one bool as its result, unless the state is a bool."""

    def checked(state: Tree) -> Tree:
        result = body(state)
        is_condition = isinstance(result, Tensor) and result.dtype is bool_ and result.size == 1
        if is_condition and not _is_bool(init_val):
            raise DTypeError(
                "body_fun returns a bool, as a condition does; the order of the arguments is "
                "(cond_fun, body_fun, init_val)"
            )
        return result

    return checked


def _is_bool(value: Any) -> bool:
    return value.dtype is bool_ if isinstance(value, Tensor) else isinstance(value, bool | np.bool_)


def _condition(value: Any) -> Tensor:
    condition = as_tree(value)
    if not isinstance(condition, Tensor) or condition.size != 1:
        actual = condition.type if isinstance(condition, Tensor) else brief(value)
        raise ShapeError(f"expected a condition of one element, got {actual}")
    return condition


# --- recorded ------------------------------------------------------------------------


def _recorded_scan(
    f: Body,
    numbers: _WeakNumbers,
    state: Tree,
    xs: Tree,
    length: Tensor | int | None,
    total: int | None,
    reverse: bool,
) -> tuple[Tree, Tree]:
    """Record a `scan` in a captured function."""
    ys: list[Tree] = []

    def iterate(_: Tensor, flat: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
        row, before = with_leaves(xs, iter(rows)), with_leaves(state, iter(flat))
        result, y = _call_with_row(f, row, before)
        after = numbers.after(result)
        if total is None:
            _require_no_rows(y)
        ys.append(y)
        return tensors(after), tensors(y)

    trip_count = as_index(length) if isinstance(length, Tensor) else total or 0
    if total is not None and isinstance(trip_count, Tensor):
        trip_count = _at_most(trip_count, total)
    init = tensors(state)
    final, rows = counted_loop(iterate, init, tensors(xs), trip_count, total, reverse=reverse)
    return with_leaves(state, iter(final)), with_leaves(ys[0], iter(rows))


def _at_most(trip_count: Tensor, total: int) -> Tensor:
    """Return the number of rows to visit, checked at run time: a value above `total` raises."""
    with rewording(_reword):
        return op.take(arange(total + 1), op.maximum(trip_count, 0), axis=0)


def _reword(error: PositionError) -> None:
    index, bound = numbers_in(error)
    error.op, error.operands = None, ()
    error.reason = f"scan: expected a length of 0 to {bound - 1}, the number of rows, got {index}"


def _scan(
    body: LoopBody,
    init: Tensors,
    xs: Tensors,
    trip_count: Tensor | int,
    total: int | None,
    *,
    reverse: bool = False,
    stacked: bool = True,
    continued: int = 0,
    residual_rows: Container[int] = (),
) -> tuple[Tensors, Tensors]:
    """Record a loop with a trip count over the rows of `xs`.

    Results have `total` rows, an upper bound of the trip count, if it is known. If the body updates
    `xs` or `trip_count` later, the loop does not change. For the first `continued` of `xs`, the
    backward pass adds to cotangents row by row, as eager iterations do. For the rest it adds the
    total. The `xs` in `residual_rows` are residuals of a different loop, or cotangents of
    residuals: each row has a separate cotangent, or none.
    """
    xs = blocks.aliases(xs)
    trip_count = untracked(trip_count) if isinstance(trip_count, Tensor) else trip_count
    count = trip_count if isinstance(trip_count, Tensor) else constant(trip_count, i64)  # an i64[]
    with context(tape=None):
        first = count - 1 if reverse else constant(0, i64)

    def more(i: Tensor, _: Tensors) -> Tensor:
        return i >= 0 if reverse else i < count

    bounds = trip_count, total, reverse, stacked, continued, residual_rows
    return _record([], [], _Loop(more, body, first, *bounds), init, xs)


class _Loop(NamedTuple):
    """Loop that runs while `more`, with iterations numbered from `first`.

    Attributes:
        trip_count: the number of iterations; None: the loop counts them.
        total: an upper bound of the trip count, which is the number of rows of results; None:
            unknown.
        stacked: whether the body returns rows.
        continued, residual_rows: see `_scan`.
    """

    more: Callable[[Tensor, Tensors], Tensor]
    body: LoopBody
    first: Tensor
    trip_count: Tensor | int | None = None
    total: int | None = None
    reverse: bool = False
    stacked: bool = False
    continued: int = 0
    residual_rows: Container[int] = ()


@blocks.retry_blocks
def _record(
    tracked: list[bool], carried: Tensors, loop: _Loop, init: Tensors, xs: Tensors
) -> tuple[Tensors, Tensors]:
    """Record the loop.

    `tracked` marks the parts of the state that are known to be tracked in any iteration; a repeated
    recording adds to it. `carried` is additional state (see `blocks.carrying`).
    """
    record, tape, trip_count, total = blocks.recorder(), taping(), loop.trip_count, loop.total
    nown, init = len(init), [*init, *carried]
    tracked += [tape is not None and x.tape is tape for x in init[len(tracked) :]]
    with context(tape=None):
        state = [blocks.new_variable(record, x) for x in init]
        i = blocks.new_variable(record, loop.first)
        last = None  # the number of the last record
        if tape is not None and total is None:
            last = blocks.new_variable(record, constant(0, i64))
    length = record.use(trip_count) if isinstance(trip_count, Tensor) else trip_count
    of_xs = [record.use(x) for x in xs]
    with record.block() as test, context(tape=None):
        test.result = record.use(loop.more(i, [untracked(x) for x in state]))
    start = 0 if tape is None else len(tape.nodes)
    is_known = True
    residuals: Tensors = []  # saved in each iteration
    stacks: Tensors = []  # contain the residuals if the trip count is bounded
    with blocks.carrying(carried) as block:
        with context(tape=None):
            now = untracked(i)
            params, rows = [untracked(x) for x in state], [op.take(x, i, axis=0) for x in xs]
            counter, row_uses = record.use(now), [record.value_of(x) for x in rows]
        if tape is not None:
            params = blocks.watch_tracked(tape, params, tracked)
            rows = blocks.watch_tracked(tape, rows, [x.tape is tape for x in xs])
            if total is not None:
                residuals = [*params]  # unused residuals are removed at the end
                stacks = [_new_stack(record, x, i, total) for x in residuals]
        own_params = blocks.aliases(params)
        blocks.assign_carried(carried, own_params[nown:])
        try:
            after, ys = loop.body(now, own_params[:nown], blocks.aliases(rows))
            after = blocks.block_outputs(carried, [*after, *carried])
            ys = blocks.block_outputs(carried, ys)
        except blocks.UnknownResults:  # determine the result types from zero iterations
            if loop.stacked:
                raise
            is_known = False
            after, ys = params, []
        segment = None
        if tape is not None:
            if not all(x or y.tape is not tape for x, y in zip(tracked, after, strict=True)):
                tracked[:] = [x or y.tape is tape for x, y in zip(tracked, after, strict=True)]
                raise blocks.RetryBlocks
            available, ends = [i, *state, *rows], [*after, *ys]
            segment = blocks.Segment(record, tape, start, ends, available, carried)
            if segment.is_constant([*init, *xs]):
                segment = None
            elif last is None:
                residuals += segment.inside
                stacks += [_new_stack(record, x, i, total) for x in segment.inside]
            else:
                residuals = [x for x in params if segment.needs(x)] + segment.inside
                with context(tape=None):
                    overwrite(last, COPY, record.push([last, *residuals]))
        results = [_new_stack(record, y, i, total) for y in ys]
        homes = [record.home_of(x) for x in (*results, *stacks)]
        written = [(h, record.use(x)) for h, x in zip(homes, [*ys, *residuals], strict=False)]
        with context(tape=None):
            _assign(state, after)
            overwrite(i, _ADD, i, constant(-1 if loop.reverse else 1, i64))
    if not is_known:
        return blocks.release(record, state)[:nown], []
    for stack in results if isinstance(trip_count, Tensor) else []:
        overwrite(stack, COPY, zeros(stack.shape, dtype=stack.dtype))
    record.control("while", [test, block])
    if length is not None:
        uses = of_xs, row_uses, written
        record.calls[-1].loop = LoopInfo(counter, length, total, loop.reverse, *uses)
    finals, results = blocks.release(record, state), blocks.release(record, results)
    stacks = blocks.release(record, stacks)
    if tape is not None and segment is not None:
        count = record.released(i) if trip_count is None else trip_count
        number = [] if last is None else [record.released(last)]
        ncontinued = 0 if isinstance(count, Tensor) else loop.continued  # one iteration per row
        vjp = _LoopVjp(loop, segment, params, rows, i, after, ys, residuals, set(), count)
        saved = [*xs, *stacks, *number, *segment.outside]
        if isinstance(count, Tensor):
            saved.append(count)
        outs = blocks.tracked_results(tape, [*finals, *results], [*params, *ys])
        if last is None:
            outs += blocks.tracked_results(tape, stacks, residuals)
        else:
            outs += number if any(x.tape is tape for x in residuals) else [None]
        vjp_fn, effect = partial(_vjp, vjp), segment.has_effect
        rows_of = range(len(init), len(init) + ncontinued)
        add_node(tape, outs, [*init, *xs], segment.closures, saved, vjp_fn, rows_of, effect=effect)
    blocks.assign_carried(carried, finals[nown:])
    return finals[:nown], results


class _LoopVjp(NamedTuple):
    """Vjp of a loop.

    residuals: tensors of the body that each iteration saves, in stacks of `total` rows. If `total`
    is None they are stored in a record, after the number of the previous record.

    used: indices of the residuals that have cotangents in a gradient of the gradient.
    """

    loop: _Loop
    segment: blocks.Segment
    params: Tensors
    rows: Tensors
    i: Tensor
    after: Tensors
    ys: Tensors
    residuals: Tensors
    used: set[int]
    trip_count: Tensor | int


def _vjp(vjp: _LoopVjp, cotangents: Cotangents, saved: Saved, sums: Sums) -> Sums:
    """Return the cotangents of the initial state, xs and the closures.

    `sums` are the partial sums of the closures, then of the `xs` that are continued (see `_scan`).
    """
    return _backward(set(), vjp, cotangents, saved, sums)


@blocks.retry_blocks
def _backward(
    partly: set[int], vjp: _LoopVjp, cotangents: Cotangents, saved: Saved, sums: Sums
) -> Sums:
    """Record the backward pass.

    `partly` contains indices into the active parts of the state and the closures, for those that
    have a cotangent only in some iterations. Each of these gets a condition as an additional part
    of the state. A repeated recording adds to `partly`.
    """
    loop, segment, trip_count = vjp.loop, vjp.segment, vjp.trip_count
    sums, so_far = blocks.split(sums, len(segment.closures))
    if isinstance(trip_count, Tensor):
        *saved, trip_count = saved
    nstate, nrows = len(vjp.params), len(vjp.rows)
    nstacks = len(vjp.residuals) if loop.total is not None else 1
    xs, stacks, outside = blocks.split(saved, nrows, nstacks)
    of_state, out_gs, residual_gs = blocks.split(cotangents, nstate, len(vjp.ys))
    tape = segment.tape
    if loop.total is None:
        numbers, residual_gs, of_record = stacks, [], [g for g in residual_gs if g is not None]
        numbers += of_record
        stacks = []
    else:
        numbers, of_record = [], []
    ys = [y for y, g in zip(vjp.ys, out_gs, strict=True) if g is not None]
    stacked = [y for y, g in zip(vjp.residuals, residual_gs, strict=False) if g is not None]
    are_tracked = [x.tape is tape for x in vjp.residuals]
    recorded = [(k, x) for k, x in enumerate(vjp.residuals, 1) if x.tape is tape and of_record]
    ends = [*ys, *stacked, *[x for k, x in recorded if k in vjp.used]]
    row_gs = [g for g in (*out_gs, *residual_gs) if g is not None]
    with_cotangents = [k for k, g in enumerate(of_state) if g is not None]
    active, varying, reached, first_reached = _activity(vjp, with_cotangents, ends)
    tracked = [k for k, x in enumerate(vjp.rows) if x.tape is tape and x.node in reached]
    continued = {k: g for k, g in enumerate(so_far) if g is not None and k in tracked}
    active_params, tracked_rows = [vjp.params[k] for k in active], [vjp.rows[k] for k in tracked]
    cells, closures = blocks.split_cells(segment.closures, sums)
    closures = {n: h for n, h in closures.items() if h is not None or n in reached}
    initial_sums = [*[of_state[k] for k in active], *closures.values()]
    sum_types = [*[x.type for x in active_params], *[segment.closures[n] for n in closures]]
    begun = {
        k
        for k, h in enumerate(initial_sums)
        if (h is None or isinstance(h, Begun)) and sum_types[k].dtype.is_inexact
    }
    if first_reached is not None:
        first = {k for k, n in enumerate(closures, len(active)) if n not in first_reached}
        partly |= {k for k, part in enumerate(active) if part in varying}
        partly |= first & begun
    partly |= {
        k for k, h in enumerate(initial_sums) if isinstance(h, Conditional) and k not in begun
    }
    is_exact = bool(partly) or any(isinstance(g, Conditional) for g in row_gs)
    partly |= {k for k, h in enumerate(initial_sums[: len(active)]) if h is None and is_exact}
    outer = {k: h for k, h in enumerate(initial_sums) if isinstance(h, Begun)}
    still_begun = set[int]()
    # the number of a record is excluded
    partly &= {k for k, type in enumerate(sum_types) if type.dtype.is_inexact}
    partly.difference_update(outer)
    conditional = sorted(partly)

    def is_scalar(g: Any) -> bool:
        """Return whether a cotangent has a single condition for all elements."""
        return isinstance(g, Conditional) and not g.present.shape

    init = [
        h.x if is_scalar(h) else or_zeros(h, type)
        for h, type in zip(initial_sums, sum_types, strict=True)
    ]
    init += [*numbers, *[present(initial_sums[k]) for k in conditional]]
    residual_rows = {
        k
        for k, x in zip(tracked, tracked_rows, strict=True)
        if k in loop.residual_rows and x.dtype.is_inexact
    }
    wider = set[int]()

    def iterate(i: Tensor, state: Tensors, rows: Tensors) -> tuple[Tensors, Tensors]:
        xrows, residuals, row_values, of_rows_present, before = blocks.split(
            rows, nrows, len(stacks), len(row_gs), len(by_row)
        )
        totals, places, conditions = blocks.split(state, len(initial_sums), len(numbers))
        of_recorded: list[Any] = []
        if places:
            types = [records.NUMBER, *[x.root.type for x in vjp.residuals]]
            places[0], *residuals = records.pull(
                places[0], types, [True, *are_tracked], vjp.used, segment.stack
            )
        if of_record:
            types = [records.NUMBER, *[x.type for _, x in recorded]]
            places[1], *of_recorded = records.pull_cotangents(places[1], types)
        inside = {segment.key(x): row for x, row in zip(vjp.residuals, residuals, strict=True)}
        inside |= {segment.key(x): row for x, row in zip(vjp.rows, xrows, strict=True)}
        inside[id(vjp.i)] = i
        sums: list[Any] = [*totals]
        for k in begun:
            if k >= len(active):
                sums[k] = Begun(totals[k], i, is_clean=True)
        for k, condition in zip(conditional, conditions, strict=True):
            sums[k] = Conditional(totals[k], condition)
        gs: list[Any] = [*row_values]
        for k, condition in zip(by_row, of_rows_present, strict=True):
            gs[k] = Conditional(gs[k], condition)
        for k, g in enumerate(row_gs):
            if is_scalar(g):
                gs[k] = Conditional(gs[k], g.present)
        gs += [
            g if k in vjp.used else None for (k, _), g in zip(recorded, of_recorded, strict=True)
        ]
        of_parts, of_closures = sums[: len(active)], sums[len(active) :]
        pending = CotangentAccumulator()
        pending.update(cells)
        pending.update(zip(closures, of_closures, strict=True))
        pending.update((vjp.rows[k].node, g) for k, g in zip(continued, before, strict=True))
        after = [*ys, *[vjp.after[k] for k in active], *stacked, *[x for _, x in recorded]]
        seed(pending, tape, after, [*gs[: len(ys)], *of_parts, *gs[len(ys) :]])
        segment.walk(pending, inside, outside)
        parts: list[Any] = [pending.get(x.node) for x in active_params]
        parts += [pending[number] for number in closures]
        still_begun.update(k for k in outer if isinstance(parts[k], Begun))
        wider.update(
            k
            for k, g in enumerate(parts)
            if k not in partly
            and k not in outer
            and sum_types[k].dtype.is_inexact
            and (isinstance(g, Conditional) or (g is None and is_exact))
        )
        values = [
            g.x if k in partly and is_scalar(g) else or_zeros(g, sum_types[k])
            for k, g in enumerate(parts)
        ]
        of_rows = [pending.get(x.node) for x in tracked_rows]
        own = [g for k, g in zip(tracked, of_rows, strict=True) if k in residual_rows]
        results = [or_zeros(g, x.type) for g, x in zip(of_rows, tracked_rows, strict=True)]
        results += [present(g, g.present.shape if isinstance(g, Conditional) else ()) for g in own]
        return [*values, *places, *[present(parts[k]) for k in conditional]], results

    by_row = [k for k, g in enumerate(row_gs) if isinstance(g, Conditional) and g.present.shape]
    rows = [*xs, *stacks, *[g.x if isinstance(g, Conditional) else g for g in row_gs]]
    rows += [row_gs[k].present for k in by_row] + [*continued.values()]
    n = nrows + len(stacks)
    finals, of_xs = _scan(
        iterate,
        init,
        rows,
        trip_count,
        loop.total,
        reverse=not loop.reverse,
        continued=n,
        residual_rows={*range(nrows, n), *range(n + len(ys), n + len(row_gs))},
    )
    if wider:
        partly |= wider
        raise blocks.RetryBlocks
    of_rows, rows_present = blocks.split(of_xs, len(tracked))
    totals: list[Any] = [*finals[: len(initial_sums)]]
    if isinstance(trip_count, Tensor):  # with zero iterations there are no cotangents
        with context(tape=None):
            has_run = op.greater(trip_count, 0)
        of_rows = [
            Conditional(g, has_run, is_clean=True) if g.dtype.is_inexact else g for g in of_rows
        ]
        for k in begun:
            totals[k] = Conditional(totals[k], has_run, is_clean=True)
        still_begun.update(outer)
    for k in still_begun:
        totals[k] = outer[k].at(finals[k])
    for k, condition in zip(conditional, finals[len(initial_sums) + len(numbers) :], strict=True):
        totals[k] = Conditional(finals[k], condition)
    parts: list[Any] = [None] * (nstate + nrows)
    for k, g in zip(active, totals, strict=False):
        parts[k] = g
    for k, g in zip(tracked, of_rows, strict=True):
        parts[nstate + k] = g
    for k, condition in zip(sorted(residual_rows), rows_present, strict=True):
        g = of_xs[tracked.index(k)]
        parts[nstate + k] = Conditional(g, condition, is_clean=True)
    of_closures = {**cells, **dict(zip(closures, totals[len(active) :], strict=False))}
    return [*parts, *[of_closures.get(number) for number in segment.closures]]


def _activity(
    vjp: _LoopVjp, active: list[int], ys: Tensors
) -> tuple[list[int], set[int], set[int], set[int] | None]:
    """Return which parts have cotangents in which iterations of the backward loop.

    The backward loop starts with cotangents of the parts `active` and `ys`. Returns four sets.
    The first is the parts of the state with a new value that has a cotangent in some iteration. The
    second is the subset of these that has none in some other iteration. The third is the nodes that
    receive cotangents in some iteration. The fourth is the nodes that receive cotangents in the
    first iteration; it is None if all iterations reach the same nodes. Zeros for an absent part
    then do not change any value.

    A part without a cotangent in an iteration gets none, as in eager mode, because a rule might
    turn zeros into nan. The number of a record has a cotangent in each iteration, which pushes a
    record of cotangents.
    """
    tape = vjp.segment.tape

    def reach(parts: list[int]) -> set[int]:
        ends = [*ys, *[vjp.after[k] for k in parts]]
        return vjp.segment.reached([y.node for y in ends if y.tape is tape])

    def before(parts: list[int], always: Container[int] = ()) -> list[int]:
        nodes, params = reach(parts), enumerate(vjp.params)
        return [k for k, x in params if k in always or (x.tape is tape and x.node in nodes)]

    union = active
    while (more := before(union, union)) != union:
        union = more
    numbers = {k for k in union if not vjp.params[k].dtype.is_inexact}
    active = sorted({*active, *numbers})
    patterns: list[list[int]] = []
    while active not in patterns:
        patterns.append(active)
        active = before(active, numbers)
    reached = reach(union)
    varying = {k for k in union if not all(k in each for each in patterns)}
    differs = any(reach(each) != reached for each in patterns)
    return union, varying, reached, reach(patterns[0]) if differs else None


def _assign(variables: Tensors, values: Tensors) -> None:
    """Assign new values to the variables simultaneously."""
    roots = {id(x) for x in variables}
    pairs = [(x, y) for x, y in zip(variables, values, strict=True) if y.root is not x]
    moved = [op.copy(y) if id(y.root) in roots else y for _, y in pairs]
    blocks.write([x for x, _ in pairs], moved)


def _new_stack(record: Recorder, row: Tensor, i: Tensor, total: int | None) -> Tensor:
    """Return a variable with `total` rows, into which each iteration writes one row.

    Raises `ShapeError` if `total` is None.
    """
    if total is None:
        raise ShapeError(
            "cannot stack results of a loop whose length is only known at run time; pass an int"
        )
    with context(tape=None):
        stack = record.variable(_with_axis(row.type, total), outside=True)
        if total:
            overwrite(stack, _SET_ROW, stack, blocks.reshape_view(row, _with_axis(row.type, 1)), i)
        else:
            overwrite(stack, COPY, zeros(stack.shape, dtype=stack.dtype))
    return stack


def _with_axis(type: TensorType, length: int) -> TensorType:
    return type.with_shape((length, *type.shape))
