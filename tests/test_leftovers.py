"""Runs of tests that leave something behind fail; interrupted ones leave nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.brief import start_python

HEAD = "import subprocess, sys, tempfile, time\nfrom pathlib import Path\n"
LEAVING = {
    "process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])",
    "temporary file": "tempfile.mkstemp()",
    "shared memory": "Path('/dev/shm/mlvm-left-by-a-test').touch()",
}
GROUP = """
import mlvm.eager as ml
def test_members_wait():
    with ml.VM(workers=2), ml.parallel.ProcessGroup(2):
        Path('ready').touch()
        time.sleep(60)
"""


def started(folder: Path, body: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(HEAD + body)
    options = ["-p", "tests.leftovers", "-p", "no:cacheprovider", "-c", os.devnull, "test_it.py"]
    return start_python("-m", "pytest", *options, cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"})


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks at processes by /proc")
def test_a_run_that_leaves_something_fails(tmp_path: Path) -> None:
    body = "".join(f"    {each}\n" for each in LEAVING.values())
    run = started(tmp_path, f"def test_it():\n{body}")
    output, _ = run.communicate(timeout=60)
    for pid in re.findall(r"  process (\d+):", output):
        os.kill(int(pid), signal.SIGKILL)
    Path("/dev/shm/mlvm-left-by-a-test").unlink(missing_ok=True)
    assert run.returncode == 1
    assert "1 passed" in output
    assert all(f"\n  {kind}" in output for kind in LEAVING), output


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    run = started(tmp_path, GROUP)
    while not (tmp_path / "ready").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "left behind" not in output, output
