"""The tests of the native machine under the compiler's sanitizers.

    python -m tests.sanitize                  # address and undefined behaviour, then threads
    python -m tests.sanitize address -k loop  # one of them; the rest goes to pytest
    python -m tests.sanitize address --quick  # few cases of each native test; no fuzzer

Builds the package into build/sanitize/, the extension under a sanitizer, and runs tests and fuzzers
on it, two processes at a time; the normal build stays as it is. A report of a sanitizer is a
failure. With `--quick` a compiler without sanitizers is none.

Python and numpy are not instrumented. Memory that C has lost is not looked for: Python keeps too
much until its end. `thread` knows Python's own locks; `threads.supp` names what is let pass.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "sanitize"

QUICK: Final = ("tests/machines/native", "--few", "1")
"""What pytest runs of all tests in the quick part."""

MEMORY: Final = "allocator_may_return_null=1:max_allocation_size_mb=4096"
"""A sanitizer needs more addresses than there is memory: it refuses large blocks itself."""


class Sanitizer(NamedTuple):
    """A sanitizer: gcc's name of it, the libraries to load before all others, and the commands run
    under it."""

    flags: str
    libraries: tuple[str, ...]
    environment: dict[str, str]
    tests: tuple[str, ...]
    fuzzers: tuple[tuple[str, ...], ...]


SANITIZERS: Final = {
    "address": Sanitizer(
        "address,undefined,float-cast-overflow",
        ("libasan.so", "libubsan.so"),
        {
            "ASAN_OPTIONS": f"detect_leaks=0:{MEMORY}",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # each object is a block of its own
        },
        (
            "tests/machines/native",
            "tests/core/machine",
            "tests/eager/test_threads.py",
            "tests/eager/transform/test_batch.py",
            "tests/walks/test_machines.py",
        ),
        (
            ("tests.fuzz", "machines", "--programs", "1000", "--memory", "0"),
            ("tests.fuzz", "language", "--programs", "20", "--memory", "0"),
            ("tests.fuzz", "threads", "--seconds", "10"),
        ),
    ),
    "thread": Sanitizer(
        "thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": f"suppressions={ROOT / 'tests' / 'threads.supp'}:{MEMORY}"},
        ("tests/machines/native", "tests/parallel", "tests/eager/test_threads.py"),
        (
            ("tests.fuzz", "machines", "--programs", "300", "--memory", "0"),
            ("tests.fuzz", "threads", "--seconds", "10"),
        ),
    ),
}


def main(argv: list[str]) -> int:
    if not {"-h", "--help"}.isdisjoint(argv):
        print(__doc__)
        return 0
    if argv and argv[0] not in SANITIZERS and argv[0][0] != "-":
        raise SystemExit(f"expected {', '.join(SANITIZERS)} or options of pytest, got {argv[0]}")
    names = [argv[0]] if argv and argv[0] in SANITIZERS else [*SANITIZERS]
    rest = argv[1:] if argv and argv[0] in SANITIZERS else argv
    return max([run(name, rest, quick=rest == ["--quick"]) for name in names])


def run(name: str, options: list[str], *, quick: bool) -> int:
    """Build and test under one sanitizer; 0 if nothing was found."""
    sanitizer = SANITIZERS[name]
    try:
        libraries = [found_library(library) for library in sanitizer.libraries]
    except FileNotFoundError as error:
        print(f"{name}: {'skipped' if quick else 'not run'}: {error}")
        return int(not quick)
    folder = BUILD / name
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder)]
    needed = {"MLVM_NATIVE": "1", "MLVM_SANITIZE": sanitizer.flags}
    if subprocess.run(build, cwd=ROOT, env={**os.environ, **needed}).returncode:
        return 1
    # Of the checkout come the tests, of the build the package; no process looks where it is.
    environment = {
        **os.environ,
        **sanitizer.environment,
        "LD_PRELOAD": " ".join(libraries),
        "MLVM_NATIVE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PYTHONSAFEPATH": "1",
        "PYTEST_ADDOPTS": "-o pythonpath=",
    }
    pytest = ["-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    here = f"from mlvm.machines.native import _native as n; assert {str(folder)!r} in n.__file__"
    tests = [*QUICK] if quick else ["--long", *options, *sanitizer.tests]
    commands = [["-m", *fuzzer] for fuzzer in sanitizer.fuzzers if not options]

    def failed(command: list[str]) -> bool:
        print(f"{name}: python {' '.join(command)}", flush=True)
        whole = [*without_random_addresses(), sys.executable, *command]
        return subprocess.run(whole, cwd=ROOT, env=environment).returncode != 0

    failures = [failed(["-c", here]), failed([*pytest, *tests])]  # no test is to be skipped
    with ThreadPoolExecutor(2) as pool:
        failures += pool.map(failed, commands)
    print(f"{name}: {sum(failures)} of {len(failures)} commands have failed", flush=True)
    return int(any(failures))


def found_library(name: str) -> str:
    """The path of a runtime library of gcc's. Raises `FileNotFoundError` where there is none."""
    compiler = (os.environ.get("CC") or "gcc").split()[-1]
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{compiler} has no {name}, the sanitizer's runtime library: it comes with gcc itself "
            f"(Debian, Ubuntu: lib{name[3:-3]}*, which gcc depends on; Fedora: lib{name[3:-3]})"
        )
    return path


def without_random_addresses() -> list[str]:
    """Return the prefix of a command that puts memory where the thread sanitizer expects it."""
    setarch = ["setarch", platform.machine(), "-R"]
    try:
        works = subprocess.run([*setarch, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return setarch if works else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
