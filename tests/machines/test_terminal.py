"""Every command treats closed streams, closed pipes, full disks and ASCII terminals alike."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mlvm.core.errors import MlvmError
from mlvm.machines.terminal import is_reader_gone, run_command
from tests.brief import Capsys, refuses, run_python, start_python, with_long

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")

COMMANDS = [
    "mlvm ops",
    "mlvm info",
    "mlvm --help",
    "mlvm disasm examples/newton.mlasm",
    "mlvm check examples/newton.mlasm",
    "mlvm memory SCRIPT",
    "mlvm show SCRIPT -o /dev/null",
    "models.vit",
    "models.mlp_mixer",
    "models.generate --help",
    "models.predict --help",
    "models.train --help",
    "models.train --model mlp --epochs 1",
]
QUICK = [COMMANDS[i] for i in (0, 2, 5, 9)]
REDIRECTED = [">&-", ">&- 2>&-", "<&- >&-", "2>&-", ">/dev/full", "| true"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that prints much, and what ASCII lacks, and creates a tensor."""
    script = tmp_path / "script.py"
    lines = (
        "import mlvm.eager as ml",
        "x = ml.ones(3)",
        "for i in range(20000): print(i, 'na\u00efve')",
    )
    script.write_text("\n".join(lines) + "\n", "utf-8")
    return script


@pytest.mark.parametrize("redirected", REDIRECTED)
@pytest.mark.parametrize("words", with_long(QUICK, COMMANDS))
def test_a_command_ends_quietly_whatever_its_streams_are(
    words: str, redirected: str, script: Path
) -> None:
    line = words.replace("SCRIPT", str(script))
    run_it = f"{sys.executable} -m {line} {redirected}; exit ${{PIPESTATUS[0]}}"
    command = f"unset PYTHONUNBUFFERED; {run_it}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    for raw in ("Traceback", "Exception ignored", "Broken pipe"):
        assert raw not in run.stderr
    is_full = redirected == ">/dev/full"
    assert run.returncode == int(is_full), run.stderr
    assert not is_full or run.stderr.splitlines()[-1].endswith("No space left on device")


def test_what_a_terminal_lacks_is_escaped(script: Path, tmp_path: Path) -> None:
    for name in ("memory", "show"):
        run = run_python("-m", "mlvm", name, script, cwd=tmp_path, PYTHONIOENCODING="ascii")
        assert "7 na\\xefve" in run.stdout
        assert run.returncode == 0, run.stderr


def test_a_reader_that_leaves_ends_the_command() -> None:
    process = start_python("-m", "models.vit")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_broken_pipe_of_another_is_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        f"import os, sys; from mlvm.machines.terminal import run_command\n"
        f"sys.exit(run_command(lambda: os.write({write}, b'x')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, pass_fds=[write], timeout=60
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "error: Broken pipe\n")
    assert not is_reader_gone(ValueError())


def test_errors_and_statuses(capsys: Capsys) -> None:
    def fails(error: BaseException) -> int:
        raise error

    with_status = MlvmError("script")
    with_status.status = 7  # type: ignore[attr-defined]
    for error, status, text in (
        (MlvmError("bad\nline"), 1, "error: bad line\n"),
        (FileNotFoundError(2, "no file", "x\x1b"), 1, "error: x\\x1b: no file\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (with_status, 7, "error: script\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):
        assert run_command(partial(fails, error)) == status
        assert capsys.readouterr().err == text
    assert run_command(lambda: None) == 0
    refuses(SystemExit, "2", run_command, lambda: fails(SystemExit(2)))
