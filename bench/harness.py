"""Time contenders side by side: each in its own process, their rounds interleaved.

A `Suite` names its contenders. A `Contender` prepares, in a separate child process (`bench.child`),
one function per case; each call of it is one timed round and returns metrics, such as
`{"us_per_op": 0.8}`. The children stay alive and run one round at a time, A B C A B C. So a slow
phase of the machine affects all of them alike.

A metric is a cost, where less is better, or a rate, where more is better. A ratio is
median(theirs) / median(ours) of a cost and the inverse of that for a rate, so a ratio above 1 is
in our favour. A suite may compare minima instead. Targets apply to ratios, limits to metrics. A
`Contest` is decided by the ratio of the best of theirs to the best of ours.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

ROOT = Path(__file__).resolve().parent.parent

Round = Callable[[], Mapping[str, float]]
Prepare = Callable[[bool], Mapping[str, Round]]


class BenchError(Exception):
    """A contender crashed, hung or failed; the text says which one, and what it was doing."""


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    `prepare(quick)` runs in the child and returns one round function per case; `quick` asks for
    short rounds. If something other than a package is missing, it says so and returns no
    functions. A contender whose `package` is not installed is named and skipped. `threads` is how
    many threads BLAS, OpenMP and XLA may use.
    """

    name: str
    package: str
    prepare: Prepare
    threads: int = 1


@dataclass(frozen=True)
class Contest:
    """The best of `ours` beside the best of `theirs`, in each case.

    `targets` has the smallest ratio to accept by case, `mean` that of their geometric mean. Without
    `cases` the contest is about every case that has the metric.
    """

    name: str
    metric: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    targets: Mapping[str, float] = field(default_factory=dict)
    mean: float | None = None
    cases: frozenset[str] | None = None


@dataclass(frozen=True)
class Suite:
    """Suite of one subcommand; the module `module` has it as `SUITE`.

    `units` has the unit of each metric. The metrics in `rates` are rates, the others costs. All
    contenders are compared with those in `ours`. `targets` has the smallest ratio to accept by
    (case, metric, ours, theirs), `limits` the largest median by (case, metric, contender).
    `statistic` names the field of records that is compared: "median", or "min" for short calls,
    which a busy machine interrupts.
    `timeout` limits each answer of a child, in seconds.
    """

    module: str
    contenders: tuple[Contender, ...]
    units: Mapping[str, str]
    rates: frozenset[str] = frozenset()
    ours: tuple[str, ...] = ("mlvm",)
    targets: Mapping[tuple[str, str, str, str], float] = field(default_factory=dict)
    limits: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    contests: tuple[Contest, ...] = ()
    rounds: int = 25
    quick_rounds: int = 2
    warm_up_rounds: int = 2
    timeout: float = 120.0
    statistic: str = "median"

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def compared(self, record: Record) -> float:
        """Return the number of a record that ratios are made of."""
        number: float = getattr(record, self.statistic)
        return number


@dataclass(frozen=True)
class Record:
    """The median, smallest and largest of one metric over `runs` rounds."""

    case: str
    contender: str
    metric: str
    unit: str
    median: float
    min: float
    max: float
    runs: int


@dataclass(frozen=True)
class Ratio:
    """The ratio of one metric between the contenders `ours` and `theirs`."""

    case: str
    metric: str
    ours: str
    theirs: str
    ratio: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of a contest in one case.

    `ours` and `theirs` are the best ones; those that were not measured are `absent`.
    """

    contest: str
    case: str
    metric: str
    ours: str
    theirs: str
    ratio: float
    target: float | None
    absent: tuple[str, ...]


def microseconds(work: Callable[[], object]) -> float:
    """Time the call in microseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def rounds_of(
    make: Callable[[str], Callable[[], object]],
    runs: Mapping[str, int],
    metric: str,
    unit: Callable[[str], float] = lambda case: 1.0,
) -> Mapping[str, Round]:
    """Return a round for each case of `runs`: that many calls of the function that `make` returns.

    `metric` is the mean time of a call, in `unit(case)` microseconds. A function is made when the
    rounds of its case begin, and the one before is dropped.
    """
    run_of = lru_cache(maxsize=1)(make)

    def timed(case: str) -> Mapping[str, float]:
        run, times = run_of(case), runs[case]
        elapsed = microseconds(lambda: [run() for _ in range(times)])
        return {metric: elapsed / times / unit(case)}

    return {case: partial(timed, case) for case in runs}


def installed_version(package: str) -> str | None:
    """Return the version, "checkout" for a package on the path that is not installed, None if
    absent."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def if_native(prepare: Prepare) -> Prepare:
    """Wrap a `prepare` that needs native kernels: without them it prints a message and prepares
    nothing."""

    def prepare_if_native(quick: bool) -> Mapping[str, Round]:
        from mlvm.machines.native import extension

        if extension.is_native(None):
            return prepare(quick)
        say(f"a VM has one thread, skipped: {extension.status()}")
        return {}

    return prepare_if_native


ONLY_AVX2: Final = {
    "MLVM_SIMD": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}
"""What keeps each library to AVX2. onnxruntime has nothing of the kind."""

SIMD: Final = "BENCH_SIMD"
"""The variable by which `--simd` reaches the contenders."""


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a contender: BLAS picks its own kernels, on `threads`
    threads, and mlvm its own, unless `--simd` says which.

    NPROC sizes XLA's thread pool.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENBLAS_", "MLVM_")) or name == "MLVM_DEVICE"
    }
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        environment[name] = str(threads)
    if os.environ.get(SIMD) == "avx2":
        environment |= ONLY_AVX2
    return environment


class Child:
    """A contender's process: first it sends its cases, then metrics for each case it is sent.

    What it prints goes to stderr. Leaving the context ends it.
    """

    def __init__(self, suite: Suite, contender: Contender, *, quick: bool) -> None:
        self._name = f"{suite.name}: {contender.name}"
        self._timeout = suite.timeout
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = [suite.module, contender.name, str(theirs.fileno()), str(int(quick))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", *arguments],
            cwd=ROOT,
            env=child_environment(contender.threads),
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C is for the harness alone, which then ends it
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()
        if error is not None:
            self._process.kill()
        try:
            self._process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cases(self) -> list[str]:
        """Return the names of the cases it has prepared. Raises `BenchError`."""
        cases: list[str] = self._receive("preparing")
        return cases

    def round(self, case: str) -> dict[str, float]:
        """Return the metrics of one timed round. Raises `BenchError`."""
        doing = f"timing {case!r}"
        try:
            self._pipe.send(case)
        except OSError:
            raise self._ended(doing) from None
        metrics: dict[str, float] = self._receive(doing)
        return metrics

    def _receive(self, doing: str) -> Any:
        try:
            if not self._pipe.poll(self._timeout):
                raise BenchError(
                    f"{self._name} gave no answer for {self._timeout:g} s while {doing}"
                )
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._ended(doing) from None
        if error is not None:
            raise BenchError(f"{self._name} failed while {doing}: {error}")
        return answer

    def _ended(self, doing: str) -> BenchError:
        status = self._process.wait()
        return BenchError(f"{self._name} ended with status {status} while {doing}")


def run(
    suite: Suite,
    *,
    quick: bool = False,
    records: list[Record] | None = None,
    only: Sequence[str] = (),
) -> list[Record]:
    """Measure every case of every installed contender: one record for each metric, appended to
    `records` when its case ends, if only by an error or Ctrl-C.

    `only` selects the cases whose names contain one of its strings; without any, all cases run.
    `quick` takes few and short rounds. Progress goes to stderr. Raises `BenchError`.
    """
    records = [] if records is None else records
    with ExitStack() as stack:
        children = {}
        cases = {}
        for contender in suite.contenders:
            version = installed_version(contender.package)
            if version is None:
                say(f"{suite.name}: {contender.name} is not installed, skipped")
                continue
            say(f"{suite.name}: {contender.name} {version} gets ready")
            child = stack.enter_context(Child(suite, contender, quick=quick))
            children[contender.name] = child
            cases[contender.name] = child.cases()
        every = list(dict.fromkeys(case for prepared in cases.values() for case in prepared))
        chosen = [x for x in every if not only or any(part.lower() in x.lower() for part in only)]
        if every and not chosen:
            say(
                f"{suite.name}: no case contains {' or '.join(only)}; there are: {', '.join(every)}"
            )
        for case in chosen:
            entrants = {name: children[name] for name in children if case in cases[name]}
            rounds = suite.quick_rounds if quick else suite.rounds
            say(f"{suite.name}: {case}, {rounds} rounds of {', '.join(entrants)}")
            for _ in range(min(1, suite.warm_up_rounds) if quick else suite.warm_up_rounds):
                for child in entrants.values():
                    child.round(case)
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in entrants}
            try:
                for _ in range(rounds):
                    for name, child in entrants.items():
                        samples[name].append(child.round(case))
                        if rounds == 1:  # each may take a minute
                            shown = [
                                f"{metric} {value:.4g}"
                                for metric, value in samples[name][0].items()
                            ]
                            say(f"{suite.name}: {case}, {name}: {', '.join(shown)}")
            finally:
                for name, metrics in samples.items():
                    records += summarize(suite, case, name, metrics) if metrics else ()
    return records


def summarize(
    suite: Suite, case: str, contender: str, samples: Sequence[Mapping[str, float]]
) -> list[Record]:
    """Return one record for each metric of the rounds of one contender in one case."""
    records = []
    for metric in samples[0]:
        values = [sample[metric] for sample in samples]
        records.append(
            Record(
                case=case,
                contender=contender,
                metric=metric,
                unit=suite.units[metric],
                median=statistics.median(values),
                min=min(values),
                max=max(values),
                runs=len(values),
            )
        )
    return records


def ratios(suite: Suite, records: Sequence[Record]) -> list[Ratio]:
    """Return each contender's number over each of ours, where both have the case and the metric,
    ours is not 0, and a rate of theirs is not 0."""
    numbers = {(r.case, r.metric, r.contender): suite.compared(r) for r in records}
    return [
        Ratio(
            r.case,
            r.metric,
            ours,
            r.contender,
            our_number / suite.compared(r)
            if r.metric in suite.rates
            else suite.compared(r) / our_number,
        )
        for r in records
        for ours in suite.ours
        if ours != r.contender and (our_number := numbers.get((r.case, r.metric, ours)))
        if suite.compared(r) or r.metric not in suite.rates
    ]


def outcomes(suite: Suite, records: Sequence[Record]) -> list[Outcome]:
    """Return each contest's outcome in each case that both sides have, ours with a cost above 0;
    and the geometric mean of its cases, if it has a target."""
    results: list[Outcome] = []
    for contest in suite.contests:
        costs: dict[str, dict[str, float]] = {}
        for r in records:
            is_contested = contest.cases is None or r.case in contest.cases
            if r.metric == contest.metric and is_contested and (number := suite.compared(r)):
                cost = 1 / number if r.metric in suite.rates else number
                costs.setdefault(r.case, {})[r.contender] = cost
        for case, by_name in costs.items():
            ours = [name for name in contest.ours if name in by_name]
            theirs = [name for name in contest.theirs if name in by_name]
            if not ours or not theirs:
                continue
            our_best, their_best = (min(names, key=by_name.__getitem__) for names in (ours, theirs))
            everyone = (*contest.ours, *contest.theirs)
            results.append(
                Outcome(
                    contest=contest.name,
                    case=case,
                    metric=contest.metric,
                    ours=our_best,
                    theirs=their_best,
                    ratio=by_name[their_best] / by_name[our_best],
                    target=contest.targets.get(case),
                    absent=tuple(name for name in everyone if name not in by_name),
                )
            )
        own = [outcome for outcome in results if outcome.contest == contest.name]
        if own and contest.mean is not None:
            mean = statistics.geometric_mean([outcome.ratio for outcome in own])
            summary = replace(own[0], case="geometric mean", ratio=mean, target=contest.mean)
            results.append(replace(summary, ours="of ours", theirs="of each", absent=()))
    return results


def table(suite: Suite, records: Sequence[Record]) -> str:
    """Return the records as text, a line each, with the ratios to ours, targets and limits beside.
    Then a line for each outcome of a contest."""
    ratio_of = {(r.case, r.metric, r.ours, r.theirs): r.ratio for r in ratios(suite, records)}
    rows = [(*_HEADER, *(f"over {ours}" for ours in suite.ours), "limit")]
    for r in records:
        keys = [(r.case, r.metric, ours, r.contender) for ours in suite.ours]
        rows.append(
            (
                r.case,
                r.contender,
                f"{r.metric} [{r.unit}]",
                *(_number(value, r.unit) for value in (r.median, r.min, r.max)),
                str(r.runs),
                *(_judged(ratio_of.get(key), suite.targets.get(key)) for key in keys),
                _within(r, suite.limits.get((r.case, r.metric, r.contender))),
            )
        )
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = ["  ".join(cells).rstrip() for cells in zip(*map(_aligned, columns), strict=True)]
    return "\n".join([*lines, *map(_outcome_line, outcomes(suite, records))])


_HEADER = ("case", "contender", "metric", "median", "min", "max", "runs")


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "bytes" else f"{value:.3f}"


def _judged(ratio: float | None, target: float | None) -> str:
    if ratio is None or target is None:
        return "" if ratio is None else f"{ratio:.2f}"
    return f"{ratio:.2f} (>= {target:.2f} {'met' if ratio >= target else 'missed'})"


def _outcome_line(outcome: Outcome) -> str:
    absent = f", without {', '.join(outcome.absent)}" if outcome.absent else ""
    return (
        f"{outcome.contest}, {outcome.case}: best {outcome.ours}, fastest peer {outcome.theirs}"
        f"{absent}: {_judged(outcome.ratio, outcome.target)}"
    )


def _within(record: Record, limit: float | None) -> str:
    if limit is None:
        return ""
    verdict = "met" if record.median <= limit else "missed"
    return f"<= {_number(limit, record.unit)} {verdict}"


def _aligned(column: Sequence[str]) -> list[str]:
    """Pad the cells to one width. They are right-aligned if the first below the header is a
    number."""
    width = max(map(len, column))
    numbers = column[1].replace(",", "").replace(".", "").isdigit()
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]


def say(text: str) -> None:
    """Print a progress line on stderr."""
    print(text, file=sys.stderr, flush=True)
