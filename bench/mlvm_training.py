"""mlvm's side of the training benchmarks: a model, its optimizer and the memory they work in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

import mlvm.eager as ml
from bench.sizes import LEARNING_RATE, MOMENTUM, MixerSize, Size, TextSize, batch_of
from mlvm.core.types import DType
from mlvm.eager import Tensor, nn
from models.bert import Bert
from models.convnet import ConvNet
from models.mlp_mixer import MlpMixer
from models.transformer import Transformer


class Training:
    """A model in training. What lasts is in the arena `weights`; a step leaves `batch` empty.

    `captured` is the step as one program. On a VM of a group, all members take a step together.
    With a `dtype` of bf16 the model computes in that; weights, momentum and the loss are f32.
    """

    def __init__(self, size: Size, vm: ml.VM | None = None, dtype: DType = ml.float32) -> None:
        self.vm = vm or ml.VM("bench")
        self.dtype = dtype
        self.weights = ml.Arena(self.vm, "weights")
        self.batch = ml.Arena(self.vm, "batch")
        with self.weights.allocating():
            self.model = model_of(size)
            self.optimizer = ml.optim.SGD(self.model, LEARNING_RATE, momentum=MOMENTUM)
            self.images, self.labels = map(ml.asarray, batch_of(size))

    @cached_property
    def captured(self) -> ml.Captured[[Tensor, Tensor], Tensor]:
        return ml.capture(self.train_step)

    def eager(self) -> float:
        """Train on the batch once, op by op. Returns the loss before."""
        with self.batch:
            return float(self.train_step(self.images, self.labels))

    def replay(self) -> float:
        """Train on the batch once, in one launch. Returns the loss before."""
        with self.batch:
            return float(self.captured(self.images, self.labels))

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        loss, grads = loss_and_grads(self.model, images, labels, self.dtype)
        self.optimizer.update(grads)
        return loss


@ml.parallel.value_and_grad
def loss_and_grads(
    model: nn.Module, images: Tensor, labels: Tensor, dtype: DType = ml.float32
) -> Tensor:
    if dtype is ml.float32:
        return ml.mean(ml.softmax_cross_entropy(model(images), labels))
    logits = model.astype(dtype)(ml.astype(images, dtype))
    return ml.mean(ml.softmax_cross_entropy(ml.astype(logits, ml.float32), labels))


def training_on(vms: int, size: Size, *, captured: bool) -> Callable[[], float]:
    """Return a function that trains once on the batch, which `members` VMs share, and returns the
    loss before."""

    def make_step(vm: ml.VM) -> Callable[..., float]:
        training = Training(size, vm)
        train_step = training.captured if captured else training.train_step

        def step(images: NDArray[Any], labels: NDArray[Any]) -> float:
            with training.batch:
                return float(train_step(ml.asarray(images), ml.asarray(labels)))

        return step

    step = ml.parallel.data_parallel(make_step, ml.parallel.Group(vms))
    images, labels = batch_of(size)
    return lambda: step(images, labels)


def vm_of(threads: int) -> ml.VM:
    """Return a VM whose kernels share `threads` threads."""
    return ml.VM("bench", threads=threads)


def model_of(size: Size) -> nn.Module:
    key = ml.random.key(0)
    if isinstance(size, MixerSize):
        return MlpMixer(*size[1:], key=key)
    if isinstance(size, TextSize):
        second = size.length if size.name == "Transformer" else size.num_symbols
        build = Transformer if size.name == "Transformer" else Bert
        return build(size.num_symbols, second, *size[4:], key=key)
    return ConvNet(*size[1:], key=key)


def parameters_of(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Copies of the parameters, by name."""
    return {name: x.numpy() for name, x in model.named_parameters().items()}
