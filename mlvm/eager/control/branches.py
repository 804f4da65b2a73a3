"""Branches: `cond` and `switch`.

Eagerly the condition is read, and Python runs one branch. In a captured function both branches are
recorded as blocks, and the program runs one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

from mlvm.arena.context import context
from mlvm.core.errors import ArgumentError, DTypeError, ShapeError
from mlvm.core.types import Shape, TensorType, bool_
from mlvm.eager.autodiff.joint import Closures, Cotangents, Saved, Sums, add_node, or_zeros, seed
from mlvm.eager.autodiff.op_rules import dense
from mlvm.eager.autodiff.tape import Begun, Conditional, CotangentAccumulator, added, taping
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.state import (
    Body,
    as_condition,
    as_like,
    as_tree,
    copied,
    integer,
    require_integer,
    tensors,
)
from mlvm.eager.functions.creation import full
from mlvm.eager.functions.shapes import broadcast_to, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, with_leaves
from mlvm.step.flow import Block


@hinted
def cond(pred: Tensor | bool, true_fun: Body, false_fun: Body, *operands: Tree) -> Any:
    """Return `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`.

    In a captured function both branches are recorded; the results must have the same structure and
    types.

    The operands and results: trees of tensors of any shapes. Raises `ShapeError` for a `pred` with
    more than one element, and `DTypeError` for a branch that is not a function: `where` selects
    between tensors.

        >>> ml.cond(ml.asarray(True), ml.negative, ml.abs, ml.asarray([1.0, -2.0]))
        Tensor([-1.,  2.], f32[2])

    Invalid calls:
        ml.cond(True, 1, 2)  # DTypeError
        ml.cond(v, ml.sin, ml.cos, v)  # ShapeError
    """
    thunks = _bind("cond", "pred, true_fun, false_fun, *operands", (true_fun, false_fun), operands)
    if isinstance(pred, Tensor) and (blocks.is_recorded() or pred.size != 1):
        return _cond(pred, thunks)
    return copied(as_tree(thunks[0 if bool(pred) else 1]()))


@hinted
def switch(index: Tensor | int, branches: Sequence[Body], *operands: Tree) -> Any:
    """Return `branches[index](*operands)`; an index out of range selects the nearest branch.

    In a captured function all branches are recorded, as in `cond`.

    The index: i[]. Raises `ArgumentError` without branches. Raises `DTypeError` for an index that
    is not an integer, for a branch that is not a function, and unless the branches are one list.

        >>> ml.switch(ml.asarray(1), [ml.sin, ml.negative], ml.asarray([1.0]))
        Tensor([-1.], f32[1])

    Invalid calls:
        ml.switch(0, [])  # ArgumentError
        ml.switch(0.5, [ml.sin], v)  # DTypeError
    """
    if callable(branches):
        raise DTypeError(
            "switch: expected a list of branches, got a function; write switch(index, [f, g], x)"
        )
    if not branches:
        raise ArgumentError("switch: expected one or more branches, got none")
    thunks = _bind("switch", "index, branches, *operands", branches, operands)
    if isinstance(index, Tensor) and blocks.is_recorded():
        require_integer("index", index)
        return _switch(index, 0, thunks)
    return copied(as_tree(thunks[min(max(integer("index", index), 0), len(thunks) - 1)]()))


def _bind(
    name: str, order: str, branches: Sequence[Body], operands: Sequence[Tree]
) -> list[Callable[[], Any]]:
    """Bind each branch to aliases of the operands, since a branch may update them.

    Raises `DTypeError` for a branch that is not a function.
    """
    for each in branches:
        if not callable(each):
            raise DTypeError(
                f"{name}: expected a function as branch, got {described(each)}; "
                f"the order is ({order}); use ml.where to select between tensors"
            )
    trees = [as_tree(each) for each in operands]

    def thunk(branch: Body) -> Any:
        return branch(*[with_leaves(x, iter(blocks.aliases(tensors(x)))) for x in trees])

    return [partial(thunk, branch) for branch in branches]


# --- recorded ------------------------------------------------------------------------


def _switch(index: Tensor, first: int, thunks: Sequence[Callable[[], Any]]) -> Any:
    """Record the branches, numbered from `first` on, as a binary tree of conditions."""
    if len(thunks) == 1:
        return copied(as_tree(thunks[0]()))
    half = len(thunks) // 2
    halves = [(first, thunks[:half]), (first + half, thunks[half:])]
    both = [partial(_switch, index, number, each) for number, each in halves]
    return _cond(
        index < first + half,
        both,
        (f"branches {first} and {first + half}", f"branch {first + half}"),
    )


def _cond(
    pred: Tensor,
    thunks: Sequence[Callable[[], Any]],
    names: tuple[str, str] = ("true_fun and false_fun", "false_fun"),
) -> Any:
    """Record the two branches of a condition in a captured function.

    Errors refer to both branches, and to the second branch, by these `names`.
    """
    if pred.size != 1:
        raise ShapeError(
            f"expected a condition of one element, got {pred.size}; select elements with ml.where"
        ).at("cond", (pred.type,))
    results: list[Tree] = []

    def run(thunk: Callable[[], Any]) -> Tensors:
        result = as_tree(thunk())
        results.append(result)
        both, second = names
        what = f"expected {both} to return"
        return tensors(as_like(results[0], result, what, source=f" from {second}"))

    outputs = _branch([], alias_of(pred), [partial(run, thunk) for thunk in thunks])
    return with_leaves(results[0], iter(outputs))


@blocks.retry_blocks
def _branch(carried: Tensors, pred: Tensor, branches: Sequence[Callable[[], Tensors]]) -> Tensors:
    """Record two branches as a `cond` of the flow; return the outputs.

    The branches also update the `carried` tensors (see `blocks.carrying`).
    """
    record, tape = blocks.recorder(), taping()
    start = 0 if tape is None else len(tape.nodes)
    recorded: list[Block] = []
    results: Tensors = []
    vjps: list[_Branch] = []
    unknown_results: blocks.UnknownResults | None = None
    for branch in branches:
        with blocks.carrying(carried) as block:
            try:
                outputs = blocks.block_outputs(carried, [*branch(), *carried])
            except blocks.UnknownResults as error:  # the other branch determines the results
                unknown_results = error
                if tape is not None:
                    del tape.nodes[start:]
                continue
            results = results or [record.variable(y.type, outside=True) for y in outputs]
            residuals: Tensors = []
            if tape is not None:
                segment = blocks.Segment(record, tape, start, outputs, [], carried)
                residuals = [record.variable(x.type, outside=True) for x in segment.inside]
                vjps.append(_Branch(segment, outputs, residuals))
            with context(tape=None):
                blocks.write(residuals, segment.inside if residuals else [])
                blocks.write(results, outputs)
        recorded.append(block)
    if unknown_results is not None:
        if not recorded:
            raise unknown_results
        return blocks.release(record, results)[: len(results) - len(carried)]
    record.control("cond", recorded, pred)
    finals = blocks.release(record, results)
    closures = {number: type for side in vjps for number, type in side.segment.closures.items()}
    if tape is not None and closures:
        vjps = [side._replace(residuals=blocks.release(record, side.residuals)) for side in vjps]
        saved = [pred, *[x for side in vjps for x in (*side.residuals, *side.segment.outside)]]
        both = zip(*[side.outputs for side in vjps], strict=True)
        outs: list[Tensor | None] = [
            y if any(x.tape is tape for x in each) else None
            for y, each in zip(finals, both, strict=True)
        ]
        for side in vjps:
            outs += blocks.tracked_results(tape, side.residuals, side.segment.inside)
        effect = any(side.segment.has_effect for side in vjps)
        add_node(tape, outs, [], closures, saved, partial(_vjp, vjps, closures), effect=effect)
    nown = len(finals) - len(carried)
    blocks.assign_carried(carried, finals[nown:])
    return finals[:nown]


class _Branch(NamedTuple):
    """Vjp of a branch: the tape segment, the outputs, and the variables with the residuals."""

    segment: blocks.Segment
    outputs: Tensors
    residuals: Tensors


def _vjp(vjps: list[_Branch], closures: Closures, gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
    """Return the cotangents of the tensors that the branches use from outside.

    They continue the partial sums `sums`. A tensor that a branch does not use gets no cotangent
    there.
    """
    [pred], rest = blocks.split(saved, 1)
    output_gs, residual_gs = blocks.split(gs, len(vjps[0].outputs))
    cells, others = blocks.split_cells(closures, sums)
    before = {number: h for number, h in others.items() if h is not None}
    sides: list[Callable[[], list[Any]]] = []
    reached = set(before)

    def back(side: _Branch, values: Tensors, outside: Tensors, residual_gs: Cotangents) -> Any:
        segment = side.segment
        inside = {segment.key(x): y for x, y in zip(segment.inside, values, strict=True)}
        pending = CotangentAccumulator()
        pending.update({**cells, **before})
        seed(pending, segment.tape, [*side.outputs, *segment.inside], [*output_gs, *residual_gs])
        segment.walk(pending, inside, outside)
        return [pending.get(number) for number in numbers]

    for side in vjps:
        segment = side.segment
        inside, outside, rest = blocks.split(rest, len(side.residuals), len(segment.outside))
        its_own, residual_gs = blocks.split(residual_gs, len(side.residuals))
        sides.append(partial(back, side, inside, outside, its_own))
        pairs = zip([*side.outputs, *segment.inside], [*output_gs, *its_own], strict=True)
        ends = [y.node for y, g in pairs if g is not None and y.tape is segment.tape]
        reached |= segment.reached(ends)
    numbers = [number for number in others if number in reached]
    totals = either(pred, sides, [closures[n] for n in numbers])
    sums_by_node = {**cells, **dict(zip(numbers, totals, strict=True))}
    return [sums_by_node.get(number) for number in closures]


def either(
    pred: Tensor, sides: Sequence[Callable[[], Sequence[Any]]], types: Sequence[TensorType]
) -> list[Any]:
    """Record two branches with results that are cotangents of these types, which may be absent.

    A result that is absent or conditional in one branch becomes `Conditional`. A result that is
    `Begun` in a branch becomes `Begun`. If a branch computes a condition, that condition becomes an
    additional result of the branches, and the recording starts again. The number of an absent
    record is 0.
    """
    record = blocks.recorder()
    shapes: dict[int, Shape] = {}
    unclean: set[int] = set()
    begun: dict[int, Begun] = {}
    conditions: dict[int, list[Any]] = {}  # by the index of the branch; None: always present

    def recorded(number: int, side: Callable[[], Sequence[Any]]) -> Tensors:
        parts = side()
        begun.update((k, g) for k, g in enumerate(parts) if isinstance(g, Begun))
        conditional = {k: g for k, g in enumerate(parts) if isinstance(g, Conditional)}
        new = {
            k: g.present.shape
            for k, g in conditional.items()
            if k not in begun and record.is_inside(g.present)
        }
        if any(k not in shapes or len(shapes[k]) < len(shape) for k, shape in new.items()):
            shapes.update({k: max(shape, shapes.get(k, ()), key=len) for k, shape in new.items()})
            raise blocks.RetryBlocks
        unclean.update(k for k, g in conditional.items() if not g.is_clean)
        conditions[number] = [g is not None for g in parts]
        for k, g in conditional.items():
            conditions[number][k] = g.present
        values = [
            g.x if isinstance(g, Conditional) else or_zeros(g, type)
            for g, type in zip(parts, types, strict=True)
        ]
        return values + [present(parts[k], shape) for k, shape in shapes.items()]

    results = _branch([], pred, [partial(recorded, i, side) for i, side in enumerate(sides)])
    totals: list[Any] = results[: len(types)]
    flags = dict(zip(shapes, results[len(types) :], strict=True))
    selected = _selecting(pred)
    sides_known = [conditions.get(i, [True] * len(types)) for i in range(2)]
    for k, (one, other) in enumerate(zip(*sides_known, strict=True)):
        if k in begun:
            totals[k] = begun[k].at(totals[k])
        elif types[k].dtype.is_inexact:
            flag = flags[k] if k in flags else selected(one, other)
            if flag is False:
                totals[k] = None
            elif flag is not True:
                totals[k] = Conditional(totals[k], flag, is_clean=k not in unclean)
    return totals


def _selecting(pred: Tensor) -> Callable[[Any, Any], Any]:
    """Return a function that selects one of two conditions, depending on `pred`.

    It returns the first condition where `pred` is true, else the second. Each condition is a bool[]
    tensor or a Python bool."""
    pair = cache(partial(complements, pred))
    results: dict[tuple[int, int], Any] = {}

    def selected(one: Any, other: Any) -> Any:
        if one is other:
            return one
        key = id(one), id(other)
        if key not in results:
            parts = [
                where if each is True else op.logical_and(where, each)
                for where, each in zip(pair(), (one, other), strict=True)
                if each is not False
            ]
            results[key] = parts[0] if len(parts) == 1 else op.logical_or(*parts)
        return results[key]

    return selected


def complements(pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return `pred` and `not pred`, each as a bool[]."""
    with context(tape=None):
        holds = reshape(as_condition(pred), ())
        return holds, op.logical_not(holds)


def present(g: Any, shape: Shape = ()) -> Tensor:
    """Return the condition under which a cotangent is present; with a shape, one per row."""
    with context(tape=None):
        if not isinstance(g, Conditional) or isinstance(g, Begun):
            return full(shape, isinstance(g, Tensor), dtype=bool_)
        own: Tensor = g.present
        if own.ndim > len(shape):
            return op.any(own, axis=tuple(range(len(shape), own.ndim)))
        return broadcast_to(reshape(own, own.shape + (1,) * (len(shape) - own.ndim)), shape)


def _added(total: Any, part: Any) -> Any:
    """Add two cotangents, at least one of which is conditional (see `Conditional`)."""
    if not isinstance(total, (Tensor, Conditional)):  # the total is a cell
        either(part.present, [lambda: [total + part.x][:0], list], [])
        return total
    x, y = [g.x if isinstance(g, Conditional) else g for g in (total, part)]
    one, other = [g.present if isinstance(g, Conditional) else None for g in (total, part)]
    if one is other and isinstance(total, Conditional) and isinstance(part, Conditional):
        return Conditional(added(x, y), total.present, is_clean=total.is_clean and part.is_clean)
    if isinstance(total, Begun):
        both = added(x, y)
        return both if other is None else total.at(_chosen(other, both, x))
    scalars = not any(each is not None and each.shape for each in (one, other))
    alone = dense(y)  # removed from the program unless used
    with context(tape=None) if scalars else nullcontext():
        value = added(x, y)
        if other is not None:
            value = _chosen(other, value, x)
        if one is not None:
            value = _chosen(one, value, alone)
    if scalars:
        _add_selection(value, (x, one), (alone, other))
    if one is None or other is None:
        return value
    with context(tape=None):
        shape = max(one.shape, other.shape, key=len)
        either_one = op.logical_or(present(total, shape), present(part, shape))
    return Conditional(value, either_one)


def _chosen(pred: Any, x: Tensor, y: Tensor) -> Tensor:
    """Select x where the condition is true, else y: by `cond` for a scalar, by `where` for rows.

    With `cond` the other operand gets no cotangent; with `where` it gets zeros.
    """
    if pred.shape:
        return op.where(reshape(pred, pred.shape + (1,) * (x.ndim - pred.ndim)), x, y)
    with context(tape=None):
        [chosen] = _branch([], pred, [lambda: [x], lambda: [y]])
    pred, otherwise = complements(pred)
    _add_selection(chosen, (x, pred), (y, otherwise))
    return chosen


def _add_selection(out: Tensor, *parts: tuple[Tensor, Tensor | None]) -> None:
    """Add the tape node of a selection: each part gets the cotangent under the part's condition."""
    tape = taping()
    operands = [x for x, _ in parts]
    if tape is None or not any(x.tape is tape for x in operands):
        return
    conditions = [condition for _, condition in parts]
    saved = [each for each in conditions if each is not None]
    have = [each is not None for each in conditions]

    def vjp(gs: Cotangents, saved: Saved, _: Sums) -> Sums:
        rest = iter(saved)
        return [_where_present(gs[0], next(rest) if has else None) for has in have]

    add_node(tape, [out], operands, {}, saved, vjp)


def _where_present(g: Any, condition: Tensor | None) -> Any:
    """Return a cotangent that is present only where both the old condition and `condition` hold."""
    if g is None or condition is None:
        return g
    if not isinstance(g, Conditional):
        return Conditional(g, condition)
    with context(tape=None):
        both = op.logical_and(g.present, condition)
    return Conditional(g.x, both)


def _cleaned(g: Conditional) -> Tensor:
    x: Tensor = g.x
    return x if g.is_clean else _chosen(g.present, x, full(x.shape, 0, dtype=x.dtype))


Conditional.added = staticmethod(_added)
Conditional.cleaned = staticmethod(_cleaned)
