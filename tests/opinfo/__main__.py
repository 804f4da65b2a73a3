"""mlvm against the samples of PyTorch's own operator tests (OpInfo).

    python -m tests.opinfo
    python -m tests.opinfo --op linalg.det --dtype f32 --captured
    python -m tests.opinfo --part 1/2 --samples 20

Takes PyTorch 2.13 with `expecttest`. For each operator that `names.txt` maps, in each of its
dtypes, every sample is computed by both: values agree (in dtype and shape, in the places of nan
and infinities, and within the dtype's rounding), and so do gradients; with `--captured` the same
sample, captured, has the bits of the eager one. Input that is refused is refused with an error of
`ml.errors`, for a reason in `refused.toml`; so is what PyTorch refuses, if no value comes of it.
The exit status is 1 if anything is wrong or raw.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from tests.opinfo.names import COUNT, Entry, Refusals, entries


def names(table: dict[str, Entry]) -> str:
    """Return the number of names, and why others are absent."""
    kinds = Counter(each.kind for each in table.values())
    absent = Counter(each.reason.partition(":")[0] for each in table.values() if each.kind == "-")
    lines = [
        f"names: {kinds['=']} present, {kinds['~']} by one expression, "
        f"together {kinds['='] + kinds['~']} of {COUNT}"
    ]
    lines += [f"    absent: {count:3} {reason}" for reason, count in absent.most_common()]
    return "\n".join(lines)


def describe(outcome: Any) -> str:
    """Describe an outcome: what is wrong with which sample."""
    name = f"{outcome.name}.{outcome.variant}".rstrip(".")
    place = f"{outcome.verdict} {outcome.what}: {name} {outcome.dtype} #{outcome.number}"
    return f"{place}: {outcome.text}\n    ({outcome.sample[:300]})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--op", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--dtype", action="append", help="only this one (repeatable)")
    parser.add_argument("--samples", type=int, metavar="N", help="at most so many of each dtype")
    parser.add_argument("--captured", action="store_true", help="captured, too")
    parser.add_argument("--no-gradients", action="store_true", help="values alone")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the Ith of N parts")
    args = parser.parse_args()

    from tests.opinfo.walk import DTYPES, Walk, operators

    table = entries()
    chosen = [op for op in operators() if not args.op or op.name in args.op]
    unknown = {op.name for op in chosen} - table.keys()
    if unknown or not chosen:
        parser.error(f"not in names.txt: {', '.join(sorted(unknown)) or args.op}")
    part, parts = map(int, args.part.split("/"))
    walk = Walk(Refusals(), args.samples, not args.no_gradients, args.captured)
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    bad = 0
    for op in chosen[part - 1 :: parts]:
        entry = table[op.name]
        if entry.kind == "-":
            continue
        results = [walk.of(op, entry, dtype) for dtype in args.dtype or DTYPES]
        for outcomes in [*results, walk.errors(op, entry)]:
            shown = 0
            for outcome in outcomes:
                counts[outcome.what, outcome.verdict] += 1
                if outcome.verdict in ("refused", "skipped"):
                    skipped = ", skipped" * (outcome.verdict == "skipped")
                    reasons[f"{outcome.what}{skipped}: {outcome.text[:60]}"] += 1
                if outcome.verdict in ("wrong", "raw"):
                    bad += 1
                    shown += 1
                    if shown <= 2:
                        print(describe(outcome), flush=True)
    print(names(table))
    for what in ("value", "gradient", "captured", "error"):
        verdicts = ("right", "refused", "skipped", "wrong", "raw")
        print(f"{what}: {', '.join(f'{counts[what, each]} {each}' for each in verdicts)}")
    for reason, count in reasons.most_common():
        print(f"{count:7} {reason}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
