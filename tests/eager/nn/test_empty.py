"""Layers on tensors without elements: a batch of nothing, a sequence of no steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.types import Shape
from mlvm.eager import nn
from tests.eager.nn.checks import numbers
from tests.rows import table

CASES: dict[str, tuple[Callable[[], nn.Module], Shape, list[Shape]]] = table(globals(), "CASES")


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_is_nothing_out(name: str) -> None:
    make, shape, shapes = CASES[name]
    layer, x = make(), ml.zeros(shape)
    assert [y.shape for y in numbers(layer(x))] == shapes

    def total(layer: Any) -> ml.Tensor:
        result = layer(x)
        return ml.sum(result if isinstance(result, ml.Tensor) else result[0])

    if any(True for _ in layer.named_parameters()):
        for _, slope in sorted(ml.grad(total)(layer).items()):
            for part in numbers(slope):
                assert not np.any(part)
