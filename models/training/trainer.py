"""A model in training: parameters, optimizer and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models import weights
from models.data import DataSet, load
from models.data.batches import evaluation_batches
from models.data.dataset import NO_LABEL
from models.training.checkpoint import CheckpointError
from models.training.choices import MODELS

Array: TypeAlias = NDArray[Any]

WEIGHT_DECAY: Final = 0.05
WARMUP: Final = 0.1  # share of steps with an increasing learning rate


class Score(NamedTuple):
    """Share of correctly predicted labels, and mean cross-entropy in nats."""

    accuracy: float
    loss: float


class ArenaReport(TypedDict):
    """Capacity of an arena and peak use, in bytes."""

    name: str
    capacity: int
    high_water: int


class Replica:
    """Trainer of a model with AdamW and a cosine schedule, on one VM.

    It may be a member of a group. All members then call the same methods together.

    `init` is a file with initial weights, which `models.weights` reads. With the `dtype` "f16" or
    "bf16", a step computes in this dtype, for f16 under a loss scale; weights, the optimizer's
    state and the loss stay f32. The arena `weights` contains all state between steps. A step uses
    the arena `batch`, which is empty after the step, and the scratch memory of the program.
    """

    def __init__(
        self,
        vm: ml.VM | ml.RemoteVM,
        model: str,
        dataset: DataSet,
        *,
        steps: int,
        learning_rate: float,
        seed: int,
        init: Path | None = None,
        dtype: str = "f32",
    ) -> None:
        self.vm = vm
        self.dataset = dataset
        self.dtype = dtype
        self.weights = ml.Arena(vm, "weights")
        self.batch = ml.Arena(vm, "batch")
        schedule = ml.optim.cosine(learning_rate, steps, warmup_steps=round(WARMUP * steps))
        with self.weights.allocating():
            key = ml.random.key(seed)
            self.model = (
                MODELS[model].build(dataset, key)
                if init is None
                else weights.read(init).build(dataset.shape, dataset.num_classes, key=key)
            )
            self.optimizer = ml.optim.AdamW(self.model, schedule, weight_decay=WEIGHT_DECAY)
            self.scale = ml.optim.LossScale() if dtype == "f16" else None
        self._recording = ExitStack()
        self._loss_and_grads = ml.parallel.value_and_grad(self._loss)
        self.train_step: ml.Captured[..., Tensor] = ml.capture(self._train_step)
        self.guess: ml.Captured[..., tuple[Tensor, Tensor]] = ml.capture(self._guess)

    def _train_step(self, samples: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor
        loss, grads = self._loss_and_grads(self.model, samples, labels)
        if self.scale is None:
            self.optimizer.update(grads)
            return loss
        loss, grads = self.scale.unscale((loss, grads))
        self.scale.update(self.optimizer, grads)
        return loss

    def _loss(self, model: nn.Module, samples: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(model, samples)
        loss = ml.softmax_cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="mean")
        return loss if self.scale is None else self.scale.scale(loss)

    def _logits(self, model: nn.Module, samples: Tensor) -> Tensor:
        if self.dtype == "f32":
            return model(samples)  # type: ignore[no-any-return]
        if ml.isdtype(samples.dtype, "real floating"):
            samples = ml.astype(samples, self.dtype)
        return ml.astype(model.astype(self.dtype)(samples), ml.float32)

    def _guess(self, samples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(self.model, samples)
        losses = ml.softmax_cross_entropy(logits, labels, ignore_index=NO_LABEL)
        return ml.argmax(logits, axis=-1), losses

    def step(self, samples: Tensor | Array, labels: Tensor | Array) -> float:
        """Train on one batch; return the loss before the update."""

        with self.batch:
            return float(self.train_step(samples, labels))

    def record(self, folder: Path | None) -> None:
        """Start recording steps in a new folder, or stop recording if it is None.

        Only the first member records.
        """
        if folder is not None and not ml.parallel.rank():
            self._recording.enter_context(ml.runs.record(folder))
        elif folder is None:
            self._recording.close()

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        with self.batch:
            return self.optimizer.learning_rate

    def loss_scale(self) -> float:
        """Return the factor of the next loss: 1 without a loss scale.

        While the factor exceeds 1, a step with an infinite loss changes only the factor.
        """
        return 1.0 if self.scale is None else float(self.scale.value)

    def test(self, batch_size: int) -> Score | None:
        """Test the model in evaluation mode.

        If all members have equal weights, only the first member computes the test.
        """
        if ml.parallel.rank() and not isinstance(self.model.parameters(), ml.parallel.Parts):
            return None
        correct, loss, count = 0, 0.0, 0
        self.model.eval()
        for samples, labels in evaluation_batches(self.dataset.test, batch_size):
            with self.batch:
                guesses, losses = self.guess(samples, labels)
                correct += int((guesses.numpy() == labels).sum())
                loss += float(losses.numpy().sum(dtype=np.float64))
                count += int((labels != NO_LABEL).sum())
        self.model.train()
        return Score(correct / count, loss / count)

    def state(self) -> dict[str, Array]:
        """Return the state for later steps by name: parameters, buffers, optimizer, random keys.

        The first member returns whole tensors; the other members return None.
        """
        with self.batch:
            tensors = self._tensors()
            if ml.parallel.rank():
                return {}
            arrays = {name: x.numpy() for name, x in tensors.items()}
        return {**arrays, "random": self._random()}

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{f"model/{path}": x for path, x in self.model.state().items()},
            **{f"optimizer/{path}": x for path, x in self.optimizer.state().items()},
            **{
                f"scale/{name}": x for name, x in (self.scale.state() if self.scale else {}).items()
            },
        }

    def _random(self) -> Array:
        with self.weights.allocating():
            return ml.random.state()

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of `state` of a replica of the same model.

        For arrays of a different model, raise `CheckpointError` without any change.
        """
        with self.batch:
            own = {name: (x.dtype.numpy, x.shape) for name, x in self._tensors().items()}
        random = self._random()
        own["random"] = random.dtype, random.shape
        if arrays.keys() != own.keys():
            names = ", ".join(sorted(arrays.keys() ^ own.keys()))
            raise CheckpointError(f"missing or unknown: {names}")
        for name, (dtype, shape) in own.items():
            array = arrays[name]
            if (array.dtype, array.shape) != (dtype, shape):
                raise CheckpointError(
                    f"{name}: expected {dtype} {shape}, got {array.dtype} {array.shape}"
                )
        self.model.load_state(_below("model/", arrays))
        self.optimizer.load_state(_below("optimizer/", arrays))
        if self.scale is not None:
            self.scale.load_state(_below("scale/", arrays))
        with self.weights.allocating():
            ml.random.set_state(arrays["random"])

    def consumed(self) -> int:
        """Return the bytes that the VMs of all members hold."""
        own = round(self.vm.consumed_size_in_mib() * 2**20)
        with self.batch:
            total = ml.full((), float(own), dtype=ml.float64)
            ml.parallel.all_reduce(total)
            return int(total)

    def memory(self) -> list[ArenaReport]:
        """Return a report of this member's arenas and the step's plan."""
        planned = self.train_step.plan.nbytes if self.train_step.signatures else 0
        return [
            *[
                ArenaReport(name=arena.name, capacity=arena.capacity, high_water=arena.high_water)
                for arena in (self.weights, self.batch)
            ],
            ArenaReport(name="step", capacity=planned, high_water=planned),
        ]

    def plot(self, file: Path) -> None:
        """Draw the memory of the first member's step."""
        if not ml.parallel.rank():
            self.train_step.plot(file)


@dataclass(frozen=True)
class Making:
    """Function that creates a member's replica; in a different process it loads the data again."""

    model: str
    data: str
    seed: int
    steps: int
    learning_rate: float
    init: Path | None
    image_shape: tuple[int, int, int] | None
    dataset: DataSet | None = None
    dtype: str = "f32"

    def __call__(self, vm: ml.VM | ml.RemoteVM) -> Callable[..., Any]:
        dataset = self.dataset or load(self.data, seed=self.seed, image_shape=self.image_shape)
        replica = Replica(
            vm,
            self.model,
            dataset,
            steps=self.steps,
            learning_rate=self.learning_rate,
            seed=self.seed,
            init=self.init,
            dtype=self.dtype,
        )
        return partial(_call, replica)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dataset": None}


def _call(replica: Replica, *rows: Any, do: str = "step", **options: Any) -> Any:
    return getattr(replica, do)(*rows, **options)


class Trainer:
    """Trainer with one replica, or with one replica per member of a group.

    The members share every batch. Results are the results of the first member. Batches are written
    to `vm`, which also runs the single replica; the default is a VM of this process.
    """

    def __init__(
        self,
        make: Making,
        group: ml.parallel.AnyGroup | None = None,
        *,
        shard: ml.parallel.Shard | None = None,
        vm: ml.VM | ml.RemoteVM | None = None,
    ) -> None:
        self.vm = vm or ml.VM("train" if group is None else "input")
        self._ask: Callable[..., Any] = (
            make(self.vm) if group is None else ml.parallel.data_parallel(make, group, shard=shard)
        )
        self._alone = group is None

    def step(self, samples: Tensor, labels: Tensor) -> float:
        """Train on one batch; return the loss before the update."""
        return self._ask(samples, labels)  # type: ignore[no-any-return]

    @contextmanager
    def recording(self, folder: Path | None) -> Iterator[None]:
        """Record the steps of the block in a new folder, unless it is None."""
        if folder is None:
            yield
            return
        self._ask(do="record", folder=folder)
        try:
            yield
        finally:
            self._ask(do="record", folder=None)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._ask(do="rate")  # type: ignore[no-any-return]

    def loss_scale(self) -> float:
        """Return the factor of the next loss: 1 without a loss scale."""
        return self._ask(do="loss_scale")  # type: ignore[no-any-return]

    def test(self, batch_size: int) -> Score:
        return Score(*self._ask(do="test", batch_size=batch_size))

    def state(self) -> dict[str, Array]:
        return self._ask(do="state")  # type: ignore[no-any-return]

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of `state`. Raises the errors of `Replica.load_state`."""
        self._ask(do="load_state", arrays=arrays)

    def consumed(self) -> int:
        """Return the bytes that the VMs hold."""
        here = 0 if self._alone else round(self.vm.consumed_size_in_mib() * 2**20)
        return here + int(self._ask(do="consumed"))

    def memory(self) -> list[ArenaReport]:
        return self._ask(do="memory")  # type: ignore[no-any-return]

    def plot(self, file: Path) -> None:
        self._ask(do="plot", file=file)


def _below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
