"""A small training, recorded: what tests of recordings compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.eager import Tensor
from mlvm.eager.runs.run import Run

STEPS = 10


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    shapes = (8, 3), (8, 2)
    return [
        tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)  # type: ignore[misc]
        for _ in range(STEPS)
    ]


def square(x: Tensor) -> Tensor:
    return x * x


def train(
    folder: Path,
    *,
    rate: float = 0.1,
    order: Sequence[int] = range(STEPS),
    square: Callable[[Tensor], Tensor] = square,
    between: Callable[[int, Any], None] = lambda n, model: None,
    captured: bool = True,
    options: Any = (),
) -> Run:
    """Train a linear layer with dropout for ten steps; return the recording."""
    ml.random.seed(0)
    model = ml.nn.Linear(3, 2, key=ml.random.key(1))
    optimizer = ml.optim.AdamW(model, learning_rate=rate)
    dropout = ml.nn.Dropout(0.25)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def loss(model: Any) -> Tensor:
            d = model(dropout(x)) - y
            return ml.mean(square(d))

        value, grads = ml.value_and_grad(loss)(model)
        optimizer.update(grads)
        return value  # type: ignore[no-any-return]

    run = ml.capture(step) if captured else ml.runs.step(step)
    data = batches()
    with ml.runs.record(folder, every=4, **dict(options)):
        for n, i in enumerate(order):
            x, y = data[i]
            run(ml.asarray(x), ml.asarray(y))
            between(n, model)
    return ml.runs.open(folder)  # type: ignore[no-any-return]
