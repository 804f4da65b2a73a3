"""The training command: what it writes, that it repeats itself, and how it refuses."""

from __future__ import annotations

import itertools
import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from models import data
from models.data import DataError
from models.mlp import Mlp
from models.training.checkpoint import CheckpointError, load, save
from models.training.choices import MODELS
from models.training.train import Diverged, OptionError, main, train
from models.training.trainer import Replica, Trainer
from tests.brief import ROOT, Capsys, Patch, cases, output_of, refuses, run_python
from tests.drawn import SVG, parse, texts
from tests.wired import connect_to

IMAGE_MODELS = [name for name, choice in MODELS.items() if choice.kind == "images"]


RESULT = """
model data epochs seed test_accuracy test_loss train_loss step_ms_median input_wait_share arenas
growth_after_first_epoch_bytes
"""


def interrupt_after(steps: int, monkeypatch: Patch) -> None:
    """Have Ctrl-C come in the step after that many of all trainers."""
    step, calls = Trainer.step, itertools.count()

    def interrupted(trainer: Trainer, images: ml.Tensor, labels: ml.Tensor) -> float:
        if next(calls) == steps:
            raise KeyboardInterrupt
        return step(trainer, images, labels)

    monkeypatch.setattr(Trainer, "step", interrupted)


def assert_one_line(text: str, *parts: str) -> None:
    assert text.count("\n") == 1
    assert text.startswith(("error: ", "interrupted"))
    for part in parts:
        assert part in text


def timeless(result: Any) -> dict[str, Any]:
    """A result without what a clock measured."""
    return {k: v for k, v in result.items() if k not in ("step_ms_median", "input_wait_share")}


# --- a whole run ---------------------------------------------------------------------


def titles_and_kinds(svg: str) -> list[str]:
    """Return the texts of a plan's picture but for its numbers, which machines may round
    otherwise."""
    shown = texts(parse(svg))
    return [text for text in shown if not any(map(str.isdigit, text)) and "others" not in text]


def test_the_mixer_trains_in_constant_memory_and_repeats_itself(tmp_path: Path) -> None:
    file, plots = tmp_path / "one.json", tmp_path / "new" / "plots"
    options = ["--epochs", "2", "--seed", "3", "--json", str(file), "--plot", str(plots)]
    done = run_python("-m", "models.train", *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    one = json.loads(file.read_text())
    loss = (plots / "loss.svg").read_text("utf-8")
    titles = [title.text or "" for title in parse(loss).iter(f"{SVG}title")]
    assert sum("test after epoch" in title for title in titles) == 2
    documented = (ROOT / "docs/memory/mixer_step.svg").read_text("utf-8")
    drawn = (plots / "step_memory.svg").read_text("utf-8")
    assert titles_and_kinds(documented) == titles_and_kinds(drawn)
    first, second, summary = done.stdout.splitlines()
    assert first.startswith("epoch 1/2  loss ")
    assert second.startswith("epoch 2/2  loss ")
    accuracy = 100 * one["test_accuracy"]
    assert f"mlp_mixer on digits: test accuracy {accuracy:.2f} % after 2 epochs" in summary
    assert (one["model"], one["data"], one["epochs"], one["seed"]) == ("mlp_mixer", "digits", 2, 3)
    assert 0.8 < one["test_accuracy"] < 1
    assert 0 < one["train_loss"][1] < one["train_loss"][0] < 3
    assert one["step_ms_median"] > 0
    assert 0 < one["input_wait_share"] < 1
    assert one["growth_after_first_epoch_bytes"] == 0
    assert [arena["name"] for arena in one["arenas"]] == ["weights", "batch", "step"]
    for arena in one["arenas"]:
        assert 0 < arena["high_water"] <= arena["capacity"]

    again = train(epochs=2, seed=3)
    assert [*one] == [*again] == RESULT.split()
    assert timeless(one) == timeless(json.loads(json.dumps(again)))


@pytest.mark.parametrize("model", [name for name in IMAGE_MODELS if name != "mlp_mixer"])
def test_every_model_of_images_learns(model: str) -> None:
    result = train(model=model, epochs=2, seed=1)
    assert result["test_accuracy"] > 0.7
    assert result["growth_after_first_epoch_bytes"] == 0


@pytest.mark.parametrize(("model", "data"), [("transformer", "text"), ("bert", "masked")])
def test_models_of_text_learn(tmp_path: Path, model: str, data: str) -> None:
    file, plots = tmp_path / "text", tmp_path / "plots"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 80)
    plots.mkdir()
    result = train(model=model, data=f"{data}:{file}", epochs=2, batch_size=2, plot=plots)
    assert result["train_loss"][-1] < 0.9 * result["train_loss"][0]
    assert result["test_loss"] < math.log(256)
    assert result["growth_after_first_epoch_bytes"] == 0
    assert {each.name for each in plots.iterdir()} == {"loss.svg", "step_memory.svg"}


def test_training_on_files(mnist: Path) -> None:
    result = train(model="mlp", data=f"mnist:{mnist}", epochs=2, batch_size=2)
    assert result["data"] == f"mnist:{mnist}"
    assert result["test_accuracy"] in [0, 1 / 3, 2 / 3, 1]
    assert result["growth_after_first_epoch_bytes"] == 0


def test_help_tells_every_default(capsys: Capsys) -> None:
    assert refuses(SystemExit, "", main, ["--help"]).code == 0
    text = " ".join(capsys.readouterr().out.split())
    for default in ("mlp_mixer", "20", "32", "0.005", "0"):
        assert f"(default: {default})" in text
    assert "(default: digits, text, masked, lines, listops, by model)" in text


# --- checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
def test_resuming_gives_what_an_uninterrupted_training_gives(
    tmp_path: Path, monkeypatch: Patch, workers: int
) -> None:
    whole, part, rest = (tmp_path / f"{name}.safetensors" for name in ("whole", "part", "rest"))
    options: dict[str, Any] = {"model": "mlp", "epochs": 3, "seed": 5, "batch_size": 96}
    options["workers"] = workers
    expected = train(**options, save=whole)
    interrupt_after(28, monkeypatch)  # of 14 each epoch
    refuses(KeyboardInterrupt, "", train, **options, save=part, save_every=10)
    monkeypatch.undo()
    position = json.loads(load(part).metadata["mlvm.pipeline"])
    assert position == {"epoch": 1, "next_index": 6 * 96, "seed": 5}

    result = train(**options | {"workers": 3 - workers}, resume=part, save=rest)
    assert result["train_loss"] == expected["train_loss"]
    assert result["test_accuracy"] == expected["test_accuracy"]
    assert result["growth_after_first_epoch_bytes"] == 0
    assert whole.read_bytes() == rest.read_bytes()
    again = train(**options, resume=whole)
    assert timeless(again) == timeless(expected | {"arenas": again["arenas"]})
    assert {each.suffix for each in tmp_path.iterdir()} == {".safetensors"}


class Counting(Mlp):
    """Counts its calls in a buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = ml.nn.buffer(ml.zeros((), dtype=ml.int64))

    def __call__(self, images: ml.Tensor) -> ml.Tensor:
        self.calls += 1
        return super().__call__(images)


def test_buffers_are_part_of_a_trainings_state(monkeypatch: Patch) -> None:
    choice = MODELS["mlp"]._replace(
        build=lambda data, key: Counting(data.shape, data.num_classes, key=key)
    )
    monkeypatch.setitem(MODELS, "mlp", choice)
    digits = data.load("digits")
    options: dict[str, Any] = {"steps": 3, "learning_rate": 0.1, "seed": 0}
    trainer, other = (Replica(ml.VM(), "mlp", digits, **options) for _ in range(2))
    images, labels = np.zeros((4, *digits.shape), np.float32), np.zeros(4, np.int64)
    for _ in range(2):
        trainer.step(images, labels)
    other.load_state(trainer.state())
    assert int(other.state()["model/calls"]) == 2


def test_resuming_by_command(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "x.safetensors"
    command = ["--model", "convnet", "--epochs", "1"]
    assert main([*command, "--save", str(file)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert main([*command, "--resume", str(file)]) == 0
    [last] = capsys.readouterr().out.splitlines()
    assert main([*command, "--seed", "1", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert (err, [line.partition(" ")[0] for line in out.splitlines()]) == ("", ["convnet"])
    assert out.partition(";")[0] != first[-1].partition(";")[0]  # by another seed
    assert last.partition(";")[0] == first[-1].partition(";")[0]
    assert last.endswith(" after 1 epochs; all steps were already complete")


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    train(model="mlp", epochs=1, save=file)
    with pytest.raises(
        CheckpointError, match="with model mlp, epochs 1, expected model convnet, ep"
    ):
        train(model="convnet", epochs=2, resume=file)
    tensors, metadata = load(file)
    wrong: list[tuple[dict[str, Any], dict[str, str], str]] = [
        (tensors, {}, "not written by models.train"),
        *(
            (tensors, metadata | {"mlvm.training": text}, "not written by models.train")
            for text in ("{", "3", "[" * 100_000)
        ),
        (
            tensors,
            metadata | {"mlvm.pipeline": "[]"},
            "belongs to a different training: .* expected a state with",
        ),
        ({"losses": tensors["losses"]}, metadata, "missing or unknown: model/"),
        (
            tensors | {"random": np.zeros(3)},
            metadata,
            r"random: expected uint64 \(2,\), got float64",
        ),
        ({k: v for k, v in tensors.items() if k != "losses"}, metadata, "not written by"),
        *(
            (tensors | {"losses": losses}, metadata, "expected losses of 44 steps")
            for losses in (np.zeros(43), np.zeros((44, 1)), np.full(44, np.nan), np.zeros(44, "i8"))
        ),
    ]
    for wrong_tensors, wrong_metadata, reason in wrong:
        save(file, wrong_tensors, wrong_metadata)
        refuses(CheckpointError, reason, train, model="mlp", epochs=1, resume=file)


# --- refusals ------------------------------------------------------------------------


@cases(
    "arguments",
    ["--model", "resnet"],
    ["--model", "transformer", "--data", "digits"],
    ["--data", "imagenet"],
    ["--data", "mnist"],
    ["--epochs", "0"],
    ["--epochs", "many"],
    ["--batch-size", "-1"],
    ["--batch-size", "1438"],
    ["--learning-rate", "0"],
    ["--learning-rate", "nan"],
    ["--seed", "-1"],
    ["--seed", str(2**64)],
    ["--workers", "-1"],
    ["--save-every", "0"],
    ["--colour", "red"],
    ["--group", "threads:"],
    ["--vms", "many"],
    ["--vms", "0"],
    ["--shard", "weights"],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: Capsys) -> None:
    assert refuses(SystemExit, "", main, arguments).code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err
    assert "Traceback" not in err


@cases(
    "arguments, reason",
    (["--data", "mnist:{tmp}"], "train-images-idx3-ubyte"),
    (["--data", "cifar10:{tmp}/nowhere"], "data_batch_1.bin"),
    (["--json", "{tmp}/nowhere/x.json"], "nowhere/x.json"),
    (["--json", "{tmp}"], "{tmp}"),
    (["--plot", "{tmp}/file"], "{tmp}/file"),
    (["--save", "{tmp}/nowhere/x"], "nowhere/x"),
    (["--save", "{tmp}"], "{tmp}"),
    (["--resume", "{tmp}/nowhere"], "{tmp}/nowhere"),
    (["--resume", "{tmp}/file"], "{tmp}/file is not a checkpoint"),
    (["--plot", "{tmp}/file/plots"], "{tmp}/file/plots"),
    (["--model", "mlp", "--learning-rate", "1e18"], "learning rate below 1e+18 may help"),
)
def test_an_error_is_one_line_and_exit_status_1(
    arguments: list[str], reason: str, tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "file").write_text("in the way")
    status = main([argument.format(tmp=tmp_path) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 1
    assert out == ""
    assert_one_line(err, reason.format(tmp=tmp_path))


def test_what_a_file_cannot_replace_is_refused_before_the_training(
    folder: Path, capsys: Capsys
) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("it")
    assert main(["--save", "it", "--data", "mnist:nowhere"]) == 1
    assert_one_line(capsys.readouterr().err, "it: not a regular file")


def test_a_failed_run_leaves_no_file_and_keeps_an_old_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for file in (new, old):
        assert main(["--data", f"mnist:{tmp_path}", "--json", str(file)]) == 1
    assert not new.exists()
    assert old.read_text() == "{}"


def test_an_interrupt_is_one_line_and_exit_status_130(monkeypatch: Patch, capsys: Capsys) -> None:
    interrupt_after(3, monkeypatch)
    assert main(["--model", "mlp"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_line(err, "interrupted")


@cases(
    "error, reason, options",
    (
        OptionError,
        "unknown model 'resnet'; expected one of mlp_mixer, vit, mlp",
        {"model": "resnet"},
    ),
    (OptionError, "training samples, 1437", {"batch_size": 2000}),
    (
        OptionError,
        "lstm requires sequences; digits contains images",
        {"model": "lstm", "data": "digits"},
    ),
    (DataError, "unknown data set 'x'", {"data": "x"}),
    (Diverged, "step", {"model": "mlp", "learning_rate": 1e18}),
    (OptionError, "resume=True requires save=", {"model": "mlp", "resume": True}),
    (OptionError, "dtype must be one of f32, bf16, f16, got i8", {"dtype": "i8"}),
    (OptionError, "batch_size 32 must be a multiple of 3 members", {"group": "threads:3"}),
    *(
        (OptionError, "^group: ", {"group": group})
        for group in ("threads", "threads:0", "threads:x", "sockets:2", "")
    ),
)
def test_train_raises_typed_errors(error: type[Exception], reason: str, options: Any) -> None:
    if "group" in options:
        pytest.importorskip("threadpoolctl")
    refuses(error, reason, train, **options)
    assert issubclass(error, ml.errors.MlvmError)


# --- groups --------------------------------------------------------------------------


def test_two_members_train_as_one_does_wherever_they_meet(tmp_path: Path) -> None:
    pytest.importorskip("threadpoolctl")
    options: dict[str, Any] = {"model": "mlp", "epochs": 1}
    one = train(**options)
    results, files = [], []
    groups: list[tuple[str, ml.parallel.Shard | None]] = [
        ("threads:2", None),
        ("threads:2", "all"),
        ("processes:2", None),
        ("processes:2", "optimizer"),
    ]
    for number, (group, shard) in enumerate(groups):
        file = tmp_path / f"{number}.safetensors"
        results.append(train(**options, group=group, shard=shard, save=file))
        files.append(file.read_bytes())
        assert results[-1]["growth_after_first_epoch_bytes"] == 0
    assert results[0]["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    assert results[0]["test_accuracy"] > 0.8
    for result, content in zip(results, files, strict=True):
        assert result["train_loss"] == results[0]["train_loss"]
        assert result["test_loss"] == results[0]["test_loss"]
        assert content == files[0]
    high_waters = [result["arenas"][0]["high_water"] for result in results]
    assert high_waters[1] < high_waters[3] < high_waters[0] == high_waters[2]


def test_members_under_mpi_train_as_threads_do(tmp_path: Path) -> None:
    pytest.importorskip("threadpoolctl")
    pytest.importorskip("mpi4py")
    one, two, json_file = (tmp_path / name for name in ("one", "two", "result.json"))
    options = ["--model", "mlp", "--epochs", "1", "--shard", "optimizer"]
    assert main([*options, "--group", "threads:2", "--save", str(one), "--quiet"]) == 0
    launch = ["-m", "mlvm", "mpirun", "-n", "2", "-m", "models.train", *options]
    output = output_of(*launch, "--group", "mpi", "--save", two, "--json", json_file)
    assert len(output.splitlines()) == 2  # of the first process alone
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(json_file.read_text())["growth_after_first_epoch_bytes"] == 0


def test_a_training_goes_on_with_other_members(tmp_path: Path) -> None:
    pytest.importorskip("threadpoolctl")
    whole, part, rest = (tmp_path / f"{name}.safetensors" for name in ("whole", "part", "rest"))
    options: dict[str, Any] = {"model": "mlp", "epochs": 2, "group": "threads:2"}
    expected = train(**options, save=whole)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(30, patch)
        refuses(KeyboardInterrupt, "", train, **options, shard="all", save=part, save_every=10)
    result = train(**options, shard="optimizer", resume=part, save=rest)
    assert result["train_loss"] == expected["train_loss"]
    assert rest.read_bytes() == whole.read_bytes()
    four = train(**options | {"group": "threads:4"}, shard="all", resume=part)
    assert four["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    alone = train(**options | {"group": None}, resume=part)
    assert alone["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)


DIES = """
import os, signal, sys
from models.training import trainer
from models.training.train import main

step, steps = trainer.Trainer.step, []

def dies(self, *batch):
    steps.append(None)
    if len(steps) == 5 and os.environ["RANK"] == "1" and os.environ["MLVM_RESTARTS"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *batch)

trainer.Trainer.step = dies
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_member_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("threadpoolctl")
    script, file, result = (tmp_path / name for name in ("train.py", "x.safetensors", "x.json"))
    script.write_text(DIES)
    command = ["--group", "auto", "--model", "mlp", "--epochs", "1", "--batch-size", "128"]
    command += ["--save", str(file), "--save-every", "3", "--resume", "--json", str(result)]
    launch = ["-m", "mlvm", "launch", "--members", "2", "--restarts", "1", "--", str(script)]
    done = run_python(*launch, *command)
    assert done.returncode == 0, done.stderr
    assert "all members are started again, 1 of 1 times" in done.stderr
    once = train(model="mlp", epochs=1, batch_size=128, group="threads:2")
    again = json.loads(result.read_text())
    for name in ("train_loss", "test_accuracy", "test_loss"):
        assert again[name] == once[name]
    four = train(model="mlp", epochs=1, batch_size=128, group="threads:4", resume=file)
    assert four["test_accuracy"] == once["test_accuracy"]


def test_resume_without_a_file_is_the_one_that_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    first = train(model="mlp", epochs=1, batch_size=128, save=file, resume=True)
    assert first["step_ms_median"] is not None
    again = train(model="mlp", epochs=1, batch_size=128, save=file, resume=True)
    assert again["step_ms_median"] is None


def test_a_group_by_command(tmp_path: Path, capsys: Capsys) -> None:
    pytest.importorskip("threadpoolctl")
    command = ["--model", "mlp", "--epochs", "1", "--batch-size", "478", "--plot", str(tmp_path)]
    assert main([*command, "--group", "threads:2", "--shard", "optimizer"]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"loss.svg", "step_memory.svg"}
    first = capsys.readouterr().out.splitlines()[-1]
    assert main([*command, "--vms", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].partition(";")[0] == first.partition(";")[0]


def test_a_vm_elsewhere_trains_to_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "mlp", "epochs": 2, "batch_size": 64, "seed": 5}
    here = train(**options, save=tmp_path / "here")
    vm = connect_to(ml.VM("far"))
    there = train(**options, vm=vm, workers=2, save=tmp_path / "there")
    assert timeless(there) == timeless(here)
    states = [load(tmp_path / name)[0] for name in ("here", "there")]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])


def test_a_server_that_is_to_train(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    requests: list[Any] = []

    def connect(address: str, **options: Any) -> Any:
        requests.append((address, options["secret_file"], options["tls"]))
        return connect_to(ml.VM("far"))

    monkeypatch.setattr(ml, "connect", connect)
    secret = tmp_path / "secret"
    command = ["--model", "mlp", "--epochs", "1", "--batch-size", "479", "--vm", "host:1"]
    assert main([*command, "--secret-file", str(secret)]) == 0
    assert main([*command, "--tls", "a.pem"]) == 0
    assert main([*command, "--tls"]) == 0
    assert requests == [
        ("host:1", secret, False),
        ("host:1", None, Path("a.pem")),
        ("host:1", None, True),
    ]
    for wrong, message in (
        ([*command, "--group", "threads:2"], "--vm and --group threads:2 cannot be combined"),
        (["--secret-file", str(secret)], "--secret-file and --tls require --vm, a server"),
        (["--tls"], "--secret-file and --tls require --vm, a server"),
    ):
        assert refuses(SystemExit, "", main, wrong).code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_model_learns_in_halves_and_its_checkpoint_has_f32_weights(
    dtype: str, tmp_path: Path
) -> None:
    options: Any = {"model": "mlp", "epochs": 2, "batch_size": 64, "seed": 3}
    file = tmp_path / "half"
    result = train(**options, dtype=dtype, save=file, save_every=22)
    wide = train(**options)
    assert result["test_accuracy"] > wide["test_accuracy"] - 0.03 > 0.8
    assert result["train_loss"] != wide["train_loss"]
    tensors, _ = load(file)
    assert {x.dtype.name for name, x in tensors.items() if name.startswith("model/")} == {"float32"}
    assert ("scale/value" in tensors) == (dtype == "f16")
    refuses(
        CheckpointError, f"with dtype {dtype}, expected dtype f32", train, **options, resume=file
    )
    again = train(**options, dtype={"bf16": "bfloat16", "f16": "float16"}[dtype], resume=file)
    assert again["test_loss"] == result["test_loss"]


def test_an_overflow_under_a_loss_scale_is_no_divergence(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The step was skipped, and the scale is less at the next."""
    step, factors = Trainer.step, iter([math.inf, 1.0, math.nan])

    def overflowing(trainer: Trainer, images: ml.Tensor, labels: ml.Tensor) -> float:
        return step(trainer, images, labels) * next(factors)

    monkeypatch.setattr(Trainer, "step", overflowing)
    options: Any = {"model": "mlp", "epochs": 1, "batch_size": 479, "dtype": "f16"}
    result = train(**options, save=tmp_path / "half", plot=tmp_path)
    assert math.isfinite(result["train_loss"][0])
    assert train(**options, resume=tmp_path / "half")["train_loss"] == result["train_loss"]
    factors = iter([math.inf])
    refuses(Diverged, "the loss of step 1 is inf", train, **{**options, "dtype": "f32"})
    factors = iter([math.inf] * 3)
    refuses(Diverged, "epoch 1 has no finite loss", train, **options)
    monkeypatch.setattr(Trainer, "loss_scale", lambda _: 1.0)
    factors = iter([math.nan])
    refuses(Diverged, "the loss of step 1 is nan", train, **options)
