"""Captured training steps of the reference models: the bits of the eager ones, step after step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models.convnet import ConvNet
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer

STEPS = 50
MODELS: dict[str, Callable[[Tensor], nn.Module]] = {
    "mlp": lambda key: Mlp((8, 8, 1), 10, key=key),
    "mlp_mixer": lambda key: MlpMixer((8, 8, 1), 10, 4, 16, 2, 8, 32, key=key),
    "convnet": lambda key: ConvNet((8, 8, 1), 10, key=key),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], ml.optim.Optimizer]] = {
    "mlp": lambda model: ml.optim.SGD(
        model, ml.optim.cosine(0.05, STEPS), momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "mlp_mixer": lambda model: ml.optim.AdamW(
        model, ml.optim.cosine(1e-2, 2 * STEPS, 10), weight_decay=0.1
    ),
    "convnet": lambda model: ml.optim.Adam(model, 1e-3),
}


class Run:
    """Model in training on its own VM, from one seed."""

    def __init__(self, name: str, wrap: Callable[..., Any]) -> None:
        self.vm = ml.VM("run")
        self.weights, self.batch = ml.Arena(self.vm, "weights"), ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            ml.random.seed(7)
            self.model = MODELS[name](ml.random.key(0))
            self.optimizer = OPTIMIZERS[name](self.model)
        self.step = wrap(self._step)

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        noisy = ml.dropout(images, 0.1) + 0.01 * ml.random.normal(images.shape)

        def loss_of(model: nn.Module) -> Tensor:
            return ml.mean(ml.softmax_cross_entropy(model(noisy), labels))

        loss, grads = ml.value_and_grad(loss_of)(self.model)
        norm = ml.optim.global_norm(grads)
        self.optimizer.update(ml.optim.clip_by_global_norm(grads, 1.0))
        return loss, norm

    def usage(self) -> Any:
        counts = [(x.used, x.high_water, x.views_created) for x in (self.weights, self.batch)]
        return self.vm.consumed_size_in_mib(), counts

    def train(self) -> list[bytes]:
        """Return the results of each step, then all that it changes, as bytes."""
        draws = np.random.default_rng(0)
        outputs = []
        for i in range(STEPS):
            n = 6 if i % 10 == 9 else 8  # a short batch now and then
            images = draws.standard_normal((n, 8, 8, 1)).astype(np.float32)
            labels = draws.integers(0, 10, n)
            with self.batch:
                results = self.step(ml.asarray(images), ml.asarray(labels))
                outputs += [x.numpy().tobytes() for x in results]
        state = [*self.model.named_parameters().values(), *self.optimizer.state().values()]
        with self.weights.allocating():
            return [*outputs, *[x.numpy().tobytes() for x in state], ml.random.state().tobytes()]


@pytest.fixture(scope="module", params=MODELS)
def eager(request: pytest.FixtureRequest) -> tuple[str, list[bytes]]:
    return request.param, Run(request.param, lambda step: step).train()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_captured_step_trains_to_the_same_bits(
    eager: tuple[str, list[bytes]], fuse: bool, recompute: bool
) -> None:
    name, expected = eager
    run = Run(name, lambda step: ml.capture(step, fuse=fuse, recompute=recompute))
    assert run.train() == expected
    assert run.step.signatures == 2
    usage = run.usage()
    run.train()
    assert run.usage() == usage
    assert run.step.plan.nbytes <= 1.05 * run.step.plan.lower_bound


@pytest.mark.parametrize("name", MODELS)
def test_what_is_measured_suffices_exactly(name: str) -> None:
    run = Run(name, lambda step: step)
    types = ml.TensorType("f32", (8, 8, 8, 1)), ml.TensorType("i64", (8,))
    with run.batch:
        needed = ml.measure(run.step, *types)
    assert run.batch.capacity == 0
    with ml.Arena(run.vm, "given").allocating():
        x, y = ml.zeros(types[0].shape), ml.zeros(types[1].shape, dtype=ml.int64)
    with ml.Arena(run.vm, "enough", capacity=needed.capacity) as enough:
        run.step(x, y)
    with (
        ml.Arena(run.vm, "less", capacity=enough.high_water - 64),
        pytest.raises(ml.errors.ArenaOverflowError),
    ):
        run.step(x, y)
    gc.collect()  # as recording does: what the errors above hold ends
    before = run.vm.consumed_size_in_mib()
    captured = ml.capture(run.step)
    with run.batch:
        captured(x, y)
    growth = run.vm.consumed_size_in_mib() - before - run.batch.capacity / 2**20
    plan = captured.plan
    assert plan == needed.plan
    assert round(growth * 2**20) == plan.nbytes + plan.hoisted_nbytes
    captured.close()
    assert run.vm.consumed_size_in_mib() == before + run.batch.capacity / 2**20
