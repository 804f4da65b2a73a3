"""Sums along and over the rows of a matrix by BLAS, which is 2 to 10 times faster than numpy.

BLAS splits large work among threads, and the split changes the rounding. So it is called on pieces
below the threshold for threads. The bits then depend neither on the number of threads nor on the
other rows.
"""

from __future__ import annotations

import numpy as np

from mlvm.core.types import Array

_PIECE = 8192  # elements per product, so that OpenBLAS uses one thread


def row_sums(x: Array, y: Array) -> Array:
    """Return the sum of x * y along each row of the matrix x, as a column.

    y has the shape of x, or is one row.
    """
    length = x.shape[1]
    if length > _PIECE:
        half = length // 2
        return row_sums(x[:, :half], y[..., :half]) + row_sums(x[:, half:], y[..., half:])
    sums: Array = np.vecdot(x, y)
    return sums[:, None]


def sum_rows(x: Array, weights: Array | None = None) -> Array:
    """Return the weighted sum of the rows of the matrix x, weights @ x; by default the sum."""
    length, columns = x.shape
    height = min(_PIECE // max(1, columns), 256)  # BLAS adds them sequentially
    if height < 16 and length > 256 and weights is None:
        half = length // 2
        return sum_rows(x[:half]) + sum_rows(x[half:])
    if height < 16 or not x.size:
        total: Array = np.add.reduce(x, 0) if weights is None else np.einsum("i,ij->j", weights, x)
        return total
    if weights is None:
        weights = np.ones(length, x.dtype)
    rest = length % height
    whole = length - rest
    pieces = np.matmul(
        weights[:whole].reshape(-1, 1, height), x[:whole].reshape(-1, height, columns)
    )
    total = sum_rows(pieces[:, 0]) if len(pieces) > 32 else np.add.reduce(pieces, (0, 1))
    if rest:
        np.add(total, np.matmul(weights[whole:], x[whole:]), total)
    return total
