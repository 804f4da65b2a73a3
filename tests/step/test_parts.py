"""Convolutional layers in parts of the batch: eager's bits, and much less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import BudgetError
from mlvm.eager import Tensor, nn
from models.convnet import ConvNet
from tests.brief import cases

Images = tuple[int, int, int]


class NormedConvNet(nn.Module):
    """A ConvNet with batch normalization before each relu."""

    def __init__(self, images: Images, classes: int, features: tuple[int, int]) -> None:
        first = nn.Conv2d(images[2], features[0], 3, padding="SAME")
        self.convolutions = [first, nn.Conv2d(*features, 3, padding="SAME")]
        self.norms = [nn.BatchNorm(n) for n in features]
        self.head = nn.Linear(images[0] // 4 * (images[1] // 4) * features[1], classes)

    def __call__(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = ml.max_pool2d(ml.relu(norm(convolution(x))), 2)
        return self.head(ml.reshape(x, (x.shape[0], -1)))


class Training:
    """A step of a ConvNet for classes of images."""

    def __init__(
        self, batch: int, images: Images, optim: Any, features: Any = (8, 16), kind: Any = ConvNet
    ) -> None:
        ml.random.seed(0)
        self.model: nn.Module = kind(images, 10, features)
        self.optimizer: Any = optim(self.model, 0.01)
        rng = np.random.default_rng(0)
        self.x = ml.asarray(rng.standard_normal((batch, *images), np.float32))
        self.y = ml.asarray(rng.integers(10, size=batch))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(model: Any) -> Tensor:
            return ml.softmax_cross_entropy(model(x), y, reduction="mean")

        value, gradients = ml.value_and_grad(loss)(self.model)
        self.optimizer.update(gradients)
        return value

    def bits(self, step: Any) -> list[bytes]:
        """Return the bytes of results, weights and running values after three calls."""
        losses = [step(self.x, self.y) for _ in range(3)]
        return [each.numpy().tobytes() for each in (*losses, *self.model.state().values())]


@cases("batch, images", (16, (20, 20, 3)), (24, (28, 28, 1)), (12, (21, 19, 2)), (37, (20, 20, 1)))
@cases("optimizer", ml.optim.SGD, ml.optim.AdamW)
@cases(
    "kind, features, shares",
    (ConvNet, (8, 16), (0.75, 0.5, 0.35)),
    (NormedConvNet, (8, 16), (0.75, 0.5)),
    (ConvNet, (16, 16), (0.6,)),  # the gradient of this narrow kernel is no matrix product
)
def test_a_convnet_trains_with_the_same_bits_in_a_part_of_the_memory(
    batch: int, images: Images, optimizer: Any, kind: Any, features: Any, shares: tuple[float, ...]
) -> None:
    training = Training(batch, images, optimizer, features, kind)
    plan = ml.measure(training.step, training.x, training.y).plan
    expected = training.bits(training.step)
    for share in shares:
        memory = int(share * (plan.nbytes + plan.hoisted_nbytes))
        training = Training(batch, images, optimizer, features, kind)
        assert training.bits(ml.capture(training.step, memory=memory)) == expected


@cases("batch, images", (7, (8, 8, 1)), (15, (9, 9, 1)))
def test_a_batch_of_a_single_block_of_the_sum_stays_whole(batch: int, images: Images) -> None:
    training = Training(batch, images, ml.optim.SGD)
    plan = ml.measure(training.step, training.x, training.y).plan
    with pytest.raises(BudgetError):
        ml.measure(training.step, training.x, training.y, memory=plan.nbytes // 2)


def same(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A convolution with that kernel, at the same places."""
    return lambda images: ml.conv2d(images, x, padding="SAME")


def rows_beside_channels(x: Tensor, kernel: Tensor, scale: Tensor) -> Tensor:
    """As many channels as images: the means of the images are broadcast along the channels."""
    means = ml.mean(same(kernel)(x), axis=(1, 2, 3))
    return ml.sum(ml.square(ml.sum(same(kernel)(means + scale), axis=(1, 2, 3))))


def gradient_as_kernel(x: Tensor, kernel: Tensor, scale: Tensor) -> Tensor:
    gradient = ml.grad(lambda kernel: ml.sum(ml.square(same(kernel)(x))))(kernel)
    return ml.sum(ml.tanh(same(gradient)(same(kernel)(x) * scale)))


@cases("fn, n", (rows_beside_channels, 8), (gradient_as_kernel, 20))
def test_a_value_of_the_whole_batch_is_complete_before_a_part_reads_it(fn: Any, n: int) -> None:
    shapes = [(8, 16, 16, n), (3, 3, n, n), (8, 16, 16, 1)]
    rng = np.random.default_rng(0)
    args = [ml.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
    curve = ml.measure(fn, *args).curve()
    for point in (curve[0], curve[-1]):
        result = ml.capture(fn, memory=point.nbytes)(*args)
        assert result.numpy().tobytes() == fn(*args).numpy().tobytes()
