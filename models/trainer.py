"""A model in training: its parameters, its optimizer, and the memory that they work in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models.convnet import ConvNet
from models.data import DataSet
from models.data.batches import evaluation_batches
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer

MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "mlp_mixer": MlpMixer,
    "mlp": Mlp,
    "convnet": ConvNet,
}
WEIGHT_DECAY: Final = 0.05
WARMUP: Final = 0.1  # share of the steps in which the learning rate rises


class Trainer:
    """A model and its optimizer, AdamW under a cosine schedule.

    What lasts is in the arena `weights`; each step works in `batch`, which it leaves empty.
    """

    def __init__(
        self, model: str, dataset: DataSet, *, steps: int, learning_rate: float, seed: int
    ) -> None:
        self.vm = ml.VM("train")
        self.weights = ml.Arena(self.vm, "weights")
        self.batch = ml.Arena(self.vm, "batch")
        schedule = ml.optim.cosine(learning_rate, steps, warmup_steps=round(WARMUP * steps))
        with self.weights.allocating():
            key = ml.random.key(seed)
            self.model = MODELS[model](dataset.image_shape, dataset.num_classes, key=key)
            self.optimizer = ml.optim.AdamW(self.model, schedule, weight_decay=WEIGHT_DECAY)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Improve the model by one batch; its loss before is returned."""
        with self.batch:
            loss, grads = _loss_and_grads(self.model, images, labels)
            self.optimizer.update(grads)
            return float(loss)

    def accuracy(self, dataset: DataSet, batch_size: int) -> float:
        """The share of the test images that the model labels right."""
        correct = 0
        for images, labels in evaluation_batches(dataset.test, batch_size):
            with self.batch:
                guesses = ml.argmax(self.model(ml.asarray(images)), axis=-1)
                correct += int(ml.sum(guesses == ml.asarray(labels)))
        return correct / len(dataset.test)

    def consumed(self) -> int:
        """The bytes the VM holds for all of its arenas."""
        return round(self.vm.consumed_size_in_mib() * 2**20)

    def state(self) -> dict[str, NDArray[Any]]:
        """All that later steps depend on, by name: parameters, optimizer, random keys."""
        with self.weights.allocating():
            return {
                **{f"model/{path}": x.numpy() for path, x in self.model.named_parameters().items()},
                **{f"optimizer/{path}": x.numpy() for path, x in self.optimizer.state().items()},
                "random": ml.random.state(),
            }

    def load_state(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` returned, of a trainer of the same model.

        Raises `DTypeError` or `ShapeError` for arrays of another, and changes nothing then.
        """
        own = self.state()
        if arrays.keys() != own.keys():
            names = ", ".join(sorted(arrays.keys() ^ own.keys()))
            raise ml.errors.DTypeError(f"missing or unknown: {names}")
        for name, array in own.items():
            given = arrays[name]
            if (given.dtype, given.shape) != (array.dtype, array.shape):
                raise ml.errors.ShapeError(
                    f"{name} is {array.dtype} {array.shape}, not {given.dtype} {given.shape}"
                )
        self.model.load_parameters(_below("model/", arrays))
        self.optimizer.load_state(_below("optimizer/", arrays))
        with self.weights.allocating():
            ml.random.set_state(arrays["random"])


def _below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


@ml.value_and_grad
def _loss_and_grads(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))
