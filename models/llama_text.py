"""Text generation with a Llama from a GGUF file, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.machines.terminal import OptionError
from models.llama import Cache, Llama, LlamaConfig
from models.tokenizer import Decoder, Tokenizer
from models.transformer import sample

_ROOM: Final = 256
"""Initial number of positions in the cache, which doubles when it is full."""


class LlamaText:
    """A Llama and its tokenizer, from a GGUF file; low-bit weights stay packed.

    Raises `OSError` for a file that cannot be read, `WeightsError` for a damaged file or a file of
    a different model.
    """

    def __init__(self, file: Path, vm: ml.VM | None = None) -> None:
        self.vm = ml.VM("generate") if vm is None else vm
        self.weights, self.cached = ml.Arena(self.vm, "weights"), ml.Arena(self.vm, "cache")
        self.batch = ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            loaded = ml.load(file)
            if not loaded.plain:
                raise ml.errors.WeightsError(f"{file} is not a GGUF file, or lacks metadata")
            self.model = Llama(LlamaConfig.of(loaded.plain), loaded).eval()
        self.tokenizer = Tokenizer(loaded.plain)
        self.step = ml.capture(self._step)

    def _step(
        self,
        tokens: Tensor,
        cache: Cache,
        at: Tensor,
        key: Tensor,
        temperature: Tensor | None,
        top_k: int | None,
    ) -> Tensor:
        logits = self.model(tokens, cache, at)
        if temperature is None:
            return ml.argmax(logits)
        return sample(logits / temperature, top_k, ml.random.fold_in(key, at))

    def generate(
        self,
        prompt: list[int],
        *,
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int | None = None,
        length: int | None = None,
        until_end: bool = True,
    ) -> Iterator[int]:
        """Generate the tokens after the prompt, until the end token (if `until_end`), `length`
        tokens, or the model's context length. With a temperature of 0, each token is the most
        likely token. Otherwise the same seed generates the same tokens.

        Raises `OptionError` for an empty or too long prompt, and for other options that are out of
        range.
        """
        config = self.model.config
        if not 0 < len(prompt) < config.context:
            raise OptionError(f"a prompt has 1 to {config.context - 1} tokens, got {len(prompt)}")
        if not 0 <= temperature < math.inf:
            raise OptionError(f"temperature must be 0 or more, got {temperature}")
        if top_k is not None and top_k < 1:
            raise OptionError(f"top_k must be 1 or more, got {top_k}")
        if length is not None and length < 0:
            raise OptionError(f"length must be 0 or more, got {length}")
        most = config.context - len(prompt)
        last = most if length is None else min(length, most)
        end = self.tokenizer.eos if until_end else None
        return self._generate(prompt, seed, temperature, top_k, last, end)

    def _generate(
        self,
        prompt: list[int],
        seed: int,
        temperature: float,
        top_k: int | None,
        count: int,
        end: int | None,
    ) -> Iterator[int]:
        room, at, tokens = 0, 0, prompt
        cache: Cache = []
        for _ in range(count):
            if at + len(tokens) > room:
                while room < at + len(tokens):
                    room = max(_ROOM, 2 * room)
                cache = self._room(cache, min(room, self.model.config.context))
            with self.batch:
                drawn = self.step(
                    ml.asarray(np.array(tokens)),
                    cache,
                    ml.asarray(np.int64(at)),
                    ml.random.key(seed),
                    ml.asarray(temperature) if temperature else None,
                    top_k,
                )
                token = int(drawn)
            yield token
            if token == end:
                return
            at, tokens = at + len(tokens), [token]

    def _room(self, cache: Cache, length: int) -> Cache:
        """Copy a cache into a longer one."""
        old = [(keys.numpy(), values.numpy()) for keys, values in cache]
        self.cached.reset()
        with self.cached.allocating():
            larger = self.model.init_cache(length)
            for (keys, values), (old_keys, old_values) in zip(larger, old, strict=False):
                keys[..., : old_keys.shape[2]] = old_keys
                values[:, : old_values.shape[1]] = old_values
        return larger

    def text(self, prompt: str, **options: object) -> Iterator[str]:
        """Continue a text, piece by piece; the options are the same as for `generate`."""
        decoder = Decoder(self.tokenizer)
        for token in self.generate(self.tokenizer.encode(prompt), **options):  # type: ignore[arg-type]
            yield decoder(token)
        yield decoder.end()
