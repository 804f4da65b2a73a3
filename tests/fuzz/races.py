"""The kernels of a device under oclgrind, which finds what no device tells: two items that touch an
element without a barrier between them, and accesses outside of a buffer.

    python -m tests.fuzz races

All cases of ops run, and larger ones, as on a processor and as on a GPU. Needs the program oclgrind
(https://github.com/jrprice/Oclgrind) and pyopencl. What is found is printed, and the status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.command import parser_of

AGAINST = "tests.machines.gpu.against"


def main(argv: list[str] | None = None) -> int:
    parser_of(__name__, __doc__).parse_args(argv)
    oclgrind = shutil.which("oclgrind")
    if oclgrind is None:
        print("there is no oclgrind here: https://github.com/jrprice/Oclgrind")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "found")
        # Its version 21.10 does not know an instruction that optimized code has.
        options = ("--build-options", "-cl-opt-disable", "--data-races", "--max-errors", "20")
        command = [oclgrind, *options, "--log", str(log), sys.executable, "-m"]
        environment = {**os.environ, "PYOPENCL_NO_CACHE": "1"}
        environment.pop("OCL_ICD_VENDORS", None)  # oclgrind's own device is the only one
        ran = subprocess.run([*command, AGAINST, "opencl:0"], env=environment, check=False)
        report = log.read_text() if log.exists() else ""
    print(report or "no race, and no access outside of a buffer")
    return int(bool(report) or ran.returncode != 0)
