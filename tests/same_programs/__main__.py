"""Two checkouts of mlvm make the same programs of the same Python, byte for byte.

    python -m tests.same_programs A B          # models, examples and 500 fuzzed functions
    python -m tests.same_programs A B --quick  # 40 of them

A and B are folders with `mlvm`, `models` and `examples` in them, their extensions built in place.
Each runs in separate processes (`probe.py`): every model's training step, the examples, and
functions that the language fuzzer of this checkout has written, once and for both. A step runs
eagerly, and captured with fusion and recomputation on and off. Compared are:

- each program that is launched, as `Program.to_bytes` writes it, in order;
- each captured step as `Captured.save` writes it: program, plan, lifetimes, and the state's bits;
- what steps return and leave, to the bit; the class of an error; what examples print.

Two things may differ and are put right first. Handles of operands are new numbers in each launch:
they only say which operands are one tensor. (B allocates some more beforehand, so that a program
that depended on them would differ.) Lines of Python that a step was made by are known by their
text: a model's file may lie elsewhere, and its lines stand elsewhere in it.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from mlvm.core.errors import MlvmError
from mlvm.core.program.assembly import disassemble
from mlvm.core.program.program import Program
from mlvm.step.saved import SavedStep
from tests.fuzz.language import world
from tests.fuzz.language.making import make

PROBE: Final = Path(__file__).with_name("probe.py")
IMPORTS: Final = """\
import numpy as np

import mlvm.eager as ml
from world import Box, World, tensor, values
"""
SEED: Final = 23
AT_ONCE: Final = 25
"""Parts that a process runs, one after the other."""

SECONDS: Final = 600
"""For a process; more counts as a hang."""

MOST_TOLD: Final = 10
MOST_LINES: Final = 40
"""Of a difference that is shown."""


class Checkout:
    """A folder with mlvm in it, and what it has made of the parts."""

    def __init__(self, root: Path, out: Path, other_handles: int) -> None:
        self.root = root.resolve()
        self.out = out
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{self.root}{os.pathsep}{out.parent}",
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": str(other_handles),
            "OPENBLAS_NUM_THREADS": "1",
            "OTHER_HANDLES": str(other_handles),
        }
        code = "import mlvm.__main__ as main; print(main.__file__); main.main(['info'])"
        file, *info = self.python("-c", code).splitlines()
        if not Path(file).is_relative_to(self.root):
            sys.exit(f"{root} has no mlvm: Python finds {file}")
        self.kernels = info[1]

    def python(self, *arguments: str) -> str:
        """Run Python there and return what it prints; its errors, where it fails."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return done.stdout if not done.returncode else f"status {done.returncode}: {done.stderr}"

    def run(self, parts: Sequence[str]) -> str:
        """Run the parts in a process; how it failed, if it did."""
        return self.python(str(self.out.with_name(PROBE.name)), str(self.out), *parts)

    def program(self, digest: str) -> str:
        """The program of that digest as assembly."""
        return disassembled((self.out / "programs" / digest).read_bytes())

    def text(self, name: str) -> list[str]:
        """A file as lines for people, with programs in their places."""
        data = (self.out / name).read_bytes()
        if data.startswith(b"MLVM"):
            return as_text(self.with_text_of_lines(data))
        lines: list[str] = []
        for line in data.decode().splitlines():
            lines.append(line)
            digest, _, _ = line.partition(" ")
            if (self.out / "programs" / digest).is_file():
                lines += self.program(digest).splitlines()
        return lines

    def data(self, name: str) -> bytes | None:
        """A file as it is to be compared; None where there is none."""
        file = self.out / name
        if not file.is_file():
            return None
        data = file.read_bytes()
        return self.with_text_of_lines(data) if data.startswith(b"MLVM") else data

    def with_text_of_lines(self, data: bytes) -> bytes:
        """A saved step that knows the lines of this checkout by their text."""
        try:
            step = SavedStep.from_bytes(data)
        except MlvmError:  # of another format
            return data
        if step.to_bytes() != data:
            return data
        planned = step.planned
        lines = {place: self.line(each) for place, each in planned.lines.items()}
        lifetimes = tuple(replace(each, place=self.line(each.line)) for each in planned.lifetimes)
        return step._replace(planned=replace(planned, lines=lines, lifetimes=lifetimes)).to_bytes()

    def line(self, line: str) -> str:
        """`file:line` as the file's name in the checkout and the text there."""
        file, _, number = line.rpartition(":")
        if not file.startswith(f"{self.root}{os.sep}"):
            return line
        text = Path(file).read_text("utf-8").splitlines()[int(number) - 1].strip()
        return f"{Path(file).relative_to(self.root)}: {text}"


def disassembled(data: bytes) -> str:
    try:
        return disassemble(Program.from_bytes(data))
    except MlvmError as error:
        return f"no program that this checkout reads: {error}"


def as_text(data: bytes) -> list[str]:
    """A saved step as lines for people."""
    step = SavedStep.from_bytes(data)
    planned = step.planned
    return [
        *disassemble(planned.program).splitlines(),
        str(planned.plan),
        *map(str, (*planned.arguments, *step.inputs, *step.outputs, *step.results)),
        *(f"{place}: {line}" for place, line in planned.lines.items()),
        *map(str, planned.lifetimes),
        f"moments {planned.moments}",
        *(f"state {i}: {array.dtype} {array.tolist()}" for i, array in enumerate(step.states)),
    ]


def difference(a: Checkout, b: Checkout, name: str) -> str | None:
    """Return how a file differs, if it does."""
    actual, expected = b.data(name), a.data(name)
    if actual == expected:
        return None
    if actual is None or expected is None:
        return f"{name}: only {(b if expected is None else a).root} has made it"
    roots = str(a.root), str(b.root)
    lines = difflib.unified_diff(a.text(name), b.text(name), *roots, n=2, lineterm="")
    shown = [line[:200] for line in itertools.islice(lines, MOST_LINES + 1)]
    if len(shown) > MOST_LINES:
        shown[-1] = "..."
    return "\n".join([f"{name} differs:", *(shown or ["in bytes that are not read here"])])


def written(folder: Path, count: int) -> list[str]:
    """Write the files of `count` fuzzed programs, and the probe beside them."""
    shutil.copy(PROBE, folder)
    shutil.copy(world.__file__, folder / "world.py")
    files = []
    for number in range(count):
        files.append(folder / f"fuzz_{number:03}.py")
        files[-1].write_text(make(SEED, number).text(IMPORTS), "utf-8")
        progress(f"{number + 1} of {count} programs written")
    return [str(file) for file in files]


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


def chosen(parts: Sequence[str], fuzzed: Sequence[str], only: str) -> list[str]:
    """Return the parts and functions whose names contain the text. Exits if there are none."""
    named = [part for part in (*parts, *fuzzed) if only in part]
    if not named:
        raise SystemExit(f"--only {only}: expected a text in one of {', '.join(parts)}")
    return named


def compared(a: Checkout, b: Checkout, fuzzed: Sequence[str], only: str) -> Iterator[str]:
    """Yield the differences, in words."""
    lists = []
    for each in (a, b):
        failed = each.run(["list"])
        if failed:
            yield f"{each.root} does not run: {failed}"
            return
        lists.append((each.out / "list").read_text().splitlines())
    if lists[0] != lists[1]:
        yield f"models and examples differ: {sorted({*lists[0]} ^ {*lists[1]})}"
    both = [part for part in lists[0] if part in lists[1]]
    parts = chosen(both, fuzzed, only)
    start, checked, names, broken = time.monotonic(), set[str](), 0, 0
    chunks = [parts[i : i + AT_ONCE] for i in range(0, len(parts), AT_ONCE)]
    with ThreadPoolExecutor(2) as pool:
        for number, chunk in enumerate(chunks):
            failures = list(pool.map(lambda each, chunk=chunk: each.run(chunk), (a, b)))
            for checkout, failed in zip((a, b), failures, strict=True):
                if failed:
                    yield f"{checkout.root}: the process of {chunk} has failed: {failed[-2000:]}"
            files = {file.name for each in (a, b) for file in each.out.iterdir() if file.is_file()}
            for name in sorted(files - checked):
                report = difference(a, b, name)
                names += 1
                if report is not None:
                    yield report
                elif name.endswith(".failed"):
                    broken += 1
                    print(f"{name} in both: {a.text(name)[-1]}")
            checked |= files
            done = min((number + 1) * AT_ONCE, len(parts))
            progress(f"{done} of {len(parts)} parts, {time.monotonic() - start:.0f} s")
    programs = len(list((a.out / "programs").iterdir()))
    print(f"\n{names} files of {len(parts)} parts, {programs} programs; {broken} fail in both")
    if broken > len(parts) // 50:
        yield f"{broken} parts fail in both: what is compared says little"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_programs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("a", type=Path, help="a checkout, as it was")
    parser.add_argument("b", type=Path, help="a checkout, as it is")
    parser.add_argument("--quick", action="store_true", help="40 fuzzed functions")
    parser.add_argument("--functions", type=int, help="so many fuzzed functions")
    parser.add_argument("--only", default="", help="parts whose names contain this text")
    parser.add_argument("--keep", type=Path, help="a folder for what both have made")
    options = parser.parse_args(argv)
    count = options.functions if options.functions is not None else 40 if options.quick else 500
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        a, b = (
            Checkout(root, folder / name, other)
            for root, name, other in ((options.a, "a", 0), (options.b, "b", 5))
        )
        for each in (a, b):
            each.out.mkdir(parents=True)
            print(f"{each.out.name.upper()}: {each.root}, {each.kernels}")
        if a.kernels != b.kernels:
            print("for other kernels programs differ: is the extension built in both?")
            return 1
        differences = 0
        for report in compared(a, b, written(folder, count), options.only):
            differences += 1
            if differences <= MOST_TOLD:
                print(f"\n{report}")
        if differences > MOST_TOLD:
            print(f"\n... and {differences - MOST_TOLD} more")
    print("the same" if not differences else f"{differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
