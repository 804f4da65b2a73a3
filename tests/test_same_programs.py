"""`python -m tests.same_programs` finds programs that differ, and none where none does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.brief import ROOT
from tests.same_programs.__main__ import main


def test_one_checkout_beside_itself(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT), str(ROOT), "--functions", "2", "--only", "fuzz"]) == 0
    text = capfd.readouterr().out
    assert "of 2 parts" in text
    assert "; 0 fail in both" in text


def test_another_op_in_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("mlvm", "models", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "models" / "mlp.py"
    text = file.read_text("utf-8")
    file.write_text(text.replace("relu(", "elu("), "utf-8")
    assert main([str(ROOT), str(tmp_path), "--functions", "0", "--only", "mlp guesses"]) == 1
    text = capfd.readouterr().out
    assert '-    push_str "relu.out"' in text
    assert "models:mlp guesses.eager differs" in text
    assert "models:mlp guesses.fuse=True,recompute=True.0 differs" in text


def test_another_step_of_an_example(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("mlvm", "models", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "examples" / "embedded" / "anomaly.py"
    text = file.read_text("utf-8")
    file.write_text(
        "\n" + text.replace("HIDDEN, WINDOWS = 16, 3, 12", "HIDDEN, WINDOWS = 16, 3, 8")
    )
    assert main([str(ROOT), str(tmp_path), "--functions", "0", "--only", "anomaly"]) == 1
    text = capfd.readouterr().out
    assert "example:examples embedded anomaly.py.learn differs" in text
    assert "printed differs" not in text
