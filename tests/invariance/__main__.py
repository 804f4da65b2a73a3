"""Rows have the same bits beside any other rows: docs/determinism.md.

    python -m tests.invariance
    python -m tests.invariance --op matmul --op sum --rows 1 2 33
    python -m tests.invariance --part 1/2 --dtype bf16

Each op with rows is called with 70 of them and with 1 to 70: the first, the last, and some
between. The same rows must have the same bits: on numpy's kernels, and on the native ones with each
instruction set of this processor, on 1, 2, 3 and 5 threads. Calls are the cases of all ops, and
shapes that take the loops of kernels to their ends, in f32, f64, f16, bf16 and i64; of many
elements, some numbers of rows are tried. Prints what differs; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from mlvm.core.op import OPS
from mlvm.machines.native import extension
from tests.invariance.machines import machines, outside
from tests.invariance.samples import samples
from tests.invariance.walk import COUNTS, DTYPES, differing, rows_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.invariance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--op", action="append", choices=OPS, metavar="NAME", help="only this one (repeatable)"
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this one")
    parser.add_argument("--rows", nargs="+", type=int, default=COUNTS, help="so many, of 70")
    parser.add_argument("--machine", default="", help="only those whose names begin so")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the Ith of N parts")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    used = [each for each in machines() if str(each).startswith(options.machine)]
    if not used:
        parser.error(f"--machine: expected {', '.join(map(str, machines()))}")
    simd = extension.EXTENSION and extension.EXTENSION.simd()
    tried: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for sample in [*samples()][part - 1 :: parts]:
        if options.op and sample.op not in options.op:
            continue
        others = [sample.in_dtype(dtype) for dtype in options.dtype or DTYPES]
        for each in (*others, *[sample] * (options.dtype is None)):
            for rows in rows_of(each) if each is not None else ():
                for machine in used:
                    if each is None or outside(machine, each):
                        continue
                    tried[each.op] += 1
                    differs = [*differing(machine, each, rows, options.rows)]
                    if differs:
                        wrong[each.op] += 1
                        print(f"{each} on {machine}: of {rows.axes}, rows from, how many", differs)
    if extension.EXTENSION is not None:
        extension.EXTENSION.choose_simd(simd)
    machine_names = ", ".join(map(str, used))
    print(f"{len(tried)} ops, {sum(tried.values())} calls with rows, on {machine_names}")
    print(f"{sum(wrong.values())} differ" + "".join(f"; {op} {n}" for op, n in wrong.items()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
