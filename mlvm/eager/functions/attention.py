"""Attention and position encodings (Vaswani et al., arXiv 1706.03762)."""

from __future__ import annotations

import math
from typing import Any

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.rules import is_real
from mlvm.core.types import f64
from mlvm.eager.functions.arguments import type_of
from mlvm.eager.functions.creation import arange
from mlvm.eager.functions.elements import astype, where
from mlvm.eager.functions.halves import in_f32, through_f32
from mlvm.eager.functions.neural import dropout as dropped
from mlvm.eager.functions.shapes import concat, expand_dims, reshape, split, stack
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.default import float_dtype
from mlvm.eager.tensor.dtypes import finfo
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


@public
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    /,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """Compute softmax(query key^T scale) value, in the last two axes.

    f[..., T, D], f[..., S, D] and f[..., S, E] -> f[..., T, E] (arXiv 1706.03762, equation 1). The
    default scale is 1 / sqrt(D). The axis before T and S is the head axis. H query heads may share
    G key and value heads if G divides H (grouped-query attention, Ainslie et al., arXiv
    2305.13245). Query head i then attends to key head i // (H / G).

    `mask`, a bool tensor that broadcasts to [..., T, S], is True where a query may attend to a key.
    With `is_causal`, query i attends only to keys 0 .. i. The result for a query that may not
    attend to any key is zero. With `dropout`, each softmax weight is dropped at this rate, with
    `dropout_key` or the next global key.

    Raises `ShapeError` if the shapes do not fit; `DTypeError` if the mask is not bool, or an
    operand is complex; `ArgumentError` if the rate is not in [0, 1).

        >>> q = ml.ones((1, 2, 5, 4))
        >>> ml.scaled_dot_product_attention(q, q, q, is_causal=True).type
        f32[1,2,5,4]

    Invalid calls:
        ml.scaled_dot_product_attention(x, x, x, dropout=2.0)  # ArgumentError
        ml.scaled_dot_product_attention(x, x, x, x)  # DTypeError
    """
    if min(type_of(x).ndim for x in (query, key, value)) < 2:
        raise ShapeError(
            "expected query, key and value as [..., time, features], "
            f"got {query.type}, {key.type} and {value.type}"
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"expected equal features of query and key, got {query.shape[-1]} and {key.shape[-1]}, "
            f"and equal lengths of key and value, got {key.shape[-2]} and {value.shape[-2]}"
        )
    causal = causal_mask(query.shape[-2], key.shape[-2]) if is_causal else None
    scale = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    return attended(query, key, value, mask, causal, scale, dropout, dropout_key)


@in_f32
def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: Tensor | None,
    scale: float,
    dropout: float,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """Compute `scaled_dot_product_attention` with an explicit causal mask, or None for no mask.

    With the causal mask each query attends to at least one key."""
    groups = _groups(query, key, value)
    scores = op.matmul(_merge_heads(query * scale, groups), key, transpose_y=True)
    scores = _split_heads(scores, groups)
    if mask is not None:
        _require_mask(mask, scores)
    visible = mask if causal is None else causal
    if visible is not None:
        if mask is not None and causal is not None:
            visible = op.logical_and(causal, mask)
        scores = where(visible, scores, float(finfo(scores.dtype).min))
    weights = op.softmax(scores, axis=-1)
    if mask is not None and visible is not None:
        # a query without any visible key would otherwise attend to all keys
        weights = where(visible, weights, 0.0)
    weights = dropped(weights, dropout, key=dropout_key)
    return _split_heads(op.matmul(_merge_heads(weights, groups), value), groups)


def _groups(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the number of query heads that share a key and value head; 1 if all share one."""
    if min(x.ndim for x in (query, key, value)) < 3:
        return 1
    heads, shared = query.shape[-3], key.shape[-3]
    if shared < 2 or heads <= shared:
        return 1
    if heads % shared or value.shape[-3] != shared:
        raise ShapeError(
            f"the number of query heads ({heads}) must be a multiple of the number of key heads "
            f"({shared}), which must equal the number of value heads ({value.shape[-3]})"
        )
    return heads // shared


def _merge_heads(x: Tensor, groups: int) -> Tensor:
    """Merge the rows of query heads that share a key head.

    [..., H, T, D] -> [..., H / groups, groups T, D]."""
    if groups == 1:
        return x
    *batch, heads, rows, width = x.shape
    return reshape(x, (*batch, heads // groups, groups * rows, width))


def _split_heads(x: Tensor, groups: int) -> Tensor:
    """Invert `_merge_heads`."""
    if groups == 1:
        return x
    *batch, shared, rows, width = x.shape
    return reshape(x, (*batch, shared * groups, rows // groups, width))


def _require_mask(mask: Any, scores: Tensor) -> None:
    shape, actual = list(scores.shape), mask.type if isinstance(mask, Tensor) else brief(mask)
    if not isinstance(mask, Tensor) or mask.dtype.kind != "bool":
        raise DTypeError(
            f"attention: expected a bool mask that broadcasts to {shape}, True where a query "
            f"attends to a key, got {actual}"
        )
    fits = zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    if mask.ndim > scores.ndim or any(n not in (1, length) for n, length in fits):
        text = f"attention: expected a mask that broadcasts to bool{shape}, got {actual}"
        if len(shape) > 2 and mask.shape == (shape[0], shape[-1]):
            hint = ", ".join(["None"] * (len(shape) - 2))
            text += f"; one that says for each sequence which keys are seen is mask[:, {hint}, :]"
        raise ShapeError(text)


def causal_mask(queries: int, keys: int, position: Tensor | int = 0) -> Tensor:
    """Return the causal mask of queries that start at `position`.

    bool[queries, keys]: True for keys that do not come after the query."""
    return arange(keys) <= expand_dims(arange(queries), axis=1) + position


# --- positions -----------------------------------------------------------------------


@public
def sinusoidal_encoding(
    positions: Tensor, features: int, *, base: float = 10000.0, dtype: object = None
) -> Tensor:
    """Return sines and cosines of positions: i[...] -> f[..., features].

        out[..., 2 i] = sin(p / base^(2 i / features)), out[..., 2 i + 1] = cos(the same)

    See arXiv 1706.03762, section 3.5.

    Raises `DTypeError` if the positions are not integers, or `dtype` is not a float;
    `ArgumentError` if the number of features is odd.

        >>> ml.sinusoidal_encoding(ml.arange(5), 8).type
        f32[5,8]

    Invalid calls:
        ml.sinusoidal_encoding(ints, 3)  # ArgumentError
        ml.sinusoidal_encoding(ints, 4, base="x")  # ArgumentError
        ml.sinusoidal_encoding(ints, 4, dtype="i64")  # DTypeError
    """
    angles = _angles(positions, features, base)
    target = float_dtype(dtype)
    if not target.is_float:
        raise DTypeError(f"expected a float dtype, got {target.name}")
    both = stack([op.sin(angles), op.cos(angles)], axis=-1)
    return astype(reshape(both, (*positions.shape, features)), target)


@public
@through_f32
def rotary_encoding(
    x: Tensor, positions: Tensor | None = None, /, *, base: float = 10000.0
) -> Tensor:
    """Rotate pairs of features by angles that grow with the position: f[..., T, D] -> f[..., T, D].

    The positions, i[..., T], are 0 .. T - 1 by default. After the rotation, the dot product of a
    query and a key depends on the distance between the two (Su et al., arXiv 2104.09864).

    Features i and i + D / 2 are rotated as a pair, by position base^(-2 i / D). The paper rotates
    adjacent features; the two differ only in the order of the features.

    Raises `ShapeError` if x has fewer than two axes, or the positions do not fit; `DTypeError` if x
    is not of floats, or the positions are not integers; `ArgumentError` if D is odd.

        >>> ml.rotary_encoding(ml.ones((1, 2, 5, 4)), ml.arange(5)).type
        f32[1,2,5,4]

    Invalid calls:
        ml.rotary_encoding(ml.ones((5, 3)))  # ArgumentError
        ml.rotary_encoding(ml.ones((5, 4), dtype="i64"))  # DTypeError
    """
    if type_of(x).ndim < 2:
        raise ShapeError(f"expected x as [..., time, features], got {x.type}")
    if not x.dtype.is_float:
        raise DTypeError(f"expected floats, got {x.dtype.name}; convert with astype")
    if positions is None:
        positions = arange(x.shape[-2])
    return rotated(x, *rotary_table(positions, x.shape[-1], base, x.dtype))


def rotary_table(
    positions: Tensor, features: int, base: float, dtype: object
) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of the angles of `rotary_encoding`.

    Both are f[..., features / 2]."""
    angles = _angles(positions, features, base)
    return astype(op.cos(angles), dtype), astype(op.sin(angles), dtype)


@through_f32
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of features i and i + D / 2 by angles with these cosines and sines."""
    first, second = split(x, 2, axis=-1)
    return concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _angles(positions: Tensor, features: int, base: float) -> Tensor:
    """Return position base^(-2 i / features) for i below features / 2: f64[..., features / 2].

    In f32, the angles of late positions would be inaccurate."""
    if not type_of(positions).dtype.is_integer:
        raise DTypeError(f"expected integers as positions, got {positions.dtype.name}")
    if features < 2 or features % 2:
        raise ArgumentError(f"expected an even number of features, got {features}")
    if not is_real(base) or not base > 0:
        raise ArgumentError(f"expected base as a number > 0, got {brief(base)}")
    rates = op.exp(astype(arange(features // 2), f64) * (-2 * math.log(base) / features))
    return expand_dims(astype(positions, f64), axis=-1) * rates
