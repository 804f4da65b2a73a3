"""The tests of the reference machine, run on the native one."""

from __future__ import annotations

import pytest

from mlvm.machines.native.extension import EXTENSION
from tests.brief import require_passing, with_long

FOLDERS = ["tests/core/machine", "tests/core/test_vm.py", "tests/core/test_observe.py"]


@pytest.mark.skipif(EXTENSION is None, reason="the native machine was not built")
def test_the_tests_of_the_reference_machine_pass_on_the_native_one() -> None:
    """Two parameters of each, with `--long` all."""
    require_passing("--native", *with_long(["--few=2"], ["--long"]), *FOLDERS)
