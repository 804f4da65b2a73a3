"""Train a model: `python -m models.train --help`, or `train(...)` from Python.

The seed determines everything: the held-out samples, the initial parameters, the order of the
samples and the distortions. The same call computes the same bits on the same kind of processor with
the same number of BLAS threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

import mlvm.eager as ml
from mlvm.machines.files import require_writable, write_file
from mlvm.machines.terminal import CommandParser, unknown
from mlvm.machines.terminal import OptionError as OptionError
from models import weights
from models.data import SPECS, DataError, load, parse
from models.training import checkpoint
from models.training.checkpoint import CheckpointError
from models.training.choices import MODELS
from models.training.plot import loss_curve
from models.training.progress import Progress
from models.training.trainer import ArenaReport, Making, Trainer

DEFAULT: Final = "mlp_mixer"
LOSS_FILE: Final = "loss.svg"
STEP_FILE: Final = "step_memory.svg"
LOSSES: Final = "losses"  # key of the losses of completed steps in a checkpoint
DTYPES: Final = ("f32", "bf16", "f16")
_LONG_NAMES: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Diverged(ml.errors.MlvmError, ArithmeticError):
    """Error for a training loss that is not finite (under a loss scale: at the scale 1)."""


class Options(NamedTuple):
    """Options that determine the result of a training, up to the rounding of a group."""

    model: str
    data: str
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    init: str | None = None
    dtype: str = "f32"


class Result(TypedDict):
    """Result of a training.

    `test_accuracy`: share of correctly predicted test labels.
    `test_loss`: mean cross-entropy of the test, nats.
    `train_loss`: mean loss of each epoch, without steps that overflowed in f16.
    `step_ms_median`: time of a step; None if the checkpoint contained all steps.
    `input_wait_share`: share of the step time that was spent waiting for batches.
    """

    model: str
    data: str
    epochs: int
    seed: int
    test_accuracy: float
    test_loss: float
    train_loss: list[float]
    step_ms_median: float | None
    input_wait_share: float
    arenas: list[ArenaReport]
    growth_after_first_epoch_bytes: int


def train(
    *,
    model: str | None = None,
    data: str | None = None,
    epochs: int = 20,
    batch_size: int = 32,
    learning_rate: float = 5e-3,
    seed: int = 0,
    dtype: str = "f32",
    workers: int = 0,
    group: ml.parallel.AnyGroup | str | None = None,
    shard: ml.parallel.Shard | None = None,
    vm: ml.VM | ml.RemoteVM | None = None,
    save: Path | None = None,
    save_every: int | None = None,
    resume: Path | bool | None = None,
    init: Path | None = None,
    plot: Path | None = None,
    log: Path | None = None,
    record: Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train a model of `MODELS` on the data set `data` (default: per model), and test it.

    With the `dtype` "f16" or "bf16" ("float16", "bfloat16"), the model computes in this dtype, and
    the weights stay f32. `workers` threads prepare the batches; the number of threads does not
    change the results.

    The members of `group`, such as "threads:2" (see `ml.parallel.group`), share every batch, and
    with `shard` the optimizer and the weights (see `ml.parallel.data_parallel`). The number of
    members changes the rounding of results; the transport does not. In a group of MPI or TCP, all
    processes call this function with the same arguments and get the same result. Only the first
    process writes files and shows progress. Without a group, `vm` is the VM of the training, such
    as `ml.connect(address)`. This process prepares the batches and writes each batch to the VM
    before the step. The bits of the result do not depend on the VM.

    After every `save_every` steps (default: the steps of an epoch), and at the end, a checkpoint is
    written to the file `save`. `resume` continues from the checkpoint of a training with the same
    options, in any group. The result equals the result of an uninterrupted training. True means the
    file `save`, if it exists.

    `init` is a file that `models.weights` reads, with the initial weights of a Mixer or a ViT.
    Images of a folder are converted to the size and channels of the weights. All changes are
    printed: for a different number of classes, the head is new. For images of a different size, the
    position embeddings of a ViT are interpolated.

    The folder `plot` receives loss.svg and step_memory.svg. The folder `log` receives an
    `ml.ScalarLog` with the loss and learning rate of each step and the test result of each epoch.
    The new folder `record` receives an `ml.runs.record` recording of all steps.

    Raises `OptionError`, `DataError`, `CheckpointError`, `WeightsError`, `Diverged`, `OSError` for
    a file, and `ShapeError` for images that the model does not support.
    """
    start = None if init is None else weights.read(init)
    if start is not None and model not in (None, start.model):
        raise OptionError(f"{init} contains weights of {start.model}, expected {model}")
    model = model or (start.model if start else DEFAULT)
    if model not in MODELS:
        raise OptionError(unknown("model", model, MODELS))
    data = MODELS[model].data if data is None else data
    begun, dtype = None if init is None else str(init), _LONG_NAMES.get(dtype, dtype)
    options = Options(model, data, epochs, batch_size, learning_rate, seed, begun, dtype)
    _require_possible(options, workers, save_every)
    if vm is not None and group is not None:
        raise OptionError("vm= and group= cannot be combined; each member of a group has a VM")
    if resume is True:
        if save is None:
            raise OptionError("resume=True requires save=, the file to resume from")
        resume = save if save.exists() else None
    image_shape = start.image_shape if start else None
    dataset = load(data, seed=seed, image_shape=image_shape)
    if dataset.kind != MODELS[model].kind:
        raise OptionError(f"{model} requires {MODELS[model].kind}; {data} contains {dataset.kind}")
    steps = len(dataset.train) // batch_size
    if not steps:
        raise OptionError(
            f"batch_size {batch_size} exceeds the number of training samples, {len(dataset.train)}"
        )
    description = weights.described(
        dataset.shape,
        dataset.classes,
        approximate=start.options["approximate"] if start else None,
    )
    make = Making(
        model, data, seed, epochs * steps, learning_rate, init, image_shape, dataset, dtype
    )
    losses: list[float] = []
    seconds: list[float] = []
    tests: dict[int, float] = {}
    score = held_then = None
    with opened(group) as members:
        if members is not None and batch_size % members.size:
            raise OptionError(
                f"batch_size {batch_size} must be a multiple of {members.size} members"
            )
        is_first = speaks(members)
        progress = progress if progress is not None and is_first else Progress(quiet=True)
        if start is not None:
            progress.say(f"{init}: {start}")
            for change in start.changes(dataset.shape, dataset.num_classes, dataset.classes):
                progress.say(change)
        trainer = Trainer(make, members, shard=shard, vm=vm)
        with (
            ExitStack() as stack,
            trainer.recording(record),
            ml.Pipeline(
                dataset.train,
                batch_size,
                vm=trainer.vm,
                shuffle=True,
                seed=seed,
                epochs=epochs,
                drop_last=True,
                workers=workers,
                transform=dataset.augment,
            ) as pipeline,
        ):
            if resume:
                losses += _resumed(resume, options, steps, trainer, pipeline)
            scalars: ml.ScalarLog | None = None
            if log is not None and is_first:
                scalars = stack.enter_context(ml.ScalarLog(log, purge_step=len(losses) + 1))
            progress.begin(epochs, epochs * steps, len(losses))
            try:
                while len(losses) < epochs * steps:
                    samples, labels = pipeline.get()
                    rate = trainer.rate() if log is not None else 0.0
                    began = time.perf_counter()
                    losses.append(trainer.step(samples, labels))
                    seconds.append(time.perf_counter() - began)
                    if not (math.isfinite(losses[-1]) or trainer.loss_scale() > 1):
                        raise Diverged(
                            f"the loss of step {len(losses)} is {losses[-1]}; "
                            f"a learning rate below {learning_rate} may help"
                        )
                    progress.step()
                    if scalars is not None:
                        scalars.add("train", len(losses), loss=losses[-1], learning_rate=rate)
                    is_last = len(losses) == epochs * steps
                    if save is not None and (len(losses) % (save_every or steps) == 0 or is_last):
                        state = trainer.state()
                        if is_first:
                            _save(save, options, description, state, pipeline, losses)
                    if len(losses) % steps == 0:
                        score = trainer.test(batch_size)
                        loss = _mean(losses[-steps:])
                        if not math.isfinite(loss):
                            raise Diverged(f"epoch {len(losses) // steps} has no finite loss")
                        tests[len(losses) // steps] = score.loss
                        progress.epoch(len(losses) // steps, loss, score.accuracy)
                        if scalars is not None:
                            scalars.add(
                                "epoch",
                                len(losses),
                                train_loss=loss,
                                test_loss=score.loss,
                                test_accuracy=score.accuracy,
                            )
                        held_then = held_then or trainer.consumed()
            finally:
                progress.end()
            waited = pipeline.stats().consumer_waited
        held_last = trainer.consumed()
        if score is None:
            score = trainer.test(batch_size)
            tests[epochs] = score.loss
        memory = trainer.memory()
        if plot is not None and seconds and is_first:
            trainer.plot(plot / STEP_FILE)
    train_loss = [_mean(losses[i : i + steps]) for i in range(0, len(losses), steps)]
    if plot is not None and is_first:
        title = f"Training {model} on {data}"
        write_file(plot / LOSS_FILE, loss_curve(title, losses, train_loss, tests))
    return Result(
        model=model,
        data=data,
        epochs=epochs,
        seed=seed,
        test_accuracy=score.accuracy,
        test_loss=score.loss,
        train_loss=train_loss,
        step_ms_median=1000 * statistics.median(seconds) if seconds else None,
        input_wait_share=waited / (sum(seconds) + waited) if seconds else 0.0,
        arenas=memory,
        growth_after_first_epoch_bytes=held_last - (held_then or held_last),
    )


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of the finite losses, or nan if no loss is finite.

    A loss scale can cause infinite losses.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite) if finite else math.nan


def _require_possible(options: Options, workers: int, save_every: int | None) -> None:
    _, _, epochs, batch_size, learning_rate, seed, _, dtype = options
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if epochs < 1 or batch_size < 1:
        raise OptionError(f"epochs and batch_size must be >= 1, got {epochs} and {batch_size}")
    if not (0 < learning_rate < math.inf):
        raise OptionError(f"learning_rate must be positive, got {learning_rate}")
    if not 0 <= seed < 2**64:
        raise OptionError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
    if workers < 0:
        raise OptionError(f"workers must be >= 0, got {workers}")
    if save_every is not None and save_every < 1:
        raise OptionError(f"save_every must be >= 1, got {save_every}")


# --- groups --------------------------------------------------------------------------


def opened(
    group: ml.parallel.AnyGroup | str | None,
) -> AbstractContextManager[ml.parallel.AnyGroup | None]:
    """Open a group by name for the block; return a group object unchanged.

    Raises `OptionError` for an unknown text.
    """
    if not isinstance(group, str):
        return nullcontext(group)
    try:
        return ml.parallel.group(group)
    except ml.errors.GroupError as error:
        raise OptionError(f"group: {str(error).removeprefix('group: ')}") from None


def speaks(group: ml.parallel.AnyGroup | None) -> bool:
    """Return whether this process is the first member, which writes files and shows progress."""
    return getattr(group, "rank", 0) == 0


def _connected(
    address: str | None, secret_file: Path | None, tls: Path | bool, device: str
) -> AbstractContextManager[ml.RemoteVM | ml.VM | None]:
    """Open a VM of the server, or on the device, for the block.

    Raises `OptionError`, and the errors of `ml.connect` and `ml.VM`.
    """
    if address is None:
        if secret_file is not None or tls:
            raise OptionError("--secret-file and --tls require --vm, a server")
        return nullcontext(None if device == "cpu" else ml.VM("train", device=device))
    if device != "cpu":
        raise OptionError("--device selects a local device and cannot be combined with --vm")
    return ml.connect(address, secret_file=secret_file, tls=tls, name="train")


# --- checkpoints ---------------------------------------------------------------------


def _save(
    file: Path,
    options: Options,
    description: dict[str, str],
    state: dict[str, NDArray[Any]],
    pipeline: ml.Pipeline,
    losses: list[float],
) -> None:
    """Write a checkpoint with the whole state of the training and the losses so far."""
    metadata = {
        checkpoint.TRAINING: json.dumps(options._asdict()),
        checkpoint.PIPELINE: json.dumps(pipeline.state()),
        **description,
    }
    checkpoint.save(file, {**state, LOSSES: np.array(losses)}, metadata)


def _resumed(
    file: Path, options: Options, steps: int, trainer: Trainer, pipeline: ml.Pipeline
) -> list[float]:
    """Restore trainer and pipeline from a checkpoint; return the losses so far.

    An epoch has `steps` steps.

    Raises `CheckpointError` for a file of a different training.
    """
    tensors, metadata = checkpoint.load(file)
    try:
        then = dict(json.loads(metadata[checkpoint.TRAINING]))
        position = json.loads(metadata[checkpoint.PIPELINE])
        losses = tensors.pop(LOSSES)
    except (KeyError, ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{file} was not written by models.train") from None
    now = options._asdict()
    then = {**Options._field_defaults, **then}  # defaults for older files
    differing = [name for name in now if then.get(name) != now[name]]
    if differing:
        begin = " (init starts a new training)" if options.model in weights.KINDS else ""
        was, options_now = (", ".join(f"{k} {x.get(k)}" for k in differing) for x in (then, now))
        raise CheckpointError(f"{file} was trained with {was}, expected {options_now}{begin}")
    try:
        pipeline.restore(position)
        done = position["epoch"] * steps + position["next_index"] / options.batch_size
        possible = options.dtype == "f16" or np.isfinite(losses).all()
        if losses.dtype != np.float64 or losses.shape != (done,) or not possible:
            raise CheckpointError(f"expected {LOSSES} of {done:g} steps")
        trainer.load_state(tensors)
    except (CheckpointError, ml.errors.PipelineError) as error:
        raise CheckpointError(f"{file} belongs to a different training: {error}") from None
    return list(losses.tolist())


# --- the command ---------------------------------------------------------------------


def parser() -> CommandParser:
    """Return the parser of the command."""
    prog = "python -m models.train"
    command = CommandParser(_run, prog=prog, argument_default=argparse.SUPPRESS)
    add = command.add_argument
    add("--model", choices=MODELS, help=f"model to train (default: {DEFAULT})")
    own = ", ".join(dict.fromkeys(each.data for each in MODELS.values()))
    add(
        "--data",
        type=_spec,
        help=f"data set: {', '.join(SPECS)} (default: {own}, "
        "by model). images reads DIR/train/CLASS/FILE and DIR/test/CLASS/FILE; npz "
        "reads the arrays train_images, train_labels, test_images and test_labels",
    )
    add("--epochs", type=int, default=20, metavar="N", help="passes over the training set")
    add("--batch-size", type=int, default=32, metavar="N", help="samples per step")
    add("--learning-rate", type=float, default=5e-3, metavar="X", help="peak of the schedule")
    add("--seed", type=int, default=0, metavar="N", help="seed of all random choices")
    add(
        "--dtype",
        choices=(*DTYPES, *_LONG_NAMES),
        default="f32",
        help="dtype of the computation: half precision saves activation memory; docs/dtypes.md "
        "describes the effect on speed",
    )
    add(
        "--group",
        metavar="GROUP",
        help="group that shares each batch: threads:N, processes:N, ray:N, mpi; or auto: processes "
        "that `python -m mlvm launch`, torchrun, srun or mpirun has started",
    )
    add("--vms", type=_vms, dest="group", metavar="N", help="the same as --group threads:N")
    add(
        "--shard",
        choices=("optimizer", "all"),
        help="state that is divided among members: the optimizer's state, or also the weights",
    )
    add("--vm", metavar="ADDRESS", help="server (`mlvm serve`): HOST:PORT or unix:PATH")
    add(
        "--device",
        metavar="NAME",
        help="train on cpu, or on a device such as opencl:0: docs/gpu.md (default: cpu)",
    )
    add("--secret-file", type=Path, metavar="FILE", help="file with the secret of the server")
    add(
        "--tls",
        type=Path,
        nargs="?",
        const=True,
        metavar="PEM",
        help="encrypted; PEM has the certificates to trust, if not the system's",
    )
    add("--workers", type=int, default=0, metavar="N", help="threads that prepare batches")
    add("--save", type=Path, metavar="FILE", help="write checkpoints to this safetensors file")
    add(
        "--save-every",
        type=int,
        metavar="N",
        help="steps between checkpoints (default: an epoch)",
    )
    add(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="continue from a checkpoint; without FILE, from the file of --save, if it exists",
    )
    add(
        "--init",
        type=Path,
        metavar="FILE",
        help="start with the model and weights in this file (the formats of models.predict)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--plot", type=Path, metavar="DIR", help="draw the loss and a step's memory in this folder")
    add(
        "--log",
        type=Path,
        metavar="DIR",
        help="write the loss and learning rate of each step and the test of each epoch as CSV "
        "and for TensorBoard",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="record all steps in this new folder, for python -m mlvm diff, replay and verify",
    )
    add("--quiet", action="store_true", help="print only the result")
    return command


def _spec(text: str) -> str:
    try:
        parse(text)
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _vms(text: str) -> str | None:
    return f"threads:{int(text)}" if int(text) != 1 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `CommandParser.run`."""
    return parser().run(arguments)


def _run(parsed: argparse.Namespace) -> int:
    """Train and test a model, and print the accuracy.

    In a group, only the first member prints errors.

    Example:
        python -m models.train --model mlp --epochs 1 --save mlp.safetensors
    """
    options = vars(parsed)
    json_file: Path | None = options.pop("json", None)
    plot: Path | None = options.get("plot")
    progress = Progress(quiet=options.pop("quiet", False))
    is_first = True
    try:
        address, secret_file = options.pop("vm", None), options.pop("secret_file", None)
        group = options.get("group")
        if group is not None and (address is not None or options.get("device", "cpu") != "cpu"):
            option = "--device" if address is None else "--vm"
            raise OptionError(f"{option} and --group {group} cannot be combined: use only one")
        if "shard" in options and group is None:
            raise OptionError("--shard requires --group: each member stores a part")
        where = _connected(
            address, secret_file, options.pop("tls", False), options.pop("device", "cpu")
        )
        with where as vm, opened(options.pop("group", None)) as group:
            is_first = speaks(group)
            if json_file is not None and is_first:
                require_writable(json_file)
            if "save" in options and is_first:
                require_writable(options["save"], is_stream_allowed=False)
            if plot is not None and is_first:
                plot.mkdir(parents=True, exist_ok=True)
                for name in (LOSS_FILE, STEP_FILE):
                    require_writable(plot / name)
            result = train(**options, vm=vm, group=group, progress=progress)
        if json_file is not None and is_first:
            write_file(json_file, json.dumps(result) + "\n")
    except (OptionError, Diverged, KeyboardInterrupt) as error:
        if is_first:
            raise
        return 2 if isinstance(error, OptionError) else 1 if isinstance(error, Diverged) else 130
    if not is_first:
        return 0
    pace = result["step_ms_median"]
    print(
        f"{result['model']} on {result['data']}: test accuracy "
        f"{100 * result['test_accuracy']:.2f} % after {result['epochs']} epochs; "
        + (f"{pace:.1f} ms per step" if pace is not None else "all steps were already complete")
    )
    return 0
