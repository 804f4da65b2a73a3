"""The tests of the layers above pass on VMs at the end of a socket, posts and all: here each with
one of its parameters, with all of them by `python -m pytest --remote tests/eager tests/arena`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CAPTURE = "tests/eager/capture"
TRANSFORM = "tests/eager/transform"
"""What these tests do is eager code, which other tests run: one of them will do."""

LANES = f"{TRANSFORM}/test_batch.py::test_sentences_of_any_length_go_their_own_way"


@pytest.mark.parametrize(
    "folders",
    [
        ["tests/eager", f"--ignore={CAPTURE}", f"--ignore={TRANSFORM}"],
        [CAPTURE, "tests/arena", LANES],
    ],
)
def test_the_eager_and_arena_tests_pass_on_remote_vms(folders: list[str]) -> None:
    options = ["--remote", "--few=1", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
