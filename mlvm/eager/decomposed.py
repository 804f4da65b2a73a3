"""The ops of several parts as pairs and triples of tensors, for functions and gradient rules.

Such an op lays its parts one after the other along one last axis; see `core.ops.decompositions`.
"""

from __future__ import annotations

import math

from mlvm.core.types import Shape
from mlvm.eager import primitives as op
from mlvm.eager.functions import reshape
from mlvm.eager.tensor import Tensor


def cut(packed: Tensor, *shapes: Shape) -> tuple[Tensor, ...]:
    """The parts, of these shapes behind the batch axes, that follow each other in the last axis."""
    stack, at, parts = packed.shape[:-1], 0, []
    for shape in shapes:
        size = math.prod(shape)
        part = op.slice(
            packed,
            start=(*(0 for _ in stack), at),
            length=(*stack, size),
            step=(1,) * packed.ndim,
        )
        parts.append(reshape(part, (*stack, *shape)))
        at += size
    return tuple(parts)


def columns(x: Tensor, start: int, count: int) -> Tensor:
    """So many columns of each matrix, from `start` on."""
    if count == x.shape[-1]:
        return x
    return op.slice(
        x,
        start=(*(0 for _ in x.shape[:-1]), start),
        length=(*x.shape[:-1], count),
        step=(1,) * x.ndim,
    )


def adjoint(x: Tensor) -> Tensor:
    """The conjugate transpose of each matrix."""
    return x.mT if x.dtype.is_float else op.conj(x.mT)
