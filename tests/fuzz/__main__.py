"""Programs that nobody would write, thrown at the machine and at the eager language.

    python -m tests.fuzz --programs 100000 --seed 0
    python -m tests.fuzz --language --programs 5000 --seed 0

Without `--language`: random programs, valid ones with instructions, text or bytes changed, each
launched with a limit on its steps. Whatever they are, the VM may only run them or raise an
`MlvmError`; it loses no byte, keeps every tensor readable, and computes on. What it runs, the raw
machine and one with workers run to the same bits.

With it: random functions in the eager language, called a few times eagerly and captured, with
fusion and recomputation on and off. All must be equal to the bit, and share what it shares.

Prints what was tried and what came out. The first program that does anything else is printed with
the numbers that make it again, one in the eager language cut down to what is needed, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tests.fuzz import trying
from tests.fuzz.language import fuzzing
from tests.fuzz.language.trying import KINDS

MEMORY: Final = 4 << 30
"""Bytes that the process may have, where the system can hold it to that."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--language", action="store_true", help="programs in the eager language")
    parser.add_argument("--programs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=KINDS,
        help="with --language: a kind of difference that is let pass (may be given several times)",
    )
    options = parser.parse_args(argv)
    limit_memory()
    gc.freeze()  # what is there now need not be looked at when a program's garbage is collected
    fuzz: Callable[..., tuple[Any, str | None]] = trying.fuzz
    if options.language:
        fuzz = partial(fuzzing.fuzz, skip=options.skip)
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
