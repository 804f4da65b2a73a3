"""Records of residuals, as values through which gradients flow.

The forward pass pushes a record; the backward pass pulls it. The vjp of a push is a pull, and the
vjp of a pull is a push. The cotangent of a record's number is the number of a record of cotangents.
Gradients of any order therefore work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from mlvm.arena.context import context
from mlvm.core.errors import GradientError
from mlvm.core.types import TensorType, f32, i64
from mlvm.eager.autodiff.joint import Cotangents, Saved, Sums, add_node, or_zeros
from mlvm.eager.autodiff.tape import Conditional, taping
from mlvm.eager.control.blocks import Tensors, is_recorded, recorder
from mlvm.eager.control.branches import present
from mlvm.eager.functions.creation import asarray, full
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.shapes import broadcast_to, concat, reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor, is_tracked

NUMBER = TensorType(i64)


def push(xs: Sequence[Tensor], ntracked: int | None = None) -> Tensor:
    """Save copies of floats and record numbers in a new record; return the number of the record.

    Only the first `ntracked` have cotangents, by default all.
    """
    number, tape = recorder().push(xs), taping()
    if tape is not None and any(x.tape is tape for x in xs):
        types = [x.type for x in xs[:ntracked]]
        nothing: list[Any] = [None] * (len(xs) - len(types))

        def pull_gs(gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
            [g] = gs
            return ([None] * len(types) if g is None else pull_cotangents(g, types)) + nothing

        add_node(tape, [number], xs, {}, [], pull_gs)
    return number


def pull_cotangents(number: Tensor, types: Sequence[TensorType]) -> list[Any]:
    """Return the tensors of a record of cotangents, each with the condition that it is present."""
    counts_type = TensorType(f32, (*number.shape, len(types)))
    *gs, counts = pull(number, [*types, counts_type], [True] * len(types) + [False])
    if number.shape:
        return gs
    return [
        Conditional(g, op.greater(counts[k], 0.0), is_clean=True) if g.dtype.is_inexact else g
        for k, g in enumerate(gs)
    ]


def pull(
    number: Tensor,
    types: Sequence[TensorType],
    are_tracked: Sequence[bool] | None = None,
    used: set[int] | None = None,
    stack: object = None,
) -> Tensors:
    """Return the tensors of a record; for a vector of numbers, row i of each is from record i.

    - are_tracked: which tensors were tracked when they were pushed.

    - used: a set to which the indices of tensors with a cotangent are added.

    - stack: the stack of the recorder that pushed the record. Default: the current recorder's
      stack.
    """
    record, tape = recorder(), taping()
    outside = None
    if stack is not None and stack is not record.stack:
        outside = partial(pull, types=types, are_tracked=are_tracked, used=used, stack=stack)
    xs = record.pull(number, types, outside)
    if tape is not None and is_tracked(number):
        results: list[Tensor | None] = [
            x if tracked else None
            for x, tracked in zip(xs, are_tracked or [True] * len(xs), strict=True)
        ]
        shape = number.shape

        def push_gs(gs: Cotangents, saved: Saved, sums: Sums) -> Sums:
            if used is not None:
                used.update(k for k, g in enumerate(gs) if g is not None)
            pairs = [(g, x.type) for g, x in zip(gs, results, strict=True) if x is not None]
            with context(tape=None):
                counts = concat([full((1,), 0, dtype=f32), *[_count(g) for g, _ in pairs]])[1:]
            values = [or_zeros(g, type) for g, type in pairs]
            number = push([*values, broadcast_to(counts, (*shape, len(pairs)))], len(pairs))
            if not shape:
                return [number]
            if taping() is not None and is_tracked(number):
                raise GradientError(
                    "a third derivative through the residuals of a batch is not supported; "
                    "use ml.vmap"
                )
            return [broadcast_to(number, shape)]

        add_node(tape, results, [number], {}, [], push_gs)
    return xs


def summed(number: Tensor, other: Tensor, add: Callable[[int, int], int]) -> Tensor:
    """Return the numbers of the sums of records, including nested records.

    Eagerly, `add` returns the number of the sum of two records."""
    if is_recorded():
        return recorder().summed(number, other)
    add = cache(add)
    pairs = zip(numbers(number), numbers(other), strict=True)
    sums = [add(p, q) if p and q else p or q for p, q in pairs]
    return reshape(asarray(sums, dtype=i64), number.shape)


def numbers(x: Tensor) -> list[int]:
    """Return the elements of an integer tensor as Python ints."""
    return [int(number) for number in x.numpy().reshape(-1)]


def _count(g: Any) -> Tensor:
    """Return 1 for a cotangent that is present, else 0."""
    return astype(reshape(present(g), (1,)), f32)
