"""A small run of the fuzz command, and that it notices what it looks for."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from importlib import import_module
from itertools import filterfalse
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.arena.arena import Arena
from mlvm.core.errors import DTypeError, MlvmError
from mlvm.core.machine.functions import Binding
from mlvm.core.program.program import Program
from mlvm.core.store import FreeStore
from mlvm.core.vm import VM
from mlvm.eager.capture.guards.guard_set import GuardSet
from mlvm.eager.runs import interpreter
from mlvm.eager.runs.diff import Difference
from mlvm.eager.runs.log import LogEnd, LogWriter
from mlvm.eager.runs.verification import Verified
from mlvm.eager.tensor import wrapper
from mlvm.input.slots import Slot, _Finalizer
from mlvm.machines.native import extension
from mlvm.machines.remote.bounded import BoundedVM
from mlvm.machines.remote.session import Session
from mlvm.onnx.bodies import BODIES
from mlvm.onnx.table import TABLE
from mlvm.step import fusion
from mlvm.step.batch_rules import BATCHING
from tests.brief import Capsys, Patch, cases, output_of, refuses, run_python, with_long
from tests.fuzz import (
    arguments,
    attributes,
    budgets,
    counts,
    debugger,
    differences,
    equal_runs,
    extremes,
    graphs,
    guards,
    interrupts,
    kills,
    kinks,
    recipes,
    recordings,
    remote,
    saved,
    tails,
    templates,
    threads,
    transformations,
    variants,
    windows,
    writers,
)
from tests.fuzz.__main__ import OTHERS, main
from tests.fuzz.machines import Machines, fuzz
from tests.fuzz.making import VALID, Case, make_case
from tests.onnx import backend
from tests.test_docstrings import public

KINDS = ("attributes", "program", "text", "bytes")
Run = Callable[..., str]
PROGRAMS = with_long(1000, 2000)
QUEUE_CALLS = ("put", "reserve", "get", "cancels", "keep", "forget", "put", "inside", "fails")


@pytest.fixture
def run(capsys: Capsys) -> Run:
    """A function that runs the command in this process and returns its output."""

    def run(*arguments: str) -> str:
        status, output = main([*arguments]), capsys.readouterr().out
        assert status == 0, output
        return output

    return run


def test_the_command_names_its_fuzzers(capsys: Capsys) -> None:
    assert main(["nothing"]) == 2
    expected = capsys.readouterr().out
    assert "neighbours" in expected
    for name in OTHERS:
        assert callable(import_module(f"tests.fuzz.{name}").main)
    assert main(["--help"]) == 0


def test_random_programs() -> None:
    output = output_of("-m", "tests.fuzz", "machines", "--programs", str(PROGRAMS))
    outcomes = re.findall(r"^ +(\d+)  (.+)$", output, re.MULTILINE)
    assert sum(int(n) for n, _ in outcomes) == PROGRAMS
    for kind in ("random program", *(f"changed {x}" for x in KINDS)):
        assert any(outcome.startswith(f"{kind}: ") for _, outcome in outcomes)
    errors = {f"{name}Error" for name in ("Program", "Shape", "DType", "Machine", "LimitExceeded")}
    assert {"ran", *errors} <= {outcome.partition(": ")[2] for _, outcome in outcomes}


@pytest.mark.skipif(extension.EXTENSION is None, reason=extension.REASON)
@cases("name, wrong", ("MAX_TERM", 3), ("CallSite.perform", lambda site, params: params))
def test_what_the_native_machine_does_otherwise_is_found(
    name: str, wrong: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(f"mlvm.machines.native.loop.{name}", wrong)
    _, failure = fuzz(2000, seed=0)
    assert failure is not None
    assert "the native machine" in failure
    again = re.search(r"tests.fuzz machines --seed 0 --first (\d+) --programs 1$", failure)
    assert again is not None
    monkeypatch.undo()
    assert fuzz(1, seed=0, first=int(again[1]))[1] is None


def test_the_programs_to_change_run() -> None:
    runs, valid = Machines(), VALID[:: with_long(4, 1)]
    for program, args in valid:
        runs.run(
            Case("valid", partial(Program, program.functions.values(), program.constants), args)
        )
    ended = runs.counts["valid: ran"] + runs.counts["valid: LimitExceededError"]
    assert ended > 0.95 * len(valid)  # some examples want other arguments


def test_a_case_is_made_again_from_its_numbers() -> None:
    for number in range(50):
        first, again = make_case(7, number), make_case(7, number)
        assert first.kind == again.kind
        if first.kind == "random program":
            assert repr(first.make().functions) == repr(again.make().functions)


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


def forgets(store: FreeStore, storage: Any) -> None:
    storage.holders -= 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is told by /proc")
def test_attacks_on_a_server(run: Run) -> None:
    *attacks, end = run("remote", "--attacks", "1").splitlines()
    assert (len(attacks), end) == (4, "remote: no fault found")


@cases("owner, name, wrong, reason",
    (Binding, "check", fails, "ZeroDivisionError"), (FreeStore, "_release", forgets, "MiB"),
    (FreeStore, "replace", fails, "ZeroDivisionError"),
)  # fmt: skip
def test_what_is_wrong_is_found_and_printed(
    owner: type, name: str, wrong: Callable[..., Any], reason: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    _, failure = fuzz(2000, seed=0)
    assert failure is not None
    assert reason in failure
    program, _, again = failure.partition("Again: python -m tests.fuzz machines --seed 0 --first ")
    assert ".func main" in program
    number = int(again.split()[0])
    assert fuzz(1, seed=0, first=number)[1] is not None
    monkeypatch.undo()
    assert fuzz(1, seed=0, first=number)[1] is None


# --- a short run of each fuzzer, and a fault that it must find ------------------------------


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="chains run in copies of this process")
NEEDED = {
    graphs: ["onnxruntime"],
    saved: ["onnx", "onnxruntime"],
    variants: ["onnx", "onnxruntime"],
}
"""Packages that fuzzers need."""


@pytest.fixture
def need(tmp_path: Path, monkeypatch: Patch) -> Callable[[Any], None]:
    """Skip the test if a fuzzer's packages are missing."""

    def need(fuzzer: Any) -> None:
        for package in NEEDED.get(fuzzer, ()):
            monkeypatch.setenv("TMPDIR", str(tmp_path))  # where onnxruntime leaves a file
            pytest.importorskip(package)

    return need


@pytest.mark.filterwarnings("ignore")  # of gradients that reach no parameter
@cases("fuzzer, numbers, least",
    (guards, (with_long(30, 400), 0, 0), {"changed": 20, "field": 50}),
    (graphs, (6, 0), {"the same": 6}),
    (saved, (40, 0), {"the same": 30}),
    (windows, (with_long(12, 1500), 0),
     {"windows are read": 1, "windows are written": 1, "windows are read, at dynamic sizes": 1}),
    (budgets, (with_long(16, 150), 0),
     {"the same bits": 1, "the same bits, and the same error": 1, "refused": 1}),
    (debugger, (with_long(9, 60), 0), {"the same bits": 1}),
    (recordings, (with_long(30, 2000), 0, 0), {"not accepted": 1}),
    (differences, (with_long(8, 40), 0, 0, with_long(20, 200)),
     {"a flipped bit: named": 1, "a changed rate: named": 1, "an exchanged batch: named": 1,
      "an op replaced by an equal one: named": 1}),
    pytest.param(templates, (with_long(100, 500), 0),
                 {"chains on 1 threads": 1, "chains on 3 threads": 1}, marks=forks),
)  # fmt: skip
def test_a_short_run_finds_no_fault(fuzzer: Any, numbers: Any, least: Any, need: Any) -> None:
    """The least number of programs of some outcomes is given."""
    need(fuzzer)
    runs, failure = fuzzer.fuzz(*numbers)
    assert failure is None, failure
    outcomes = getattr(runs, "outcomes", runs)
    assert all(outcomes[name] >= n for name, n in least.items()), outcomes


@pytest.mark.filterwarnings("ignore")
@cases("fuzzer, numbers, owner, name, wrong, text",
    (guards, (1, 0, 26), GuardSet, "_slots", lambda *_: None, "slots of .*(out of date|expected)"),
    (graphs, (1, 0, 1), TABLE, "Tanh", TABLE["Sin"], "apart by"),
    (saved, (40, 0), BODIES, "multiply", BODIES["add"], ""),
    (windows, (20, 0), fusion, "may_write", lambda call, others: True, ""),
    (debugger, (3, 0), interpreter.ExecutionState, "copy", lambda snapshot: snapshot, ""),
    (recordings, (4, 0, 0), recordings, "verify", lambda *_, **__: Verified([0], [], {}, []),
     "accepts a damaged recording"),
    (differences, (4, 0, 0, 5), differences, "diff",
     lambda *_: Difference(7, "op", "the first op"), "(?s)(not\n.*){4}"),
    (threads, (20, 0), Arena, "_give_back", lambda arena: None, "the VM still holds"),
    (threads, (20, 0), Arena, "mark", fails, "ZeroDivisionError"),
    (threads, (20, 0), VM, "read", lambda vm, handle: np.zeros(1, np.int64), r"holds \[0\]"),
    (interrupts, (400, 0, 0, "free slots"), _Finalizer, "__del__", lambda finalizer: None,
     "free slots, bytes and tensors"),
    (interrupts, (400, 0, 0, "free slots"), Slot, "sweep", lambda slot: None,
     "free slots, bytes and tensors"),
    (remote, (500, 0), VM, "swap", fails, "class ZeroDivisionError"),
    (remote, (500, 0), Session, "close", fails, "the log has .*ZeroDivisionError"),
    (remote, (500, 0), BoundedVM, "close", lambda vm: vm.alloc_storage(8),
     "the log has .*'left': 8"),
)  # fmt: skip
def test_a_fault_is_found(
    fuzzer: Any,
    numbers: Any,
    owner: Any,
    name: str,
    wrong: Any,
    text: str,
    need: Any,
    monkeypatch: Patch,
) -> None:
    need(fuzzer)
    put: Any = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    put(owner, name, wrong)
    *_, failure = fuzzer.fuzz(*numbers)
    assert failure is not None
    assert re.search(text, failure), failure


# --- servers ------------------------------------------------------------------------------


# The watchdog's exception may come up in a callback of a weak reference or of the collector, where
# Python only reports it; the watchdog raises it again.
IS_RAISED_AGAIN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@IS_RAISED_AGAIN
def test_messages_and_killed_clients(run: Run) -> None:
    output = run("remote", "--messages", with_long("500", "2000"), "--killed", with_long("5", "20"))
    outcomes = re.findall(r"^ +[1-9]\d*  (.+)$", output, re.MULTILINE)
    assert {"answered", "EncodingError", "HandleError"} <= set(outcomes)


# --- threads ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::mlvm.eager.RecompilationWarning")
def test_a_second_of_threads() -> None:
    """Or more, where a busy machine does not come to each operation in so short a time."""
    missing = {"compute", "read", "update", "share", "keep", "rewind"}
    for seconds in (with_long("1", "2"), "8", "30"):
        output = output_of("-m", "tests.fuzz", "threads", "--seconds", seconds)
        assert re.search(r"^[1-9]\d* rounds, [\d,]+ operations$", output, re.MULTILINE)
        missing -= set(re.findall(r"^ +[1-9]\d*  (\w+)$", output, re.MULTILINE))
        if not missing:
            break
    assert not missing


# --- interrupts ---------------------------------------------------------------------------


def test_two_hundred_interrupts(run: Run) -> None:
    output = run("interrupts", "--programs", "200")
    kinds = {*re.findall(r"^ +[1-9]\d*  (.+)$", output, re.MULTILINE)}
    assert kinds >= {"queue", "pipeline", "group of 2"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@cases("trial, folder",
    (partial(interrupts.queue, QUEUE_CALLS), interrupts.INPUT),
    (partial(interrupts.queue, QUEUE_CALLS, single_threaded=True), interrupts.INPUT),
    (partial(interrupts.queue, ["put", "end", "get", "get"]), interrupts.INPUT),
    (partial(interrupts.queue, ["put", "cancel", "get", "get"]), interrupts.INPUT),
    *[(partial(interrupts.pipeline, ["get", "close"], workers, count), interrupts.INPUT)
      for workers in (0, 2) for count in (0, 1)],
    (interrupts.end_of_group, interrupts.PARALLEL),
    ids=[*("queue", "queue of one thread", "queue that ends", "queue that is cancelled"),
         *(f"pipeline, {workers} workers, after {n}" for workers in (0, 2) for n in (0, 1)),
         "end of a group"],
)  # fmt: skip
def test_an_interrupt_before_any_line(trial: interrupts.Trial, folder: str) -> None:
    assert interrupts.interrupt_each(trial, folder, with_long(3, 1)) > 20


def test_random_transformations(monkeypatch: Patch) -> None:
    """Captured, lane by lane, and beside differences; a wrong rule and a wrong tangent are found.
    Under autocast the states of loops, into which products go, keep their types."""
    assert transformations.fuzz(2, 0, 50, autocast=True)[1] is None
    assert transformations.fuzz(with_long(2, 12), 0, 21, slopes=True)[1] is None
    jvp, rule = ml.jvp, BATCHING["sum"]

    def doubled(*args: Any) -> Any:
        value, tangents = jvp(*args)
        return value, ml.tree.map(lambda t: t * 2.0, tangents)

    with monkeypatch.context() as patch:
        patch.setattr(ml, "jvp", doubled)
        failures = [transformations.fuzz(1, 0, 21, slopes=True)[1]]
    doubled_rule: Any = lambda *args: cast(Any, rule(*args)) * 2.0  # noqa: E731
    monkeypatch.setitem(BATCHING, "sum", doubled_rule)
    failures.append(transformations.fuzz(1, 0, 21, slopes=True)[1])
    for failure in failures:
        assert re.match(r"--first 21: .*; grad, vmap, vmap\n", failure or "")


# --- budgets ------------------------------------------------------------------------------


@cases("behind", False, True)
def test_a_byte_outside_of_scratch_memory_is_noticed(behind: bool) -> None:
    x = ml.ones(1000)
    step: Any = ml.capture(lambda x: ml.sum(ml.sort(x)))
    with budgets.guarded() as written:
        step(x)
        vm = x.device
        scratch = step._scratch.of(vm)
        at = budgets.FIELD + scratch.nbytes if behind else budgets.FIELD - 1
        byte = vm.tensor_from_storage(scratch.storage, ml.TensorType("u8", (1,)), at)
        vm.write(byte, np.zeros(1, np.uint8))
    assert len(written) == 1


# --- templates ----------------------------------------------------------------------------


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes once for arguments of equal types and values."""
    results: dict[Any, Any] = {}

    @wraps(function)
    def remember(*args: Any, **options: Any) -> Any:
        key = templates.shown(args), templates.shown(options)
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return remember


@forks
def test_a_wrong_cache_is_found_and_its_chain_cut_down(monkeypatch: Patch) -> None:
    """A draw that is replayed with its first key."""
    monkeypatch.setattr(ml.random, "normal", remembered(ml.random.normal))
    _, failure = templates.fuzz(with_long(100, 500), seed=0)
    assert failure is not None
    *program, expected, got, again = failure.splitlines()
    assert 1 <= sum("normal(" in line for line in program) <= 4
    assert len(program) <= 8
    assert expected.partition(": ")[2] != got.partition(":    ")[2]
    number = re.fullmatch(r"Again: python -m tests.fuzz templates --seed 0 --first (\d+) .*", again)
    assert number is not None
    monkeypatch.undo()
    assert templates.fuzz(1, 0, int(number[1]))[1] is None


# --- values -----------------------------------------------------------------------------------


def test_extreme_values_and_what_is_wrong_at_them() -> None:
    names = ["softplus", "i0", "gelu", "hypot", "interp", "median", "lerp", "erf", "atan", "square"]
    found = [*extremes.findings(names[: with_long(6, 10)], ["f32"])]
    assert [*map(str, filterfalse(extremes.is_excepted, found))] == []
    found = [*extremes.precision("naive", lambda x: ml.log(ml.exp(x) + 1.0), 1, "f32")]
    assert any(each.order.startswith("value") for each in found)
    found = [*extremes.limits("naive", lambda x: x / (ml.abs(x) + 1.0), 1, "f32")]
    assert any(np.isnan(each.got) for each in found)


def test_a_fuzzer_of_functions_refuses_an_unknown_name(capsys: Capsys) -> None:
    for fuzzer in (extremes, kinks, counts):
        refuses(SystemExit, "2", fuzzer.main, ["nosuch"])
        assert "unknown: nosuch; known: " in capsys.readouterr().err


def test_derivatives_at_kinks_and_what_is_wrong_there(monkeypatch: Patch) -> None:
    names = ["softplus", "log_sigmoid", "mish", "linalg.vector_norm", "std", "logaddexp"]
    names = names[: with_long(5, 6)]
    assert [*kinks.findings(names)] == []

    def naive(t: ml.Tensor) -> ml.Tensor:
        return ml.maximum(t, 0.0) + ml.log1p(ml.exp(-ml.abs(t)))

    monkeypatch.setattr(kinks, "lines", lambda names: [("naive at 0 along 1", naive)])
    [finding] = kinks.findings([])
    assert "derivative 2 is -0, expected 0.25" in finding


def test_counts_in_half_precision_and_what_overflows(monkeypatch: Patch) -> None:
    names = ["mean by axis", "var by axis", "segment_max", "avg_pool1d", "max_pool1d", "at.max"]
    assert [*counts.findings(names, ("f16",))] == []
    naive = {"naive": lambda x: ml.sum(x / ml.full((), float(x.size), dtype=x.dtype))}
    monkeypatch.setattr(counts, "CALLS", naive)
    assert any("gradient is 0" in finding for finding in counts.findings(["naive"], ("f16",)))


@cases("name", *tails.QUANTILES)
def test_tails_of_distributions(name: str) -> None:
    low, high = tails.QUANTILES[name]
    assert [*tails.findings(name, 1 << 20, 0, [(low, 1e-3)], [(high, 1e-3)])] == []
    assert [*tails.findings(name, 1 << 20, 0, [(low, 2e-3)], [(high, 5e-4)])] != []


def test_the_rarest_draws_are_there() -> None:
    """A uniform number of 24 bits near 1 makes no Gumbel number above 16.64."""
    assert ml.max(ml.random.gumbel(1 << 21, key=ml.random.key(34))).item() > 16.7


def test_a_writer_that_fails_leaves_the_older_file() -> None:
    few = ["save", "onnx.save external", "Captured.save", "ScalarLog", "VM.trace", "mlvm run"]
    names = with_long(few, [*writers.WRITERS])
    if sys.platform == "win32":
        pytest.skip("needs limits of a process's files")
    words = ["-m", "tests.fuzz", "writers", "--cuts", "1", "--only"]
    run = run_python(*words, *names, "--no-kills", MLVM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    run = run_python(*words, *with_long(["save"], names), MLVM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_file_written_in_place_is_noticed(monkeypatch: Patch) -> None:
    in_place = writers.Writer(lambda folder, n: (folder / "f").write_text("line\n" * n))
    monkeypatch.setitem(writers.WRITERS, "write_file", in_place)
    assert writers.main(["--only", "write_file", "--cuts", "2", "--no-kills"]) == 1


def test_every_attribute_of_an_onnx_op_is_read_refused_or_harmless(monkeypatch: Patch) -> None:
    assert attributes.unread() == []
    for name in attributes.HARMLESS:
        if not name.startswith("*."):
            assert any(f"{op}.{x}" == name for op, xs, _ in attributes.frozen() for x in xs)
    assert len([*attributes.frozen()]) > 200

    def blind(at: Any, x: Any, axes: Any = None) -> Any:
        return x if at.get("keepdims") else None

    monkeypatch.setitem(TABLE, "ReduceMax", TABLE["ReduceMax"]._replace(run=blind))
    expected = ["ReduceMax.noop_with_empty_axes", "ReduceMax(axes)"]
    assert attributes.unread() == expected


def test_a_variant_of_an_onnx_test_that_differs_is_noticed(need: Any, monkeypatch: Patch) -> None:
    need(variants)
    case = backend.frozen()["test_reduce_l1_do_not_keepdims_example"]
    assert variants.differences("ReduceL1", case) == []
    wrong = TABLE["ReduceL1"]._replace(run=lambda at, x, axes=None: x)
    monkeypatch.setitem(TABLE, "ReduceL1", wrong)
    assert variants.differences("ReduceL1", case)


def test_wrong_arguments_raise_typed_errors_that_name_the_function() -> None:
    counts, found = arguments.faults(every=with_long(401, 11))
    assert found == []
    assert counts.total() > 100


def test_arguments_of_a_wrong_number_or_name_raise_typed_errors() -> None:
    unmade = {ml.Captured, ml.Measured, ml.Tensor, ml.optim.Optimizer, ml.parallel.AnyGroup}
    for value in {*public().values()} - unmade - {ml.Dataset, ml.Transform, ml.host_call}:
        own = vars(value).get("__init__") if inspect.isclass(value) else value
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        if inspect.isfunction(own) and not is_error:
            kinds = {each.kind for each in inspect.signature(value).parameters.values()}
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                refuses(MlvmError, "", value, *[object()] * 20)
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                refuses(MlvmError, "", value, no_such_argument=1)


def test_every_dtype_argument_refuses_the_name_i8(folder: Path, monkeypatch: Patch) -> None:
    """But those of quantised numbers, which count bits."""
    monkeypatch.setattr(arguments, "WRONG", {"i8": lambda: "i8"})
    tried = set[str]()
    for call in arguments.right_calls():
        for text, attempt in arguments.attempts(call):
            if "(dtype=" in text and "quantize" not in text:
                tried.add(call.name)
                refuses(DTypeError, "two meanings|expected a float dtype", attempt)
    assert len(tried) > 70


def test_a_raw_error_and_an_error_without_a_name_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(wrapper, "refusal", lambda *_: None)
    _, found = arguments.faults("nan_to_num")
    assert any("raises TypeError: float() argument" in fault for fault in found)
    monkeypatch.undo()
    monkeypatch.setattr(wrapper, "named", lambda *_: None)
    _, found = arguments.faults("jvp")
    assert any("does not name the function" in fault for fault in found)


def test_recipes_are_as_the_functions_that_they_replace(run: Run) -> None:
    pytest.importorskip("torch")
    assert "recipes are as the functions" in run("recipes")


def test_a_wrong_recipe_is_found(monkeypatch: Patch) -> None:
    pytest.importorskip("torch")
    wrong = recipes.written() | {"threshold": ("ml.where(x > t, x, value)", "")}
    monkeypatch.setattr(recipes, "written", lambda: wrong)
    [threshold] = [each for each in recipes.recipes() if each.name == "threshold"]
    assert [*recipes.faults_of(threshold)] != []


@forks
def test_killed_recordings_have_all_steps_that_returned(monkeypatch: Patch) -> None:
    outcomes, failure = kills.fuzz(with_long(4, 60), 0, 0)
    assert failure is None
    assert outcomes.total() == with_long(4, 60)
    held: dict[int, list[Any]] = {}
    after = LogWriter.after

    def late(writer: LogWriter, end: LogEnd, values: Iterable[Any]) -> LogEnd:
        """Write frames only with the next ones."""
        before, held[id(writer)] = held.get(id(writer), []), [*values]
        return after(writer, end, before)

    monkeypatch.setattr(LogWriter, "after", late)
    assert "steps have returned" in str(kills.fuzz(4, 0, 0)[1])


def test_equal_runs_raise_no_alarm(monkeypatch: Patch) -> None:
    names = [*equal_runs.VARIANTS]
    for number in with_long([0, names.index("2 members")], range(20)):
        assert equal_runs.fuzz(1, 0, number)[1] is None
    wrong = partial(equal_runs.in_vm, kind="eager")
    monkeypatch.setitem(equal_runs.VARIANTS, names[0], lambda path, seed: wrong(path, seed + 1))
    assert "a false alarm" in str(equal_runs.fuzz(1, 0, 0)[1])
