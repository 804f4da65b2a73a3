"""The options of `tests/conftest.py` that choose among the cases of walks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WALK = "tests/walks/test_machines.py"


def test_a_failed_walk_prints_the_command_that_runs_it_alone(tmp_path: Path) -> None:
    plugin = tmp_path / "wrong_sum.py"
    plugin.write_text("from tests.cases import evaluate as e\nr = e.evaluate\n"
        "e.evaluate = lambda name, *x, **a: r(name, *x, **a) + (name == 'negative')\n")  # fmt: skip
    command = ["-m", "pytest", "-n", "0", "-p", "wrong_sum", "--op", "negative", "--machine"]
    done = subprocess.run(
        [sys.executable, *command, "reference", WALK],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    alone = "python -m pytest --op negative --case 0 --machine reference"
    assert alone in done.stdout, done.stdout + done.stderr
