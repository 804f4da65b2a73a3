"""`measure(...).arena` is the high-water mark of the arena of an eager call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.op import OPS
from mlvm.eager.tensor import templates
from mlvm.eager.tensor.apply import apply, one_op
from mlvm.eager.tensor.tensor import from_array
from models.bert import Bert
from models.convnet import ConvNet
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from models.transformer import Transformer
from models.vit import VisionTransformer
from tests.brief import cases
from tests.cases import CASES

_RNG = np.random.default_rng(0)
IMAGES = _RNG.normal(size=(4, 8, 8, 1)).astype(np.float32), _RNG.integers(0, 10, 4)
TEXT = tuple(_RNG.integers(1, 11, (2, 3, 8)))

MODELS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "mlp": (lambda: Mlp((8, 8, 1), 10, (16, 8)), IMAGES),
    "convnet": (lambda: ConvNet((8, 8, 1), 10, (4, 8)), IMAGES),
    "mlp_mixer": (lambda: MlpMixer((8, 8, 1), 10, 4, 16, 2, 8, 32), IMAGES),
    "vit": (lambda: VisionTransformer((8, 8, 1), 10, 4, 16, 2, 32, 2), IMAGES),
    "transformer": (lambda: Transformer(11, 8, 16, 2, 2), TEXT),
    "bert": (lambda: Bert(11, 11, 16, 2, 2), TEXT),
}

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda x: ml.sum(ml.tanh(x @ x + x) @ x),
    "gradient": ml.grad(lambda x: ml.sum(ml.tanh(ml.tanh(x @ x)))),
    "second derivative": ml.grad(lambda x: ml.sum(ml.grad(lambda y: ml.sum(ml.tanh(y)))(x) ** 2)),
    "tangent": lambda x: ml.jvp(ml.tanh, (x,), (x,)),
    "batch": lambda x: ml.vmap(lambda row: ml.sum(row) * row)(x),
    "checkpoint": ml.grad(lambda x: ml.sum(ml.checkpoint(lambda y: ml.tanh(ml.tanh(y)))(x))),
    "views": lambda x: [x[1:], x.T, ml.reshape(x, (-1,)), x[0]],
    "dropped": lambda x: [ml.sum(ml.exp(x)), ml.max(ml.exp(x)), ml.min(x)],
    "update": lambda x: _updated(x),
    "solve": lambda x: ml.linalg.solve(x + ml.eye(64) * 9, x),
    "covariance": ml.cov,
    "deviation": lambda x: ml.std(x, axis=0),
    "median": ml.median,
}


def _updated(x: ml.Tensor) -> ml.Tensor:
    y = x + 1.0
    y[3] = 0.0
    y += x
    return y


def high_water(call: Callable[[], object]) -> int:
    """Return the high-water mark of a fresh arena in which the call runs."""
    arena = ml.Arena(ml.default_vm(), "fresh")
    with arena.allocating():
        results = call()
    mark = arena.high_water
    del results
    arena.close()
    return mark


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if not op.dynamic))
def test_of_an_op(name: str) -> None:
    for case in CASES[name]:
        operands = list(map(from_array, case.inputs))
        call = partial(apply, one_op(name, **case.attributes))
        assert ml.measure(call, *operands).arena == high_water(partial(call, *operands))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_a_function(name: str) -> None:
    x = ml.asarray(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    fn = FUNCTIONS[name]
    with templates.disabled():
        fn(x)  # constants are made once
        measured = ml.measure(fn, x)
        assert measured.arena == high_water(lambda: fn(x))
    assert measured.arena <= measured.capacity


@cases("lists", True, False)
@cases("optimizer", ml.optim.SGD, ml.optim.AdamW)
@pytest.mark.parametrize("name", MODELS)
def test_of_a_model(name: str, optimizer: Any, lists: bool) -> None:
    build, arrays = MODELS[name]
    model = build()
    update = optimizer(model, 0.01).update

    def loss_of(model: Any, inputs: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        return ml.softmax_cross_entropy(model(inputs), labels, reduction="mean")

    def step(inputs: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        loss, gradients = ml.value_and_grad(loss_of)(model, inputs, labels)
        update(gradients)
        return loss

    operands = list(map(ml.asarray, arrays))
    with nullcontext() if lists else templates.disabled():
        for _ in range(3):  # constants and lists of calls are made once
            step(*operands)
        measured = ml.measure(step, *operands).arena
        assert measured == high_water(lambda: step(*operands))
