"""The training command: what it writes, that it repeats itself, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mlvm.eager as ml
from models.data import DataError
from models.data.dataset import Images, Labels
from models.train import MODELS, Diverged, OptionError, Trainer, main, train

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "models.train", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )


def assert_one_line(text: str, *parts: str) -> None:
    assert text.count("\n") == 1
    assert text.startswith("python -m models.train: ")
    for part in parts:
        assert part in text


# --- a whole run ---------------------------------------------------------------------


def test_the_mixer_trains_in_constant_memory_and_repeats_itself(tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        file, plots = tmp_path / f"{name}.json", tmp_path / name / "plots"
        done = run("--epochs", "2", "--seed", "3", "--json", str(file), "--plot", str(plots))
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        results.append(json.loads(file.read_text()))
        for picture in ("loss.svg", "batch_arena.svg"):
            assert ElementTree.parse(plots / picture).getroot().tag.endswith("svg")
    first, second, summary = done.stdout.splitlines()
    assert first.startswith("epoch 1/2  loss ")
    assert second.startswith("epoch 2/2  loss ")
    accuracy = results[0]["test_accuracy"]
    assert f"mlp_mixer on digits: test accuracy {100 * accuracy:.2f} % after 2 epochs" in summary

    one, two = results
    assert list(one) == [
        "model",
        "data",
        "epochs",
        "seed",
        "test_accuracy",
        "train_loss",
        "step_ms_median",
        "arenas",
        "growth_after_first_epoch_bytes",
    ]
    assert (one["model"], one["data"], one["epochs"], one["seed"]) == ("mlp_mixer", "digits", 2, 3)
    assert 0.8 < one["test_accuracy"] < 1
    assert 0 < one["train_loss"][1] < one["train_loss"][0] < 3
    assert one["step_ms_median"] > 0
    assert one["growth_after_first_epoch_bytes"] == 0
    assert [arena["name"] for arena in one["arenas"]] == ["weights", "batch"]
    for arena in one["arenas"]:
        assert 0 < arena["high_water"] <= arena["capacity"]

    del one["step_ms_median"], two["step_ms_median"]
    assert one == two


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns(model: str) -> None:
    result = train(model=model, epochs=2, seed=1)
    assert result["test_accuracy"] > 0.7
    assert result["growth_after_first_epoch_bytes"] == 0


def test_the_seed_matters() -> None:
    one, two = (train(model="mlp", epochs=1, seed=seed)["train_loss"] for seed in (0, 1))
    assert one != two


@pytest.mark.parametrize("model", MODELS)
def test_training_on_files(mnist: Path, model: str) -> None:
    result = train(model=model, data=f"mnist:{mnist}", epochs=2, batch_size=2)
    assert result["data"] == f"mnist:{mnist}"
    assert result["test_accuracy"] in [0, 1 / 3, 2 / 3, 1]
    assert result["growth_after_first_epoch_bytes"] == 0


def test_quiet_prints_the_result_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "mlp", "--epochs", "1", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert out.startswith("mlp on digits: test accuracy ")
    assert err == ""


def test_help_tells_every_default() -> None:
    done = run("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for default in ("mlp_mixer", "digits", "20", "32", "0.005", "0"):
        assert f"(default: {default})" in text


# --- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "transformer"],
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
        ["--colour", "red"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--data", "mnist:{tmp}"], "train-images-idx3-ubyte"),
        (["--data", "cifar10:{tmp}/nowhere"], "data_batch_1.bin"),
        (["--json", "{tmp}/nowhere/x.json"], "nowhere/x.json"),
        (["--json", "{tmp}"], "{tmp}"),
        (["--plot", "{tmp}/file"], "{tmp}/file"),
        (["--plot", "{tmp}/file/plots"], "{tmp}/file/plots"),
        (["--model", "mlp", "--learning-rate", "1e18"], "learning rate below 1e+18 may help"),
    ],
)
def test_an_error_is_one_line_and_exit_status_1(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    status = main([argument.format(tmp=tmp_path) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 1
    assert out == ""
    assert_one_line(err, reason.format(tmp=tmp_path))


def test_a_failed_run_leaves_no_file_and_keeps_an_old_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for file in (new, old):
        assert main(["--data", f"mnist:{tmp_path}", "--json", str(file)]) == 1
    assert not new.exists()
    assert old.read_text() == "{}"


def test_an_interrupt_is_one_line_and_exit_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def interrupted(trainer: Trainer, images: Images, labels: Labels) -> float:
        if int(trainer.optimizer.count) == 3:
            raise KeyboardInterrupt
        return step(trainer, images, labels)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(["--model", "mlp"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_line(err, "interrupted")


def test_train_raises_typed_errors() -> None:
    with pytest.raises(OptionError, match="no model 'vit'; there are mlp_mixer, mlp, convnet"):
        train(model="vit")
    with pytest.raises(OptionError, match="1437 training images"):
        train(batch_size=2000)
    with pytest.raises(DataError, match="no data set 'x'"):
        train(data="x")
    with pytest.raises(Diverged, match="step"):
        train(model="mlp", learning_rate=1e18)
    assert issubclass(OptionError, ml.errors.MlvmError)
    assert issubclass(Diverged, ml.errors.MlvmError)
