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


def checkout(folder: Path, file: str, before: str, after: str) -> None:
    """Make a checkout that is this one but for a text and the lines of a file; others are links."""
    changed, *inside = Path(file).parts
    for name in {"mlvm", "models", "examples"} - {changed}:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / changed, folder / changed)
    text = (ROOT / file).read_text("utf-8")
    assert before in text
    (folder / changed).joinpath(*inside).write_text("\n" + text.replace(before, after), "utf-8")


def test_another_op_in_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkout(tmp_path, "models/mlp.py", "relu(", "elu(")
    assert main([str(ROOT), str(tmp_path), "--functions", "0", "--only", "mlp guesses"]) == 1
    text = capfd.readouterr().out
    assert '-    push_str "relu.out"' in text
    assert "models:mlp guesses.eager differs" in text
    assert "models:mlp guesses.fuse=True,recompute=True.0 differs" in text
