"""Every instruction set gives the same bits: docs/determinism.md.

    python -m tests.same_bits
    python -m tests.same_bits --op gelu --step mixer --simd plain avx2
    python -m tests.same_bits --op none --turns 200

Runs all calls of `tests.invariance` and `tests.cases` in f32, f64, f16, bf16 and i64, elementwise
ops with values of any bits, and training steps of all models, eagerly and captured. Each
instruction set of this processor computes them in a process of its own. The digests must be equal.
Prints for each op, and for each step, the first result that differs; the exit status is then 1.
With `--write FILE` the set in use writes its values, a line each. Such files of two processors, one
of which may be emulated by qemu, can be compared with `diff`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Final

from mlvm.machines.native import extension
from tests.brief import run_python
from tests.same_bits.values import Value, of_ops, of_steps, read, write

EXCEPTIONS: Final = ("amx", "amx_emulated", "avx512_bf16")
"""Sets whose products of bf16 have other bits."""


def sets() -> list[str]:
    """Return the instruction sets of this processor that share their bits, the best first."""
    return [x for x, here in extension.simd_sets().items() if here and x not in EXCEPTIONS]


def computed(simd: str, folder: Path, arguments: Sequence[str]) -> list[Value]:
    """Compute all values with an instruction set, in a process of its own."""
    file = folder / simd
    module = "-m", "tests.same_bits", "--write", str(file), *arguments
    done = run_python(
        *module, timeout=7200, OPENBLAS_NUM_THREADS="1", MLVM_SIMD=simd, MLVM_NATIVE="1"
    )
    if done.returncode:
        sys.exit(f"{simd}: {done.stderr[-4000:]}")
    return read(file)


def differences(one: Sequence[Value], other: Sequence[Value]) -> Iterator[tuple[str, str]]:
    """Yield the name of each op, and of each step, and its first value that differs."""
    seen = set[str]()
    for x, y in zip(one, other, strict=True):
        name = x.by.partition("(")[0] if x.of.startswith("call ") else x.of
        if x != y and name not in seen:
            seen.add(name)
            yield name, x.by if x.by == y.by else f"{x.by} and {y.by}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--op", default="", help="the ops whose names contain this text, or none")
    parser.add_argument("--step", default="", help="the steps whose names do, or none")
    parser.add_argument("--turns", type=int, help="run captured steps so many times (default: 2)")
    parser.add_argument("--every", type=int, default=1, help="of the calls, one of so many")
    parser.add_argument("--simd", nargs="+", choices=sets(), default=sets(), help="these sets")
    parser.add_argument("--write", metavar="FILE", help="write the values of the set in use")
    options = parser.parse_args(argv)
    parts = []
    if options.op != "none":
        parts.append(of_ops(options.op, options.every))
    if options.step != "none":
        parts.append(of_steps(options.step, options.turns))
    if options.write:
        write(Path(options.write), chain.from_iterable(parts))
        return 0
    passed = ["--op", options.op, "--step", options.step, "--every", str(options.every)]
    if options.turns:
        passed += ["--turns", str(options.turns)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        first, *rest = pool.map(lambda simd: computed(simd, Path(folder), passed), options.simd)
    wrong = Counter[str]()
    for simd, values in zip(options.simd[1:], rest, strict=True):
        for name, by in differences(first, values):
            wrong[name] += 1
            print(f"{name}: {options.simd[0]} and {simd} differ first in {by}")
    kinds = len({x.of for x in first if not x.of.startswith("call ")})
    print(f"{len(first)} values, of {kinds} steps, with {', '.join(options.simd)}")
    print(f"{len(wrong)} differ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
