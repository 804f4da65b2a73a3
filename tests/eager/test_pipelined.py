"""Eager code on a remote VM that answers later does not wait, and has the results of a local
one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import OperandValueError
from mlvm.eager import nn, optim
from tests.wired import connect_to, machine

pytestmark = pytest.mark.processor(reason="what it serves is in memory of the host")

SAMPLES = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
LABELS = np.arange(40) % 3


def trained(vm: Any, *, captured: bool, workers: int) -> list[bytes]:
    """The losses of a training, and the weights after it."""
    weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
    with weights.allocating():
        key = ml.random.key(3)
        model = nn.Sequential(nn.Linear(6, 8, key=key), ml.tanh, nn.Linear(8, 3, key=key))
        optimizer = optim.AdamW(model, 0.01)

    def step(samples: ml.Tensor, labels: ml.Tensor) -> ml.Tensor:
        def loss_of(model: nn.Module) -> ml.Tensor:
            return ml.mean(ml.softmax_cross_entropy(model(samples), labels))

        loss, grads = ml.value_and_grad(loss_of)(model)
        optimizer.update(grads)
        return loss

    improve = ml.capture(step) if captured else step
    outputs = []
    with ml.Pipeline(
        (SAMPLES, LABELS), 10, vm=vm, epochs=3, shuffle=True, workers=workers
    ) as batches:
        for _ in range(3):
            for samples, labels in batches:
                with batch:
                    outputs.append(improve(samples, labels).numpy().tobytes())
    outputs += [x.numpy().tobytes() for x in model.state().values()]
    return outputs


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_has_the_same_bits(captured: bool, workers: int) -> None:
    here = trained(ml.VM("here"), captured=captured, workers=0)
    there = connect_to(machine(ml.VM("there")))
    assert trained(there, captured=captured, workers=workers) == here
    there.close()


def test_residuals_are_kept_where_the_program_runs() -> None:
    def length(x: ml.Tensor) -> Any:
        return ml.while_loop(lambda s: ml.sum(s) < 100.0, lambda s: s * (x + 1.0), x)

    gradients = []
    for vm in (ml.VM("here"), connect_to(machine(ml.VM("there")))):
        with ml.Arena(vm, "weights").allocating():
            gradient = ml.capture(ml.grad(lambda x: ml.sum(length(x))))
            gradients.append(gradient(ml.ones(5)).numpy().tobytes())
            assert gradient.residuals == 1 << 16
    assert gradients[0] == gradients[1]


def test_an_error_is_raised_by_who_waits_and_names_who_asked() -> None:
    vm = connect_to(machine(ml.VM("there")))
    with ml.Arena(vm, "step").allocating():
        x, labels = ml.ones((2, 3)), ml.asarray([0, 7])
        with pytest.raises(OperandValueError) as caught:
            ml.exp(
                ml.softmax_cross_entropy(x, labels)  # here
            ).numpy()
        [line] = re.findall(rf"called from {__file__}:(\d+)", str(caught.value.__notes__))
        assert Path(__file__).read_text("utf-8").splitlines()[int(line) - 1].endswith("# here")
        assert ml.sum(x).item() == 6.0
