"""The command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlvm
from mlvm.__main__ import main
from mlvm.core.op import OPS
from mlvm.core.program import Opcode
from mlvm.core.types import DType

ROOT = Path(__file__).resolve().parent.parent


def test_ops_lists_every_op_once_under_its_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    listing, errors = capsys.readouterr()
    lines = listing.splitlines()
    assert errors == ""
    for op in OPS.values():
        place = lines.index(f"  {op.signature}")
        assert lines[place + 1].strip() == op.doc.splitlines()[0]
        rooms = [line for line in lines[:place] if not line.startswith(" ")]
        assert rooms[-1] == f"{op.room}:"
    assert len(lines) == 2 * len(OPS) + len({op.room for op in OPS.values()})


def test_ops_documents_the_named_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "clip", "sum"]) == 0
    text = capsys.readouterr().out
    for name in ("clip", "sum"):
        assert f"{OPS[name].signature}\n\n{OPS[name].doc}\n" in text
    assert text.index("clip(") < text.index("sum(")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("multiplt", "error: no function 'multiplt'; did you mean multiply"),
        ("add.out", "error: no op 'add.out': that name is a form of one"),
    ],
)
def test_an_unknown_op_is_one_message_and_status_1(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", name]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(text)
    assert errors.count("\n") == 1


def test_info_shows_version_dtypes_and_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"mlvm {mlvm.__version__}," in text
    assert f"{len(OPS)} ops; dtypes {' '.join(DType.all)}" in text
    lines = text.splitlines()
    for opcode in Opcode:
        [line] = [line for line in lines if line.split()[:1] == [opcode.text]]
        assert line.endswith(opcode.meaning)
        assert f" {opcode.effect} " in line


@pytest.mark.parametrize("argv", [[], ["nosuch"], ["info", "extra"], ["--nosuch"]])
def test_bad_usage_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: python -m mlvm" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("ops", "info"):
        assert f"  {command} " in text


def test_as_a_process_whose_reader_has_seen_enough() -> None:
    """As in `python -m mlvm info | head -1`: no complaint, also not from the flush at exit."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "mlvm", "info"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 0
