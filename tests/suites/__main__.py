"""Test suites of other libraries, run with mlvm in the place of their arrays.

    python -m tests.suites scipy
    python -m tests.suites scipy scipy.fft scipy.special -- -k softmax -n 2
    python -m tests.suites autograd ~/checkouts/autograd

`scipy`, `sklearn` and `array_api_extra` need the package, which contains its tests. `autograd`
(HIPS), `mlx` and `array_api` (array-api-tests, with its submodule and what its requirements.txt
names) need the folder of a checkout, whose tests are run; nothing of it is copied.
`expected/NAME.txt` lists the tests that are known to fail, and why. The exit status is 1 if another
test fails, or if no test fails that a line names. What follows `--` is for pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from tests.packages import remedy

HERE: Final = Path(__file__).parent


class Suite(NamedTuple):
    """A suite: the package that has to be there, what pytest is given, and its options."""

    package: str
    targets: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_SCIPY: Final = (
    "cluster constants differentiate fft integrate interpolate linalg ndimage optimize signal "
    "spatial special stats"
)

_OWN: Final = {
    "autograd": "core graphs vspaces wrappers tests performance ufunc_dispatch scipy builtins util",
    "mlx": "bf16 compile conv_transpose device eval export_import fast fast_sdpa graph init load "
    "losses memory nn optimizers quantized threads tree upsample zero_copy",
}
"""Files of tests of what other libraries have and mlvm has not, `test_NAME.py`."""


def _without(name: str) -> tuple[str, ...]:
    return tuple([f"--ignore-glob=/*/test_{each}.py" for each in _OWN[name].split()])


SUITES: Final = {
    "scipy": Suite(
        "scipy",
        tuple([f"scipy.{name}" for name in _SCIPY.split()]),
        ("-m", "array_api_backends"),
    ),
    "sklearn": Suite("sklearn", ("sklearn",), ("-k", "mlvm")),
    "array_api_extra": Suite("array_api_extra", ("array_api_extra.tests.main",), ("-k", "mlvm")),
    "autograd": Suite("numpy", options=_without("autograd")),
    "mlx": Suite("numpy", options=(*_without("mlx"), "-p", "no:subtests")),
    "array_api": Suite(
        "ndindex",
        options=(
            *("--max-examples=20", "--hypothesis-seed=0", "--disable-deadline"),
            "--ignore-glob=/*/meta_tests",
        ),
    ),
}


def command(name: str, targets: list[str], options: list[str]) -> list[str]:
    """Return the command that runs a suite."""
    suite = SUITES[name]
    given = targets or list(suite.targets)
    is_checkout = bool(given) and Path(given[0]).exists()
    where = [str(Path(each).resolve()) for each in given] if is_checkout else ["--pyargs", *given]
    return [
        *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tempfile.gettempdir()),
        *("-p", "tests.suites.expected", "-p", f"tests.suites.with_{name}"),
        *("-p", "no:cacheprovider", "-q", "-W", "ignore"),
        f"--import-mode={'prepend' if is_checkout else 'importlib'}",
        *("--expected", str(HERE / "expected" / f"{name}.txt")),
        *(() if targets else ("--all-expected",)),
        *suite.options,
        *where,
        *options,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.suites",
        usage="python -m tests.suites SUITE [TARGET ...] [-- OPTION OF PYTEST ...]",
        description=__doc__,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("targets", nargs="*", help="packages, or the folder of a checkout")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    suite = SUITES[args.suite]
    for package in ("pytest", suite.package):
        if find_spec(package) is None:
            parser.error(f"{package} is not installed; {remedy(package)}")
    if not suite.targets and not args.targets:
        parser.error(f"{args.suite} needs the folder of a checkout")
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Read when SciPy and scikit-learn are imported, before any plugin
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "PYTHONPATH": path}
    words = command(args.suite, args.targets, given[end + 1 :])
    with tempfile.TemporaryDirectory() as folder:  # where no conftest.py is, as in the checkout
        return subprocess.run(words, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
