"""Shared pieces of the fuzzers: command lines, and loops over programs by their numbers."""

from __future__ import annotations

import argparse
import traceback
from collections import Counter
from collections.abc import Callable, Iterable


class Wrong(Exception):
    """A program, or what ran it, did what it may not."""


class Outcomes(Counter[str]):
    """Numbers of programs by their outcomes."""

    def report(self) -> str:
        """A line for each outcome."""
        return "\n".join(f"{n:8}  {outcome}" for outcome, n in self.most_common())


def outcomes_of(
    numbers: range, attempt: Callable[[int], str], until: str | None = None
) -> tuple[Outcomes, str | None]:
    """Try programs by their numbers: return how often each outcome was, and what the attempts
    raised, if one did. With `until` the first failure with this text is the last. Ctrl-C ends the
    loop, and the outcomes so far are returned."""
    outcomes, failures = Outcomes(), list[str]()
    for number in numbers:
        try:
            outcomes[attempt(number)] += 1
        except KeyboardInterrupt:
            outcomes[f"interrupted by Ctrl-C; continue with --first {number}"] += 1
            break
        except Exception as error:
            text = str(error) if isinstance(error, Wrong) else traceback.format_exc()
            failures.append(f"--first {number}: {text}")
            if until is not None and until in text:
                break
    return outcomes, "\n".join(failures) or None


def told(outcomes: Outcomes, failure: str | None) -> int:
    """Print outcomes, and what failed, if anything did; return the exit status."""
    print(outcomes.report())
    if failure is not None:
        print(failure)
    return int(failure is not None)


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of the fuzzer in that module."""
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz {name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def require_known(
    parser: argparse.ArgumentParser, unknown: list[str], known: Callable[[], Iterable[str]]
) -> None:
    """Exit with the known names if the command line has unknown ones."""
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted({*known()}))}")


def limit_memory(most: int) -> None:
    """Limit the addresses of this process: a program that asks for too much gets an error."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
