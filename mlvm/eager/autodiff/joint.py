"""Nodes of a tape for what has several results: a loop, a branch, a function.

Such a node goes back once, for all of its operands. The node of each result hands its cotangent on
to it, as one of several `_Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from mlvm.core.types import TensorType, i64
from mlvm.eager.autodiff.tape import Joint, Node, Pending, Pull, Tape, taping
from mlvm.eager.functions.creation import full
from mlvm.eager.tensor.context import current_capture
from mlvm.eager.tensor.tensor import Tensor

Closures: TypeAlias = dict[int, TensorType]
"""Nodes that a way back ends at, by their numbers, and their types."""

Cotangents: TypeAlias = Sequence[Tensor | None]
Saved: TypeAlias = Sequence[Tensor]
Held: TypeAlias = Sequence[Any]
"""What a way back is given: cotangents of the results, what was saved, and of what it goes to the
cotangents so far. It gives these as they are then (see `leave`)."""


def closures_of(
    tape: Tape, nodes: Sequence[Node | None], start: int, results: Sequence[Tensor]
) -> Closures:
    """The nodes before number `start` that cotangents go to from these nodes, which begin there,
    and from the results that come of them; and their types."""
    closures: Closures = {}
    for node in nodes:
        if node is not None:
            pulls, origins, _ = node
            types = [pull.type for pull in pulls] if isinstance(pulls, tuple) else pulls.types
            closures.update((o, t) for t, o in zip(types, origins, strict=True) if o < start)
    closures.update((y.node, y.type) for y in results if y.tape is tape and y.node < start)
    return closures


def seed(pending: Pending, tape: Tape, results: Saved, parts: Cotangents) -> None:
    """Begin a way back with cotangents of results, where these are tracked and there is one: with
    that of the last one, as a way back does."""
    for y, part in reversed([*zip(results, parts, strict=True)]):
        if part is not None and y.tape is tape:
            held = pending.get(y.node)
            pending[y.node] = part if held is None else plus(held, part)


_PARTS: Final = TensorType(i64, (0,))
"""Stands for the type of `_Parts`."""


class _Parts(dict[int, Tensor]):
    """Cotangents of several results, by their numbers."""

    type = _PARTS

    def __add__(self, other: _Parts) -> _Parts:
        sums = dict(self)
        for number, part in other.items():
            sums[number] = plus(sums[number], part) if number in sums else part
        return _Parts(sums)


def leave(
    tape: Tape,
    results: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    closures: Closures,
    saved: Sequence[Tensor],
    pull: Callable[..., Sequence[Any]],
    continued: Sequence[int] = (),
    *,
    effect: bool = False,
) -> None:
    """Leave a node for control flow with several results, and one for each result; there is None
    for one that does not depend on what is tracked. A result is a float, complex, or the number of
    a record. Cotangents go to the operands that are tracked, and to the closures, what it reaches
    besides.

    `pull(cotangents, saved, held)` makes a cotangent for each operand, and for each of the
    closures, of which so much is held before. So it does for operands that are `continued`, by
    their numbers: held has theirs after that of the closures, or None, which then is added here.
    """
    nresults, noperands, nclosures = len(results), len(operands), len(closures)
    tracked = [(k, x.node) for k, x in enumerate(operands) if x.tape is tape]
    origins = (*closures, *[origin for _, origin in tracked])
    alone = {k: origin for k, origin in tracked if origins.count(origin) == 1}
    own = [alone.get(k, -1) for k in continued]

    def back(g: _Parts, saved: Saved, held: Held) -> Held:
        totals = dict(zip(origins, held, strict=True))
        given = [totals.get(origin) for origin in own]
        given = [h if isinstance(h, Tensor) else None for h in given]
        for origin, h in zip(own, given, strict=True):
            if origin is not None and h is not None:
                totals[origin] = None
        made = pull([g.get(i) for i in range(nresults)], saved, [*held[:nclosures], *given])
        totals.update(zip(origins, made[noperands:], strict=False))
        for k, origin in reversed(tracked):
            part, before = made[k], totals[origin]
            if part is not None:
                totals[origin] = part if before is None else plus(before, part)
        return [totals[origin] for origin in origins]

    types = [*closures.values(), *[operands[k].type for k, _ in tracked]]
    node = len(tape.nodes)
    tape.nodes.append((Joint(types, back, effect), origins, tuple(saved)))
    tape.kept.update(id(x.root) for x in saved)
    for number, y in enumerate(results):
        if y is not None:
            tape.leave(y, (Pull(_PARTS, partial(_one_part, number), ()),), (node,), ())


def _one_part(number: int, g: Tensor) -> Any:
    return _Parts({number: g})


def plus(held: Any, part: Any) -> Any:
    """The sum of two cotangents. Those of the number of a record are such numbers, too (see
    `mlvm.machines.residuals`)."""
    record: Any = current_capture.get()
    if not isinstance(part, Tensor) or part.dtype.is_inexact or record is None:
        return held + part
    total: Tensor = record.summed(held, part)
    tape = taping()
    if tape is not None:
        leave(tape, [total], [held, part], {}, [], lambda of_total, *_: [*of_total, *of_total])
    return total


def or_zeros(g: Tensor | None, type: TensorType) -> Tensor:
    return full(type.shape, 0, dtype=type.dtype) if g is None else g
