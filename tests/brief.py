"""Short forms of common test code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import pytest

from mlvm.core.machine.frame import PythonFunction

ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout."""

IGNORED: Final = (ROOT / ".gitignore").read_text("utf-8").split()
"""Patterns of files that git ignores."""

P = ParamSpec("P")
E = TypeVar("E", bound=BaseException)

Capsys: TypeAlias = pytest.CaptureFixture[str]
Patch: TypeAlias = pytest.MonkeyPatch
Fn: TypeAlias = Callable[..., Any]


def refuses(
    error: type[E] | tuple[type[E], ...],
    text: str,
    call: Callable[P, object],
    /,
    *args: P.args,
    **options: P.kwargs,
) -> E:
    """The error that the call raises. Its text matches the pattern, as in `pytest.raises`; "" is
    any."""
    with pytest.raises(error, match=text or None) as caught:
        call(*args, **options)
    try:
        return caught.value
    finally:
        del caught  # or the error would hold itself, by its traceback


def copied(source: Path, to: Path, *patterns: str) -> Path:
    """Copy a folder without files that match patterns like those of `.gitignore`; return `to`."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = [each for each in patterns if each[0] != "/" or Path(folder) == source]
        return shutil.ignore_patterns(*[each.strip("/") for each in here])(folder, names)

    return shutil.copytree(source, to, ignore=ignored)


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python, which imports this checkout, or a build that PYTHONPATH names, to its end, with
    these variables of environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Started(subprocess.Popen[str]):
    """A process that ends where its block fails, which would wait for it otherwise."""

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


def start_python(
    *arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start Python, which imports what that of `run_python` does, its outputs in pipes; with these
    variables of environment, and options of `Popen`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, *arguments]
    return Started(command, cwd=cwd, env=_environment(env or {}), text=True, **options)


def line_of(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that the process prints, and return it."""
    assert process.stdout is not None
    return process.stdout.readline()


def line_with(end: str, file: str) -> str:
    """The place, as errors name it, of the one line of a file that ends so."""
    lines = Path(file).read_text("utf-8").splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(end)]
    return f"{Path(file).name}:{number}"


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, **variables}


def output_of(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = 300, **variables: str
) -> str:
    """Return the output of `run_python`, which must end well."""
    done = run_python(*arguments, cwd=cwd, timeout=timeout, **variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def require_passing(*arguments: str | Path, timeout: float = 840, of_test: float = 420) -> None:
    """Run pytest in another process, all tests of which must pass. A test or a run that hangs fails
    with its output, before the `faulthandler_timeout` of pyproject.toml ends this process."""
    ends = f"faulthandler_timeout={of_test}", "faulthandler_exit_on_timeout=true"
    options = ["-q", "-p", "no:cacheprovider", *[part for end in ends for part in ("-o", end)]]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    with TemporaryFile("w+", encoding="utf-8") as output:  # processes left over may hold a pipe
        end: object = f"still runs after {timeout} s"
        with suppress(subprocess.TimeoutExpired):
            how: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            end = subprocess.run(
                command, cwd=ROOT, env=_environment({}), timeout=timeout, **how
            ).returncode
        output.seek(0)
        assert end == 0, f"{end}: {output.read()[-8000:]}"


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Trace memory of Python and numpy in the block; the function returns the most there has been
    at once."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Before:
    """An instrument that hears of each call before it runs."""

    def __init__(self, hears: Callable[[str, Sequence[Any]], object]) -> None:
        self.hears = hears

    def before(self, name: str, params: Sequence[Any], attributes: Any) -> None:
        self.hears(name, params)

    def after(self, *_: Any) -> None:
        """Nothing to do."""


def cases(names: str, *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """A decorator: the test runs with each row for the names, as by `pytest.mark.parametrize`."""
    return pytest.mark.parametrize(names, rows, ids=ids)


def count_calls(patch: Patch, owner: Any, *names: str) -> Counter[str]:
    """Count the calls of these functions or methods, by name, from now on."""
    counts = Counter[str]()

    def counted(name: str, function: Fn) -> Fn:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return call

    for name in names:
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return counts


def with_long(quick: Any, whole: Any) -> Any:
    """Return `whole` in a run with `--long`, `quick` in any other."""
    return whole if os.environ.get("MLVM_TESTS_LONG") else quick


def replace_op(vm: Any, name: str, fn: Callable[..., Any], nresults: int | None = None) -> None:
    """Put a host function in the place of an op, which `vm.register` refuses."""
    vm.register_callees({name: PythonFunction(name, fn, None, nresults)})
