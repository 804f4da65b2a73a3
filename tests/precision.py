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
    for precision, (dtype, half) in WAYS.items():
        with ml.autocast(half):
            result = train(model=model, epochs=epochs, learning_rate=learning_rate, dtype=dtype)
        yield precision, result["train_loss"]


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.precision", description=__doc__)
    parser.add_argument("--model", default="mlp_mixer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--within", type=float, default=0.03)
    args = parser.parse_args()
    final = {}
    for precision, losses in curves(args.model, args.epochs, args.learning_rate):
        print(f"{precision:10}", *[f"{loss:.4f}" for loss in losses], flush=True)
        final[precision] = losses[-1]
    return int(any(abs(x - final["f32"]) > args.within * final["f32"] for x in final.values()))


if __name__ == "__main__":
    raise SystemExit(main())
