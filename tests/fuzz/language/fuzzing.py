"""Many programs, one after the other; one that fails is cut down to what makes it fail."""

from __future__ import annotations

import argparse
import time
import traceback
import warnings
from typing import Final

import mlvm.eager as ml
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
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


def described(source: Source, seed: int, number: int, device: str | None, failed: Exception) -> str:
    """Return the program, cut down if it fails by itself, and how it failed."""
    smaller = cut_down(source, device)
    error = failure_of(smaller, device)
    if error is None:
        smaller, error = source, failed
    trace = "".join(traceback.format_exception(error))
    rest = f" --device {device}" if device else ""
    again = f"python -m tests.fuzz language --seed {seed} --first {number} --programs 1"
    return (
        f"{smaller.text()}\n\nrequire_same(build)\n\n{trace}\n"
        f"The program above did this. Again: {again}{rest}"
    )


def too_many_refused(outcomes: Outcomes) -> str | None:
    """Return a complaint if too many programs are refused to say much about the others."""
    total = outcomes.total()
    refused = sum(n for outcome, n in outcomes.items() if outcome.startswith("refused"))
    if refused <= MOST_REFUSED * total + 1:
        return None
    return f"{refused} of {total} programs are refused by a CaptureError"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="beside the processor, as opencl:0")


def fuzz(
    programs: int, seed: int, first: int = 0, *, device: str | None = None
) -> tuple[Outcomes, str | None]:
    """Try programs until one fails; return the outcomes, and how it failed, if one did."""

    def attempt(number: int) -> str:
        source = make(seed, number)
        try:
            return outcome_of(source, device)
        except Exception as error:
            raise Wrong(described(source, seed, number, device, error)) from None

    outcomes, failure = outcomes_of(range(first, first + programs), attempt, until="")
    return outcomes, failure or too_many_refused(outcomes)
