"""Llama models: RMSNorm, rotary positions, a gated perceptron, and a key-value cache.

The cache is updated in place (Touvron et al., arXiv 2302.13971; grouped queries: arXiv 2305.13245).

Weights have the names of GGUF files and stay in the low-bit blocks of the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlvm.eager as ml
from mlvm.eager import Tensor, nn

Layer = Callable[[Tensor], Tensor]
SCALE = ".scale"
"""Suffix of the name under which `ml.load` returns the scales of a low-bit tensor."""


class LlamaConfig(NamedTuple):
    """The sizes of a model.

    `rope_base` is the base of the rotary positions, which rotate `rope_dim` features of each head.
    """

    width: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    head_dim: int
    rope_dim: int
    rope_base: float
    eps: float
    context: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> LlamaConfig:
        """Read the configuration from a GGUF file's metadata.

        Raises `WeightsError` for a different architecture, and for missing or invalid sizes.
        """
        kind = metadata.get("general.architecture")
        if kind != "llama":
            raise ml.errors.WeightsError(f"the architecture must be 'llama', got {kind!r}")
        older = (metadata.get(f"llama.rope.{key}", 1) for key in ("scale_linear", "scaling.factor"))
        kind = metadata.get("llama.rope.scaling.type")
        if kind not in (None, "none") or (kind is None and any(x not in (0, 1) for x in older)):
            raise ml.errors.WeightsError("scaled rotary positions are not supported")

        def size(name: str, default: int | None = None) -> int:
            value = metadata.get(f"llama.{name}", default)
            if type(value) is not int or not 0 < value < 1 << 31:
                raise ml.errors.WeightsError(f"llama.{name} must be an int above 0, got {value!r}")
            return value

        def number(name: str, default: float) -> float:
            value = metadata.get(f"llama.{name}", default)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                reason = f"llama.{name} must be a number above 0, got {value!r}"
                raise ml.errors.WeightsError(reason)
            return float(value)

        width, heads = size("embedding_length"), size("attention.head_count")
        kv_heads = size("attention.head_count_kv", heads)
        head_dim = size("attention.key_length", width // heads)
        rope_dim = size("rope.dimension_count", head_dim)
        if heads % kv_heads or rope_dim % 2 or rope_dim > head_dim:
            raise ml.errors.WeightsError(
                f"invalid sizes: {heads} heads, {kv_heads} key heads, {rope_dim} rotated features"
            )
        return cls(
            width,
            size("block_count"),
            heads,
            kv_heads,
            size("feed_forward_length"),
            head_dim,
            rope_dim,
            number("rope.freq_base", 10000.0),
            number("attention.layer_norm_rms_epsilon", 1e-5),
            size("context_length", 2048),
        )


class Weights:
    """Builder of layers from tensors, by the names in GGUF files.

    Raises `WeightsError` for a missing tensor, and for a tensor of a wrong shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        x = self._tensors.get(name)
        if x is None:
            raise ml.errors.WeightsError(f"the weights lack {name}")
        fits = len(x.shape) == len(shape) and all(
            n in (None, own) for n, own in zip(shape, x.shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if n is None else str(n) for n in shape)
            raise ml.errors.WeightsError(f"{name} must be [{expected}], got {x.type}")
        return x

    def linear(self, name: str, inputs: int, outputs: int | None) -> Layer:
        weight = self.tensor(f"{name}.weight", outputs, inputs)
        bias = self.tensor(f"{name}.bias", outputs) if f"{name}.bias" in self else None
        scale = self._tensors.get(f"{name}.weight{SCALE}")
        if scale is not None:
            return nn.QuantizedLinear(weight, scale, bias)
        return Dense(weight, bias)

    def embedding(self, name: str, features: int) -> Layer:
        rows = self.tensor(f"{name}.weight", None, features)
        scale = self._tensors.get(f"{name}.weight{SCALE}")
        return Rows(rows) if scale is None else nn.QuantizedEmbedding(rows, scale)

    def norm(self, name: str, width: int, eps: float) -> nn.RMSNorm:
        norm = nn.RMSNorm(width, eps=eps)
        norm.scale = self.tensor(f"{name}.weight", width)
        return norm


class Dense(nn.Module):
    """Linear layer y = x weight^T + bias, built from a weight [outputs, inputs] of the file."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.kernel, self.bias = ml.copy(weight.mT), bias

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.kernel
        return y if self.bias is None else y + self.bias


class Rows(nn.Module):
    """Embedding: a row for each integer."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, indices: Tensor) -> Tensor:
        return ml.take(self.rows, indices, axis=0)


class Attention(nn.Module):
    """Causal attention of [T, width] to itself and to the cache."""

    def __init__(self, weights: Weights, name: str, config: LlamaConfig) -> None:
        self.config, dim = config, config.head_dim
        wide, narrow = config.num_heads * dim, config.num_kv_heads * dim
        self.query = weights.linear(f"{name}.attn_q", config.width, wide)
        self.key = weights.linear(f"{name}.attn_k", config.width, narrow)
        self.value = weights.linear(f"{name}.attn_v", config.width, narrow)
        self.out = weights.linear(f"{name}.attn_output", wide, config.width)

    def __call__(
        self, x: Tensor, cache: tuple[Tensor, Tensor], at: Tensor, turns: Turns, mask: Tensor
    ) -> Tensor:
        config, length = self.config, x.shape[0]
        shared, dim = config.num_kv_heads, config.head_dim
        each = config.num_heads // shared
        query = ml.reshape(self.query(x), (length, shared, each, dim))
        key = ml.reshape(self.key(x), (length, shared, 1, dim))
        query, key = (self._turned(part, turns) for part in (query, key))
        value = ml.reshape(self.value(x), (length, shared, dim))
        keys, values = cache
        ml.dynamic_update(keys, ml.permute_dims(key[:, :, 0], (1, 2, 0)), at, axis=2, out=keys)
        ml.dynamic_update(values, ml.permute_dims(value, (1, 0, 2)), at, axis=1, out=values)
        rows = ml.reshape(ml.permute_dims(query, (1, 2, 0, 3)), (shared, each * length, dim))
        scores = rows @ keys * (1 / math.sqrt(dim))
        scores = ml.reshape(scores, (shared, each, length, keys.shape[2]))
        weights = ml.softmax(ml.where(mask, scores, -math.inf), axis=-1)
        mixed = ml.reshape(weights, (shared, each * length, keys.shape[2])) @ values
        mixed = ml.permute_dims(ml.reshape(mixed, (shared, each, length, dim)), (2, 0, 1, 3))
        return self.out(ml.reshape(mixed, (length, config.num_heads * dim)))

    def _turned(self, x: Tensor, turns: Turns) -> Tensor:
        """Rotate pairs of adjacent features of x[T, ..., head_dim], as stored in GGUF files.

        The result contains the first features of all pairs, then the second features. Queries and
        keys have the same order, so the products do not change.
        """
        turned, rest = x[..., : self.config.rope_dim], x[..., self.config.rope_dim :]
        pairs = ml.reshape(turned, (*turned.shape[:-1], self.config.rope_dim // 2, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        cos, sin = turns
        parts = [first * cos - second * sin, second * cos + first * sin]
        return ml.concat([*parts, rest] if rest.size else parts, axis=-1)


class Mlp(nn.Module):
    """down(silu(gate(x)) up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, weights: Weights, name: str, config: LlamaConfig) -> None:
        self.gate = weights.linear(f"{name}.ffn_gate", config.width, config.mlp_dim)
        self.up = weights.linear(f"{name}.ffn_up", config.width, config.mlp_dim)
        self.down = weights.linear(f"{name}.ffn_down", config.mlp_dim, config.width)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ml.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, weights: Weights, name: str, config: LlamaConfig) -> None:
        self.attention_norm = weights.norm(f"{name}.attn_norm", config.width, config.eps)
        self.attention = Attention(weights, name, config)
        self.mlp_norm = weights.norm(f"{name}.ffn_norm", config.width, config.eps)
        self.mlp = Mlp(weights, name, config)

    def __call__(
        self, x: Tensor, cache: tuple[Tensor, Tensor], at: Tensor, turns: Turns, mask: Tensor
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, at, turns, mask)
        return x + self.mlp(self.mlp_norm(x))


Turns = tuple[Tensor, Tensor]
"""Cosines and sines of positions."""
Cache = list[tuple[Tensor, Tensor]]
"""Keys f32[num_kv_heads, head_dim, length] and values f32[num_kv_heads, length, head_dim] of each
block."""


class Llama(nn.Module):
    """Tokens i64[T] at positions `at` .. at + T - 1 -> logits f32[num_tokens] of the next token.

    The cache contains keys and values of earlier positions; the keys and values of these tokens are
    added in place.
    """

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor]) -> None:
        weights = Weights(tensors)
        self.config = config
        self.tokens = weights.embedding("token_embd", config.width)
        self.blocks = [Block(weights, f"blk.{i}", config) for i in range(config.num_blocks)]
        self.norm = weights.norm("output_norm", config.width, config.eps)
        head = "output" if "output.weight" in weights else "token_embd"
        self.head = weights.linear(head, config.width, None)
        rates = ml.arange(config.rope_dim // 2) * (-2 * math.log(config.rope_base))
        rates = ml.exp(ml.astype(rates, ml.float64) / config.rope_dim)
        if "rope_freqs.weight" in weights:  # in Llama 3.1 and later
            rates = rates / weights.tensor("rope_freqs.weight", config.rope_dim // 2)
        self.rates = nn.buffer(rates)

    def init_cache(self, length: int) -> Cache:
        """Allocate a cache for `length` positions."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return [
            (ml.zeros((heads, dim, length)), ml.zeros((heads, length, dim))) for _ in self.blocks
        ]

    def __call__(self, tokens: Tensor, cache: Cache, at: Tensor) -> Tensor:
        return self.head(self.norm(self._features(tokens, cache, at)[-1:]))[0]

    def all_logits(self, tokens: Tensor) -> Tensor:
        """Compute logits f32[T, num_tokens] of the token after each token i64[T]."""
        cache = self.init_cache(tokens.shape[0])
        return self.head(self.norm(self._features(tokens, cache, ml.asarray(0))))

    def _features(self, tokens: Tensor, cache: Cache, at: Tensor) -> Tensor:
        positions = ml.arange(tokens.shape[0]) + at
        angles = ml.expand_dims(positions, axis=1) * self.rates
        shape = (tokens.shape[0], 1, 1, self.config.rope_dim // 2)
        both = (ml.cos(angles), ml.sin(angles))
        cos, sin = (ml.astype(ml.reshape(x, shape), ml.float32) for x in both)
        mask = ml.arange(cache[0][0].shape[2]) <= ml.expand_dims(positions, axis=1)
        x = self.tokens(tokens)
        for block, block_cache in zip(self.blocks, cache, strict=True):
            x = block(x, block_cache, at, (cos, sin), mask)
        return x
