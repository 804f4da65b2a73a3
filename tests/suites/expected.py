"""Plugin of pytest: the tests of a suite that are known to fail, each with the reason.

A line of the file is a pattern and a reason, `stats/tests/test_stats.py::test_mode*  # reason`. A
pattern begins with the last folders of the file, and `*` matches any text. A test that matches a
pattern and passes is a failure: the pattern is too wide, or no longer needed. If the reason begins
with "some: ", other tests that match the pattern may pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Expectation(NamedTuple):
    """A line of the file."""

    pattern: str
    reason: str

    def fits(self, item: pytest.Item) -> bool:
        name = f"{item.path.as_posix()}::{item.nodeid.partition('::')[2]}"
        pattern = ".*".join(map(re.escape, self.pattern.split("*")))
        return re.fullmatch(f".*/{pattern}", name) is not None


def read(file: Path) -> list[Expectation]:
    """Return the lines of a file of expected failures."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [line.partition("  # ") for line in lines if line.strip() and line[0] != "#"]
    assert all(reason for _, _, reason in rows), "a line has no reason"
    return [Expectation(pattern.strip(), reason) for pattern, _, reason in rows]


class Failures:
    """The expected failures of a run, and those that have been seen."""

    def __init__(self, expectations: list[Expectation], *, all_lines: bool) -> None:
        self.expectations, self.all_lines = expectations, all_lines
        self.reached: set[str] = set()
        self.failed: set[str] = set()
        self.partly: set[str] = set()  # tests of which a part has failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            found = next((each for each in self.expectations if each.fits(item)), None)
            if found is not None:
                item.user_properties.append(("expected", found.pattern))
                strict = not found.reason.startswith("some: ")
                item.add_marker(pytest.mark.xfail(reason=found.reason, strict=strict))

    @pytest.hookimpl(wrapper=True)  # before pytest counts the report
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Iterator[None]:
        # The reports of worker processes contain these properties
        for key, pattern in report.user_properties:
            if key == "expected":
                is_part = type(report).__name__ == "SubtestReport"  # of pytest 9
                if is_part and report.skipped:
                    self.partly.add(report.nodeid)
                is_strict = str(report.longrepr).startswith("[XPASS(strict)]")
                if report.failed and is_strict and (is_part or report.nodeid in self.partly):
                    report.outcome, report.longrepr = "passed", None  # another part failed
                self.reached.add(str(pattern))
                if report.skipped:  # also if it failed as expected
                    self.failed.add(str(pattern))
        yield

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.stale() and exitstatus == 0:
            session.exitstatus = 1

    def stale(self) -> list[Expectation]:
        """Return the lines whose tests all pass; of a part of the suite, those that it reached."""
        return [
            each
            for each in self.expectations
            if (self.all_lines or each.pattern in self.reached) and each.pattern not in self.failed
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for each in self.stale():
            terminalreporter.write_line(f"no test fails any more: {each.pattern}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expected", type=Path, help="file of expected failures")
    parser.addoption("--all-expected", action="store_true", help="each line of it has to fail")


def pytest_configure(config: pytest.Config) -> None:
    expectations = read(config.getoption("--expected"))
    failures = Failures(expectations, all_lines=config.getoption("--all-expected"))
    config.pluginmanager.register(failures)
