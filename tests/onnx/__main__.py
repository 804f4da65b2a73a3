"""`python -m tests.onnx`: ONNX's own backend suite, eagerly and captured; `onnx` is installed.

`expected.toml` says which cases fail, and why; the command fails for any other. `--freeze` writes
`frozen.bin`, the part that `make test` runs. `--wheels FOLDER` compares the models in published
wheels, which `pip download --no-deps` puts there, with ONNX Runtime. `--exports` compares what
PyTorch exports of its modules with PyTorch; `onnxscript` is installed.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time
from pathlib import Path

from mlvm.core.errors import MlvmError
from tests.onnx import backend, damaged, exports, wheels


def main() -> int:
    """The exit status: 0, or 1 where something is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.onnx", description=__doc__)
    parser.add_argument("-k", default="", metavar="PATTERN", help="cases whose name has it")
    parser.add_argument("--freeze", action="store_true", help="write what `make test` runs")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="models of wheels there")
    parser.add_argument("--damaged", type=int, metavar="N", help="load so many damaged files")
    parser.add_argument("--exports", action="store_true", help="modules that PyTorch exports")
    options = parser.parse_args()
    if options.exports:
        return exports.run(options.k)
    if options.damaged:
        damaged.run(options.damaged, int(time.time()))
        return 0
    if options.wheels:
        return wheels.compare(options.wheels, options.k)
    cases = [case for case in backend.cases() if re.search(options.k, case.name)]
    if options.freeze:
        backend.freeze(cases)
        return 0
    status = 0
    for captured in (False, True):
        started, passed = time.perf_counter(), 0
        reasons: collections.Counter[str] = collections.Counter()
        for case in cases:
            reason = backend.expected(case.name, captured=captured)
            try:
                backend.run(case, captured=captured)
            except (MlvmError, AssertionError) as error:
                off = reason == backend.ROUNDED and not backend.is_near(case, captured=captured)
                if reason is None or off:
                    status = 1
                    print(f"{case.name} fails: {' '.join(str(error).split())[:300]}")
                else:
                    reasons[reason] += 1
                continue
            passed += 1
        mode = "captured" if captured else "eagerly"
        print(f"{mode}: {passed} of {len(cases)} in {time.perf_counter() - started:.0f} s")
        for reason, count in reasons.most_common():
            print(f"  {count} fail, as expected: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
