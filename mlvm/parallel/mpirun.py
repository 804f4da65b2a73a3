"""`python -m mlvm mpirun`: processes for an `MpiGroup`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mlvm.core.errors import MissingExtra


def mpirun(processes: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by an `mpiexec` that runs `processes` processes of this Python with
    these arguments.

    It is the one in this Python's folder, from the package mpich, or else the system's. Raises
    `MissingExtra` without mpi4py or any mpiexec.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingExtra('mpi4py is not installed: pip install "mlvm[mpi]"')
    folder = str(Path(sys.executable).parent)
    mpiexec = shutil.which("mpiexec", path=folder) or shutil.which("mpiexec")
    if mpiexec is None:
        raise MissingExtra('there is no mpiexec: pip install "mlvm[mpi]"')
    sys.stdout.flush()
    os.execv(mpiexec, [mpiexec, "-n", str(processes), sys.executable, *command])
