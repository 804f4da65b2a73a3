"""A BERT-like encoder (Devlin et al., arXiv 1810.04805), which guesses hidden symbols."""

from __future__ import annotations

import mlvm.eager as ml
from mlvm.eager import Tensor, nn


class EncoderBlock(nn.Module):
    """Attention to all places, and a perceptron, each followed by a norm: [N, T, width] ->
    [N, T, width]. Places from `lengths` i64[N] on are not attended to."""

    def __init__(self, width: int, num_heads: int, mlp_dim: int, key: Tensor) -> None:
        keys = ml.random.split(key, 3)
        self.attention = nn.MultiHeadAttention(width, num_heads, key=keys[0])
        self.mlp = [nn.Linear(width, mlp_dim, key=keys[1]), nn.Linear(mlp_dim, width, key=keys[2])]
        self.norm = [nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm[0](x + self.attention(x, mask=mask))
        return self.norm[1](x + self.mlp[1](ml.gelu(self.mlp[0](x), approximate=False)))


class Bert(nn.Module):
    """Symbols i64[N, T] -> logits [N, T, num_symbols]; T is at most `length`."""

    def __init__(
        self,
        num_symbols: int,
        length: int,
        width: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        *,
        key: Tensor | None = None,
    ) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key, num_blocks + 3)
        self.length = length
        self.tokens = nn.Embedding(num_symbols, width, key=keys[0])
        self.positions = nn.Embedding(length, width, key=keys[1])
        self.norm = nn.LayerNorm(width)
        self.block = [
            EncoderBlock(width, num_heads, 4 * width, keys[3 + i]) for i in range(num_blocks)
        ]
        self.head = nn.Linear(width, num_symbols, key=keys[2])

    def __call__(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.length:
            raise ml.errors.ShapeError(f"built for {self.length} symbols, given {tokens.type}")
        x = self.norm(self.tokens(tokens) + self.positions.embedding[: tokens.shape[1]])
        for block in self.block:
            x = block(x)
        return self.head(x)
