"""Checks shared by the tests of layers: random weights, gradients, capture beside eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlvm.eager as ml
from mlvm.core.types import Array
from mlvm.eager import nn
from tests.cases.case import Draws
from tests.slopes import check_slopes
from tests.trees import arrays, assert_close

DRAWS = Draws(5)
RNG, normal = DRAWS.rng, DRAWS.f64
_BEGIN = RNG.bit_generator.state


def f64(*shape: int) -> ml.Tensor:
    return ml.asarray(normal(*shape))


def randomized(layer: nn.Module) -> dict[str, Array]:
    """Give every parameter random values, also those that begin at zero or one. These and later
    draws are the same whatever was drawn before, or a slope may lie at a kink."""
    RNG.bit_generator.state = _BEGIN
    values = {path: 0.5 * normal(*x.shape) for path, x in layer.named_parameters().items()}
    layer.load_parameters(values)
    return values


def check(call: Callable[..., Any], layer: nn.Module, *args: Any, tolerance: float = 1e-6) -> None:
    """Gradients of `call(layer, *args)` are its slopes; captured it has the bits of eager calls."""
    check_slopes(call, layer, *args, tolerance=tolerance)
    state = {path: x.numpy() for path, x in layer.state().items()}
    eager = arrays(call(layer, *args))
    layer.load_state(state)
    for fuse in (False, True):
        step = ml.capture(lambda *args: call(layer, *args), fuse=fuse)
        for _ in range(2):
            layer.load_state(state)
            assert_close(eager, step(*args), 1e-12 * fuse, 1e-14 * fuse)
