"""Multi-head attention."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from mlvm.core.errors import ArgumentError, DTypeError, ShapeError, brief
from mlvm.core.types import DType, f32
from mlvm.eager.functions import attention, creation, elements, random, shapes
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.linear import Linear
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.parameters import Init, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public
from mlvm.eager.tree import among_others, flatten

Cache: TypeAlias = tuple[Tensor, ...]
"""Keys and values of the previous positions, each f[batch, num_kv_heads, max_length, head_dim].

With rotary positions, the cosines and sines of all positions follow, f[max_length, head_dim / 2].
"""


class MultiHeadAttention(Module):
    """Multi-head attention: `scaled_dot_product_attention` per head, between linear projections.

    The projections are `query`, `key`, `value` and, for the concatenated heads, `out` (Vaswani et
    al., arXiv 1706.03762, section 3.2.2).

    Queries are computed from x, f[batch, time, embed_dim]; keys and values from x, or from a memory
    with `memory_dim` features. A head has embed_dim / num_heads features.

    Arguments:

    - `num_kv_heads`: the number of key and value heads, a divisor of `num_heads`. Each is shared by
      num_heads / num_kv_heads query heads (Ainslie et al., arXiv 2305.13245). Default: num_heads.

    - `dropout`: the rate at which softmax weights are dropped while `training`.

    - `rotary_base`: with a number, such as 10000, `rotary_encoding` rotates queries and keys.

    f[batch, time, embed_dim] -> the same. Raises `ShapeError` if the features or axes do not fit;
    `DTypeError` if an operand is complex; `ArgumentError` if a size is below 1, if `embed_dim` is
    not a multiple of `num_heads`, or if `num_heads` is not a multiple of `num_kv_heads`. Each of
    the four Linears may be replaced by Modules with the same number of output features, such
    as one with an adapter.

        >>> ml.nn.MultiHeadAttention(16, 4)(ml.ones((2, 5, 16)), is_causal=True).type
        f32[2,5,16]

    Invalid calls:
        ml.nn.MultiHeadAttention(4, 3)  # ArgumentError
    """

    query: Linear | Any
    key: Linear | Any
    value: Linear | Any
    out: Linear | Any

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        memory_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary_base: float | None = None,
        kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name = "MultiHeadAttention"
        memory = embed_dim if memory_dim is None else memory_dim
        width, heads, memory_width = sizes(
            name, embed_dim=embed_dim, num_heads=num_heads, memory_dim=memory
        )
        if width % heads:
            raise ArgumentError(
                f"{name}: expected num_heads that divides embed_dim, got {heads} of {width}"
            )
        [shared] = sizes(name, num_kv_heads=heads if num_kv_heads is None else num_kv_heads)
        if heads % shared:
            raise ArgumentError(
                f"{name}: expected num_kv_heads that divides num_heads, got {shared} of {heads}"
            )
        if rotary_base is not None and width // heads % 2:
            raise ArgumentError(
                f"{name}: rotary_base: expected an even head size, got {width // heads}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = heads, shared, width // heads
        self.memory_dim = memory_width
        self.rotary_base = rotary_base
        self.dropout = Dropout(dropout)
        keys = shapes.unstack(random.split(random.next_key() if key is None else key, 4))
        narrow = shared * self.head_dim
        inputs, outputs = (width, memory_width, memory_width, width), (width, narrow, narrow, width)
        options: dict[str, Any] = {"bias": bias, "dtype": dtype}
        options |= {"kernel_init": kernel_init, "bias_init": bias_init}
        self.query, self.key, self.value, self.out = (
            Linear(*features, key=each, **options)
            for *features, each in zip(inputs, outputs, keys, strict=True)
        )

    @public
    def __call__(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
        position: Tensor | int | None = None,
    ) -> Any:
        """Compute attention: f[batch, time, embed_dim] -> the same.

        It is self-attention unless `memory`, f[batch, length, memory_dim], is given.

        Arguments:

        - `mask`: a bool tensor that broadcasts to [batch, num_heads, time, length], True where a
          query may attend to a key. With a cache the length is the cache's `max_length`.

        - `is_causal`: query i attends only to keys 0 .. i.

        - `cache`: a cache of `init_cache`. x is then at the positions `position` .. `position +
          time - 1`; the keys and values of x are written there, and attention is causal. The result
          is (y, cache) with a new cache; the old cache does not change.

        - `position`: an int or an i64[], >= 0.

        Raises `ShapeError` or `DTypeError` if operands have wrong types; `ArgumentError` if a cache
        is combined with a memory or passed without a position; `OperandValueError` if the cache is
        too short for the position.
        """
        if isinstance(position, np.integer):
            position = int(position)
        self._require(x, memory, cache, position)
        source, start = x if memory is None else memory, 0 if position is None else position
        query, key, value = (
            self._heads(linear(each))
            for linear, each in ((self.query, x), (self.key, source), (self.value, source))
        )
        if self.rotary_base is not None:
            if cache is None:
                turns = self._turns(x.shape[1], self.rotary_base)
            else:
                rows = creation.arange(x.shape[1]) + start
                turns = [op.take(table, rows, axis=0) for table in cache[2:]]
            query, key = (attention.rotated(each, *turns) for each in (query, key))
        if cache is not None:
            key = elements.dynamic_update(cache[0], key, start, axis=2)
            value = elements.dynamic_update(cache[1], value, start, axis=2)
            cache = (key, value, *cache[2:])
        causal = None
        if is_causal or cache is not None:
            causal = attention.causal_mask(query.shape[2], key.shape[2], start)
        rate, scale = self.dropout.rate if self.training else 0.0, 1 / math.sqrt(self.head_dim)
        y = attention.attended(query, key, value, mask, causal, scale, rate)
        together = shapes.permute_dims(y, (0, 2, 1, 3))
        y = self.out(shapes.reshape(together, x.shape))
        return y if cache is None else (y, cache)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for sequences of at most `max_length`."""
        batch, length = sizes("init_cache", batch=batch, max_length=max_length)
        shape = (batch, self.num_kv_heads, length, self.head_dim)
        keys, values = (creation.zeros(shape, dtype=self._dtype) for _ in range(2))
        if self.rotary_base is None:
            return keys, values
        return keys, values, *self._turns(length, self.rotary_base)

    def _turns(self, length: int, base: float) -> list[Tensor]:
        """Return the cosines and sines for positions 0 .. length - 1."""
        positions = creation.arange(length)
        return [*attention.rotary_table(positions, self.head_dim, base, self._dtype)]

    @property
    def _dtype(self) -> DType:
        """Dtype of queries and keys: the dtype of the widest weight that computes them."""
        weights, _ = flatten([self.query, self.key], ends=among_others, buffers=True)
        floats = [x.dtype for _, x in weights if x.dtype.is_float]
        return max(floats, key=lambda dtype: dtype.itemsize, default=f32)

    def _heads(self, x: Tensor) -> Tensor:
        """Split heads: f[batch, time, heads * head_dim] -> f[batch, heads, time, head_dim]."""
        heads = x.shape[2] // self.head_dim
        split = shapes.reshape(x, (*x.shape[:2], heads, self.head_dim))
        return shapes.permute_dims(split, (0, 2, 1, 3))

    def _require(self, x: Tensor, memory: Tensor | None, cache: Any, position: Any) -> None:
        """Raise if the operands do not fit."""
        name, width = "MultiHeadAttention", self.num_heads * self.head_dim
        if x.ndim != 3 or x.shape[2] != width:
            raise ShapeError(f"{name}: expected x as [batch, time, {width}], got {x.type}")
        width = self.memory_dim
        source = x if memory is None else memory
        if source.ndim != 3 or source.shape[::2] != (x.shape[0], width):
            raise ShapeError(
                f"{name}: expected the memory as [{x.shape[0]}, length, {width}], got {source.type}"
            )
        if memory is not None and (cache is not None or self.rotary_base is not None):
            what = "a cache" if cache is not None else "a rotary_base"
            raise ArgumentError(
                f"{name}: {what} is only supported for self-attention; omit it, or the memory"
            )
        if (cache is None) != (position is None):
            raise ArgumentError(f"{name}: expected both cache and position, got only one of them")
        if position is not None and not isinstance(position, (int, Tensor)):
            raise DTypeError(f"{name}: expected position as an integer, got {brief(position)}")
        if isinstance(position, int) and position < 0:
            raise ArgumentError(f"{name}: expected position >= 0, got {position}")
        size = 2 if self.rotary_base is None else 4
        if cache is not None and (not isinstance(cache, (list, tuple)) or len(cache) != size):
            raise DTypeError(f"{name}: expected a cache from init_cache, got {brief(cache)}")
