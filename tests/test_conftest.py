"""The options of `tests/conftest.py` that choose tests, and tables that no test would read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.brief import ROOT, output_of, refuses, require_passing, run_python

WALK = "tests/walks/test_machines.py"


def test_a_failed_walk_prints_the_command_that_runs_it_alone(tmp_path: Path) -> None:
    plugin = tmp_path / "wrong_sum.py"
    plugin.write_text("from tests.cases import evaluate as e\nr = e.evaluate\n"
        "e.evaluate = lambda name, *x, **a: r(name, *x, **a) + (name == 'negative')\n")  # fmt: skip
    command = ["-m", "pytest", "-n", "0", "-p", "wrong_sum", "--op", "negative", "--machine"]
    done = run_python(*command, "reference", WALK, PYTHONPATH=f"{ROOT}:{tmp_path}")
    alone = "python -m pytest --op negative --case 0 --machine reference"
    assert alone in done.stdout, done.stdout + done.stderr
    output_of(*alone.split()[1:])  # without the wrong sum


def test_each_table_of_claims_is_read() -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    tables = {file.stem for file in (ROOT / "tests" / "cases" / "claims").iterdir()}
    assert tables == {*re.findall(r'\bclaims\("(\w+)", ', sources)}


def test_a_test_of_another_process_that_hangs_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import time\ndef test_slow(): time.sleep(60)\n")
    refuses(AssertionError, "in test_slow", require_passing, file, of_test=1)
