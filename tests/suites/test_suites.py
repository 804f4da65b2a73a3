"""The commands of `python -m tests.suites`, and the files of expected failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.brief import ROOT, cases
from tests.suites.__main__ import HERE, SUITES, command
from tests.suites.expected import read

TESTS = """
import pytest, unittest

class TestParts(unittest.TestCase):
    def test_known(self):
        with self.subTest(): assert False

@pytest.mark.parametrize("n", [1, 2])
def test_known(n): assert n == 2

def test_mended(): pass

def test_other(): assert {other}
"""


@cases("suite", *SUITES)
def test_each_expected_failure_has_a_reason(suite: str) -> None:
    assert all(each.reason for each in read(HERE / "expected" / f"{suite}.txt"))
    assert f"tests.suites.with_{suite}" in command(suite, [], [])
    assert (HERE / f"with_{suite}.py").exists()


@cases("other, options", (True, ()), (False, ("-n", "1")))
def test_other_failures_and_lines_without_one_are_told(
    tmp_path: Path, other: bool, options: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(other=other))
    lines = [
        "# why",
        "test_it.py::TestParts::test_known  # a part fails",
        "test_it.py::test_known[*  # some: one is not two",
        "test_it.py::test_m*  # mended",
        "test_it.py::test_gone  # gone",
    ]
    (tmp_path / "known.txt").write_text("\n".join(lines))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "tests.suites.expected"),
            *("--rootdir", str(tmp_path), "--expected", str(tmp_path / "known.txt"), "-q"),
            *("--all-expected", str(tmp_path), "-p", "no:cacheprovider", *options),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    told = [line for line in lines if line.startswith("no test fails")]
    assert told == [
        "no test fails any more: test_it.py::test_m*",
        "no test fails any more: test_it.py::test_gone",
    ]
    assert f"{1 if other else 2} failed" in result.stdout
    assert "xfailed, 1 xpassed" in result.stdout  # pytest 9 counts parts of tests, too
    # pytest repeats this in its summary, if the environment has CI
    assert sum(line.startswith("[XPASS(strict)]") for line in lines) == 1
