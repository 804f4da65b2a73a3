"""Tests of the layers above pass on a device: here few of them, the others by
`python -m pytest --device opencl:0 tests/eager tests/arena`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_arena_tests_pass_on_a_device(device: str) -> None:
    options = ["--device", device, "--few=1", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/arena"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
