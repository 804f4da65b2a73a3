"""Coverage of the tests: `python -m tests.cover` for C, `python -m tests.cover python` for Python.

    python -m tests.cover              # build, run the native tests and the fuzzers, print shares
    python -m tests.cover --missing    # the lines that were not reached, too
    python -m tests.cover --keep       # count on from the last run; do not run anything

C is built into build/coverage/ with gcov's counters; the normal build stays as it is. A line of a
kernel counts as reached if any instruction set reaches it. The shares of Python are coverage.py's.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "coverage"
SOURCE: Final = "mlvm/machines/native/src"
COUNTED: Final = (f"{SOURCE}/plan", f"{SOURCE}/machine")
EXCLUDED: Final = (f"{SOURCE}/plan/kernels/amx.c",)
"""Sources for a processor that the tests emulate elsewhere."""

PYTEST: Final = "-m pytest -q --long -o pythonpath= -p no:cacheprovider"
COMMANDS: Final = (
    f"{PYTEST} tests/machines/test_c_functions.py tests/eager/nn tests/onnx/test_quantized.py",
    f"{PYTEST} tests/core/machine tests/machines/test_residuals.py tests/machines/native",
    f"{PYTEST} tests/eager/transform/test_batch.py",
    "-m tests.fuzz machines --programs 200 --memory 0",
)


def main(argv: list[str]) -> int:
    if "python" in argv:
        return python()
    if "--keep" not in argv:
        run()
    lines = reached_lines()
    total = reached = 0
    for file, counts in sorted(lines.items()):
        hits = sum(map(bool, counts.values()))
        total, reached = total + len(counts), reached + hits
        print(f"{hits / len(counts):6.1%} {hits:6,} of {len(counts):6,}  {file}")
        if "--missing" in argv:
            print("".join([f"        {number}\n" for number, n in counts.items() if not n]), end="")
    print(f"{reached / max(total, 1):6.1%} {reached:6,} of {total:6,}  in all")
    return 0


def run() -> None:
    """Build with counters, and run the tests and fuzzers, whose failures are only printed."""
    for old in (ROOT / "build").rglob("*.gcda"):
        old.unlink()
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(BUILD)]
    build += ["--build-temp", str(ROOT / "build" / "coverage-objects")]
    flags = {"MLVM_NATIVE": "1", "MLVM_COVERAGE": "1", "MLVM_TARGETS": "own"}
    subprocess.run(build, cwd=ROOT, env={**os.environ, **flags}, check=True)
    for simd in ("", "plain"):
        environment = {
            **os.environ,
            "MLVM_NATIVE": "1",
            "MLVM_SIMD": simd,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": f"{BUILD}{os.pathsep}{ROOT}",
            "PYTHONSAFEPATH": "1",
        }
        for command in COMMANDS if not simd else COMMANDS[:1]:
            options = ["--few", "1"] if simd else []
            print(f"python {command} {simd}", flush=True)
            subprocess.run([sys.executable, *command.split(), *options], cwd=ROOT, env=environment)


def reached_lines() -> dict[str, dict[int, int]]:
    """Count the runs of each line of each counted file, in all objects together."""
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    data = [str(path) for path in (ROOT / "build" / "coverage-objects").rglob("*.gcda")]
    with tempfile.TemporaryDirectory() as folder:
        gcov = ["gcov", "--json-format", "--preserve-paths", *data]
        subprocess.run(gcov, cwd=folder, check=True, capture_output=True)
        for report in Path(folder).glob("*.gcov.json.gz"):
            for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
                name = os.path.relpath(ROOT / file["file"], ROOT)
                if name.startswith(COUNTED) and name not in EXCLUDED:
                    for line in file["lines"]:
                        lines[name][line["line_number"]] += line["count"]
    return lines


def python() -> int:
    """Run all tests under coverage.py, and print its report."""
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "run", "-m", "pytest", "-q", "--long", "-n", "0"], cwd=ROOT)
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT)
    return subprocess.run([*coverage, "report"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
