"""The tests of the layers above pass on VMs at the end of a socket, posts and all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CAPTURE = "tests/eager/capture"


@pytest.mark.parametrize("folder", ["tests/eager", CAPTURE, "tests/arena"])
def test_the_eager_and_arena_tests_pass_on_remote_vms(folder: str) -> None:
    command = [sys.executable, "-m", "pytest", "--remote", "-q", "-p", "no:cacheprovider", folder]
    if folder != CAPTURE:
        command.append(f"--ignore={CAPTURE}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
