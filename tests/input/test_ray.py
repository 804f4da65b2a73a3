"""Pipelines of Ray's datasets, of which a test needs their blocks alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.input import ray as module
from tests.brief import Patch


class Dataset:
    """Blocks of columns, one of them empty, as references are to Ray."""

    def materialize(self) -> Any:
        return self

    def to_numpy_refs(self) -> list[dict[str, Any]]:
        numbers = np.arange(7, dtype=np.float32)
        return [
            {"x": part, "y": np.stack([part, -part], 1)}
            for part in (numbers[:3], numbers[3:3], numbers[3:])
        ]


def test_batches_have_the_rows_of_all_blocks(monkeypatch: Patch) -> None:
    fake = SimpleNamespace(get=lambda block: block)
    monkeypatch.setattr(module, "extra", lambda *_: fake)
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "epochs": 1}
    x = np.arange(7, dtype=np.float32)
    rows = {"x": x, "y": np.stack([x, -x], 1)}
    with (
        ml.Pipeline.from_ray(Dataset(), 4, vm=ml.VM(), **options) as batches,
        ml.Pipeline(rows, 4, vm=ml.VM(), **options) as expected,
    ):
        for batch, wanted in zip(batches, expected, strict=True):
            assert batch[0].tolist() == wanted[0].tolist()
            assert batch[1].tolist() == wanted[1].tolist()
