"""The tests of the reference machine, run on the native one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlvm.machines.native.extension import EXTENSION

ROOT = Path(__file__).parent.parent.parent.parent
FOLDERS = ["tests/core/machine", "tests/core/test_vm.py", "tests/core/test_observe.py"]


@pytest.mark.skipif(EXTENSION is None, reason="the native machine was not built")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tests_of_the_reference_machine_pass_on_the_native_one(folder: str) -> None:
    command = [sys.executable, "-m", "pytest", "--native", "-q", "-p", "no:cacheprovider", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
