"""Transformer layers (Vaswani et al., Attention is All you Need, arXiv 1706.03762)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlvm.eager.functions import random, shapes
from mlvm.eager.nn.attention import Cache, MultiHeadAttention
from mlvm.eager.nn.dropout import Dropout
from mlvm.eager.nn.linear import Linear
from mlvm.eager.nn.module import Module
from mlvm.eager.nn.norm import LayerNorm
from mlvm.eager.nn.parameters import Init, sizes
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import public


class _TransformerLayer(Module):
    """Base class of encoder and decoder layers.

    Each sublayer is a residual branch. The sum is normalised, or with `pre_norm` the input of the
    branch."""

    _parts: int

    attention: MultiHeadAttention
    hidden: Linear
    out: Linear
    norm: list[LayerNorm]  # one per sublayer

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        memory_dim: int | None = None,
        pre_norm: bool = False,
        activation: Callable[[Tensor], Tensor] = op.relu,
        dropout: float = 0.0,
        rotary_base: float | None = None,
        eps: float = 1e-6,
        bias: bool = True,
        kernel_init: Init | None = None,
        bias_init: Init | None = None,
        key: Tensor | None = None,
        dtype: object = None,
    ) -> None:
        name = type(self).__name__
        [width] = sizes(name, embed_dim=embed_dim)
        [inner] = sizes(name, hidden_dim=4 * width if hidden_dim is None else hidden_dim)
        keys = shapes.unstack(random.split(random.next_key() if key is None else key, 4))
        common: dict[str, Any] = {"bias": bias, "dtype": dtype}
        common |= {"kernel_init": kernel_init, "bias_init": bias_init}
        heads = {**common, "num_kv_heads": num_kv_heads, "dropout": dropout}
        self.attention = MultiHeadAttention(
            width, num_heads, rotary_base=rotary_base, key=keys[0], **heads
        )
        if self._parts == 3:
            self.memory_attention = MultiHeadAttention(
                width, num_heads, memory_dim=memory_dim, key=keys[1], **heads
            )
        self.hidden = Linear(width, inner, key=keys[2], **common)
        self.out = Linear(inner, width, key=keys[3], **common)
        self.norm = [LayerNorm(width, eps=eps, dtype=dtype) for _ in range(self._parts)]
        self.dropout = Dropout(dropout)
        self.activation, self.pre_norm = activation, bool(pre_norm)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for sequences of at most `max_length`."""
        return self.attention.init_cache(batch, max_length)

    def _branch_input(self, part: int, x: Tensor) -> Tensor:
        """Return the input of a branch: normalised with `pre_norm`."""
        return self.norm[part](x) if self.pre_norm else x

    def _added(self, part: int, x: Tensor, output: Tensor) -> Tensor:
        """Add the output of a branch to x, and normalise unless `pre_norm`."""
        y = x + self.dropout(output)
        return y if self.pre_norm else self.norm[part](y)

    def _perceived(self, part: int, x: Tensor) -> Tensor:
        """Apply the last sublayer, a perceptron."""
        inner = self.activation(self.hidden(self._branch_input(part, x)))
        return self._added(part, x, self.out(self.dropout(inner)))

    def _attended(self, x: Tensor, cache: Cache | None, **options: Any) -> tuple[Tensor, Any]:
        """Apply the first sublayer, self-attention; also return the new cache."""
        y = self.attention(self._branch_input(0, x), cache=cache, **options)
        y, cache = (y, None) if cache is None else y
        return self._added(0, x, y), cache


class TransformerEncoderLayer(_TransformerLayer):
    """Encoder layer: self-attention, then a perceptron with one hidden layer of `hidden_dim`.

    Both are residual branches, and the sum is normalised: norm(x + attention(x)) (Vaswani et al.,
    arXiv 1706.03762, section 3.1). With `pre_norm`, it is x + attention(norm(x)) (Xiong et al.,
    arXiv 2002.04745); a model then needs a norm after the last layer. The default `hidden_dim` is 4
    embed_dim.

    `dropout` is the rate for softmax weights, the hidden layer and the outputs of the branches,
    while `training`. `num_kv_heads` and `rotary_base` are the same as for `MultiHeadAttention`.
    Call it as `layer(x, mask=None, is_causal=False)`. With `cache=` and `position=` the result is
    (y, cache), as in `MultiHeadAttention`; `layer.init_cache(batch, max_length)` returns a cache.

    f[batch, time, embed_dim] -> the same. Raises `ShapeError` if the features or axes do not fit;
    `DTypeError` if an operand is complex; `ArgumentError` if a size is below 1 or `embed_dim` is
    not a multiple of `num_heads`.

        >>> ml.nn.TransformerEncoderLayer(16, 4)(ml.ones((2, 5, 16))).type
        f32[2,5,16]

    Invalid calls:
        ml.nn.TransformerEncoderLayer(4, 3)  # ArgumentError
    """

    _parts = 2

    @public
    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
        position: Tensor | int | None = None,
    ) -> Any:
        x, cache = self._attended(x, cache, mask=mask, is_causal=is_causal, position=position)
        y = self._perceived(1, x)
        return y if cache is None else (y, cache)


class TransformerDecoderLayer(_TransformerLayer):
    """Decoder layer: causal self-attention, attention to a memory, and a perceptron.

    The memory is, for example, the output of an encoder, with `memory_dim` features (default:
    embed_dim). The other options are the same as for `TransformerEncoderLayer` (Vaswani et al.,
    arXiv 1706.03762, section 3.1).

    Call it as `layer(x, memory, mask=None, memory_mask=None, is_causal=True)`. With `cache=` and
    `position=` the result is (y, cache). Self-attention is causal unless `is_causal` is False,
    which is PyTorch's default.

    f[batch, time, embed_dim] and f[batch, length, memory_dim] -> f[batch, time, embed_dim]. Raises
    `ShapeError` if the features or axes do not fit; `DTypeError` if an operand is complex;
    `ArgumentError` if a size is below 1 or `embed_dim` is not a multiple of `num_heads`.

        >>> layer = ml.nn.TransformerDecoderLayer(16, 4)
        >>> layer(ml.ones((2, 5, 16)), ml.ones((2, 7, 16))).type
        f32[2,5,16]

    Invalid calls:
        ml.nn.TransformerDecoderLayer(2, 1)(
            ml.ones((1, 4, 2), dtype="c64"), sequences)  # DTypeError
        ml.nn.TransformerDecoderLayer(4, 2)(x, x)  # ShapeError
        ml.nn.TransformerDecoderLayer(4, 3)  # ArgumentError
    """

    _parts = 3

    memory_attention: MultiHeadAttention

    @public
    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        is_causal: bool = True,
        cache: Cache | None = None,
        position: Tensor | int | None = None,
    ) -> Any:
        x, cache = self._attended(x, cache, mask=mask, is_causal=is_causal, position=position)
        attended = self.memory_attention(self._branch_input(1, x), memory, mask=memory_mask)
        y = self._perceived(2, self._added(1, x, attended))
        return y if cache is None else (y, cache)
