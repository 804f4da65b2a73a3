"""A BERT-like encoder (Devlin et al., arXiv 1810.04805) that predicts masked symbols.

BERT learns a vector for each position. This model instead rotates queries and keys by position
(RoFormer, Su et al., arXiv 2104.09864), so it learns to attend to neighbours within hundreds of
steps.
"""

from __future__ import annotations

import mlvm.eager as ml
from mlvm.eager import Tensor, nn

ROTARY_BASE = 10_000.0


class EncoderBlock(nn.Module):
    """Transformer layer: attention and a perceptron, each followed by a norm.

    [N, T, width] -> [N, T, width]. With a `mask` bool[T], attention is limited to positions where
    it is True.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        rotary_base: float | None = None,
        key: Tensor | None = None,
    ) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key, 3)
        self.attention = nn.MultiHeadAttention(
            width, num_heads, rotary_base=rotary_base, key=keys[0]
        )
        self.mlp = [nn.Linear(width, mlp_dim, key=keys[1]), nn.Linear(mlp_dim, width, key=keys[2])]
        self.norm = [nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm[0](x + self.attention(x, mask=mask))
        return self.norm[1](x + self.mlp[1](ml.gelu(self.mlp[0](x), approximate=False)))


class Bert(nn.Module):
    """Symbols i64[N, T] -> logits [N, T, num_classes] of the symbol at each position."""

    def __init__(
        self,
        num_symbols: int,
        num_classes: int,
        width: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        *,
        key: Tensor | None = None,
    ) -> None:
        keys = ml.random.split(ml.random.next_key() if key is None else key, num_blocks + 2)
        self.embedding = nn.Embedding(num_symbols, width, key=keys[0])
        self.norm = nn.LayerNorm(width)
        self.block = [
            EncoderBlock(width, num_heads, 4 * width, rotary_base=ROTARY_BASE, key=keys[2 + i])
            for i in range(num_blocks)
        ]
        self.head = nn.Linear(width, num_classes, key=keys[1])

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        for block in self.block:
            x = block(x)
        return self.head(x)
