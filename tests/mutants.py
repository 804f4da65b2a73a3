"""The share of small defects that tests find: `python -m tests.mutants --sample 60 --seed 0`.

Each mutant is the package with one place changed: a comparison, a sum or product, a truth value or
an integer. The tests of the room run on a copy of the checkout until the first failure. Prints a
line a mutant, with its number, and the share found in each room.

    python -m tests.mutants --room gradients --sample 100
    python -m tests.mutants --show 17 --seed 0      # print mutant 17 and run nothing
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
_WALK = "tests/walks/test_machines.py"
_VALUES = "tests/eager/test_valued_calls.py"
ROOMS: Final = {
    "kernels": ("mlvm/core/ops/*.py", f"{_WALK} tests/core/ops"),
    "types": ("mlvm/core/rules.py mlvm/core/types.py mlvm/core/op.py", f"{_WALK} tests/core"),
    "gradients": ("mlvm/eager/autodiff/rules*.py", f"{_VALUES} tests/eager/autodiff tests/walks"),
    "planners": ("mlvm/machines/native/planners/*.py", f"{_WALK} tests/machines/native"),
    "functions": (
        "mlvm/eager/functions/*.py",
        f"{_VALUES} tests/eager/test_refused_calls.py tests/eager/functions",
    ),
    "arena": ("mlvm/arena/*.py", "tests/arena"),
    "step": ("mlvm/step/*.py", "tests/step tests/eager/capture"),
    "capture": (
        "mlvm/eager/capture/*.py mlvm/eager/capture/guards/*.py",
        f"{_VALUES} tests/eager/capture",
    ),
}
"""Of each room, its files and the tests that judge them."""

_COMPARISONS: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARISONS_BY_NODE: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OPERATORS: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}  # fmt: skip


class Mutant(NamedTuple):
    """A piece of a file, by offsets in it, and its replacement."""

    room: str
    file: str
    line: int
    start: int
    end: int
    replaced: str
    replacement: str

    def written(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]

    def __str__(self) -> str:
        change = f"{self.replaced.strip()!r} -> {self.replacement.strip()!r}"
        return f"{self.room}: {self.file}:{self.line}: {change}"


def mutants_of(room: str, file: Path) -> Iterator[Mutant]:
    """All mutants of a file; docstrings, annotations and messages of errors stay."""
    source = file.read_text("utf-8")
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not source.isascii():  # offsets of the syntax tree are in bytes of UTF-8
        return

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        start = starts[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        end = starts[right.lineno - 1] + right.col_offset
        if source[start:end].count(old) == 1:
            text = source[start:end]
            place = room, str(file.relative_to(ROOT)), left.lineno
            yield Mutant(*place, start, end, text, text.replace(old, new))

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            old = _COMPARISONS_BY_NODE.get(type(node.ops[0]))
            if old is not None:
                yield from between(node.left, node.comparators[0], old, _COMPARISONS[old])
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield from between(node.left, node.right, *_OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between(node.values[0], node.values[1], old, new)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            new = str(not node.value if isinstance(node.value, bool) else node.value + 1)
            place = room, str(file.relative_to(ROOT)), node.lineno
            yield Mutant(*place, start, end, source[start:end], new)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run and decide: no annotation, no statement that raises."""
    if isinstance(node, ast.Raise | ast.AnnAssign | ast.JoinedStr):
        return
    yield node
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def chosen(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """The given number of mutants, as many of each room, drawn by the seed."""
    drawn = []
    for i, room in enumerate(rooms):
        files = [file for each in ROOMS[room][0].split() for file in sorted(ROOT.glob(each))]
        every = [mutant for file in files for mutant in mutants_of(room, file)]
        number = count // len(rooms) + (i < count % len(rooms))
        drawn += Random(f"{seed} {room}").sample(every, min(number, len(every)))
    return drawn


def tests_of(mutant: Mutant) -> list[str]:
    """Return the test of the file, if there is one, and those of the room."""
    _, *folders, name = mutant.file.split("/")
    own = "/".join(["tests", *folders, f"test_{name}"])
    return [*[own] * (ROOT / own).exists(), *ROOMS[mutant.room][1].split()]


def is_found(mutant: Mutant, checkout: Path, seconds: float) -> bool:
    """Return whether the tests fail on the mutant, or take longer than that."""
    file = checkout / mutant.file
    source = file.read_text("utf-8")
    file.write_text(mutant.written(source), "utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests_of(mutant)],
            cwd=checkout,
            env=os.environ | variables | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            timeout=seconds,
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(source, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--room", action="append", choices=ROOMS, help="only this one (repeatable)")
    parser.add_argument("--sample", type=int, default=400, metavar="N", help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, metavar="I", help="print the Ith mutant alone")
    parser.add_argument("--seconds", type=float, default=600, help="for the tests of one mutant")
    args = parser.parse_args()
    drawn = chosen(args.room or [*ROOMS], args.sample, args.seed)
    if args.show is not None:
        print(drawn[args.show])
        return 0
    tried: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        left_out = shutil.ignore_patterns(".git", ".venv", "build", "dist", ".mypy_cache")
        shutil.copytree(ROOT, checkout, ignore=left_out)
        for i, mutant in enumerate(drawn):
            tried[mutant.room] += 1
            found = is_found(mutant, checkout, args.seconds)
            hits[mutant.room] += found
            print(f"{'found' if found else 'SURVIVES'} {i}: {mutant}", flush=True)
    for room, number in tried.items():
        print(f"{room}: {hits[room]} of {number} found")
    print(f"in all: {hits.total()} of {tried.total()} found, {hits.total() / tried.total():.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
