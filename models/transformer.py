"""Decoder-only transformer like GPT-2, and text generation as one program.

See Radford et al., Language Models are Unsupervised Multitask Learners, 2019. The program runs
until the generation is complete.
"""

from __future__ import annotations

from typing import TypeAlias

import mlvm.eager as ml
from mlvm.eager import Tensor, nn

Known: TypeAlias = tuple[Tensor, ...]
"""Cache of `nn.MultiHeadAttention`: keys and values of all positions, initially zeros."""
Cache: TypeAlias = list[Known]
"""Caches of all blocks."""


class Block(nn.Module):
    """Causal attention and a perceptron: [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, num_heads: int, key: Tensor) -> None:
        keys = ml.random.split(key, 3)
        self.norm = [nn.LayerNorm(width) for _ in range(2)]
        self.attention = nn.MultiHeadAttention(width, num_heads, key=keys[0])
        self.mlp = [
            nn.Linear(width, 4 * width, key=keys[1]),
            nn.Linear(4 * width, width, key=keys[2]),
        ]

    def __call__(self, x: Tensor) -> Tensor:
        return self.think(x + self.attention(self.norm[0](x), is_causal=True))

    def step(self, x: Tensor, cache: Known, position: Tensor) -> tuple[Tensor, Known]:
        """Apply the block at one position [N, 1, width], with a cache of the previous positions."""
        mixed, cache = self.attention(self.norm[0](x), cache=cache, position=position)
        return self.think(x + mixed), cache

    def think(self, x: Tensor) -> Tensor:
        return x + self.mlp[1](ml.gelu(self.mlp[0](self.norm[1](x)), approximate=True))


class Transformer(nn.Module):
    """Symbols i64[N, T] -> logits [N, T, num_symbols] of the next symbols, with T <= `length`."""

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
        self.block = [Block(width, num_heads, keys[3 + i]) for i in range(num_blocks)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_symbols, key=keys[2])

    def __call__(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.length:
            raise ml.errors.ShapeError(f"built for {self.length} symbols, got {tokens.type}")
        x = self.tokens(tokens) + self.positions.embedding[: tokens.shape[1]]
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x))

    def init_cache(self, batch: int) -> Cache:
        """Allocate a cache of keys and values for `length` positions."""
        return [block.attention.init_cache(batch, self.length) for block in self.block]

    def step(self, tokens: Tensor, cache: Cache, position: Tensor) -> tuple[Tensor, Cache]:
        """Apply the model to one symbol i64[N] at `position` -> logits [N, num_symbols].

        Also return the extended cache.
        """
        x = ml.expand_dims(self.tokens(tokens) + self.positions(position), axis=1)
        after = []
        for block, block_cache in zip(self.block, cache, strict=True):
            x, block_cache = block.step(x, block_cache, position)
            after.append(block_cache)
        return self.head(self.norm(x[:, 0])), after


def generate(
    model: Transformer,
    prompt: Tensor,
    prompt_length: Tensor,
    key: Tensor,
    *,
    temperature: Tensor,
    end: Tensor,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Continue a prompt until `end` is drawn or the model's length is reached.

    `prompt` i64[length] contains `prompt_length` >= 1 symbols, followed by zeros. Returns all
    symbols i64[length], and the number of symbols. A symbol is drawn with the probabilities
    softmax(logits / temperature), f32[] above 0, or only from the `top_k` most likely symbols.
    """

    def unfinished(state: tuple[Tensor, ...]) -> Tensor:
        tokens, count, *_ = state
        return (count < model.length) & ((count <= prompt_length) | (tokens[count - 1] != end))

    def body(state: tuple[Tensor, Tensor, Cache, Tensor]) -> tuple[Tensor, Tensor, Cache, Tensor]:
        tokens, count, cache, key = state
        place = count - 1
        logits, cache = model.step(ml.expand_dims(tokens[place], axis=0), cache, place)
        key, draw = ml.unstack(ml.random.split(key))
        drawn = sample(logits[0] / temperature, top_k, draw)
        token = ml.where(count < prompt_length, tokens[count], drawn)
        return ml.dynamic_update(tokens, token, count), count + 1, cache, key

    start = (prompt, ml.ones((), dtype=ml.int64), model.init_cache(1), key)
    tokens, count, *_ = ml.while_loop(unfinished, body, start)
    return tokens, count


def sample(logits: Tensor, top_k: int | None, key: Tensor) -> Tensor:
    """Draw an index with probabilities softmax(logits), for logits f[n].

    With `top_k`, only the largest logits are considered.
    """
    if top_k is None:
        return ml.random.categorical(logits, key=key)
    largest, numbers = ml.topk(logits, top_k)
    return numbers[ml.random.categorical(largest, key=key)]
