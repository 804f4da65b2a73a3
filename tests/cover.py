"""Coverage of C by the tests: `python -m tests.cover`. `make coverage` has that of Python, too.

    python -m tests.cover              # build, run the native tests and the fuzzers, print shares
    python -m tests.cover --missing    # the lines that were not reached, too
    python -m tests.cover --keep       # count on from the last run; do not run anything

C is built into build/coverage/ with gcov's counters; the normal build stays as it is. A line or
branch of a kernel counts as reached if any instruction set reaches it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from operator import add
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "coverage"
SOURCE: Final = "mlvm/machines/native/src"
FOLDERS: Final = ("plan", "plan/kernels", "machine", "language")

PYTEST: Final = "-m pytest -q -n 0 -p no:cacheprovider"
WALK: Final = f"{PYTEST} tests/walks/test_machines.py --machine native"
QUANTIZED: Final = f"{PYTEST} tests/onnx/test_qlinear.py tests/eager/functions/test_half.py"
SOME: Final = f"{WALK} -k 'gelu or divide or remainder or matmul'"
CAPTURE: Final = ("lengths", "replay", "known_calls")
COMMANDS: Final = (
    ("", f"{PYTEST} tests/machines/native"),
    ("", WALK),
    ("", f"{PYTEST} tests/eager/nn tests/eager/test_threads.py"),
    ("", f"{PYTEST} {' '.join([f'tests/eager/capture/test_{x}.py' for x in CAPTURE])}"),
    ("", f"{PYTEST} tests/core/ops/test_claims.py tests/core/machine"),
    ("", f"{PYTEST} tests/machines/test_residuals.py tests/machines/remote/test_late_errors.py"),
    ("", f"{PYTEST} tests/machines/test_c_functions.py tests/eager/transform/test_batch.py"),
    ("", "-m tests.fuzz machines --programs 200 --memory 0"),
    ("", f"{PYTEST} tests/eager/control/test_control.py -k condition"),
    ("", QUANTIZED),
    ("plain", QUANTIZED),
    ("plain", f"{WALK} --few 1"),
    ("plain", SOME),
    ("avx512_bf16", SOME),
)
"""Instruction sets, or "" for the fastest, and what runs with them. Sets that a processor lacks run
nothing."""

Key = tuple[str, int, int]  # a function's name, a line, the number of a branch from 1 on; 0: none


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.cover", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--missing", action="store_true", help="print lines not reached, too")
    parser.add_argument("--keep", action="store_true", help="count on from the last run")
    args = parser.parse_args()
    if not args.keep:
        run()
    totals: dict[str, list[int]] = {}
    for file, counts in sorted(counts_of_files().items()):
        lines: Counter[int] = Counter()
        for (_, line, branch), n in counts.items():
            lines[line] += n * (not branch)
        branches = [n for (*_, branch), n in counts.items() if branch]
        numbers = *_reached(lines.values()), *_reached(branches)
        for name in (file, file.rpartition("/")[0], "in all"):
            totals[name] = [*map(add, totals.get(name, [0] * 4), numbers)]
        if args.missing:
            print(file, *[line for line in sorted(lines) if not lines[line]], sep="\n    ")
    for name, (hits, n, taken, m) in sorted(totals.items()):
        print(
            f"{hits / n:6.1%} of {n:6,} lines, {taken / max(m, 1):6.1%} of {m:6,} branches: {name}"
        )
    return 0


def _reached(counts: Collection[int]) -> tuple[int, int]:
    return sum(map(bool, counts)), len(counts)


def run() -> None:
    """Build with counters, and run the tests and fuzzers, whose failures are only printed."""
    for old in (ROOT / "build").rglob("*.gcda"):
        old.unlink()
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(BUILD)]
    build += ["--build-temp", str(ROOT / "build" / "coverage-objects")]
    flags = {"MLVM_NATIVE": "1", "MLVM_COVERAGE": "1", "MLVM_TARGETS": "own,amx_emulated"}
    subprocess.run(build, cwd=ROOT, env={**os.environ, **flags}, check=True)

    path = {"PYTHONPATH": f"{BUILD}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    path["PYTEST_ADDOPTS"] = "-o pythonpath="  # of a test's children, too

    def run_one(simd: str, command: str) -> None:
        variables = {"MLVM_NATIVE": "1", "MLVM_SIMD": simd, "OPENBLAS_NUM_THREADS": "1", **path}
        options = shlex.split(command)
        subprocess.run([sys.executable, *options], cwd=ROOT, env={**os.environ, **variables})
        print(f"{simd} python {command}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run_one, *zip(*COMMANDS, strict=True)))


def counts_of_files() -> dict[str, Counter[Key]]:
    """Count the runs of each line and branch of the counted files, in all objects together."""
    counts: dict[str, Counter[Key]] = defaultdict(Counter)
    data = [str(path) for path in (ROOT / "build" / "coverage-objects").rglob("*.gcda")]
    with tempfile.TemporaryDirectory() as folder:
        gcov = ["gcov", "--json-format", "--branch-probabilities", "--preserve-paths", *data]
        subprocess.run(gcov, cwd=folder, check=True, capture_output=True)
        for report in Path(folder).glob("*.gcov.json.gz"):
            for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
                name = os.path.relpath(ROOT / file["file"], ROOT / SOURCE)
                if name.rpartition("/")[0] not in FOLDERS:
                    continue
                for line in file["lines"]:
                    of_branches = [branch["count"] for branch in line["branches"]]
                    for i, count in enumerate([line["count"], *of_branches]):
                        counts[name][line.get("function_name", ""), line["line_number"], i] += count
    return counts


if __name__ == "__main__":
    sys.exit(main())
