"""mlvm against the conformance tests of the Python Array API standard.

    python -m tests.conformance ../array-api-tests
    python -m tests.conformance ../array-api-tests --examples 200 --only test_linalg
    python -m tests.conformance ../array-api-tests --module numpy
    python -m tests.conformance ../array-api-tests --freeze

Fetches nothing. The path is a checkout of https://github.com/data-apis/array-api-tests with its
submodule, and with what its requirements.txt names installed; the tag that the figures in the
documents are from is in `TAG`.

Prints how many tests passed, and for those that failed or were skipped, why. Tests that are known
to fail are in `expected.toml`, each with its reason. The exit status is 1 if a test fails that is
not there, or if one that is there passes. With `--freeze`, writes `standard.json`: the part of the
standard that `test_standard.py` checks in every run of our own tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

TAG: Final = "2026.02.26"
VERSION: Final = "2025.12"
OURS: Final = "mlvm.eager"
EXPECTED: Final = Path(__file__).with_name("expected.toml")
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass
class Outcomes:
    """Outcomes of the tests: the number that passed, and why the others did not, by name."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)


def run(checkout: Path, module: str, examples: int, only: str | None, seed: int) -> Outcomes:
    """Run the tests of the checkout on that module. Raises `SystemExit` if they could not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [sys.executable, "-m", "pytest", "array_api_tests", "-q", "-p", "no:cacheprovider"]
        options = [f"--max-examples={examples}", f"--hypothesis-seed={seed}", "--disable-deadline"]
        command = [*tests, *options, f"--junitxml={report}", *(["-k", only] if only else [])]
        environment = os.environ | {
            "ARRAY_API_TESTS_MODULE": module,
            "ARRAY_API_TESTS_VERSION": VERSION,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        print(f"{module}: the tests run for a minute or more", file=sys.stderr)
        ended = subprocess.run(
            command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if ended.returncode not in (0, 1):  # pytest: all passed, some failed
            raise SystemExit(ended.stdout.decode(errors="replace")[-4000:])
        return read(report)


def read(report: Path) -> Outcomes:
    """The outcomes in a report in JUnit's format."""
    outcomes = Outcomes()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('array_api_tests.', '')}::{case.get('name')}"
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            outcomes.failed[name] = _cause(problem.get("message") or problem.text or "")
        elif skip is not None:
            outcomes.skipped[name] = _cause(skip.get("message") or "")
        else:
            outcomes.passed.add(name)
    return outcomes


def _cause(message: str) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:160]


def expected_failures() -> dict[str, str]:
    """Names of tests and the reasons why they fail."""
    return tomllib.loads(EXPECTED.read_text())


def show(outcomes: Outcomes, module: str) -> bool:
    """Print them. Whether they are as they should be."""
    expected = expected_failures() if module == OURS else {}
    new = {name: cause for name, cause in outcomes.failed.items() if name not in expected}
    cured = sorted(expected.keys() & outcomes.passed)
    print(
        f"{module}, standard {VERSION}: {len(outcomes.passed)} of {outcomes.all} passed, "
        f"{len(outcomes.failed)} failed ({len(outcomes.failed) - len(new)} expected), "
        f"{len(outcomes.skipped)} skipped"
    )
    for title, causes in (("failed", new), ("skipped", outcomes.skipped)):
        for cause, count in Counter(causes.values()).most_common():
            names = [name for name, its in causes.items() if its == cause]
            more = f" and {count - 3} more" if count > 3 else ""
            print(f"\n{title}: {cause}\n    " + "\n    ".join(names[:3]) + more)
    for name in sorted(expected.keys() & outcomes.failed.keys()):
        print(f"\nfailed, as expected: {name}\n    {expected[name]}")
    for name in cured:
        print(f"\npassed, and is in {EXPECTED.name}: {name}")
    return not new and not cured


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path, help="a checkout of array-api-tests")
    parser.add_argument("--module", default=OURS, help="another module (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=20, help="for each test (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the examples (%(default)s)")
    parser.add_argument("--only", metavar="WORDS", help="tests whose names match, as pytest -k")
    parser.add_argument("--freeze", action="store_true", help="write standard.json instead")
    args = parser.parse_args()
    if not (args.checkout / "array_api_tests").is_dir():
        parser.error(f"{args.checkout} is no checkout of array-api-tests")
    if not (args.checkout / "array-api" / "src").is_dir():
        parser.error(f"{args.checkout} lacks its submodule: git submodule update --init")
    if any(find_spec(each) is None for each in ("hypothesis", "ndindex", "pytest_jsonreport")):
        parser.error(f"install what they need: pip install -r {args.checkout}/requirements.txt")
    if args.freeze:
        from tests.conformance.freeze import freeze

        freeze(args.checkout.resolve(), VERSION)
        return 0
    outcomes = run(args.checkout, args.module, args.examples, args.only, args.seed)
    return 0 if show(outcomes, args.module) else 1


if __name__ == "__main__":
    sys.exit(main())
