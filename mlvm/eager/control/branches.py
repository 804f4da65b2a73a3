"""Branches: `cond` and `switch`.

Eagerly the condition is read, and Python takes one branch. In a captured function both are
recorded, each as a block, and the program takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.types import Shape, TensorType, bool_
from mlvm.eager.autodiff.joint import Closures, Cotangents, Saved, Sums, add_node, or_zeros, seed
from mlvm.eager.autodiff.rows import Sparse
from mlvm.eager.autodiff.tape import Begun, Conditional, CotangentAccumulator, taping
from mlvm.eager.control import blocks
from mlvm.eager.control.blocks import Tensors
from mlvm.eager.control.state import (
    Body,
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
from mlvm.eager.tensor.apply import alias_of, apply
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, with_leaves
from mlvm.step.flow import Block


def cond(pred: Tensor | bool, true_fun: Body, false_fun: Body, *operands: Tree) -> Any:
    """Return `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`.

    In a captured function both are recorded, and have results of the same structure and types.

    The operands and results: trees of tensors of any shapes. Raises `ShapeError` for a `pred` of
    more elements than one, `DTypeError` for a branch that is no function: `where` chooses between
    tensors.

        >>> ml.cond(ml.asarray(True), ml.negative, ml.abs, ml.asarray([1.0, -2.0]))
        Tensor([-1.,  2.], f32[2])

    Refuses:
        ml.cond(True, 1, 2)  # DTypeError
        ml.cond(v, ml.sin, ml.cos, v)  # ShapeError
    """
    thunks = _bind("cond", (true_fun, false_fun), operands)
    if isinstance(pred, Tensor) and blocks.is_recorded():
        return _cond(pred, thunks)
    return copied(as_tree(thunks[0 if bool(pred) else 1]()))


def switch(index: Tensor | int, branches: Sequence[Body], *operands: Tree) -> Any:
    """Return `branches[index](*operands)`; an index out of range takes the nearest branch.

    In a captured function all are recorded, as by `cond`.

    The index: i[]. Raises `ArgumentError` without branches, `DTypeError` for an index that is no
    integer, a branch that is no function, and branches that stand beside each other.

        >>> ml.switch(ml.asarray(1), [ml.sin, ml.negative], ml.asarray([1.0]))
        Tensor([-1.], f32[1])

    Refuses:
        ml.switch(0, [])  # ArgumentError
        ml.switch(0.5, [ml.sin], v)  # DTypeError
    """
    if callable(branches):
        raise DTypeError("switch: expected a list of branches: switch(index, [f, g], x)")
    if not branches:
        raise ArgumentError("switch: expected one or more branches, got none")
    thunks = _bind("switch", branches, operands)
    if isinstance(index, Tensor) and blocks.is_recorded():
        require_integer("index", index)
        return _switch(index, 0, thunks)
    return copied(as_tree(thunks[min(max(integer("index", index), 0), len(thunks) - 1)]()))


def _bind(name: str, branches: Sequence[Body], operands: Sequence[Tree]) -> list[Callable[[], Any]]:
    """Bind each branch to aliases of the operands, since a branch may update them.

    Raises `DTypeError` for a branch that is not a function.
    """
    for each in branches:
        if not callable(each):
            got = each.type if isinstance(each, Tensor) else brief(each)
            raise DTypeError(
                f"{name}: expected a function as branch, got {got}; "
                "ml.where chooses between tensors"
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
    return _cond(index < first + half, both)


def _cond(pred: Tensor, thunks: Sequence[Callable[[], Any]]) -> Any:
    """Record two branches of a captured function."""
    if pred.size != 1:
        raise ShapeError("expected a condition of one element").at("cond", (pred.type,))
    results: list[Tree] = []

    def run(thunk: Callable[[], Any]) -> Tensors:
        result = as_tree(thunk())
        results.append(result)
        what = "a branch makes another result than the first"
        return tensors(as_like(results[0], result, what))

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
            except blocks.UnknownResults as error:  # the other tells what the function makes
                unknown_results = error
                continue
            results = results or [record.variable(y.type, outside=True) for y in outputs]
            residuals: Tensors = []
            if tape is not None:
                segment = blocks.Segment(record, tape, start, outputs, [], carried)
                residuals = [record.variable(x.type, outside=True) for x in segment.inside]
                vjps.append(_Branch(segment, outputs, residuals))
            with taped(None):
                blocks.write(residuals, segment.inside if residuals else [])
                blocks.write(results, outputs)
        recorded.append(block)
    if unknown_results is not None:
        if tape is not None:
            del tape.nodes[start:]
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
    """Vjp of one branch: its tape segment, outputs, and variables that hold its residuals."""

    segment: blocks.Segment
    outputs: Tensors
    residuals: Tensors


def _vjp(vjps: list[_Branch], closures: Closures, gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
    """Return the cotangents of the tensors that the branches use from outside.

    They continue the sums `sums` before. One that a branch does not reach has none there.
    """
    [pred], rest = blocks.split(saved, 1)
    output_gs, residual_gs = blocks.split(gs, len(vjps[0].outputs))
    cells, others = blocks.split_cells(closures, sums)
    before = {number: h for number, h in others.items() if h is not None}
    sides: list[Callable[[], list[Any]]] = []
    reached: list[set[int]] = []

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
        reached.append({*before, *segment.reached(ends)})
    numbers = [number for number in others if any(number in each for each in reached)]
    partly = [k for k, n in enumerate(numbers) if not all(n in each for each in reached)]
    totals = either(pred, sides, [closures[n] for n in numbers], partly)
    sums_by_node = {**cells, **dict(zip(numbers, totals, strict=True))}
    return [sums_by_node.get(number) for number in closures]


def either(
    pred: Tensor,
    sides: Sequence[Callable[[], Sequence[Any]]],
    types: Sequence[TensorType],
    partly: Sequence[int] = (),
) -> list[Any]:
    """Record two branches whose results are cotangents of these types, which may be absent.

    A result that is absent in one branch, or is conditional there, is `Conditional`; one that is
    `Begun` in a branch is `Begun`. `partly` has the positions of those for which this is known; the
    recording begins again with others. The number of a record is 0 where it is absent.
    """
    shapes: dict[int, Shape] = {k: () for k in partly if types[k].dtype.is_inexact}
    unclean: set[int] = set()
    begun: dict[int, Begun] = {}

    def recorded(side: Callable[[], Sequence[Any]]) -> Tensors:
        parts = side()
        begun.update((k, g) for k, g in enumerate(parts) if isinstance(g, Begun))
        new = {
            k: g.present.shape if isinstance(g, Conditional) else shapes.get(k, ())
            for k, g in enumerate(parts)
            if types[k].dtype.is_inexact
            and (g is None or (isinstance(g, Conditional) and k not in begun))
        }
        if any(k not in shapes or len(shapes[k]) < len(shape) for k, shape in new.items()):
            shapes.update({k: max(shape, shapes.get(k, ()), key=len) for k, shape in new.items()})
            raise blocks.RetryBlocks
        unclean.update(
            k for k, g in enumerate(parts) if isinstance(g, Conditional) and not g.is_clean
        )
        values = [
            g.x if isinstance(g, Conditional) else or_zeros(g, type)
            for g, type in zip(parts, types, strict=True)
        ]
        return values + [present(parts[k], shape) for k, shape in shapes.items()]

    results = _branch([], pred, [partial(recorded, side) for side in sides])
    flags = dict(zip(shapes, results[len(types) :], strict=True))
    totals: list[Any] = results[: len(types)]
    for k, flag in flags.items():
        totals[k] = Conditional(totals[k], flag, is_clean=k not in unclean)
    for k, g in begun.items():
        totals[k] = g.at(totals[k])
    return totals


def present(g: Any, shape: Shape = ()) -> Tensor:
    """Return the condition under which a cotangent is present; for a shape, of each row."""
    with taped(None):
        if not isinstance(g, Conditional) or isinstance(g, Begun):
            return full(shape, isinstance(g, Tensor), dtype=bool_)
        own: Tensor = g.present
        if own.ndim > len(shape):
            return op.any(own, axis=tuple(range(len(shape), own.ndim)))
        return broadcast_to(reshape(own, own.shape + (1,) * (len(shape) - own.ndim)), shape)


def _added(total: Any, part: Any) -> Any:
    """Add two cotangents of which one or both are conditional (see `Conditional`)."""
    if not isinstance(total, (Tensor, Conditional)):  # a cell
        either(part.present, [lambda: [total + part.x][:0], list], [])
        return total
    if isinstance(part, Sparse):
        part = apply(part.alone, *part.operands)
    x, y = [g.x if isinstance(g, Conditional) else g for g in (total, part)]
    one, other = [g.present if isinstance(g, Conditional) else None for g in (total, part)]
    if one is other and isinstance(total, Conditional) and isinstance(part, Conditional):
        return Conditional(x + y, total.present, is_clean=total.is_clean and part.is_clean)
    both = x + y
    if isinstance(total, Begun):
        return both if other is None else total.at(_chosen(other, both, x))
    if one is None or other is None:
        return _chosen(other, both, x) if one is None else _chosen(one, both, y)
    with taped(None):
        shape = max(one.shape, other.shape, key=len)
        either_one = op.logical_or(present(total, shape), present(part, shape))
    return Conditional(_chosen(one, _chosen(other, both, x), y), either_one)


def _chosen(pred: Any, x: Tensor, y: Tensor) -> Tensor:
    """Select x where the condition is true, else y: a `cond` for a scalar, a `where` for rows.

    With a `cond` the other one has no cotangent; with a `where` it has one of zeros.
    """
    if pred.shape:
        return op.where(reshape(pred, pred.shape + (1,) * (x.ndim - pred.ndim)), x, y)
    [chosen] = _branch([], pred, [lambda: [x], lambda: [y]])
    return chosen


def _cleaned(g: Conditional) -> Tensor:
    x: Tensor = g.x
    return x if g.is_clean else _chosen(g.present, x, full(x.shape, 0, dtype=x.dtype))


Conditional.added = staticmethod(_added)
Conditional.cleaned = staticmethod(_cleaned)
