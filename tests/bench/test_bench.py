"""The benchmark harness, and one quick run of each benchmark as a user starts it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import calls, dispatch, dynamic, inference, machine, memory, mixer, queue, scaling
from bench.dynamic_sizes import QUICK
from bench.environment import has_avx512
from bench.harness import (
    ONLY_AVX2,
    SIMD,
    BenchError,
    Child,
    Contest,
    Record,
    Suite,
    child_environment,
    if_native,
    installed_version,
    outcomes,
    ratios,
    run,
    table,
)
from mlvm.machines.native import extension
from tests.bench.suite import SUITE, counted
from tests.brief import Capsys, Patch, cases, output_of, refuses


def records_of(**medians: float) -> list[Record]:
    """A record of each contender's cost, all of whose rounds were the same."""
    return [
        Record("count", name, "cost", "s", median=median, min=median, max=median, runs=1)
        for name, median in medians.items()
    ]


def only(*names: str) -> Suite:
    """The suite with these contenders alone."""
    chosen = tuple(each for each in SUITE.contenders if each.name in names)
    assert len(chosen) == len(names)
    return dataclasses.replace(SUITE, contenders=chosen)


def test_a_record_summarizes_the_rounds_after_the_warm_up() -> None:
    assert run(only("ours")) == [
        Record("count", "ours", "cost", "s", median=3, min=1, max=5, runs=5)
    ]


def test_a_ratio_is_theirs_over_ours_where_both_have_the_case(capsys: Capsys) -> None:
    suite = only("ours", "theirs", "absent")
    records = run(suite, quick=True)
    assert {record.contender for record in records} == {"ours", "theirs"}
    assert {record.runs for record in records} == {SUITE.quick_rounds}
    assert "absent is not installed, skipped" in capsys.readouterr().err
    (ratio,) = ratios(suite, records)
    assert (ratio.case, ratio.metric, ratio.ours, ratio.theirs) == (
        "count",
        "cost",
        "ours",
        "theirs",
    )
    assert ratio.ratio == 8 / 1.5


def test_rounds_are_interleaved() -> None:
    first, second = run(only("first clock", "second clock"))
    assert first.min < second.min < first.max < second.max


def test_a_contender_runs_with_its_threads_and_the_kernels_that_libraries_pick(
    monkeypatch: Patch,
) -> None:
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MLVM_NATIVE", "MLVM_SIMD"):
        monkeypatch.setenv(name, "0")
    one, two = run(only("one thread", "two threads"))
    assert (one.median, two.median) == (1, 2)


def test_contenders_are_kept_to_avx2(monkeypatch: Patch) -> None:
    monkeypatch.setenv(SIMD, "avx2")
    assert not has_avx512()
    assert child_environment(2).items() >= {**ONLY_AVX2, "OPENBLAS_NUM_THREADS": "2"}.items()


@cases(
    "name, message",
    ("crashes", "suite: crashes ended with status 7 while timing 'count'"),
    ("crashes early", "suite: crashes early ended with status 8 while preparing"),
    ("raises", "suite: raises failed while timing 'count': ValueError: no such luck"),
)
def test_a_contender_that_fails_is_an_error(name: str, message: str) -> None:
    caught = refuses(BenchError, "", run, only("ours", name))
    assert str(caught) == message


def test_a_contender_that_hangs_is_an_error_after_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(BenchError, match="hangs gave no answer for 2 s while timing 'count'"):
        run(dataclasses.replace(only("hangs"), timeout=2))
    assert time.monotonic() - start < 60


def test_without_native_kernels_a_contender_of_threads_is_skipped(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    prepare = if_native(counted)
    monkeypatch.setenv("MLVM_NATIVE", "0")
    assert prepare(True) == {}
    assert "a VM has one thread, skipped: numpy (" in capsys.readouterr().err
    monkeypatch.delenv("MLVM_NATIVE")
    if extension.EXTENSION is not None:
        assert list(prepare(True)) == ["count"]


@cases("options, medians, expected",
    ({}, {"ours": 0.0, "theirs": 1.0}, {}),
    (
        {"ours": ("a", "b")}, {"a": 1.0, "b": 2.0, "c": 6.0},
        {("a", "b"): 2.0, ("b", "a"): 0.5, ("a", "c"): 6.0, ("b", "c"): 3.0},
    ),
    (
        {"rates": frozenset({"cost"})}, {"ours": 6.0, "theirs": 4.0}, {("ours", "theirs"): 1.5},
    ),
    ({"rates": frozenset({"cost"})}, {"ours": 6.0, "theirs": 0.0}, {}),
    ids=[
        "nothing beside a cost of 0", "all beside each of ours", "the larger rate is better",
        "nothing beside a rate of 0",
    ],
)  # fmt: skip
def test_ratios(options: Any, medians: Any, expected: Any) -> None:
    result = ratios(dataclasses.replace(SUITE, **options), records_of(**medians))
    assert {(each.ours, each.theirs): each.ratio for each in result} == expected


def test_the_table_has_ratio_target_and_limit_beside_the_medians() -> None:
    lines = table(only("ours", "theirs"), records_of(ours=2.0, theirs=5.0)).splitlines()
    header, our_line, their_line = (line.split()[-4:] for line in lines)
    assert header == ["runs", "over", "ours", "limit"]
    assert our_line == ["1", "<=", "2.000", "met"]
    assert their_line == ["2.50", "(>=", "3.00", "missed)"]


def contested(rate: bool = False, **medians: float) -> tuple[Suite, list[Record]]:
    """A suite in which a and b contest with c and d, and a record of each one's cost or rate."""
    contest = Contest("pairs", "cost", ("a", "b"), ("c", "d"), {"count": 2.0})
    rates = frozenset({"cost"} if rate else ())
    return dataclasses.replace(SUITE, contests=(contest,), rates=rates), records_of(**medians)


def test_a_contest_is_between_the_best_of_either_side() -> None:
    (outcome,) = outcomes(*contested(a=3.0, b=2.0, c=5.0, d=9.0))
    assert (outcome.case, outcome.ours, outcome.theirs) == ("count", "b", "c")
    assert (outcome.ratio, outcome.target, outcome.absent) == (2.5, 2.0, ())
    (outcome,) = outcomes(*contested(rate=True, a=3.0, b=2.0, c=5.0, d=9.0))
    assert (outcome.ours, outcome.theirs) == ("a", "d")
    assert outcome.ratio == pytest.approx(1 / 3)


def test_a_contest_names_who_was_absent_and_needs_one_of_either_side() -> None:
    suite, records = contested(b=2.0, c=3.0)
    (outcome,) = outcomes(suite, records)
    assert (outcome.ratio, outcome.absent) == (1.5, ("a", "d"))
    line = table(suite, records).splitlines()[-1]
    assert line == "pairs, count: best b, fastest peer c, without a, d: 1.50 (>= 2.00 missed)"
    assert outcomes(*contested(a=2.0, b=1.0)) == outcomes(*contested(c=1.0)) == []
    assert outcomes(*contested(a=0.0, c=1.0)) == []


def test_a_contest_has_a_geometric_mean_where_one_is_asked_for() -> None:
    suite, records = contested(a=2.0, c=4.0)
    records += [dataclasses.replace(record, case="again") for record in contested(a=1.0, c=8.0)[1]]
    contests = (dataclasses.replace(suite.contests[0], mean=5.0),)
    *_, outcome = outcomes(dataclasses.replace(suite, contests=contests), records)
    assert (outcome.case, outcome.target) == ("geometric mean", 5.0)
    assert outcome.ratio == pytest.approx(4.0)


def test_the_table_writes_bytes_as_whole_numbers() -> None:
    record = Record("count", "theirs", "cost", "bytes", median=12345, min=0, max=2e9, runs=1)
    line = table(SUITE, [record]).splitlines()[1]
    assert line.split()[-4:] == ["12,345", "0", "2,000,000,000", "1"]


def test_a_failing_benchmark_exits_with_1(monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(command, "SUITES", {"dispatch": SUITE.module})
    monkeypatch.setattr(command, "run", lambda _, **more: run(only("crashes early"), **more))
    monkeypatch.setattr(sys, "argv", ["bench", "dispatch"])
    assert command.main() == 1
    assert "error: suite: crashes early ended with status 8" in capsys.readouterr().err


def test_where_nothing_was_measured_there_is_no_table(monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(command, "SUITES", {"gpu": "bench.gpu"})
    monkeypatch.setattr(command, "run", lambda suite, quick, records, only: records)
    monkeypatch.setattr(sys, "argv", ["bench", "gpu"])
    assert command.main() == 0
    assert "contender " not in capsys.readouterr().out


@cases("error, status", (KeyboardInterrupt(), 130), (BenchError("it crashed"), 1))
def test_what_was_measured_till_then_is_kept(
    error: BaseException,
    status: int,
    monkeypatch: Patch,
    capsys: Capsys,
    tmp_path: Path,
) -> None:
    rounds = 0
    timed = Child.round

    def round(self: Child, case: str) -> dict[str, float]:
        nonlocal rounds
        rounds += 1
        if rounds > 1 + 3:  # of warming up, and of the five
            raise error
        return timed(self, case)

    monkeypatch.setattr(Child, "round", round)
    monkeypatch.setattr(command, "SUITES", {"dispatch": SUITE.module})
    monkeypatch.setattr(command, "run", lambda _, **options: run(only("ours"), **options))
    file = tmp_path / "measured.json"
    monkeypatch.setattr(sys, "argv", ["bench", "dispatch", "--json", str(file)])
    assert command.main() == status
    assert "count  ours" in capsys.readouterr().out
    [record] = json.loads(file.read_text())["records"]
    assert (record["median"], record["runs"]) == (2, 3)


@cases("arguments", [], ["nonsense"], ["dispatch", "--json", "/no/such/folder/x.json"])
def test_bad_usage_exits_with_2(monkeypatch: Patch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    caught = refuses(SystemExit, "", command.main)
    assert caught.code == 2


def measured(name: str, folder: Path) -> Any:
    """Run a benchmark as a user does; return its report, and what it printed."""
    file = folder / "measured.json"
    printed = output_of("-m", "bench", name, "--quick", "--json", file)
    report: dict[str, Any] = json.loads(file.read_text())
    check_report(report)
    return report, printed


def test_dispatch(tmp_path: Path) -> None:
    report, printed = measured("dispatch", tmp_path)
    assert report["ratios"]
    assert {(r["case"], r["contender"], r["metric"]) for r in report["records"]} >= {
        ("add", "numpy", "us_per_op"),
        ("add", "mlvm", "us_per_op"),
        ("add", "mlvm", "kernel_us"),
        ("add", "mlvm", "launch_us"),
        ("add_taped", "mlvm", "us_per_op"),
        ("add_backward", "mlvm", "us_per_op"),
    }
    assert all(f"{r['median']:.3f}" in printed for r in report["records"])


def test_memory(tmp_path: Path) -> None:
    report, _ = measured("memory", tmp_path)
    for contender in ("mlvm-eager", "mlvm-replay"):
        medians = {
            r["metric"]: r["median"] for r in report["records"] if r["contender"] == contender
        }
        assert medians.keys() == memory.SUITE.units.keys()
        assert medians["bytes_after_warmup"] == 0
        assert medians["lower_bound_bytes"] <= medians["planned_bytes"]
        assert medians["lower_bound_bytes"] <= medians["high_water_bytes"]
        assert medians["high_water_bytes"] < medians["peak_over_import_bytes"]


@cases("suite, packages, but, results",
    (calls.SUITE, "mlvm", "", {(c, "us_per_call") for c in ("add", "tree", "momentum", "adamw")}),
    (
        mixer.SUITE, "mlvm numpy", "mlvm-bf16 mlvm-bf16-2t mlvm-autocast-2t matmuls-alone-2t",
        {("tiny", "step_ms")},
    ),
    (inference.SUITE, "mlvm torch", "", {("tiny batch 1", "pass_ms")}),
    (dynamic.SUITE, "mlvm", "", {(case, "us_per_token") for case in QUICK}),
    (
        queue.SUITE, "mlvm numpy", "memcpy",
        {("digits", "batches_per_s"), *product(queue.ELEMENTS, ("elements_per_s", "gb_per_s"))},
    ),
    (
        scaling.SUITE, "mlvm threadpoolctl", "mlvm-eager mlvm-eager-2vm all_reduce all_reduce-2p",
        {("tiny strong", "image_ms"), ("tiny weak", "image_ms")},
    ),
    (
        scaling.SUITE, "threadpoolctl numpy", "mlvm-eager-2vm mlvm-replay-2vm mlvm-replay-2p",
        {("all_reduce 64 MiB", "gib_ms")},
    ),
    ids=["calls", "mixer", "inference", "dynamic", "queue", "scaling", "all_reduce"],
)  # fmt: skip
def test_a_quick_run(suite: Suite, packages: str, but: str, results: Any) -> None:
    """`but` are those that run as others do."""
    chosen = [c for c in suite.contenders if c.package in packages.split()]
    chosen = [c for c in chosen if c.name not in but.split()]
    records = run(dataclasses.replace(suite, contenders=tuple(chosen)), quick=True)
    names = {c.name for c in chosen if installed_version(c.package)}
    if extension.EXTENSION is None:
        names -= {"mlvm-replay-2t", "mlvm-2t"}
    expected = {(*result, name) for result in results for name in names}
    assert {(r.case, r.metric, r.contender) for r in records} == expected


@cases(
    "suite",
    calls.SUITE,
    dispatch.SUITE,
    dynamic.SUITE,
    inference.SUITE,
    machine.SUITE,
    mixer.SUITE,
    scaling.SUITE,
)
def test_targets_and_limits_are_for_contenders_of_the_suite(suite: Suite) -> None:
    names = {contender.name for contender in suite.contenders}
    assert names.issuperset(suite.ours)
    for _, metric, ours, theirs in suite.targets:
        assert {ours, theirs} <= names
        assert ours in suite.ours
        assert metric in suite.units
    for _, metric, contender in suite.limits:
        assert contender in names
        assert metric in suite.units
    for contest in suite.contests:
        assert names.issuperset((*contest.ours, *contest.theirs))
        assert contest.metric in suite.units


def check_report(report: dict[str, Any]) -> None:
    """Check the form of a benchmark's JSON."""
    assert report.keys() == {"benchmark", "environment", "records", "ratios", "contests"}
    assert report["environment"].keys() == {
        "cpu",
        "cores",
        "load",
        "platform",
        "python",
        "numpy",
        "blas",
        "kernels",
        "contenders",
        "threads",
    }
    medians = {}
    for record in report["records"]:
        assert record.keys() == {f.name for f in dataclasses.fields(Record)}
        assert record["min"] <= record["median"] <= record["max"]
        assert record["runs"] >= 1
        medians[record["case"], record["metric"], record["contender"]] = record["median"]
    for ratio in report["ratios"]:
        assert ratio.keys() == {"case", "metric", "ours", "theirs", "ratio"}
        case, metric = ratio["case"], ratio["metric"]
        theirs, ours = medians[case, metric, ratio["theirs"]], medians[case, metric, ratio["ours"]]
        assert ratio["ratio"] == pytest.approx(theirs / ours)
