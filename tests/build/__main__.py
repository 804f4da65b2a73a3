r"""Saved steps run the same without Python, to the bit.

    python -m tests.build               # models, and 500 fuzzed functions
    python -m tests.build --functions 40 --only models --simd plain
    python -m tests.build --functions 0 --only models --runs 200
    SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=all" python -m tests.build
    CC="python -m ziglang cc -target aarch64-linux-musl" AR="python -m ziglang ar" \
        RUNNER=qemu-aarch64-static LIMIT=3600 python -m tests.build --simd neon

The steps are those that `tests.same_programs` captures: of every model, and of functions that the
language fuzzer writes. Each is built as C for the instruction set `--simd`, run on the same
values as in Python with the set in use, and compared: results, state, and whether there is an
error. What cannot be built is refused with a reason; the share of these, and the reasons, are
printed. The status is 1 for a difference.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Final

from mlvm.build.targets import OPTIONS, CannotBuild
from mlvm.core.errors import MlvmError
from mlvm.machines.native import _native
from mlvm.step.saved import SavedStep
from tests.build.making import SET, Kernels, difference
from tests.same_programs.__main__ import Checkout, chosen, written

ROOT: Final = Path(__file__).resolve().parents[2]
AT_ONCE: Final = 8
MODE: Final = ".fuse=True,recompute=True."


def saved_steps(folder: Path, functions: int, only: str) -> list[Path]:
    """The files of the steps, which other processes capture."""
    checkout = Checkout(ROOT, folder / "out", 0)
    checkout.out.mkdir(parents=True)
    fuzzed = written(folder, functions)
    checkout.run(["list"])
    parts = [x for x in (checkout.out / "list").read_text().splitlines() if "models:" in x]
    parts = chosen(parts, fuzzed, only)
    chunks = [parts[i : i + AT_ONCE] for i in range(0, len(parts), AT_ONCE)]

    def run(chunk: list[str]) -> str:
        try:
            return checkout.run(chunk)
        except subprocess.TimeoutExpired:
            return f"not all of {chunk} were captured in time"

    with ThreadPoolExecutor(2) as pool:
        for failed in pool.map(run, chunks):
            if failed:
                print(failed[-500:])
    return sorted(file for file in checkout.out.iterdir() if MODE in file.name)


def outcome(file: Path, kernels: Kernels, folder: Path, runs: int = 2) -> tuple[str, str]:
    """Return the outcome of a step: a word, and why."""
    try:
        saved = SavedStep.from_bytes(file.read_bytes())
    except MlvmError as error:
        return "unread", str(error)
    try:
        report = difference(saved, kernels.build(saved, folder), runs)
    except CannotBuild as error:
        return "refused", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return ("equal", "") if report is None else ("different", report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--functions", type=int, default=500)
    parser.add_argument("--only", default="", help="parts whose names contain this text")
    parser.add_argument("--simd", choices=OPTIONS, default=SET, help="the set of the C")
    parser.add_argument("--runs", type=int, default=2, help="how often each step runs (default: 2)")
    options = parser.parse_args()
    if _native.simd() != SET:  # Python's has other products of bf16
        _native.choose_simd(SET)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = saved_steps(folder, options.functions, options.only)
        kernels = Kernels(folder / "kernels", options.simd)
        print(f"{len(files)} steps, {time.monotonic() - start:.0f} s", flush=True)
        ended: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        refused_models: set[str] = set()
        with ThreadPoolExecutor(2) as pool:
            each = [folder / "c" / str(i) for i in range(len(files))]
            outcomes = pool.map(outcome, files, repeat(kernels), each, repeat(options.runs))
            for file, (word, why) in zip(files, outcomes, strict=True):
                ended[word] += 1
                if word == "refused":
                    reason = re.sub(r", at .*? cannot be built", "", why)
                    reasons[re.sub(r"\[[0-9,]*\]", "", reason)] += 1
                    if file.name.startswith("models"):
                        refused_models.add(f"{file.name}: {why}")
                elif word != "equal":
                    print(f"{word}: {file.name}: {why[:1500]}", flush=True)
    print(f"{dict(ended)}, {time.monotonic() - start:.0f} s, {options.simd} in C, {SET} in Python")
    print(f"refused: {100 * ended['refused'] / max(len(files), 1):.1f} %")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    print(*sorted(refused_models), sep="\n")
    return int(ended["different"] + ended["failed"] + ended["unread"] > 0 or not files)


if __name__ == "__main__":
    sys.exit(main())
