"""Optimizer updates of ONNX's training preview."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlvm.eager as ml
from mlvm.onnx.table import NodeCall, op

_DOMAIN = "ai.onnx.preview.training"


def _each(xs: tuple[Any, ...], kinds: int, update: Callable[..., Any]) -> Any:
    """Apply an update to each of several tensors.

    `xs` contains all tensors of the first kind, then all tensors of the second kind, and so on. The
    result has the same order.
    """
    count = len(xs) // kinds
    updates = [update(*xs[i::count]) for i in range(count)]
    return tuple(value for column in zip(*updates, strict=True) for value in column)


@op(f"{_DOMAIN}.Adagrad", "tensors")
def adagrad(at: NodeCall, rate: Any, step: Any, *xs: Any) -> Any:
    rate = rate / (1.0 + ml.astype(step, rate.dtype) * at.get("decay_factor", 0.0))

    def update(x: Any, g: Any, h: Any) -> Any:
        g = x * at.get("norm_coefficient", 0.0) + g
        h = h + g * g
        return x - rate * g / (ml.sqrt(h) + at.get("epsilon", 1e-6)), h

    return _each(xs, 3, update)


@op(f"{_DOMAIN}.Momentum", "tensors")
def momentum(at: NodeCall, rate: Any, step: Any, *xs: Any) -> Any:
    alpha, beta = at["alpha"], at["beta"]
    share = ml.where(ml.greater(step, 0), ml.full((), beta, dtype=rate.dtype), 1.0)

    def update(x: Any, g: Any, v: Any) -> Any:
        g = x * at["norm_coefficient"] + g
        v = v * alpha + share * g
        return x - rate * (v if at["mode"] == "standard" else g + v * alpha), v

    return _each(xs, 3, update)


@op(f"{_DOMAIN}.Adam", "tensors")
def adam(at: NodeCall, rate: Any, step: Any, *xs: Any) -> Any:
    alpha, beta = at.get("alpha", 0.9), at.get("beta", 0.999)
    t = ml.astype(step, rate.dtype)
    by = ml.sqrt(1.0 - ml.pow(ml.full((), beta, dtype=rate.dtype), t))
    by = by / (1.0 - ml.pow(ml.full((), alpha, dtype=rate.dtype), t))
    rate = ml.where(ml.greater(step, 0), rate * by, rate)

    def update(x: Any, g: Any, v: Any, h: Any) -> Any:
        g = x * at.get("norm_coefficient", 0.0) + g
        v, h = v * alpha + g * (1 - alpha), h * beta + g * g * (1 - beta)
        x = x - rate * (v / (ml.sqrt(h) + at.get("epsilon", 1e-6)))
        return x * (1.0 - at.get("norm_coefficient_post", 0.0)), v, h

    return _each(xs, 4, update)
