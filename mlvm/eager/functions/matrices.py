"""Helpers of `linalg`, `fft` and the gradient rules for these.

An op with several results packs them along one last axis, as `core.ops.decompositions` defines;
`cut` unpacks them.
"""

from __future__ import annotations

import math

from mlvm.core.types import Shape, i64
from mlvm.eager.functions.arguments import type_of
from mlvm.eager.functions.elements import astype
from mlvm.eager.functions.shapes import reshape
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.default import default_float
from mlvm.eager.tensor.tensor import Tensor


def floating(x: Tensor) -> Tensor:
    """Convert integers and bools to the default float."""
    return x if type_of(x).dtype.is_inexact else astype(x, default_float())


def real(x: Tensor) -> Tensor:
    """Return the real part; x itself if it is real."""
    return x if x.dtype.is_float else op.real(x)


def conj(x: Tensor) -> Tensor:
    """Return the conjugate; x itself if it is real."""
    return x if x.dtype.kind != "complex" else op.conj(x)


def adjoint(x: Tensor) -> Tensor:
    """Return the conjugate transpose of each matrix."""
    return conj(x.mT)


def cut(packed: Tensor, *shapes: Shape) -> tuple[Tensor, ...]:
    """Unpack the parts of the last axis, which have these shapes after the batch axes."""
    at, parts = 0, []
    for shape in shapes:
        size = math.prod(shape)
        parts.append(reshape(_run(packed, at, size, 1), (*packed.shape[:-1], *shape)))
        at += size
    return tuple(parts)


def order_of(packed: Tensor) -> Tensor:
    """Unpack integers that an op has packed with floats, which may be complex."""
    return astype(real(packed), i64)


def columns(x: Tensor, start: int, count: int) -> Tensor:
    """Return `count` columns of each matrix, from `start` on."""
    return x if count == x.shape[-1] else _run(x, start, count, 1)


def diagonal_of(x: Tensor, offset: int = 0) -> Tensor:
    """Return the diagonals of matrices, empty if there is none.

    A diagonal consists of every n + 1st element of a matrix with n columns."""
    *stack, rows, wide = x.shape
    count = min(rows, wide - offset) if offset >= 0 else min(rows + offset, wide)
    first = offset if offset >= 0 else -offset * wide
    flat = reshape(x, (*stack, rows * wide))
    return _run(flat, first, count, wide + 1) if count > 0 else _run(flat, 0, 0, 1)


def _run(x: Tensor, start: int, count: int, step: int) -> Tensor:
    """Return `count` elements of the last axis, from `start` on."""
    zeros, ones = (0,) * (x.ndim - 1), (1,) * (x.ndim - 1)
    return op.slice(x, start=(*zeros, start), length=(*x.shape[:-1], count), step=(*ones, step))
