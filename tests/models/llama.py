"""`python -m tests.models.llama`: 200 tokens of a Llama of 100 million weights in few bits, at
temperature 0, are those of f32 on the dequantised weights, by the formula in numpy. `make test`
has a small one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mlvm.eager as ml
from bench.generate import PROMPT, SIZE
from bench.gguf_file import LlamaSize, llama, write
from mlvm.core.types import Array
from models.llama_text import LlamaText


def dequantized(file: Path) -> dict[str, Array]:
    """The weights of a GGUF file as numbers in f32, by name."""
    loaded = ml.load(file)
    return {
        name: (ml.dequantize(x, loaded[f"{name}.scale"]) if f"{name}.scale" in loaded else x)
        .numpy()
        .astype(np.float32)
        for name, x in loaded.items()
        if not name.endswith(".scale")
    }


def logits(size: LlamaSize, weights: dict[str, Array], tokens: list[int]) -> Array:
    """Return the logits after each token, in f32, as transformers computes them: halves of heads
    are turned, of weights whose rows are brought into that order."""
    heads, shared, dim = size.heads, size.kv_heads, size.width // size.heads
    length = len(tokens)
    angles = np.arange(length)[:, np.newaxis] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = (np.tile(f(angles), 2).astype(np.float32) for f in (np.cos, np.sin))

    def norm(x: Array, name: str) -> Array:
        root = np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-5))
        return np.asarray(x / root * weights[f"{name}.weight"])

    def split(x: Array, name: str, count: int) -> Array:
        rows = weights[f"{name}.weight"].reshape(count, dim // 2, 2, size.width)
        y = x @ rows.swapaxes(1, 2).reshape(count * dim, size.width).T
        y = y.reshape(length, count, dim).swapaxes(0, 1)
        other = np.concatenate([-y[..., dim // 2 :], y[..., : dim // 2]], axis=-1)
        return np.asarray(y * cos + other * sin)

    x = weights["token_embd.weight"][tokens]
    for i in range(size.blocks):
        name = f"blk.{i}"
        y = norm(x, f"{name}.attn_norm")
        query, key = (split(y, f"{name}.attn_q", heads), split(y, f"{name}.attn_k", shared))
        value = (y @ weights[f"{name}.attn_v.weight"].T).reshape(length, shared, dim)
        key, value = (np.repeat(z, heads // shared, 0) for z in (key, value.swapaxes(0, 1)))
        scores = query @ key.swapaxes(1, 2) / np.float32(np.sqrt(dim))
        scores = np.where(np.tri(length, dtype=bool), scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ value
        x = x + mixed.swapaxes(0, 1).reshape(length, -1) @ weights[f"{name}.attn_output.weight"].T
        y = norm(x, f"{name}.ffn_norm")
        gate = y @ weights[f"{name}.ffn_gate.weight"].T
        up = y @ weights[f"{name}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.ffn_down.weight"].T
    return np.asarray(norm(x, "output_norm") @ weights["output.weight"].T)


def main() -> int:
    """The exit status: 0 where all tokens are the same, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.llama", description=__doc__)
    parser.add_argument("--format", default="Q4_0", choices=["Q4_0", "Q8_0"])
    parser.add_argument("--length", type=int, default=200, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "llama.gguf"
        metadata, tensors = llama(SIZE, options.format)
        count = sum(int(np.prod(blocks.shape)) for blocks in tensors.values())
        write(file, metadata, tensors)
        del tensors
        text, started = LlamaText(file), time.perf_counter()
        ids = [*text.generate(PROMPT, length=options.length, until_end=False)]
        seconds = time.perf_counter() - started
        scores = logits(SIZE, dequantized(file), [*PROMPT, *ids[:-1]])[len(PROMPT) - 1 :]
    same = scores.argmax(-1) == ids
    best = np.sort(scores, axis=-1)
    gap = (best[:, -1] - best[:, -2]).min()
    print(
        f"{count:,} weights in {options.format}: {same.sum()} of {len(ids)} tokens are those "
        f"of f32, where the two likeliest are {gap:.1e} apart at least; {len(set(ids))} different "
        f"ones, {seconds:.1f} s"
    )
    return 0 if same.all() else 1


if __name__ == "__main__":
    sys.exit(main())
