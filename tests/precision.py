"""Loss curves of a model in f32, in bf16 and under `ml.autocast`.

    python -m tests.precision                          the digits
    python -m tests.precision --model transformer      the text of the standard library

Fails if the last epoch's loss is farther from that in f32 than `--within` of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import mlvm.eager as ml
from models.training.train import train

WAYS = {"f32": ("f32", None), "bf16": ("bf16", None), "autocast": ("f32", "bfloat16")}
"""What `train` is told, and the block around it."""


def curves(model: str, epochs: int, learning_rate: float) -> Iterator[tuple[str, list[float]]]:
    """The training loss of each epoch, in each way."""
    for way, (dtype, half) in WAYS.items():
        with ml.autocast(half):
            result = train(model=model, epochs=epochs, learning_rate=learning_rate, dtype=dtype)
        yield way, result["train_loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp_mixer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--within", type=float, default=0.03)
    given = parser.parse_args()
    found = {}
    for way, losses in curves(given.model, given.epochs, given.learning_rate):
        print(f"{way:10}", *[f"{loss:.4f}" for loss in losses], flush=True)
        found[way] = losses[-1]
    return int(any(abs(x - found["f32"]) > given.within * found["f32"] for x in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
