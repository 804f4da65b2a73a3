"""Tape nodes of calls with several results: loops, branches, functions.

Such a call has one node with all operands. Each result has a separate node, which passes the
cotangent of the result on to the common node, as one of several `_Parts`. The backward pass of the
call therefore runs only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from mlvm.arena.context import current
from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.tape import (
    Conditional,
    CotangentAccumulator,
    MultiOutputVjp,
    Node,
    OperandVjp,
    Tape,
    added,
    taping,
)
from mlvm.eager.functions.creation import full
from mlvm.eager.tensor.tensor import Tensor

Closures: TypeAlias = dict[int, TensorType]
"""Types of the outer nodes that receive cotangents, by node number."""

Cotangents: TypeAlias = Sequence[Any]
"""Tensors; None for an absent cotangent, or `Conditional`."""
Saved: TypeAlias = Sequence[Tensor]
Sums: TypeAlias = Sequence[Any]
"""Arguments of a backward pass: cotangents of the results, saved tensors, and partial sums.

The sums are of the destinations' cotangents; the pass returns the new sums (see `add_node`).
"""


def closures_of(
    tape: Tape, nodes: Sequence[Node | None], start: int, results: Sequence[Tensor]
) -> Closures:
    """Return the nodes before number `start` that receive cotangents from these nodes and results.

    The nodes are numbered from `start`.
    """
    closures: Closures = {}
    for node in nodes:
        if node is not None:
            vjps, origins, _ = node
            types = [vjp[0] for vjp in vjps] if isinstance(vjps, tuple) else vjps.types
            closures.update((o, t) for t, o in zip(types, origins, strict=True) if o < start)
    closures.update((y.node, y.type) for y in results if y.tape is tape and y.node < start)
    return closures


def seed(pending: CotangentAccumulator, tape: Tape, results: Saved, parts: Cotangents) -> None:
    """Add the cotangents of tracked results in the order of a backward pass, last first."""
    for y, part in reversed([*zip(results, parts, strict=True)]):
        if part is not None and y.tape is tape:
            total = pending.get(y.node)
            pending[y.node] = part if total is None else plus(total, part)


_PARTS: Final = TensorType(i64, (0,))
"""Placeholder type of `_Parts`."""


class _Parts(dict[int, Tensor]):
    """Cotangents of several results, by position."""

    type = _PARTS

    def __add__(self, other: _Parts) -> _Parts:
        sums = dict(self)
        for number, part in other.items():
            sums[number] = plus(sums[number], part) if number in sums else part
        return _Parts(sums)


def add_node(
    tape: Tape,
    results: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    closures: Closures,
    saved: Sequence[Tensor],
    vjp: Callable[..., Sequence[Any]],
    continued: Sequence[int] = (),
    *,
    effect: bool = False,
) -> None:
    """Add a node for control flow with several results, and one node for each result.

    A result is a float, a complex number, or the number of a record; None for a result that depends
    on no tracked tensor. Cotangents flow to tracked operands and to the closures, which are tensors
    that the body uses from outside.

    `vjp(cotangents, saved, sums)` returns a cotangent for each operand, then the new sum of each
    closure, which continues the partial sum in `sums`. The sums of the operands in `continued`
    (positions) follow the sums of the closures, or are None; the vjp also continues them.
    """
    nresults, noperands, nclosures = len(results), len(operands), len(closures)
    tracked = [(k, x.node) for k, x in enumerate(operands) if x.tape is tape]
    origins = (*closures, *[origin for _, origin in tracked])
    alone = {k: origin for k, origin in tracked if origins.count(origin) == 1}
    own = [alone.get(k, -1) for k in continued]

    def back(g: _Parts, saved: Saved, sums: Sums) -> Sums:
        totals = dict(zip(origins, sums, strict=True))
        own_sums = [h if isinstance(h := totals.get(n), Tensor) else None for n in own]
        totals |= {n: None for n, h in zip(own, own_sums, strict=True) if h is not None}
        gs = [g.get(i) for i in range(nresults)]
        parts = vjp(gs, saved, [*sums[:nclosures], *own_sums])
        totals.update(zip(origins, parts[noperands:], strict=False))
        for k, origin in reversed(tracked):
            part, before = parts[k], totals[origin]
            if part is not None:
                totals[origin] = part if before is None else plus(before, part)
        return [totals[origin] for origin in origins]

    types = [*closures.values(), *[operands[k].type for k, _ in tracked]]
    node = len(tape.nodes)
    tape.nodes.append((MultiOutputVjp(types, back, effect), origins, tuple(saved)))
    tape.saved_roots.update(id(x.root) for x in saved)
    for number, y in enumerate(results):
        if y is not None:
            tape.add_node(y, (OperandVjp(_PARTS, partial(_one_part, number), ()),), (node,), ())


def _one_part(number: int, g: Tensor) -> Any:
    return _Parts({number: g})


def plus(total: Any, part: Any) -> Any:
    """Add two cotangents.

    The cotangent of a record's number is also the number of a record (see
    `mlvm.machines.residuals`).
    """
    record: Any = current().recorder
    if not isinstance(part, Tensor) or part.dtype.is_inexact or record is None:
        return added(total, part)
    y: Tensor = record.summed(total, part)
    tape = taping()
    if tape is not None:
        add_node(tape, [y], [total, part], {}, [], lambda g, *_: [*g, *g])
    return y


def or_zeros(g: Any, type: TensorType) -> Tensor:
    """Return g, or zeros of that type if it is absent."""
    if isinstance(g, Conditional):
        return Conditional.cleaned(g)
    return full(type.shape, 0, dtype=type.dtype) if g is None else g
