"""A GRU that learns what a sensor does, and tells when it does something else, in a few KiB.

    python examples/embedded/anomaly.py DIR         # writes learn.mlvm and signal.npy
    python -m mlvm build DIR/learn.mlvm -o DIR/learn --simd plain --weights embed
    make -C DIR/learn
    cd DIR && learn/step --steps 400 --out . signal.npy

Each run reads a window of three channels, predicts every value from those before, learns from the
error, and leaves it. In the last windows of the signal a channel rattles: their errors stand out.
The step takes 31 KiB of memory, weights and optimizer included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import mlvm.eager as ml

WINDOW, CHANNELS, HIDDEN, WINDOWS = 16, 3, 12, 400


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))

    time = np.arange(WINDOWS * WINDOW)[:, None]
    signal = np.sin(time * np.array([0.2, 0.31, 0.47])).astype(np.float32)
    rattle = np.random.default_rng(0).normal(size=4 * WINDOW)
    signal[-4 * WINDOW :, 1] += 0.5 * rattle.astype(np.float32)
    np.save(folder / "signal.npy", signal.reshape(WINDOWS, WINDOW, CHANNELS))

    keys = ml.random.split(ml.random.key(0), 2)
    gru = ml.nn.GRU(CHANNELS, HIDDEN, key=keys[0])
    head = ml.nn.Linear(HIDDEN, CHANNELS, key=keys[1])
    optimizer = ml.optim.Adam((gru, head), 1e-2)

    def loss_of(models: tuple[ml.nn.GRU, ml.nn.Linear], window: ml.Tensor) -> ml.Tensor:
        gru, head = models
        states, _ = gru(window[:-1, None])
        return ml.mean((head(states[:, 0]) - window[1:]) ** 2)

    @ml.capture
    def learn(window: ml.Tensor) -> ml.Tensor:
        error, gradients = ml.value_and_grad(loss_of)((gru, head), window)
        optimizer.update(gradients)
        return error

    learn(ml.zeros((WINDOW, CHANNELS)))
    learn.save(folder / "learn.mlvm")


main()
