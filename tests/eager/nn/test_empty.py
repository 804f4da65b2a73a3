"""Layers on tensors without elements: a batch of nothing, a sequence of no steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Shape
from mlvm.eager import nn
from tests.trees import arrays

CASES: dict[str, tuple[Callable[[], nn.Module], Shape, list[Shape]]] = {
    "rms": (lambda: nn.RMSNorm(4), (0, 4), [(0, 4)]),
    "group": (lambda: nn.GroupNorm(2, 4), (0, 3, 4), [(0, 3, 4)]),
    "batch": (lambda: nn.BatchNorm(4).eval(), (0, 3, 4), [(0, 3, 4)]),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (0, 5, 4), [(0, 5, 6)]),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (0, 5, 5, 4), [(0, 5, 5, 6)]),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (0, 5, 5, 4), [(0, 5, 5, 4)]),
    "transpose": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (0, 2, 3, 4), [(0, 4, 6, 6)]),
    "average": (nn.GlobalAvgPool, (0, 3, 3, 4), [(0, 4)]),
    "attention": (lambda: nn.MultiHeadAttention(4, 2), (0, 3, 4), [(0, 3, 4)]),
    "no batch": (lambda: nn.LSTM(4, 3), (5, 0, 4), [(5, 0, 3), (1, 0, 3), (1, 0, 3)]),
    "no steps": (lambda: nn.GRU(4, 3), (0, 2, 4), [(0, 2, 3), (1, 2, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_is_nothing_out(name: str) -> None:
    make, shape, shapes = CASES[name]
    layer, x = make(), ml.zeros(shape)
    assert [y.shape for y in arrays(layer(x))] == shapes

    def total(layer: Any) -> ml.Tensor:
        result = layer(x)
        return ml.sum(result if isinstance(result, ml.Tensor) else result[0])

    if any(True for _ in layer.named_parameters()):
        for _, slope in sorted(ml.grad(total)(layer).items()):
            for part in arrays(slope):
                assert not np.any(part)
