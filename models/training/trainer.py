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
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer

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
            self.model = MODELS[model](dataset.image_shape, dataset.num_classes, key=key)
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

    def correct(self, images: Array, labels: Array) -> int:
        """How many of the images the model labels right."""
        with self.batch:
            return int((self.guess(images).numpy() == labels).sum())

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

        Raises `PathError` or `ShapeError` for arrays of another, and changes nothing then.
        """
        own = self.state()
        if arrays.keys() != own.keys():
            names = ", ".join(sorted(arrays.keys() ^ own.keys()))
            raise ml.errors.PathError(f"missing or unknown: {names}")
        for name, array in own.items():
            given = arrays[name]
            if (given.dtype, given.shape) != (array.dtype, array.shape):
                raise ml.errors.ShapeError(
                    f"{name} is {array.dtype} {array.shape}, not {given.dtype} {given.shape}"
                )
        self.model.load_state(_below("model/", arrays))
        self.optimizer.load_state(_below("optimizer/", arrays))
        with self.weights.allocating():
            ml.random.set_state(arrays["random"])


class Trainer:
    """A model in training, on one VM, or on `vms` of them that share each batch: replicas with the
    same parameters, of which the first speaks for all."""

    def __init__(
        self,
        model: str,
        dataset: DataSet,
        *,
        steps: int,
        learning_rate: float,
        seed: int,
        vms: int = 1,
    ) -> None:
        self.group = (
            ml.parallel.Group([ml.VM(f"train{rank}") for rank in range(vms)]) if vms > 1 else None
        )

        def replica(vm: ml.VM) -> Replica:
            return Replica(vm, model, dataset, steps=steps, learning_rate=learning_rate, seed=seed)

        if self.group is None:
            self.replicas = [replica(ml.VM("train"))]
        else:
            self.replicas = self.group.run(lambda rank, vm: replica(vm))
        self.first = self.replicas[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.group is not None:
            self.group.close()

    @property
    def vm(self) -> ml.VM:
        """The VM of the first replica."""
        return self.first.vm

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Improve the model by one batch; its loss before is returned."""
        if self.group is None:
            return self.first.step(images, labels)
        part = len(labels) // len(self.replicas)
        batch = images.numpy(), labels.numpy()

        def share(rank: int, vm: ml.VM) -> float:
            rows = slice(rank * part, (rank + 1) * part)
            return self.replicas[rank].step(*[array[rows] for array in batch])

        return self.group.run(share)[0]

    def accuracy(self, dataset: DataSet, batch_size: int) -> float:
        """The share of the test images that the model labels right."""
        batches = evaluation_batches(dataset.test, batch_size)
        correct = [self.first.correct(images, labels) for images, labels in batches]
        return sum(correct) / len(dataset.test)

    def consumed(self) -> int:
        """The bytes that the VMs hold."""
        return round(sum(each.vm.consumed_size_in_mib() for each in self.replicas) * 2**20)

    def state(self) -> dict[str, Array]:
        """All that later steps depend on, by name."""
        return self.first.state()

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Go on from what `state` returned. Raises what `Replica.load_state` raises."""
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
