"""Branches: `cond` and `switch`.

Eagerly the condition is read, and Python takes one branch. In a captured function both are
recorded, each as a block, and the program takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mlvm.core.errors import AttributeRefused, DTypeError, ShapeError, brief
from mlvm.eager.autodiff.joint import Closures, Cotangents, Held, Saved, leave, or_zeros, seed
from mlvm.eager.autodiff.tape import Pending, taping
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
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.context import taped
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tree import Tree, with_leaves
from mlvm.step.flow import Block


def cond(pred: Tensor | bool, true_fun: Body, false_fun: Body, *operands: Tree) -> Any:
    """`true_fun(*operands)` if `pred` is true, `false_fun(*operands)` if not.

    In a captured function both are recorded, and have results of the same structure and types.

    The operands and results: trees of tensors of any shapes. Raises `ShapeError` for a `pred` of
    more elements than one, `DTypeError` for a branch that is no function: `where` chooses between
    tensors.

        >>> ml.cond(ml.asarray(True), ml.negative, ml.abs, ml.asarray([1.0, -2.0]))
        Tensor([-1.,  2.], f32[2])
    """
    ways = _ways("cond", (true_fun, false_fun), operands)
    if isinstance(pred, Tensor) and blocks.is_recorded():
        return _cond(pred, ways)
    return copied(as_tree(ways[0 if bool(pred) else 1]()))


def switch(index: Tensor | int, branches: Sequence[Body], *operands: Tree) -> Any:
    """`branches[index](*operands)`; of an index out of range, the nearest branch.

    In a captured function all are recorded, as by `cond`.

    The index: i[]. Raises `AttributeRefused` without branches, `DTypeError` for an index that is no
    integer, a branch that is no function, and branches that stand beside each other.

        >>> ml.switch(ml.asarray(1), [ml.sin, ml.negative], ml.asarray([1.0]))
        Tensor([-1.], f32[1])
    """
    if callable(branches):
        raise DTypeError("switch: the branches are one argument, a list: switch(index, [f, g], x)")
    if not branches:
        raise AttributeRefused("switch takes one branch or more")
    ways = _ways("switch", branches, operands)
    if isinstance(index, Tensor) and blocks.is_recorded():
        require_integer("index", index)
        return _switch(index, 0, ways)
    return copied(as_tree(ways[min(max(integer("index", index), 0), len(ways) - 1)]()))


def _ways(name: str, branches: Sequence[Body], operands: Sequence[Tree]) -> list[Callable[[], Any]]:
    """The branches with their operands: other tensors for each, as it may update them. Raises
    `DTypeError` for a branch that is no function."""
    for each in branches:
        if not callable(each):
            found = each.type if isinstance(each, Tensor) else brief(each)
            raise DTypeError(
                f"{name}: a branch is a function, not {found}; to choose between tensors take where"
            )
    given = [as_tree(each) for each in operands]

    def way(branch: Body) -> Any:
        return branch(*[with_leaves(x, iter(blocks.aliases(tensors(x)))) for x in given])

    return [partial(way, branch) for branch in branches]


# --- recorded ------------------------------------------------------------------------


def _switch(index: Tensor, first: int, ways: Sequence[Callable[[], Any]]) -> Any:
    """The branches numbered from `first` on, by halves."""
    if len(ways) == 1:
        return copied(as_tree(ways[0]()))
    half = len(ways) // 2
    halves = [(first, ways[:half]), (first + half, ways[half:])]
    both = [partial(_switch, index, number, each) for number, each in halves]
    return _cond(index < first + half, both)


def _cond(pred: Tensor, ways: Sequence[Callable[[], Any]]) -> Any:
    """One of two branches of a captured function."""
    if pred.size != 1:
        raise ShapeError("a condition is one element").at("cond", (pred.type,))
    results: list[Tree] = []

    def run(way: Callable[[], Any]) -> Tensors:
        result = as_tree(way())
        results.append(result)
        what = "a branch makes another result than the first"
        return tensors(as_like(results[0], result, what))

    made = _branch([], alias_of(pred), [partial(run, way) for way in ways])
    return with_leaves(results[0], iter(made))


@blocks.recorded_again
def _branch(carried: Tensors, pred: Tensor, branches: Sequence[Callable[[], Tensors]]) -> Tensors:
    """What the first or the second of two branches makes, which carry tensors (see
    `blocks.carrying`)."""
    record, tape = blocks.recorder(), taping()
    start = 0 if tape is None else len(tape.nodes)
    recorded: list[Block] = []
    results: Tensors = []
    sides: list[_Side] = []
    unknown: blocks.Unknown | None = None
    for branch in branches:
        with blocks.carrying(carried) as block:
            try:
                made = blocks.left(carried, [*branch(), *carried])
            except blocks.Unknown as error:  # the other tells what the function makes
                unknown = error
                continue
            results = results or [record.variable(y.type, outside=True) for y in made]
            kept: Tensors = []
            if tape is not None:
                segment = blocks.Segment(record, tape, start, made, [], carried)
                kept = [record.variable(x.type, outside=True) for x in segment.inside]
                sides.append(_Side(segment, made, kept))
            with taped(None):
                blocks.write(kept, segment.inside if kept else [])
                blocks.write(results, made)
        recorded.append(block)
    if unknown is not None:
        if tape is not None:
            del tape.nodes[start:]
        if not recorded:
            raise unknown
        return blocks.released(record, results)[: len(results) - len(carried)]
    record.control("cond", recorded, pred)
    finals = blocks.released(record, results)
    closures = {number: type for side in sides for number, type in side.segment.closures.items()}
    if tape is not None and closures:
        sides = [side._replace(kept=blocks.released(record, side.kept)) for side in sides]
        saved = [pred, *[x for side in sides for x in (*side.kept, *side.segment.outside)]]
        both = zip(*[side.made for side in sides], strict=True)
        outs: list[Tensor | None] = [
            y if any(x.tape is tape for x in each) else None
            for y, each in zip(finals, both, strict=True)
        ]
        for side in sides:
            outs += blocks.if_tracked(tape, side.kept, side.segment.inside)
        effect = any(side.segment.has_effect for side in sides)
        leave(tape, outs, [], closures, saved, partial(_pull, sides, closures), effect=effect)
    nown = len(finals) - len(carried)
    blocks.assign(carried, finals[nown:])
    return finals[:nown]


class _Side(NamedTuple):
    """What the way back through a branch needs to know of the way there. `kept` are variables that
    have the tensors of its segment."""

    segment: blocks.Segment
    made: Tensors
    kept: Tensors


def _pull(
    sides: Sequence[_Side], closures: Closures, cotangents: Cotangents, saved: Saved, held: Held
) -> Held:
    """The cotangents of what the branches reach, of which so much is `held` before."""
    [pred], rest = blocks.split(saved, 1)
    of_made, of_kept = blocks.split(cotangents, len(sides[0].made))
    cells, others = blocks.parted(closures, held)
    before = {number: h for number, h in others.items() if h is not None}

    def back(side: _Side, kept: Tensors, outside: Tensors, of_kept: Cotangents) -> Tensors:
        segment = side.segment
        inside = {segment.key(x): y for x, y in zip(segment.inside, kept, strict=True)}
        pending = Pending()
        pending.update({**cells, **before})
        seed(pending, segment.tape, [*side.made, *segment.inside], [*of_made, *of_kept])
        segment.walk(pending, inside, outside)
        return [or_zeros(pending.get(number), closures[number]) for number in others]

    ways: list[Callable[[], Tensors]] = []
    for side in sides:
        kept, outside, rest = blocks.split(rest, len(side.kept), len(side.segment.outside))
        its_own, of_kept = blocks.split(of_kept, len(side.kept))
        ways.append(partial(back, side, kept, outside, its_own))
    totals = {**cells, **dict(zip(others, _branch([], pred, ways), strict=True))}
    return [totals[number] for number in closures]
