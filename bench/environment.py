"""Environment of a measurement: machine, Python, numpy, BLAS, mlvm's kernels, threads.

The BLAS kernel is chosen when the library loads, so `environment` asks a process that was
started as the contenders are: `python -m bench.environment` prints it as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import ROOT, SIMD, Contender, child_environment, installed_version


def environment(contenders: Iterable[Contender]) -> dict[str, Any]:
    """Return the machine and its software, and the version and threads of each contender.

    `load` is how many processes wanted a core in the last minute. Timings under load say little.
    """
    contenders = list(contenders)
    described = subprocess.run(
        [sys.executable, "-m", "bench.environment"],
        cwd=ROOT,
        env=child_environment(threads=1),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    facts: dict[str, Any] = json.loads(described.stdout)
    facts["contenders"] = {c.name: installed_version(c.package) for c in contenders}
    facts["threads"] = {c.name: c.threads for c in contenders}
    return facts


def describe(facts: dict[str, Any]) -> str:
    """Format an environment in a few lines."""
    blas = facts["blas"]
    contenders = [
        f"{name} {version} ({count_of(facts['threads'][name], 'library thread')})"
        for name, version in facts["contenders"].items()
        if version is not None
    ]
    return "\n".join(
        [
            f"{facts['cpu']}, {count_of(facts['cores'], 'core')}, load {facts['load']:.1f}",
            f"Python {facts['python']}, numpy {facts['numpy']}, {blas['name']} {blas['version']} "
            f"with kernels for {blas['kernel'] or 'an unknown machine'}",
            f"mlvm's kernels: {facts['kernels']}",
            "; ".join(contenders),
        ]
    )


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def has_avx512() -> bool:
    """Return whether contenders have AVX-512, on which matrix products are faster than on AVX2."""
    return os.environ.get(SIMD) != "avx2" and "avx512f" in (_cpuinfo("flags") or "").split()


def _facts() -> dict[str, Any]:
    from mlvm.machines.native import extension

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index,call-overload,unused-ignore]
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": {
            "name": blas["name"],
            "version": blas["version"],
            "kernel": _openblas_kernel(),
        },
        "kernels": extension.status(),
    }


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(name: str) -> str | None:
    """Read a field of the first core from /proc/cpuinfo, if there is such a file."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None


def _openblas_kernel() -> str | None:
    """Return the kernel set (`SkylakeX`, `Haswell`) that OpenBLAS has picked; None for another
    BLAS."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas" in line}
    for path in loaded:
        library = ctypes.CDLL(path)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                corename = getattr(library, f"{prefix}openblas_get_corename{suffix}", None)
                if corename is not None:
                    corename.restype = ctypes.c_char_p
                    name: bytes = corename()
                    return name.decode()
    return None


if __name__ == "__main__":
    print(json.dumps(_facts()))
