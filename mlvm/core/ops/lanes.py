"""Collectives among the lanes of a `vmap`, by the name of its axis.

These ops are never run with more than one lane: the batching rule of the `vmap` of that name
computes them. Their kernels are what they mean where x is the same in all lanes.
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
    times = np.asarray(size).astype(x.dtype) if x.dtype.kind in "iu" else size  # modulo 2**bits
    np.multiply(x, times, out)


def _gather_lanes(x: TensorType, rank: TensorType, axis_name: str, size: int) -> TensorType:
    if rank is not TensorType(i64):
        raise ShapeError(f"expected the number of the lane, i64[], as rank, got {rank}")
    if size < 0:
        raise ArgumentError(f"expected a number of lanes as size, got {size}")
    return x.with_shape((size, *x.shape))


@internal(infer=_gather_lanes, copies_only=True)
def gather_lanes(out: Array, x: Array, rank: Array, *, axis_name: str, size: int) -> None:
    """x of all lanes, stacked: [...] -> [size, ...]. `rank` is this lane's number."""
    np.copyto(out, x)
