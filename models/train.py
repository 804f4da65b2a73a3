"""Train a model on images: `python -m models.train --help`, or `train(...)` from Python.

Everything is derived from the seed: which digits are held out, the parameters at the start, the
order of the images and how each is distorted. The same call gives the same numbers to the last
bit, on one kind of processor with one number of BLAS threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypedDict

import numpy as np

import mlvm.eager as ml
from mlvm.eager import Tensor, nn
from models.convnet import ConvNet
from models.data import SPECS, DataError, Dataset, load, parse
from models.data.batches import evaluation_batches, training_batches
from models.data.dataset import Images, Labels
from models.mlp import Mlp
from models.mlp_mixer import MlpMixer
from models.plot import loss_curve, occupancy
from models.progress import Progress

WEIGHT_DECAY: Final = 0.05
WARMUP: Final = 0.1  # share of the steps in which the learning rate rises
LOSS_FILE: Final = "loss.svg"
BATCH_FILE: Final = "batch_arena.svg"


class OptionError(ml.errors.MlvmError, ValueError):
    """An option of `train` is unknown or out of range."""


class Diverged(ml.errors.MlvmError, ArithmeticError):
    """The training loss is infinite or no number."""


class ArenaReport(TypedDict):
    """Bytes an arena holds, and the most it had in use at once."""

    name: str
    capacity: int
    high_water: int


class Result(TypedDict):
    """What a training run gave; `train_loss` has the mean loss of each epoch."""

    model: str
    data: str
    epochs: int
    seed: int
    test_accuracy: float
    train_loss: list[float]
    step_ms_median: float
    arenas: list[ArenaReport]
    growth_after_first_epoch_bytes: int


MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "mlp_mixer": MlpMixer,
    "mlp": Mlp,
    "convnet": ConvNet,
}


class Trainer:
    """A model, its optimizer (AdamW under a cosine schedule), and the memory they work in.

    What lasts is in the arena `weights`; each step works in `batch`, which it leaves empty.
    """

    def __init__(
        self, model: str, dataset: Dataset, *, steps: int, learning_rate: float, seed: int
    ) -> None:
        self.vm = ml.VM("train")
        self.weights = ml.Arena(self.vm, "weights")
        self.batch = ml.Arena(self.vm, "batch")
        schedule = ml.optim.cosine(learning_rate, steps, warmup_steps=round(WARMUP * steps))
        with self.weights.allocating():
            key = ml.random.key(seed)
            self.model = MODELS[model](dataset.image_shape, dataset.num_classes, key=key)
            self.optimizer = ml.optim.AdamW(self.model, schedule, weight_decay=WEIGHT_DECAY)

    def step(self, images: Images, labels: Labels) -> float:
        """Improve the model by one batch; its loss before is returned."""
        with self.batch:
            loss, grads = _loss_and_grads(self.model, ml.asarray(images), ml.asarray(labels))
            self.optimizer.update(grads)
            return float(loss)

    def accuracy(self, dataset: Dataset, batch_size: int) -> float:
        """The share of the test images that the model labels right."""
        correct = 0
        for images, labels in evaluation_batches(dataset, batch_size):
            with self.batch:
                guesses = ml.argmax(self.model(ml.asarray(images)), axis=-1)
                correct += int(ml.sum(guesses == ml.asarray(labels)))
        return correct / len(dataset.test_labels)

    def consumed(self) -> int:
        """The bytes the VM holds for all of its arenas."""
        return round(self.vm.consumed_size_in_mib() * 2**20)


@ml.value_and_grad
def _loss_and_grads(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return ml.mean(ml.softmax_cross_entropy(model(images), labels))


def train(
    *,
    model: str = "mlp_mixer",
    data: str = "digits",
    epochs: int = 20,
    batch_size: int = 32,
    learning_rate: float = 5e-3,
    seed: int = 0,
    plot: Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train a model of `MODELS` on the data set that `data` names, and test it.

    With `plot`, a folder, loss.svg and batch_arena.svg are written there. Raises `OptionError`,
    `DataError`, `Diverged`, and `ShapeError` for images that the model cannot take.
    """
    _require_options(model, epochs, batch_size, learning_rate, seed)
    dataset = load(data, seed=seed)
    steps = len(dataset.train_labels) // batch_size
    if not steps:
        raise OptionError(
            f"batch_size {batch_size} is more than the {len(dataset.train_labels)} training images"
        )
    random = np.random.Generator(np.random.PCG64((seed, 1)))
    trainer = Trainer(model, dataset, steps=epochs * steps, learning_rate=learning_rate, seed=seed)
    progress = progress or Progress(quiet=True)
    progress.begin(epochs, epochs * steps)
    losses: list[float] = []
    seconds: list[float] = []
    train_loss: list[float] = []
    try:
        for epoch in range(1, epochs + 1):
            for images, labels in training_batches(dataset, batch_size, random):
                began = time.perf_counter()
                losses.append(trainer.step(images, labels))
                seconds.append(time.perf_counter() - began)
                if not math.isfinite(losses[-1]):
                    raise Diverged(
                        f"the loss of step {len(losses)} is {losses[-1]}; "
                        f"a learning rate below {learning_rate} may help"
                    )
                progress.step()
            train_loss.append(statistics.fmean(losses[-steps:]))
            accuracy = trainer.accuracy(dataset, batch_size)
            progress.epoch(epoch, train_loss[-1], accuracy)
            if epoch == 1:
                held_then = trainer.consumed()
    finally:
        progress.end()
    if plot is not None:
        title = f"{model} on {data}"
        (plot / LOSS_FILE).write_text(loss_curve(f"Training {title}", losses, train_loss), "utf-8")
        with ml.record(trainer.batch) as recording:  # of a step that counts for nothing else
            trainer.step(dataset.train_images[:batch_size], dataset.train_labels[:batch_size])
        (plot / BATCH_FILE).write_text(occupancy(f"Memory of a step, {title}", recording), "utf-8")
    return Result(
        model=model,
        data=data,
        epochs=epochs,
        seed=seed,
        test_accuracy=accuracy,
        train_loss=train_loss,
        step_ms_median=1000 * statistics.median(seconds),
        arenas=[
            ArenaReport(name=arena.name, capacity=arena.capacity, high_water=arena.high_water)
            for arena in (trainer.weights, trainer.batch)
        ],
        growth_after_first_epoch_bytes=trainer.consumed() - held_then,
    )


def _require_options(
    model: str, epochs: int, batch_size: int, learning_rate: float, seed: int
) -> None:
    if model not in MODELS:
        raise OptionError(f"no model {model!r}; there are {', '.join(MODELS)}")
    if epochs < 1 or batch_size < 1:
        raise OptionError(f"epochs and batch_size must be >= 1, not {epochs} and {batch_size}")
    if not (0 < learning_rate < math.inf):
        raise OptionError(f"learning_rate must be positive, not {learning_rate}")
    if not 0 <= seed < 2**64:
        raise OptionError(f"seed must be in 0 .. 2**64 - 1, not {seed}")


# --- the command ---------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Train a model on images, and test it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="mlp_mixer", help="what to train")
    add("--data", type=_spec, default="digits", help=f"what to train on: {', '.join(SPECS)}")
    add("--epochs", type=int, default=20, metavar="N", help="how often each image is seen")
    add("--batch-size", type=int, default=32, metavar="N", help="images in each step")
    add("--learning-rate", type=float, default=5e-3, metavar="X", help="the schedule's peak")
    add("--seed", type=int, default=0, metavar="N", help="what all random choices derive from")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--plot", type=Path, metavar="DIR", help="draw the loss and a step's memory there, as SVG")
    add("--quiet", action="store_true", help="print the result only")
    return parser


def _spec(text: str) -> str:
    try:
        parse(text)
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _require_writable(file: Path) -> None:
    """Raise `OSError` unless the file can be written; what it holds, if anything, is kept."""
    is_new = not file.exists()
    with file.open("a"):
        pass
    if is_new:
        file.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 for an error, 130 for an interrupt."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    json_file: Path | None = options.pop("json", None)
    plot: Path | None = options.get("plot")
    progress = Progress(quiet=options.pop("quiet", False))
    try:
        if json_file is not None:
            _require_writable(json_file)
        if plot is not None:
            plot.mkdir(parents=True, exist_ok=True)
            for name in (LOSS_FILE, BATCH_FILE):
                _require_writable(plot / name)
        result = train(**options, progress=progress)
        if json_file is not None:
            json_file.write_text(json.dumps(result) + "\n")
    except OptionError as error:
        parser.error(str(error))
    except (ml.errors.MlvmError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    print(
        f"{result['model']} on {result['data']}: test accuracy "
        f"{100 * result['test_accuracy']:.2f} % after {result['epochs']} epochs; "
        f"{result['step_ms_median']:.1f} ms a step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
