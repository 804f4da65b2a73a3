"""A model in training: its parameters, its optimizer, and the memory that they work in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models.data import DataSet
from models.data.batches import evaluation_batches
from models.data.dataset import NO_LABEL, Examples
from models.training.checkpoint import CheckpointError
from models.training.choices import MODELS

Array: TypeAlias = NDArray[Any]

WEIGHT_DECAY: Final = 0.05
WARMUP: Final = 0.1  # share of the steps in which the learning rate rises


class Score(NamedTuple):
    """The share of labels that a model guesses right, and its mean cross-entropy, in nats."""

    accuracy: float
    loss: float


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
            self.model = MODELS[model].build(dataset, key)
            self.optimizer = ml.optim.AdamW(self.model, schedule, weight_decay=WEIGHT_DECAY)
        self.improve: ml.Captured[..., Tensor] = ml.capture(self._improve)
        self.guess: ml.Captured[..., tuple[Tensor, Tensor]] = ml.capture(self._guess)

    def _improve(self, samples: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        loss, grads = _loss_and_grads(self.model, samples, labels)
        ml.parallel.all_reduce((loss, grads), "mean")
        self.optimizer.update(grads)
        return loss

    def _guess(self, samples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(samples)
        losses = ml.softmax_cross_entropy(logits, labels, ignore_index=NO_LABEL)
        return ml.argmax(logits, axis=-1), losses

    def step(self, samples: Tensor | Array, labels: Tensor | Array) -> float:
        """Improve the model by one batch; its loss before is returned."""
        with self.batch:
            return float(self.improve(samples, labels))

    def test(self, examples: Examples, batch_size: int) -> Score:
        """How the model does on these samples, in its mode for that."""
        correct, loss, count = 0, 0.0, 0
        self.model.eval()
        for samples, labels in evaluation_batches(examples, batch_size):
            with self.batch:
                guesses, losses = self.guess(samples, labels)
                correct += int((guesses.numpy() == labels).sum())
                loss += float(losses.numpy().sum(dtype=np.float64))
                count += int((labels != NO_LABEL).sum())
        self.model.train()
        return Score(correct / count, loss / count)

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

    def step(self, samples: Tensor, labels: Tensor) -> float:
        """Improve the model by one batch; its loss before is returned."""
        return self._step(samples, labels)

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
def _loss_and_grads(model: nn.Module, samples: Tensor, labels: Tensor) -> Tensor:
    return ml.softmax_cross_entropy(model(samples), labels, ignore_index=NO_LABEL, reduction="mean")
