"""`--remote`: run the tests on VMs of which there is nothing but the protocol.
`--device opencl:0`: run them on VMs on that device.
`--native`: give the plain VMs, which the tests of `mlvm.core` make, the native kernels and loop.
`--op conv2d --case 3 --machine native`: of the walks over cases of ops, run these alone.
`--long`: run the tests of `long.txt`, too, as `make test LONG=1` and `.ci/run` do.

    python -m pytest --remote tests/eager tests/arena

Every VM that a test makes is then a `RemoteVM` at the other end of a socket, or one on the device,
and so is the default VM. `pytest.raises` waits for errors of what was posted. Tests that are about
what only a VM of this process has are marked `local`, with the reason, and skipped.
tests/machines/remote/test_suites.py runs these two folders so, with `--few`.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import chdir, nullcontext, suppress
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from mlvm.core.errors import MlvmError
from mlvm.core.op import OPS
from mlvm.core.vm import VM
from tests import leftovers
from tests.wired import connect_to, elsewhere, on_device, raising_late


def put_elsewhere(connect: Callable[[VM], Any]) -> None:
    """Have tests that are imported from now on find VMs at the end of that way, and so the
    default VM."""
    keep_vms = "mlvm.__main__", "mlvm.eager", "mlvm.machines.dry", "mlvm.parallel.group"
    for each in (*keep_vms, "mlvm.eager.recording.debug"):
        import_module(each)
    for place in (
        "mlvm.core.vm.VM",
        "mlvm.machines.local.LocalVM",
        "mlvm.machines.dry.DryVM",
        "mlvm.eager.tensor.context.LocalVM",
        "mlvm.eager.VM",
    ):
        module, _, name = place.rpartition(".")
        target = import_module(module)
        setattr(target, name, elsewhere(getattr(target, name), connect))


def make_native() -> None:
    """Have every VM that is no other machine's run natively."""
    from mlvm.machines.native._native import Pool
    from mlvm.machines.native.kernels import native_kernels
    from mlvm.machines.native.loop import NativeLoop

    init = VM.__init__

    @wraps(init)
    def native(vm: VM, *args: Any, **options: Any) -> None:
        if type(vm) is VM and not {"run", "kernels"} & options.keys():
            pool = Pool(2)
            options = {**options, "kernels": native_kernels(pool), "run": NativeLoop(pool)}
        init(vm, *args, **options)

    VM.__init__ = native  # type: ignore[method-assign,assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--remote", action="store_true", help="run on VMs at the end of a socket")
    parser.addoption(
        "--few", type=int, metavar="N", help="of each test's parameters, run N spread over all"
    )
    parser.addoption("--device", metavar="NAME", help="run on VMs on that device")
    parser.addoption("--native", action="store_true", help="run on native kernels and loop")
    parser.addoption("--long", action="store_true", help="run the tests of long.txt, too")
    parser.addoption("--op", metavar="NAME", help="run walks over cases, for that op alone")
    parser.addoption("--case", type=int, metavar="N", help="of the op's cases, run that one")
    parser.addoption("--machine", metavar="NAME", help="run walks on that machine alone")


def pytest_configure(config: pytest.Config) -> None:
    """Give examples all the time they take; put VMs where the options say."""
    if not config.pluginmanager.is_registered(leftovers):  # -p tests.leftovers
        config.pluginmanager.register(leftovers)
    config.addinivalue_line("markers", "local(reason): needs a VM of this process")
    config.addinivalue_line("markers", "processor(reason): needs a VM on a processor")
    config.addinivalue_line("markers", "freezes: reads values that a trace freezes")
    # An eighth of hypothesis' examples: the suite is to take five minutes on two cores. Elsewhere
    # the calls are to be seen once more, not all that they may be called with.
    examples = 4 if _is_elsewhere(config) else 12
    settings.register_profile("untimed", deadline=None, max_examples=examples)
    settings.load_profile("untimed")
    os.fsync = os.fstat  # type: ignore[assignment]  # tests cut no power
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As under nohup, or in the background of a script: the processes of tests would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--long"):
        os.environ["MLVM_TESTS_LONG"] = "1"  # `tests.brief.with_long`
    if _choices(config) and config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        config.args[:] = WALKS
        config.args_source = pytest.Config.ArgsSource.ARGS
    if config.getoption("--native"):
        make_native()
    if config.getoption("--remote"):
        put_elsewhere(connect_to)
    elif config.getoption("--device"):
        put_elsewhere(on_device(config.getoption("--device")))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One process more than cores: some tests wait for others, for sockets or for time."""
    return (yield) + (not os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", "").isdecimal())


def _choices(config: pytest.Config) -> dict[str, Any]:
    """The options given that choose among the tests of walks."""
    values = {key: config.getoption(f"--{key}") for key in ("op", "case", "machine")}
    return {key: value for key, value in values.items() if value is not None}


def _is_elsewhere(config: pytest.Config) -> bool:
    return bool(config.getoption("--remote") or config.getoption("--device"))


@pytest.fixture
def vm() -> VM:
    """A machine of one processor, with the reference kernels; or what the options put there."""
    return import_module("mlvm.core.vm").VM()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def folder_of_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all tests of a file, which is empty at first."""
    with chdir(tmp_path_factory.mktemp("folder")):
        yield Path()


@pytest.fixture(autouse=True, scope="session")
def _errors_may_come_late(pytestconfig: pytest.Config) -> Iterator[None]:
    with raising_late() if _is_elsewhere(pytestconfig) else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """Leave what lives before the tests of a file, such as other files, out of the collections of
    garbage that tests and captured functions ask for: each would look at all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_seed_before() -> None:
    """Have new VMs and the default one begin with the keys of a process without a seed, and with
    f32 as the default dtype, whatever ran before."""
    default: Any = sys.modules.get("mlvm.eager.tensor.default")
    if default is not None:
        default.set_default_dtype("float32")
    random: Any = sys.modules.get("mlvm.eager.functions.random")
    if random is not None:
        random.process.seed, random.process.alone = 0, None
        for vm in import_module("mlvm.eager.tensor.context")._default_vms:
            with suppress(MlvmError):  # a test may have closed it
                keys = random.prepare(vm)
                keys.write(random._words(0, 1))
                keys.is_seeded = False


WALKS = (
    "tests/walks",
    "tests/eager/autodiff/test_rules.py",
    "tests/eager/autodiff/test_forward.py",
)
"""The files with tests that are `crossed` with the cases of ops."""

ODD = ("1", "3", "5", "7", "9")

SLOW = (
    "test_packaging.py",
    "remote/test_suites.py",
    "fuzz/language/test_language.py",
    "bench/test_bench.py",
)
"""Files whose tests take long. They begin, or the last of them would run while all else is done."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have every other process begin with the last file. In a new checkout pytest rewrites the
    assertions of each, for seconds in all: those that begin at one end do a half for the others."""
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "")[-1:] in ODD:
        report.result = report.result[::-1]
    return report


def _unknown(chosen: dict[str, Any], crossings: list[dict[str, Any]]) -> str:
    """Say which option no walk has beside those before it, and what it may be."""
    for key, value in chosen.items():
        known = sorted({str(each[key]) for each in crossings if key in each})
        crossings = [each for each in crossings if each.get(key) == value]
        if not crossings:
            break
    expected = (key != "case" and get_close_matches(str(value), known)) or known
    return f"--{key} {value}: expected {', '.join(expected) or 'a file with walks over cases'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not str(item.path).endswith(SLOW), item.path))
    chosen = _choices(config)
    crossings = [_crossing(item) for item in items] if chosen else []
    items[:] = [item for item in items if chosen.items() <= _crossing(item).items()]
    if chosen and not items:
        raise pytest.UsageError(_unknown(chosen, crossings))
    if not config.getoption("--long"):
        _leave_out_long(config, items)
    if _is_elsewhere(config):
        _try_few_examples(items)
    limit = config.getoption("--few")
    if limit is None:
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items[:] = [
        item
        for of_test in by_test.values()
        for i, item in enumerate(of_test)
        if len(of_test) <= limit or i * limit % len(of_test) < limit
    ]


def _leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of `long.txt`. Fail where a line there matches none of a whole run."""
    text = (Path(__file__).parent / "long.txt").read_text("utf-8")
    lines = {f"tests/{line}" for line in text.splitlines() if line and line[0] != "#"}
    matches: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        keys = item.nodeid.partition("::")[0], name, item.nodeid
        for key in lines.intersection(keys):
            matches.setdefault(key, []).append(item)
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and lines - matches.keys():
        raise pytest.UsageError(f"long.txt: no tests {sorted(lines - matches.keys())}")
    long = {item for each in matches.values() for item in each}
    if len(long) < len(items):  # else all that was asked for
        config.hook.pytest_deselected(items=[*long])
        items[:] = [item for item in items if item not in long]


def _crossing(item: pytest.Item) -> dict[str, Any]:
    """Return the op, the number of the case and the machine that a test of a walk is about."""
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    if callspec is None or not isinstance(params.get("name"), str) or params["name"] not in OPS:
        return {}
    crossing = {"op": params["name"]}
    number = re.search(rf"(?:^|-){params['name']}-(\d+)(?:-|$)", callspec.id)
    if "case" in params and number:
        crossing["case"] = int(number[1])
    return crossing | {key: params[key] for key in ("machine",) if key in params}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the command that runs a failed test alone, and the place of its row in a table."""
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    if report.failed and params:
        crossing, config = _crossing(item), item.config
        keys = "device", "long", "native", "remote"
        whole = {key: value for key in keys if (value := config.getoption(key))}
        options = [f"--{k} {v}".removesuffix(" True") for k, v in (crossing | whole).items()]
        file = os.path.relpath(item.path, config.invocation_params.dir)
        test = file if crossing else file + item.nodeid[item.nodeid.index("::") :]
        command = " ".join(["python -m pytest", *options, shlex.quote(test)])
        rows = [x.place for x in params.values() if hasattr(x, "place")]
        report.sections += [("this alone", command), *[("its row", row) for row in rows]]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure immediately in a run of several processes, which may be stopped early."""
    if report.failed and hasattr(report, "node"):  # that reports of xdist have in the first process
        lines = report.longreprtext.splitlines()
        errors = [line for line in lines if line.startswith("E ")] or lines[-1:]
        reporter: Any = report.node.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        for line in (f"FAILED {report.nodeid} [{report.when}]", *errors[:8]):
            reporter.write_line(line)


def _try_few_examples(items: list[pytest.Item]) -> None:
    """Also where a test says how many examples it takes, which goes before the profile."""
    most = settings.default.max_examples  # type: ignore[union-attr]
    for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if is_hypothesis_test(test) and own is not None:
            fewer = settings(own, max_examples=min(own.max_examples, most))
            test._hypothesis_internal_use_settings = fewer


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a VM of this process, or on a processor, where there is none."""
    mark = item.get_closest_marker("local")
    if mark is not None and _is_elsewhere(item.config):
        pytest.skip(f"needs a VM of this process: {mark.kwargs['reason']}")
    mark = item.get_closest_marker("processor")
    if mark is not None and item.config.getoption("--device"):
        pytest.skip(f"needs a VM on a processor: {mark.kwargs['reason']}")
