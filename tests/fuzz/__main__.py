"""Programs that nobody would write, thrown at the machine.

    python -m tests.fuzz --programs 100000 --seed 0

Random programs, valid ones with instructions, text or bytes changed, each launched with a
limit on its steps. Whatever they are, the VM may only run them or raise an `MlvmError`; it
loses no byte, keeps every tensor readable, and computes on. What it runs, the raw machine and
one with workers run to the same bits. Prints what was tried and what came out; the first
program that does anything else is printed with the numbers that make it again, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from tests.fuzz.trying import fuzz

MEMORY: Final = 4 << 30
"""Bytes that the process may have, where the system can hold it to that."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    options = parser.parse_args(argv)
    limit_memory()
    runs, failure = fuzz(options.programs, options.seed, options.first)
    print(runs.report())
    if failure is not None:
        print(failure)
    return int(failure is not None)


def limit_memory() -> None:
    """So that a program that asks for too much gets an error, and not all there is."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))


if __name__ == "__main__":
    sys.exit(main())
