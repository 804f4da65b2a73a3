"""Collectives among the lanes of a `vmap`, identified by the axis name.

The batching rule of that `vmap` replaces these ops, so they run with one lane only. The kernels
compute the result for equal x in all lanes.
"""

from __future__ import annotations

import numpy as np

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.op import internal
from mlvm.core.rules import require
from mlvm.core.types import Array, TensorType, i64


def _sum_lanes(x: TensorType, axis_name: str, size: int) -> TensorType:
    require("numeric", x)
    if size < 0:
        raise ArgumentError(f"expected a number of lanes as size, got {size}")
    return x


@internal(infer=_sum_lanes)
def sum_lanes(out: Array, x: Array, *, axis_name: str, size: int) -> None:
    """The sum of x over `size` lanes."""
    # computed modulo 2**bits
    times = np.asarray(size).astype(x.dtype) if x.dtype.kind in "iu" else size
    np.multiply(x, times, out)


def _gather_lanes(x: TensorType, rank: TensorType, axis_name: str, size: int) -> TensorType:
    if rank is not TensorType(i64):
        raise ShapeError(f"expected the number of the lane, i64[], as rank, got {rank}")
    if size < 0:
        raise ArgumentError(f"expected a number of lanes as size, got {size}")
    return x.with_shape((size, *x.shape))


@internal(infer=_gather_lanes, copies_only=True)
def gather_lanes(out: Array, x: Array, rank: Array, *, axis_name: str, size: int) -> None:
    """x of all lanes, stacked: [...] -> [size, ...]. `rank` is the number of this lane."""
    np.copyto(out, x)
