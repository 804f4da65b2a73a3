"""Checks shared by the tests of layers: random weights, gradients, capture beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.cases.case import Draws
from tests.slopes import check_slopes

DRAWS = Draws(5)
RNG, normal = DRAWS.rng, DRAWS.f64


def f64(*shape: int) -> ml.Tensor:
    return ml.asarray(normal(*shape))


def randomized(layer: nn.Module) -> dict[str, Array]:
    """Give every parameter random values, also those that begin at zero or one."""
    values = {path: 0.5 * normal(*x.shape) for path, x in layer.named_parameters().items()}
    layer.load_parameters(values)
    return values


def check(call: Callable[..., Any], layer: nn.Module, *args: Any, tolerance: float = 1e-6) -> None:
    """Gradients of `call(layer, *args)` are its slopes; captured it has the bits of eager calls."""
    check_slopes(call, layer, *args, tolerance=tolerance)
    state = {path: x.numpy() for path, x in layer.state().items()}
    eager = numbers(call(layer, *args))
    layer.load_state(state)
    for fuse in (False, True):
        step = ml.capture(lambda *args: call(layer, *args), fuse=fuse)
        for _ in range(2):
            layer.load_state(state)
            captured = numbers(step(*args))
            for x, y in zip(eager, captured, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-12 if fuse else 0, atol=1e-14 * fuse)


def numbers(result: Any) -> list[Array]:
    """The tensors of nested tuples, lists and dicts as arrays."""
    if isinstance(result, ml.Tensor):
        return [result.numpy()]
    parts = result.values() if isinstance(result, dict) else result
    return [x for part in parts for x in numbers(part)]
