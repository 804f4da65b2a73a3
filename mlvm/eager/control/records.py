"""Records of residuals, as values that gradients go through.

The forward pass pushes a record; the backward pass pulls it. The vjp of a push is a pull, and the
vjp of a pull is a push. The cotangent of a record's number is the number of a record of cotangents.
So gradients of any order work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlvm.core.errors import GradientError
from mlvm.core.types import Shape, TensorType, i64
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, or_zeros
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.blocks import Tensors, is_tracked, recorder
from mlvm.eager.functions.shapes import broadcast_to
from mlvm.eager.tensor.tensor import Tensor

NUMBER = TensorType(i64)


def push(xs: Sequence[Tensor]) -> Tensor:
    """Save copies of floats and record numbers in a new record; return its number."""
    number, tape = recorder().push(xs), taping()
    if tape is not None and any(is_tracked(x, tape) for x in xs):
        add_node(tape, [number], xs, {}, [], partial(_pull_gs, [x.type for x in xs]))
    return number


def _pull_gs(types: Sequence[TensorType], gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
    [g] = gs
    return [None] * len(types) if g is None else pull(g, types)


def pull(
    number: Tensor,
    types: Sequence[TensorType],
    are_tracked: Sequence[bool] | None = None,
    used: set[int] | None = None,
    stack: object = None,
) -> Tensors:
    """Return the tensors of a record; for a vector of numbers, row i of each from record i.

    `are_tracked`: which tensors were tracked when they were pushed.
    `used`: collects the positions of tensors that had a cotangent.
    `stack`: the stack of the recorder that pushed the record, by default the current one's.
    """
    record, tape = recorder(), taping()
    outside = None
    if stack is not None and stack is not record.stack:
        outside = partial(pull, types=types, are_tracked=are_tracked, used=used, stack=stack)
    xs = record.pull(number, types, outside)
    if tape is not None and is_tracked(number, tape):
        results: list[Tensor | None] = [
            x if tracked else None
            for x, tracked in zip(xs, are_tracked or [True] * len(xs), strict=True)
        ]
        add_node(tape, results, [number], {}, [], partial(_push_gs, results, used, number.shape))
    return xs


def _push_gs(
    results: Sequence[Tensor | None],
    used: set[int] | None,
    shape: Shape,
    gs: Cotangents,
    saved: Saved,
    sums: Sums,
) -> Sums:
    if used is not None:
        used.update(k for k, g in enumerate(gs) if g is not None)
    pairs = zip(gs, results, strict=True)
    number = push([or_zeros(g, x.type) for g, x in pairs if x is not None])
    if not shape:
        return [number]
    tape = taping()
    if tape is not None and number.tape is tape:
        raise GradientError("a third derivative through the residuals of a batch is not supported")
    return [broadcast_to(number, shape)]
