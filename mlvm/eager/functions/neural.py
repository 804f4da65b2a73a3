"""Public functions of neural networks that no other file is about: dropout, bags of embeddings."""

from __future__ import annotations

from typing import Literal, TypeAlias

from mlvm.core.errors import AttributeRefused, ShapeError
from mlvm.core.rules import require
from mlvm.eager.functions.arguments import type_of
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
    """Each element of x with probability 1 - rate, times 1 / (1 - rate), else 0.

    Without a `key` the next global one decides. A rate of 0 changes and copies
    nothing.

    x: f[...], and so is the result. Raises `AttributeRefused` unless 0 <= rate < 1, `DTypeError`
    for other than floats, `ShapeError` for what is no key.

        >>> ml.dropout(ml.ones(3), 0.0)
        Tensor([1., 1., 1.], f32[3])
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
    """The sum, mean or max of the rows of `embedding` that each bag of indices names; 0 of an empty
    bag. Rows are multiplied by `weights` of the shape of the indices, if there are any: in a sum,
    and in a mean, which is of as many as there are.

    embedding: f[n, features]; indices: i[..., L], bags of L -> f[..., features]. Or bags of any
    length one behind the other, i[L], with `offsets` i[B], where each begins, in ascending order ->
    f[B, features]; what stands before the first belongs to none.

    Raises `ShapeError` for other shapes, `PositionRefused` for an index out of range,
    `AttributeRefused` for another mode, for weights of a max, and for a max with offsets,
    `DTypeError` for an embedding or weights of no floats, and for indices of no integers.

        >>> rows = ml.asarray([[1.0, 2.0], [3.0, 4.0]])
        >>> ml.embedding_bag(rows, [0, 1, 1], [0, 1], mode="sum")
        Tensor([[1., 2.],
                [6., 8.]], f32[2,2])
    """
    require("float", type_of(embedding))
    if mode not in ("sum", "mean", "max"):
        raise AttributeRefused(f"mode is one of 'sum', 'mean', 'max', not {mode!r}")
    if embedding.ndim != 2 or not type_of(indices).ndim:
        raise ShapeError("an embedding has two axes, and a bag of indices one")
    if weights is not None:
        require("float", type_of(weights))
        if mode == "max":
            raise AttributeRefused("weights are of a sum or a mean, not of a max")
        if weights.shape != indices.shape:
            raise ShapeError("weights have the shape of the indices")
    if offsets is not None:
        require("integer", type_of(offsets))
        if offsets.ndim != 1 or indices.ndim != 1:
            raise ShapeError("with offsets, these and the indices have one axis each")
        if mode == "max":
            raise AttributeRefused("a max is of bags of one length, without offsets")
    rows = op.take(embedding, indices, axis=0)
    if weights is not None:
        rows = rows * expand_dims(weights, axis=-1)
    if offsets is None:
        if not indices.shape[-1]:
            return zeros((*indices.shape[:-1], embedding.shape[1]), dtype=embedding.dtype)
        return {"sum": op.sum, "mean": op.mean, "max": op.max}[mode](rows, axis=-2)
    count = offsets.shape[0] + 1  # bag 0 is what stands before the first offset
    places = arange(indices.shape[0], dtype=offsets.dtype)
    bags = searchsorted(offsets, places, side="right")
    y = op.scatter_add(rows, bags, axis=0, length=count)
    if mode == "mean":
        once = ones((indices.shape[0], 1), dtype=rows.dtype)
        y = y / op.maximum(op.scatter_add(once, bags, axis=0, length=count), 1.0)
    return part(y, 0, range(1, count))
