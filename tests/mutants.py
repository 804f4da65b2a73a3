"""The share of small defects that tests find: `python -m tests.mutants --sample 60 --seed 0`.

Each mutant is the package with one place changed: a comparison, a sum or product, a truth value or
an integer; in C a comparison, a sum or an integer. The room's tests run once under coverage.py, and
then, on a copy of the checkout, those that run the changed line, the shortest first, until one
fails. All of the room's run for C, and for what runs at the import. A line that no test runs in its
own process is `NOT RUN`. Prints a line a mutant, with its number, and the share of each room.

    python -m tests.mutants --room gradients --sample 100
    python -m tests.mutants --show 17 --seed 0      # print mutant 17 of a run with these options
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final, NamedTuple

import coverage
import pytest

from tests.brief import copied

ROOT: Final = Path(__file__).resolve().parent.parent
_C = "mlvm/machines/native/src"
_NATIVE = "tests/machines/native"
_WALK = "tests/walks/test_machines.py"
_CALLS = "tests/eager/test_valued_calls.py tests/eager/test_refused_calls.py"
ROOMS: Final = {
    "kernels": ("mlvm/core/ops/*.py", f"{_WALK} tests/core/ops"),
    "types": ("mlvm/core/rules.py mlvm/core/types.py mlvm/core/op.py", f"{_WALK} tests/core"),
    "gradients": (
        "mlvm/eager/autodiff/rules*.py",
        f"{_CALLS} tests/eager/autodiff tests/eager/transform tests/walks",
    ),
    "planners": ("mlvm/machines/native/planners/*.py", f"{_WALK} {_NATIVE}"),
    "functions": (
        "mlvm/eager/functions/*.py",
        f"{_CALLS} tests/eager/functions tests/eager/nn/test_attention.py "
        "tests/eager/nn/test_quantization.py",
    ),
    "arena": (
        "mlvm/arena/*.py",
        "tests/arena tests/show tests/input/test_lent_memory.py "
        "tests/eager/interop/test_exchange.py tests/eager/autodiff/test_autodiff.py",
    ),
    "step": ("mlvm/step/*.py", "tests/step tests/eager/capture tests/eager/transform"),
    "capture": (
        "mlvm/eager/capture/*.py mlvm/eager/capture/guards/*.py",
        f"{_CALLS} tests/eager/capture tests/eager/transform/test_custom.py",
    ),
    "language": (f"{_C}/language/*.c", f"{_NATIVE} tests/eager/test_remote.py tests/eager/capture"),
    "c": (
        f"{_C}/*.c {_C}/machine/*.c {_C}/plan/**/*.c",
        f"{_NATIVE} tests/eager/transform/test_batch.py {_WALK}",
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
    last: int
    """The last line of the statement."""
    in_lambda: bool
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
    name = str(file.relative_to(ROOT))
    if file.suffix == ".c":
        yield from _mutants_of_c(room, name, source)
        return
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    if not source.isascii():  # offsets of the syntax tree are in bytes of UTF-8
        return
    for node, last, in_lambda in _code(ast.parse(source), 0, False):
        for line, start, end, replacement in _changes(node, source, starts):
            place = room, name, line, max(line, last), in_lambda, start, end
            yield Mutant(*place, source[start:end], replacement)


Change = tuple[int, int, int, str]  # a line, two offsets, the text between them from now on


def _changes(node: ast.AST, source: str, starts: list[int]) -> Iterator[Change]:
    """Each change of a node, of which the lines start at the offsets."""

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        start = starts[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        end = starts[right.lineno - 1] + right.col_offset
        if source[start:end].count(old) == 1:
            yield left.lineno, start, end, source[start:end].replace(old, new)

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = _COMPARISONS_BY_NODE.get(type(node.ops[0]))
        if operator is not None:
            yield from between(node.left, node.comparators[0], operator, _COMPARISONS[operator])
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from between(node.left, node.right, *_OPERATORS[type(node.op)])
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from between(node.values[0], node.values[1], old, new)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield node.lineno, start, end, str(value)


def _code(node: ast.AST, last: int, in_lambda: bool) -> Iterator[tuple[ast.AST, int, bool]]:
    """The nodes that run and decide, each with its statement's last line, and whether it is of a
    lambda: no annotation or decorator, no statement that raises."""
    if isinstance(node, ast.Raise | ast.AnnAssign | ast.JoinedStr):
        return
    if isinstance(node, ast.stmt):
        last = 0 if hasattr(node, "body") else node.end_lineno or 0
    yield node, last, in_lambda
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _code(child, last, in_lambda or isinstance(node, ast.Lambda))


def _mutants_of_c(room: str, name: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file of C: comments, texts, directives and declarations stay."""
    skipped = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|^[ \t]*#(?:\\\n|[^\n])*|^static[^\n;]*'
    code = re.sub(skipped, lambda at: re.sub(r"\S", " ", at[0]), source, flags=re.S | re.M)
    for at in re.finditer(r"(?<![\w.])\d+(?![\w.])| (?:<=?|>=?|==|!=|\+|-) ", code):
        old = at[0].strip()
        new = str(int(old) + 1) if old.isdigit() else {**_COMPARISONS, "+": "-", "-": "+"}[old]
        line = source.count("\n", 0, at.start()) + 1
        span = at.start(), at.end()
        yield Mutant(room, name, line, line, False, *span, at[0], at[0].replace(old, new))


def files_of(room: str) -> list[Path]:
    """The files whose places a room's mutants change."""
    return [file for each in ROOMS[room][0].split() for file in sorted(ROOT.glob(each))]


def _is_c(room: str) -> bool:
    """Return whether the room's files are of C."""
    return ROOMS[room][0].endswith(".c")


def chosen(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """The given number of mutants, as many of each room, in turn, drawn by the seed."""
    drawn = []
    for i, room in enumerate(rooms):
        every = [mutant for file in files_of(room) for mutant in mutants_of(room, file)]
        number = count // len(rooms) + (i < count % len(rooms))
        drawn.append(Random(f"{seed} {room}").sample(every, min(number, len(every))))
    return [mutant for turn in zip_longest(*drawn) for mutant in turn if mutant]


IMPORT: Final = ""
"""Stands for the import among the tests that run a line."""

Lines = dict[str, dict[int, list[str]]]
"""Of each file, and of each line that runs, the tests that run it, the shortest first."""


def tests_of(mutant: Mutant, lines: Lines) -> list[str]:
    """Return the tests that run the mutant's line, or any of its statement, the shortest first;
    then, where it runs at the import or in C, the test of its file and those of the room."""
    of_file = lines.get(mutant.file, {})
    rows = [of_file.get(line, []) for line in range(mutant.line, mutant.last + 1)]
    tests = [*dict.fromkeys(test for row in rows for test in row)]
    if mutant.file.endswith(".c") or (IMPORT in tests and not mutant.in_lambda):
        _, *folders, name = mutant.file.split("/")
        own = "/".join(["tests", *folders, f"test_{name}"])
        tests += [*[own] * (ROOT / own).exists(), *ROOMS[mutant.room][1].split()]
    return [test for test in tests if test != IMPORT]


class _Recorder:
    """Plugin of pytest that records which lines a test runs, and its time."""

    def __init__(self, room: str) -> None:
        files = [*map(str, files_of(room))]
        self.coverage = coverage.Coverage(data_file=None, include=files, config_file=False)
        self.seconds: dict[str, float] = {IMPORT: 0.0}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        self.coverage.switch_context(item.nodeid)
        start = perf_counter()
        done = yield
        self.seconds[item.nodeid] = perf_counter() - start
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def lines(self) -> Lines:
        data = self.coverage.get_data()
        lines: Lines = {}
        for file in data.measured_files():
            rows = lines[str(Path(file).relative_to(ROOT))] = {}
            for line, tests in data.contexts_by_lineno(file).items():
                timed = self.seconds.keys() & tests
                rows[line] = sorted(timed, key=self.seconds.__getitem__)
        return lines


def record(room: str) -> Lines:
    """Run the room's tests in this process, which has not imported mlvm. Exits if one fails."""
    recorder = _Recorder(room)
    recorder.coverage.start()
    for file in files_of(room):  # else what a test imports is among the lines of that test alone
        parts = file.relative_to(ROOT).with_suffix("").parts
        import_module(".".join(parts).removesuffix(".__init__"))
    pytest.main([*_OPTIONS, *ROOMS[room][1].split()], plugins=[recorder])
    recorder.coverage.stop()
    if recorder.failed:
        raise SystemExit(f"tests fail without a mutant: {' '.join(sorted(recorder.failed))}")
    return recorder.lines()


class _Selection:
    """Plugin of pytest that runs the given tests alone, in their order, those of a file together,
    and then those of the given files and folders."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}
        self.files: dict[str, int] = {}
        for test, place in self.places.items():
            self.files.setdefault(test.partition("::")[0], place)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {item: self._place(item) for item in items}
        items[:] = sorted((item for item in items if places[item]), key=places.__getitem__)

    def _place(self, item: pytest.Item) -> tuple[int, ...]:
        """The place of the test among the others; () for none."""
        file, *_ = item.nodeid.partition("::")
        if item.nodeid in self.places:
            return self.files[file], self.places[item.nodeid]
        names = (file, *map(str, Path(file).parents))
        return min(((self.places[name],) for name in names if name in self.places), default=())


def meet(tests: list[str]) -> int:
    """Run tests up to the first failure; pytest's exit status."""
    paths = dict.fromkeys(test.partition("::")[0] for test in tests)
    return pytest.main(["-x", *_OPTIONS, *paths], plugins=[_Selection(tests)])


_OPTIONS: Final = "-n", "0", "-p", "no:cacheprovider"


def _in(checkout: Path, *arguments: str, text: str = "", seconds: float | None = None) -> str:
    """Run this module in the checkout; raises CalledProcessError, TimeoutExpired."""
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.mutants", *arguments],
        cwd=checkout,
        env=os.environ | variables | {"PYTHONPATH": str(checkout)},
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds,
    ).stdout


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)


def build(checkout: Path) -> None:
    """Compile the files of C that have changed; raises CalledProcessError."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    variables = {"MLVM_NATIVE": "1", "MLVM_TARGETS": "own"}
    subprocess.run(
        command, cwd=checkout, env=os.environ | variables, check=True, capture_output=True
    )


def is_found(mutant: Mutant, checkout: Path, tests: list[str], seconds: float) -> bool:
    """Return whether a compiler or a test finds the mutant, or the tests take longer than that."""
    file = checkout / mutant.file
    source = file.read_text("utf-8")
    file.write_text(mutant.written(source), "utf-8")
    try:
        if file.suffix == ".c":
            build(checkout)
        _in(checkout, "--meet", text=json.dumps(tests), seconds=seconds)
        return False
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return True
    finally:
        file.write_text(source, "utf-8")
        if file.suffix == ".c":
            build(checkout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--room", action="append", choices=ROOMS, help="only this one (repeatable)")
    parser.add_argument(
        "--sample", type=_positive, default=400, metavar="N", help="mutants in all (400)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants (0)")
    parser.add_argument("--show", type=int, metavar="I", help="print the Ith mutant alone")
    parser.add_argument(
        "--seconds", type=float, default=600, help="for the tests of one mutant (600)"
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="mutants at once (one for each core)",
    )
    parser.add_argument("--record", help=argparse.SUPPRESS, metavar="ROOM")
    parser.add_argument("--meet", help=argparse.SUPPRESS, action="store_true")
    args = parser.parse_args()
    if args.record:
        print(f"\n{json.dumps(record(args.record))}")
        return 0
    if args.meet:
        return meet(json.load(sys.stdin))
    rooms = [*dict.fromkeys(args.room or ROOMS)]
    drawn = chosen(rooms, args.sample, args.seed)
    if args.show is not None:
        if not 0 <= args.show < len(drawn):
            parser.error(f"--show: expected a number below {len(drawn)}, got {args.show}")
        print(drawn[args.show])
        return 0
    hits: Counter[str] = Counter()
    tried = Counter(mutant.room for mutant in drawn)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as workers:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for i in range(args.jobs):
            checkouts.put(_copied(Path(folder) / f"checkout{i}", any(map(_is_c, rooms))))

        def recorded(room: str) -> Lines:
            if _is_c(room):  # of which coverage.py sees nothing
                return {}
            checkout = checkouts.get()
            try:
                text = _in(checkout, "--record", room).rpartition("\n{")[2]
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"{room}: {error.stderr}") from None
            finally:
                checkouts.put(checkout)
            files = json.loads("{" + text)
            return {
                file: {int(n): tests for n, tests in rows.items()} for file, rows in files.items()
            }

        def met(mutant: Mutant) -> str:
            tests = tests_of(mutant, lines[mutant.room])
            if not tests:
                return "NOT RUN"
            checkout = checkouts.get()
            try:
                return "found" if is_found(mutant, checkout, tests, args.seconds) else "SURVIVES"
            finally:
                checkouts.put(checkout)

        print("first each room's tests run under coverage.py, for minutes", flush=True)
        lines = {}
        for room, of_room in zip(rooms, workers.map(recorded, rooms), strict=True):
            lines[room] = of_room
            print(f"{room}: {sum(map(len, of_room.values()))} lines reached by tests", flush=True)
        for i, verdict in enumerate(workers.map(met, drawn)):
            hits[drawn[i].room] += verdict == "found"
            print(f"{verdict} {i}: {drawn[i]}", flush=True)
    for room, number in tried.items():
        print(f"{room}: {hits[room]} of {number} found")
    print(f"in all: {hits.total()} of {tried.total()} found, {hits.total() / tried.total():.0%}")
    return 0


def _copied(to: Path, compiles: bool) -> Path:
    """Copy the checkout, and compile its extension where there are mutants of C."""
    copied(ROOT, to, ".git", ".venv", "/build", "dist", ".mypy_cache")
    if compiles:
        build(to)
    return to


if __name__ == "__main__":
    sys.exit(main())
