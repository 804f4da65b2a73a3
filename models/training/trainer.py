"""A model in training: its parameters, its optimizer, and the memory that they work in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeAlias

from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models.convnet import ConvNet
from models.data import DataSet
from models.data.batches import evaluation_batches
from models.data.dataset import Examples
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from models.training.checkpoint import CheckpointError

Array: TypeAlias = NDArray[Any]

MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "mlp_mixer": MlpMixer,
    "mlp": Mlp,
    "convnet": ConvNet,
}
WEIGHT_DECAY: Final = 0.05
WARMUP: Final = 0.1  # share of the steps in which the learning rate rises


class Replica:
    """A model and its optimizer, AdamW under a cosine schedule, on one VM.

    What lasts is in the arena `weights`; each step works in `batch`, which it leaves empty, and in
    the scratch memory of its program.
    """

    def __init__(
        self,
        vm: ml.VM,
        model: str,
        dataset: DataSet,
        *,
        steps: int,
        learning_rate: float,
        seed: int,
    ) -> None:
        self.vm = vm
        self.weights = ml.Arena(vm, "weights")
        self.batch = ml.Arena(vm, "batch")
        schedule = ml.optim.cosine(learning_rate, steps, warmup_steps=round(WARMUP * steps))
        with self.weights.allocating():
            key = ml.random.key(seed)
            self.model = MODELS[model](dataset.shape, dataset.num_classes, key=key)
            self.optimizer = ml.optim.AdamW(self.model, schedule, weight_decay=WEIGHT_DECAY)
        self.improve: ml.Captured[..., Tensor] = ml.capture(self._improve)
        self.guess: ml.Captured[..., Tensor] = ml.capture(self._guess)

    def _improve(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        loss, grads = _loss_and_grads(self.model, images, labels)
        ml.parallel.all_reduce((loss, grads), "mean")
        self.optimizer.update(grads)
        return loss

    def _guess(self, images: Tensor) -> Tensor:
        return ml.argmax(self.model(images), axis=-1)

    def step(self, images: Tensor | Array, labels: Tensor | Array) -> float:
        """Improve the model by one batch; its loss before is returned."""
        with self.batch:
            return float(self.improve(images, labels))

    def accuracy(self, examples: Examples, batch_size: int) -> float:
        """The share of the images that the model labels right."""
        correct = 0
        for images, labels in evaluation_batches(examples, batch_size):
            with self.batch:
                correct += int((self.guess(images).numpy() == labels).sum())
        return correct / len(examples)

    def state(self) -> dict[str, Array]:
        """All that later steps depend on, by name: parameters, buffers, optimizer, random keys."""
        with self.weights.allocating():
            return {
                **{f"model/{path}": x.numpy() for path, x in self.model.state().items()},
                **{f"optimizer/{path}": x.numpy() for path, x in self.optimizer.state().items()},
                "random": ml.random.state(),
            }

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Go on from what `state` returned, of a replica of the same model.

        Raises `CheckpointError` for arrays of another, and changes nothing then.
        """
        own = self.state()
        if arrays.keys() != own.keys():
            names = ", ".join(sorted(arrays.keys() ^ own.keys()))
            raise CheckpointError(f"missing or unknown: {names}")
        for name, array in own.items():
            given = arrays[name]
            if (given.dtype, given.shape) != (array.dtype, array.shape):
                raise CheckpointError(
                    f"{name} is {array.dtype} {array.shape}, not {given.dtype} {given.shape}"
                )
        self.model.load_state(_below("model/", arrays))
        self.optimizer.load_state(_below("optimizer/", arrays))
        with self.weights.allocating():
            ml.random.set_state(arrays["random"])


class Trainer:
    """A model in training: a replica that `make` builds, or one on each of `vms` machines, which
    share every batch. Replicas have the same parameters; the first speaks for all."""

    def __init__(self, make: Callable[[ml.VM], Replica], vms: int = 1) -> None:
        self.group: ml.parallel.Group | None = None
        if vms == 1:
            self.replicas = [make(ml.VM("train"))]
            self._step = self.first.step
        else:
            self.group = ml.parallel.Group([ml.VM(f"train{rank}") for rank in range(vms)])
            self.replicas = self.group.run(lambda rank, vm: make(vm))
            self._step = ml.parallel.data_parallel(
                lambda vm: self.replicas[ml.parallel.rank()].step, self.group
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.group is not None:
            self.group.close()

    @property
    def first(self) -> Replica:
        return self.replicas[0]

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Improve the model by one batch; its loss before is returned."""
        return self._step(images, labels)

    def consumed(self) -> int:
        """The bytes that the VMs hold."""
        return round(sum(each.vm.consumed_size_in_mib() for each in self.replicas) * 2**20)

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Go on from what a replica's `state` returned. Raises what `Replica.load_state` does."""
        for replica in self.replicas:
            replica.load_state(arrays)


def _below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


@ml.value_and_grad
def _loss_and_grads(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))
