"""Plugin of pytest: a run of tests fails if it leaves a process, shared memory or a file behind.

The run has a separate folder for temporary files, named in the environment of its processes, so
that runs beside it and their processes are not mistaken for its own. Sockets are files of that
folder, or end with their process. `pytest -p tests.leftovers PATH` holds other tests to it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PATIENCE: Final = 3.0
"""Seconds for processes that have been told to end."""

_RUN: Final = "MLVM_TEST_RUN"
_OF_PYTHON: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes of the standard library, which end with the process that began them."""

_UNTIL_EXIT: Final = ("mlvm-tests-", "pymp-")
"""Folders of test modules and of multiprocessing, which Python removes when it exits."""

_SHARED: Final = Path("/dev/shm")


def processes_of(run: str) -> dict[int, str]:
    """Return the command of each process of the run but this one, by its id."""
    marked = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # another user's, or ended
        values = [each for each in environment if each.startswith(f"{_RUN}={run}".encode())]
        of_python = parent == os.getpid() and any(name in command for name in _OF_PYTHON)
        if values and command and not of_python and int(folder.name) != os.getpid():
            marked[int(folder.name)] = command.strip()
    return marked


def _unmapped() -> set[str]:
    """Return the names of shared memory that no process has mapped."""
    if not _SHARED.is_dir():
        return set()
    names = {each.name for each in _SHARED.iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text("utf-8", "replace")
        except OSError:
            continue
        names = {name for name in names if f"{_SHARED}/{name}" not in text}
    return names


def _untracked() -> set[str]:
    """Return the files of the checkout that git neither tracks nor ignores."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return set()
    return set(done.stdout.splitlines())


class Leftovers:
    """The state before a run, and the differences after it."""

    def __init__(self) -> None:
        self.shared, self.untracked = _unmapped(), _untracked()
        # Pytest keeps the folders of its last three runs, and tests of other plugins their sockets.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self.folder = tempfile.mkdtemp(prefix="mlvm-")
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        os.environ["TMPDIR"] = os.environ[_RUN] = self.folder
        tempfile.tempdir = None

    def lines(self) -> Iterator[str]:
        """Yield a line for each thing that is left; give processes time to end."""
        until = time.monotonic() + PATIENCE
        while (processes := processes_of(self.folder)) and time.monotonic() < until:
            time.sleep(0.05)
        yield from (f"process {pid}: {command}" for pid, command in processes.items())
        yield from (f"shared memory: {name}" for name in _unmapped() - self.shared)
        yield from (f"file of the checkout: {name}" for name in _untracked() - self.untracked)
        for path in Path(self.folder).rglob("*"):
            name = str(path.relative_to(self.folder))
            if not path.is_dir() and not name.startswith(_UNTIL_EXIT):
                yield f"temporary file: {name}"


_KEY: Final = pytest.StashKey[Leftovers]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process of xdist is judged by the one that began it
        config.stash[_KEY] = Leftovers()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if something is left, once the processes of xdist have ended."""
    state = session.config.stash.get(_KEY, None)
    if state is None:
        return
    lines = list(state.lines())
    if lines:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line("left behind by the tests:", red=True)
        for line in lines:
            reporter.write_line(f"  {line}", red=True)
        if session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
