"""Convolutional layers in parts of the batch: eager's bits, and much less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import BudgetError
from mlvm.eager import Tensor
from models.convnet import ConvNet
from tests.brief import cases

Images = tuple[int, int, int]


class Training:
    """A step of a ConvNet for classes of images."""

    def __init__(
        self, batch: int, images: Images, optimizer: Any, features: tuple[int, int] = (8, 16)
    ) -> None:
        ml.random.seed(0)
        self.model = ConvNet(images, 10, features)
        self.optimizer: Any = optimizer(self.model, 0.01)
        rng = np.random.default_rng(0)
        self.x = ml.asarray(rng.standard_normal((batch, *images), np.float32))
        self.y = ml.asarray(rng.integers(10, size=batch))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(model: ConvNet) -> Tensor:
            return ml.softmax_cross_entropy(model(x), y, reduction="mean")

        value: Tensor
        value, gradients = ml.value_and_grad(loss)(self.model)
        self.optimizer.update(gradients)
        return value

    def bits(self, step: Any) -> list[bytes]:
        """Return the bytes of results and weights after three calls."""
        losses = [step(self.x, self.y) for _ in range(3)]
        return [each.numpy().tobytes() for each in (*losses, *ml.tree.leaves(self.model))]


@cases("batch, images", (16, (20, 20, 3)), (24, (28, 28, 1)), (12, (21, 19, 2)), (32, (16, 16, 3)))
@cases("optimizer", ml.optim.SGD, ml.optim.AdamW)
def test_a_convnet_trains_with_the_same_bits_in_a_third_of_the_memory(
    batch: int, images: Images, optimizer: Any
) -> None:
    training = Training(batch, images, optimizer)
    plan = ml.measure(training.step, training.x, training.y).plan
    expected = training.bits(training.step)
    for share in (0.75, 0.5, 0.35):
        memory = int(share * (plan.nbytes + plan.hoisted_nbytes))
        training = Training(batch, images, optimizer)
        assert training.bits(ml.capture(training.step, memory=memory)) == expected


def test_a_narrow_kernel_is_not_summed_in_parts() -> None:
    """With 16 channels on both sides, the gradient of the kernel is no matrix product."""
    training = Training(16, (20, 20, 3), ml.optim.SGD, (16, 16))
    plan = ml.measure(training.step, training.x, training.y).plan
    expected = training.bits(training.step)
    training = Training(16, (20, 20, 3), ml.optim.SGD, (16, 16))
    step = ml.capture(training.step, memory=int(0.6 * plan.nbytes))
    assert training.bits(step) == expected


@cases("batch, images", (7, (8, 8, 1)), (15, (9, 9, 1)), (37, (20, 20, 1)))
def test_a_batch_that_blocks_of_the_sum_do_not_divide_stays_whole(
    batch: int, images: Images
) -> None:
    training = Training(batch, images, ml.optim.SGD)
    plan = ml.measure(training.step, training.x, training.y).plan
    with pytest.raises(BudgetError):
        ml.measure(training.step, training.x, training.y, memory=plan.nbytes // 2)
