"""`--log`: what a training writes of each step and each epoch."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from models.training.train import main, train
from tests.brief import Capsys, refuses


def rows(file: Path) -> tuple[list[str], list[list[float]]]:
    with file.open(newline="") as text:
        header, *records = csv.reader(text)
    return header, [list(map(float, row)) for row in records]


def test_a_training_writes_its_scalars(tmp_path: Path) -> None:
    result = train(model="mlp", epochs=2, log=tmp_path / "log", learning_rate=0.01)
    header, steps = rows(tmp_path / "log" / "train.csv")
    assert header == ["step", "loss", "learning_rate"]
    numbers, losses, rates = np.transpose(steps)
    total = len(steps)
    assert numbers.tolist() == list(range(1, total + 1))
    half = total // 2
    np.testing.assert_allclose(
        [losses[:half].mean(), losses[half:].mean()], result["train_loss"], rtol=1e-12
    )
    warmup = round(0.1 * total)
    expected = [
        0.01 * n / warmup
        if n < warmup
        else 0.01 * (1 + math.cos(math.pi * (n - warmup) / (total - warmup))) / 2
        for n in range(total)
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-4, atol=1e-8)
    header, epochs = rows(tmp_path / "log" / "epoch.csv")
    assert header == ["step", "train_loss", "test_loss", "test_accuracy"]
    assert [row[:2] for row in epochs] == [
        [half * i, loss] for i, loss in enumerate(result["train_loss"], 1)
    ]
    assert epochs[-1][2:] == [result["test_loss"], result["test_accuracy"]]
    assert len(list((tmp_path / "log").glob("events.out.tfevents.*"))) == 1


def test_a_log_changes_no_number_and_a_new_training_begins_anew(tmp_path: Path) -> None:
    plain = train(model="mlp", epochs=1)
    for _ in range(2):
        logged = train(model="mlp", epochs=1, log=tmp_path)
    assert logged["train_loss"] == plain["train_loss"]
    assert logged["test_loss"] == plain["test_loss"]
    assert [row[0] for row in rows(tmp_path / "epoch.csv")[1]] == [
        len(rows(tmp_path / "train.csv")[1])
    ]


OPTIONS: Any = {"model": "mlp", "epochs": 2, "batch_size": 96}


def test_a_resumed_training_writes_the_rows_that_it_makes_again(tmp_path: Path) -> None:
    whole, halves, file = tmp_path / "whole", tmp_path / "halves", tmp_path / "checkpoint"
    train(**OPTIONS, log=whole)
    refuses(KeyboardInterrupt, "", interrupted, halves, file)
    assert len(rows(halves / "train.csv")[1]) == 20
    train(**OPTIONS, log=halves, resume=file)
    for name in ("train.csv", "epoch.csv"):
        assert (halves / name).read_text() == (whole / name).read_text()


def interrupted(folder: Path, file: Path) -> None:
    """Train for 20 steps of 28, with a checkpoint of the 16th."""
    add = ml.ScalarLog.add

    def interrupt(log: ml.ScalarLog, group: str, step: int, **scalars: float) -> None:
        add(log, group, step, **scalars)
        if step == 20:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ml.ScalarLog, "add", interrupt)
        train(**OPTIONS, log=folder, save=file, save_every=16)


def test_members_write_one_log(tmp_path: Path) -> None:
    pytest.importorskip("threadpoolctl")
    result = train(model="mlp", epochs=1, log=tmp_path, group="threads:2")
    _, steps = rows(tmp_path / "train.csv")
    assert np.mean([row[1] for row in steps]) == pytest.approx(result["train_loss"][0], rel=1e-12)
    assert max(row[2] for row in steps) == pytest.approx(5e-3, rel=0.05)


def test_the_command(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["--model", "mlp", "--epochs", "1", "--quiet", "--log", str(tmp_path / "log")]) == 0
    assert (tmp_path / "log" / "train.csv").exists()
    (tmp_path / "file").touch()
    assert main(["--model", "mlp", "--epochs", "1", "--log", str(tmp_path / "file")]) == 1
    assert "file" in capsys.readouterr().err
