"""Records of residuals as values that gradients go through.

What is pushed on the way there is pulled on the way back. The way back of a push is a pull, and
that of a pull is a push: the cotangent of a record's number is the number of a record of
cotangents. So gradients through all this are of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlvm.core.errors import GradientError
from mlvm.core.types import Shape, TensorType, i64
from mlvm.eager.autodiff.joint import Cotangents, Held, Saved, leave, or_zeros
from mlvm.eager.autodiff.tape import taping
from mlvm.eager.control.blocks import Tensors, is_tracked, recorder
from mlvm.eager.functions.shapes import broadcast_to
from mlvm.eager.tensor.tensor import Tensor

NUMBER = TensorType(i64)


def push(xs: Sequence[Tensor]) -> Tensor:
    """The number of a new record of copies of the tensors, of floats and numbers of records."""
    number, tape = recorder().push(xs), taping()
    if tape is not None and any(is_tracked(x, tape) for x in xs):
        leave(tape, [number], xs, {}, [], partial(_pull_cotangents, [x.type for x in xs]))
    return number


def _pull_cotangents(
    types: Sequence[TensorType], cotangents: Cotangents, saved: Saved, held: Held
) -> Held:
    [g] = cotangents
    return [None] * len(types) if g is None else pull(g, types)


def pull(
    number: Tensor,
    types: Sequence[TensorType],
    are_tracked: Sequence[bool] | None = None,
    used: set[int] | None = None,
    stack: object = None,
) -> Tensors:
    """The tensors of a record, or row i of each in record i of many numbers. Those that are tracked
    if its number is, are those that were so when they were pushed. `used` gets the numbers of those
    that had a cotangent. `stack` is that of the recorder that pushed the record, without a word
    that of this one."""
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
        leave(
            tape, results, [number], {}, [], partial(_push_cotangents, results, used, number.shape)
        )
    return xs


def _push_cotangents(
    results: Sequence[Tensor | None],
    used: set[int] | None,
    shape: Shape,
    cotangents: Cotangents,
    saved: Saved,
    held: Held,
) -> Held:
    if used is not None:
        used.update(k for k, g in enumerate(cotangents) if g is not None)
    pairs = zip(cotangents, results, strict=True)
    made = push([or_zeros(g, x.type) for g, x in pairs if x is not None])
    if not shape:
        return [made]
    tape = taping()
    if tape is not None and made.tape is tape:
        raise GradientError("there is no third derivative through residuals of lanes")
    return [broadcast_to(made, shape)]
