"""Many programs, one after the other; one that fails is cut down to what makes it fail."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Final

import mlvm.eager as ml
from tests.fuzz.language.making import make
from tests.fuzz.language.source import Source, built_by
from tests.fuzz.language.trying import Found, require_same
from tests.fuzz.trying import time_limit

SECONDS: Final = 60
"""For one program; more counts as a hang."""

ON_DEVICE: Final = 10
"""Factor of that time on a device, whose driver compiles the kernels."""

CUTTING_SECONDS: Final = 120
"""For cutting one program down."""

MOST_REFUSED: Final = 0.05
"""Of all programs, as a fraction, that may be refused by a `CaptureError`."""


def outcome_of(source: Source, device: str | None = None) -> str:
    """Run a program and return its outcome in a few words. Raises `Found`, and what else it fails
    with."""
    with (
        warnings.catch_warnings(action="error"),
        time_limit(SECONDS * (ON_DEVICE if device else 1)),
    ):
        warnings.simplefilter("ignore", ml.NoEffectWarning)  # random losses may use no parameter
        return require_same(built_by(source.text()), device=device)


def failure_of(source: Source, device: str | None = None) -> Exception | None:
    """Return the error by which a program fails, if it does."""
    try:
        outcome_of(source, device)
    except Exception as error:
        return error
    return None


def kind_of(error: Exception | None) -> str | None:
    """Return a key by which failures of one cause are equal."""
    return error.kind if isinstance(error, Found) else type(error).__name__ if error else None


def cut_down(source: Source, device: str | None = None) -> Source:
    """The program without what it does not need to fail as it does."""
    kind = kind_of(failure_of(source, device))
    until = time.monotonic() + CUTTING_SECONDS
    smaller: Source | None = source
    while smaller is not None:
        source, smaller = smaller, None
        for each in source.cuts():
            if time.monotonic() > until:
                return source
            if kind_of(failure_of(each, device)) == kind:
                smaller = each
                break
    return source


class Fuzz:
    """Tries programs, and counts what comes of them."""

    def __init__(self, seed: int, device: str | None = None) -> None:
        self.seed = seed
        self.device = device
        self.counts: Counter[str] = Counter()

    def run(self, number: int) -> str | None:
        """Try the program of that number; how it failed, if it did."""
        source = make(self.seed, number)
        try:
            self.counts[outcome_of(source, self.device)] += 1
        except Exception as error:
            failed = error
        else:
            return None
        return self._describe(number, source, failed)

    def _describe(self, number: int, source: Source, failed: Exception) -> str:
        """The program, cut down if it fails by itself, and how it failed."""
        smaller = cut_down(source, self.device)
        error = failure_of(smaller, self.device)
        if error is None:
            smaller, error = source, failed
        trace = "".join(traceback.format_exception(error))
        rest = f" --device {self.device}" if self.device else ""
        again = f"python -m tests.fuzz language --seed {self.seed} --first {number} --programs 1"
        return (
            f"{smaller.text()}\n\nrequire_same(build)\n\n{trace}\n"
            f"The program above did this. Again: {again}{rest}"
        )

    def report(self) -> str:
        """Return the outcomes, a line each."""
        total = sum(self.counts.values())
        lines = [f"{n:8d}  {outcome}" for outcome, n in self.counts.most_common()]
        return "\n".join([f"programs in the eager language: {total}", *lines])

    def too_many_refused(self) -> str | None:
        """A complaint if too many programs are refused to say much about the others."""
        total = sum(self.counts.values())
        refused = sum(n for outcome, n in self.counts.items() if outcome.startswith("refused"))
        if refused <= MOST_REFUSED * total + 1:
            return None
        return f"{refused} of {total} programs are refused by a CaptureError"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="beside the processor, as opencl:0")


def fuzz(
    programs: int, seed: int, first: int = 0, *, device: str | None = None
) -> tuple[Fuzz, str | None]:
    """Try the given number of programs, with a line of progress on a terminal; return the outcomes,
    and how one failed, if one did."""
    runs = Fuzz(seed, device)
    start = time.monotonic()
    for number in range(first, first + programs):
        failure = runs.run(number)
        if failure is not None:
            return runs, failure
        if sys.stderr.isatty():
            done = number + 1 - first
            rate = done / (time.monotonic() - start)
            print(
                f"\r{done:,} of {programs:,} programs, {rate:.1f} a second", end="", file=sys.stderr
            )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return runs, runs.too_many_refused()
