"""Normalising layers, beside numpy and PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import mlvm.eager as ml
from mlvm.eager import nn
from tests.brief import cases
from tests.eager.nn.checks import normal, randomized


def test_rms_norm() -> None:
    layer = nn.RMSNorm(5, eps=1e-3, dtype="f64")
    w, x = randomized(layer), normal(2, 3, 5)
    expected = x / np.sqrt((x**2).sum(-1, keepdims=True) / 5 + 1e-3) * w["scale"]
    np.testing.assert_allclose(layer(ml.asarray(x)).numpy(), expected, rtol=1e-12)


def test_layer_norm_is_over_the_last_axis_alone() -> None:
    layer, x = nn.LayerNorm(5, eps=1e-3, dtype="f64"), normal(2, 3, 5)
    rows = [layer(ml.asarray(row)).numpy() for row in x.reshape(6, 1, 5)]
    np.testing.assert_array_equal(layer(ml.asarray(x)).numpy(), np.reshape(rows, x.shape))


@cases(
    "make, groups, shape",
    (partial(nn.LayerNorm, 6), 1, (4, 6)),
    (partial(nn.GroupNorm, 1, 6), 1, (4, 6)),
    (partial(nn.GroupNorm, 2, 6), 2, (2, 3, 2, 6)),
    (partial(nn.GroupNorm, 6, 6), 6, (2, 5, 6)),
    (partial(nn.InstanceNorm, 6), 6, (2, 3, 2, 6)),
)
def test_norms_of_groups(make: Any, groups: int, shape: tuple[int, ...]) -> None:
    layer = make(eps=1e-3, dtype="f64")
    w, x = randomized(layer), normal(*shape)
    parts = x.reshape(shape[0], -1, groups, 6 // groups)
    mean, var = (f(parts, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    expected = ((parts - mean) / np.sqrt(var + 1e-3)).reshape(shape) * w["scale"] + w["bias"]
    np.testing.assert_allclose(layer(ml.asarray(x)).numpy(), expected, rtol=1e-10, atol=1e-12)


def test_a_captured_training_step_moves_the_running_statistics() -> None:
    """In an arena that ends after each step, and with a gradient: as eager steps do."""
    x = [normal(8, 2) * (i + 1) + i for i in range(4)]
    states = []
    for wrap in (lambda step: step, ml.capture):
        with ml.Arena(ml.VM(), "weights").allocating():
            model = nn.Sequential(nn.Linear(2, 3, key=ml.random.key(1), dtype="f64"))
            model.layers = (*model.layers, nn.BatchNorm(3, dtype="f64"))
            optimizer = ml.optim.SGD(model, 0.1)

            def loss(model: Any, x: ml.Tensor) -> ml.Tensor:
                return ml.mean(ml.square(model(x) - 1.0))

            def step(x: ml.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
                value, gradients = ml.value_and_grad(loss)(model, x)
                optimizer.update(gradients)
                return value

        run: Any = wrap(step)
        batch = ml.Arena(model.layers[0].kernel.arena.vm, "batch")  # type: ignore[attr-defined]
        for each in x:
            with batch:
                run(ml.asarray(each))
        states.append({path: each.numpy() for path, each in model.state().items()})
    eager, captured = states
    assert abs(eager["layers_1/mean"]).min() > 0
    for path, value in eager.items():
        np.testing.assert_allclose(captured[path], value, rtol=1e-9, err_msg=path)
