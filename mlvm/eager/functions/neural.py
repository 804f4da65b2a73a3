"""Dropout and embedding bags."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mlvm.core.errors import ArgumentError, ShapeError
from mlvm.core.rules import require
from mlvm.eager.functions.arguments import span, type_of
from mlvm.eager.functions.creation import arange, ones, zeros
from mlvm.eager.functions.halves import through_f32
from mlvm.eager.functions.random import next_key
from mlvm.eager.functions.shapes import expand_dims, part
from mlvm.eager.functions.sorting import searchsorted
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import alias_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public

Reduction: TypeAlias = Literal["sum", "mean", "max"]


@public
def dropout(x: Tensor, rate: float, *, key: Tensor | None = None) -> Tensor:
    """Keep each element of x with probability 1 - rate, scaled by 1 / (1 - rate); zero the rest.

    Without a `key`, the next global key is used. With a rate of 0, x is returned unchanged.

    x: f[...], and so is the result. Raises `ArgumentError` unless 0 <= rate < 1; `DTypeError` if
    x is not of floats; `ShapeError` if `key` is not a u64[2].

        >>> ml.dropout(ml.ones(3), 0.0)
        Tensor([1., 1., 1.], f32[3])

    Invalid calls:
        ml.dropout(v, 1.0)  # ArgumentError
        ml.dropout(v, 0.5, key=v)  # ShapeError
        ml.dropout(ml.ones((4, 4), dtype="bool"), 0.5)  # DTypeError
    """
    if rate == 0:
        return alias_of(x)
    return op.dropout(x, next_key() if key is None else key, rate=rate)


@public
@through_f32
def embedding_bag(
    embedding: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    /,
    *,
    mode: Reduction = "mean",
    weights: Tensor | None = None,
) -> Tensor:
    """Reduce the rows of `embedding` that each bag of indices selects to a sum, mean or max.

    The result for an empty bag is 0. In a sum or mean, rows are multiplied by `weights`, which have
    the shape of the indices; a mean divides by the number of rows.

    embedding: f[n, features]; indices: i[..., L], bags of length L -> f[..., features]. Bags of
    different lengths are passed as consecutive indices i[L], with the start offsets `offsets` i[B]
    in ascending order -> f[B, features]. Indices before the first offset do not belong to any bag.

    Raises `ShapeError` if the shapes do not fit; `PositionError` if an index is out of range;
    `ArgumentError` if the mode is unknown, a max has weights, or a max has offsets; `DTypeError`
    if the embedding or the weights are not floats, or the indices are not integers.

        >>> rows = ml.asarray([[1.0, 2.0], [3.0, 4.0]])
        >>> ml.embedding_bag(rows, [0, 1, 1], [0, 1], mode="sum")
        Tensor([[1., 2.],
                [6., 8.]], f32[2,2])

    Invalid calls:
        ml.embedding_bag(ml.ones((1, 2)), ints)  # PositionError
        ml.embedding_bag(x, ints, mode="most")  # ArgumentError
        ml.embedding_bag(x, x)  # DTypeError
    """
    require("float", type_of(embedding))
    if mode not in ("sum", "mean", "max"):
        raise ArgumentError(f"expected mode as one of 'sum', 'mean', 'max', got {mode!r}")
    if embedding.ndim != 2 or not type_of(indices).ndim:
        raise ShapeError(
            f"expected an embedding with 2 axes and indices with at least 1 axis, got "
            f"{embedding.ndim} and {indices.ndim}"
        )
    if weights is not None:
        require("float", type_of(weights))
        if mode == "max":
            raise ArgumentError(
                "expected mode 'sum' or 'mean' with weights=, got 'max'; omit weights="
            )
        if weights.shape != indices.shape:
            raise ShapeError(
                f"expected weights of the shape of the indices, {list(indices.shape)}, got "
                f"{list(weights.shape)}"
            )
    if offsets is not None:
        require("integer", type_of(offsets))
        if offsets.ndim != 1 or indices.ndim != 1:
            raise ShapeError(
                f"expected 1-D offsets and indices, got {offsets.type} and {indices.type}"
            )
        if mode == "max":
            raise ArgumentError(
                "expected mode 'sum' or 'mean' with offsets=, got 'max'; omit offsets="
            )
    rows = op.take(embedding, indices, axis=0)
    if weights is not None:
        rows = rows * expand_dims(weights, axis=-1)
    if offsets is None:
        if not indices.shape[-1]:
            return zeros((*indices.shape[:-1], embedding.shape[1]), dtype=embedding.dtype)
        return {"sum": op.sum, "mean": op.mean, "max": op.max}[mode](rows, axis=-2)
    count = offsets.shape[0] + 1  # bag 0 contains the indices before the first offset
    bags = searchsorted(offsets, arange(indices.shape[0], dtype=offsets.dtype), side="right")
    y = op.scatter_add(rows, bags, axis=0, length=count)
    if mode == "mean":
        once = ones((indices.shape[0], 1), dtype=rows.dtype)
        y = y / op.maximum(op.scatter_add(once, bags, axis=0, length=count), 1.0)
    return part(y, 0, span(1, count))
