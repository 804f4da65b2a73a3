"""Attention, and what tells it the order of things (Vaswani et al., arXiv 1706.03762)."""

from __future__ import annotations

import math
from typing import Any

from mlvm.core.errors import AttributeRefused, DTypeError, ShapeError, brief
from mlvm.core.rules import is_real
from mlvm.core.types import DType, f32, f64
from mlvm.eager.functions.arguments import type_of
from mlvm.eager.functions.creation import arange
from mlvm.eager.functions.elements import astype, where
from mlvm.eager.functions.halves import in_f32, through_f32
from mlvm.eager.functions.neural import dropout as dropped
from mlvm.eager.functions.shapes import concat, expand_dims, reshape, split, stack
from mlvm.eager.tensor import primitives as op
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
    """softmax(query key^T scale) value, in the last two axes (arXiv 1706.03762, equation 1):
    f[..., T, D], f[..., S, D] and f[..., S, E] -> f[..., T, E]. The scale is 1 / sqrt(D) unless
    given. Of the axes before, the last are heads: H heads of queries may share G of keys and
    values, where G divides H; head i sees head i // (H / G) of these (grouped-query attention,
    Ainslie et al., arXiv 2305.13245).

    `mask`, a bool tensor that broadcasts to [..., T, S], is True where a query may see a key. With
    `is_causal`, query i sees keys 0 .. i only. A query that may see no key gets zeros. Each weight
    of the softmax is dropped at the rate `dropout`, with `dropout_key` or the next global key.

    Raises `ShapeError` for shapes that do not fit, `DTypeError` for a mask that is not bool and for
    complex numbers, `AttributeRefused` for a rate that is not in [0, 1).

        >>> q = ml.ones((1, 2, 5, 4))
        >>> ml.scaled_dot_product_attention(q, q, q, is_causal=True).type
        f32[1,2,5,4]
    """
    types = (type_of(query), type_of(key), type_of(value))
    if min(type.ndim for type in types) < 2:
        raise ShapeError("query, key and value have two axes or more")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            "query and key have equally many features, key and value equally many rows"
        )
    before = seen_before(query.shape[-2], key.shape[-2]) if is_causal else None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return attended(query, key, value, mask, before, scale, dropout, dropout_key)


@in_f32
def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Tensor | None,
    scale: float,
    dropout: float,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`, with the keys that a query sees in `before`, too: each query
    one or more."""
    groups = _groups(query, key, value)
    scores = op.matmul(_together(query * scale, groups), key, transpose_y=True)
    scores = _apart(scores, groups)
    if mask is not None:
        _require_mask(mask, scores)
    seen = mask if before is None else before
    if seen is not None:
        if mask is not None and before is not None:
            seen = op.logical_and(before, mask)
        scores = where(seen, scores, float(finfo(scores.dtype).min))
    weights = op.softmax(scores, axis=-1)
    if mask is not None and seen is not None:
        weights = where(seen, weights, 0.0)  # else a query that sees no key would see all
    weights = dropped(weights, dropout, key=dropout_key)
    return _apart(op.matmul(_together(weights, groups), value), groups)


def _groups(query: Tensor, key: Tensor, value: Tensor) -> int:
    """How many heads of queries see one of keys and values; 1 too where there is one for all."""
    if min(x.ndim for x in (query, key, value)) < 3:
        return 1
    heads, shared = query.shape[-3], key.shape[-3]
    if shared < 2 or heads <= shared:
        return 1
    if heads % shared or value.shape[-3] != shared:
        raise ShapeError(
            f"{heads} heads of queries share {shared} of keys and {value.shape[-3]} of values; "
            "these are equally many, and divide those"
        )
    return heads // shared


def _together(x: Tensor, groups: int) -> Tensor:
    """The rows of heads that share one behind each other: [..., H, T, D] -> [..., H / groups,
    groups T, D]."""
    if groups == 1:
        return x
    *batch, heads, rows, width = x.shape
    return reshape(x, (*batch, heads // groups, groups * rows, width))


def _apart(x: Tensor, groups: int) -> Tensor:
    """The inverse of `_together`."""
    if groups == 1:
        return x
    *batch, shared, rows, width = x.shape
    return reshape(x, (*batch, shared * groups, rows // groups, width))


def _require_mask(mask: Any, scores: Tensor) -> None:
    shape, given = list(scores.shape), mask.type if isinstance(mask, Tensor) else brief(mask)
    if not isinstance(mask, Tensor) or mask.dtype.kind != "bool":
        raise DTypeError(
            f"attention: a mask is of bools that broadcast to {shape}, True where a query may "
            f"see a key, not {given}"
        )
    fits = zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    if mask.ndim > scores.ndim or any(n not in (1, length) for n, length in fits):
        text = f"attention: a mask must broadcast to bool{shape}, given {given}"
        if len(shape) > 2 and mask.shape == (shape[0], shape[-1]):
            hint = ", ".join(["None"] * (len(shape) - 2))
            text += f"; one that says for each sequence which keys are seen is mask[:, {hint}, :]"
        raise ShapeError(text)


def seen_before(queries: int, keys: int, position: Tensor | int = 0) -> Tensor:
    """Which keys a query sees that stands at `position` or behind: bool[queries, keys], True for
    those that do not come after it."""
    return arange(keys) <= expand_dims(arange(queries), axis=1) + position


# --- positions -----------------------------------------------------------------------


@public
def sinusoidal_encoding(
    positions: Tensor, features: int, *, base: float = 10000.0, dtype: object = f32
) -> Tensor:
    """Sines and cosines of positions (arXiv 1706.03762, section 3.5): i[...] -> f[..., features],

        out[..., 2 i] = sin(p / base^(2 i / features)), out[..., 2 i + 1] = cos(the same)

    Raises `DTypeError` for positions that are no integers, and a dtype of no floats,
    `AttributeRefused` for an odd number of features.

        >>> ml.sinusoidal_encoding(ml.arange(5), 8).type
        f32[5,8]
    """
    angles = _angles(positions, features, base)
    if not DType.of(dtype).is_float:
        raise DTypeError(f"sines are floats, not {dtype}")
    both = stack([op.sin(angles), op.cos(angles)], axis=-1)
    return astype(reshape(both, (*positions.shape, features)), dtype)


@public
@through_f32
def rotary_encoding(
    x: Tensor, positions: Tensor | None = None, /, *, base: float = 10000.0
) -> Tensor:
    """x turned by angles that grow with the position, so that the product of a query and a key
    depends on the distance between them (Su et al., arXiv 2104.09864): f[..., T, D] with i[..., T]
    -> f[..., T, D]. The positions are 0 .. T - 1 unless given.

    Features i and i + D / 2 are turned as a pair, by position base^(-2 i / D). The paper's pairs
    are neighbours, which is the same but for the order of the features.

    Raises `ShapeError` for fewer axes than two and for positions that do not fit, `DTypeError` for
    an x that is no floats and positions that are no integers, `AttributeRefused` for an odd D.

        >>> ml.rotary_encoding(ml.ones((1, 2, 5, 4)), ml.arange(5)).type
        f32[1,2,5,4]
    """
    if type_of(x).ndim < 2:
        raise ShapeError("takes [..., time, features]")
    if not x.dtype.is_float:
        raise DTypeError(f"takes floats, not {x.dtype}; convert with astype")
    if positions is None:
        positions = arange(x.shape[-2])
    return rotated(x, *rotary_table(positions, x.shape[-1], base, x.dtype))


def rotary_table(
    positions: Tensor, features: int, base: float, dtype: object
) -> tuple[Tensor, Tensor]:
    """The cosines and the sines of the angles of `rotary_encoding`: twice f[..., features / 2]."""
    angles = _angles(positions, features, base)
    return astype(op.cos(angles), dtype), astype(op.sin(angles), dtype)


@through_f32
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs of features i and i + D / 2 turned by angles with these cosines and sines."""
    first, second = split(x, 2, axis=-1)
    return concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _angles(positions: Tensor, features: int, base: float) -> Tensor:
    """position base^(-2 i / features) for i below features / 2: f64[..., features / 2]. In f32, the
    angles of late positions would be off."""
    type = type_of(positions)
    if not type.dtype.is_integer:
        raise DTypeError("positions must be integers")
    if features < 2 or features % 2:
        raise AttributeRefused(f"features must be even, given {features}")
    if not is_real(base) or not base > 0:
        raise AttributeRefused(f"base is a number > 0, not {brief(base)}")
    rates = op.exp(astype(arange(features // 2), f64) * (-2 * math.log(base) / features))
    return expand_dims(astype(positions, f64), axis=-1) * rates
