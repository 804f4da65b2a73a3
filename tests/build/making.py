"""Builds steps as C for tests: all kernels are compiled once, and a step's own tables for each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from mlvm.build import build as builder
from mlvm.build.targets import OPTIONS
from mlvm.core.errors import MlvmError
from mlvm.core.types import Array, TensorType
from mlvm.eager.tensor.number import open_lengths
from mlvm.machines.local import LocalVM
from mlvm.machines.native import _native
from mlvm.step.saved import LoadedStep, SavedStep

SET: Final = _native.simd() if _native.simd() in OPTIONS else "avx512"
"""The set in use, or the one of C that its kernels are of: avx512_bf16 has more products."""
COMPILER: Final = shlex.split(os.environ.get("CC", "gcc"))
ARCHIVER: Final = shlex.split(os.environ.get("AR", "ar"))
RUNNER: Final = shlex.split(os.environ.get("RUNNER", ""))
"""What runs a program for another processor: qemu."""
LIMIT: Final = float(os.environ.get("LIMIT", "600"))
"""Seconds for each command. A compiler for another processor needs more on a busy machine."""
FLAGS: Final = [
    "-std=c11", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-I.",
    *os.environ.get("SANITIZE", "").split(),
]  # fmt: skip
SEED: Final = 5


def command(arguments: Sequence[str | Path], folder: Path) -> None:
    words = [str(each) for each in arguments]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise AssertionError(f"{arguments}: {done.stderr[-4000:]}")


class Kernels:
    """All kernels of an instruction set, compiled once."""

    def __init__(self, folder: Path, simd: str, optimize: str = "-O1") -> None:
        self.folder, self.simd, self.optimize = folder, simd, optimize
        folder.mkdir(parents=True, exist_ok=True)
        uses = [("kernel", name) for name in _native.kernels()]
        uses += [("row", name) for name in _native.rows()]
        text = "".join(f"#define USES_{kind}_{name} ~, KEPT\n" for kind, name in uses)
        (folder / "used.h").write_text(text)
        sources = sorted((builder.NATIVE / "src" / "plan" / "kernels").glob("*.c"))
        options = [*OPTIONS[simd].split(), f"-DTARGET={simd}", '-DWANTED="used.h"']
        running = [
            subprocess.Popen([*COMPILER, *FLAGS, optimize, *options, "-c", source], cwd=folder)
            for source in sources
        ]
        assert not sum([each.wait() for each in running])
        command([*ARCHIVER, "rcs", "libkernels.a", *[f"{x.stem}.o" for x in sources]], folder)

    def build(self, saved: SavedStep, folder: Path, records: int = 1 << 26) -> Path:
        """The step's program. Raises `CannotBuild`."""
        target = "aarch64" if self.simd == "neon" else "host"
        builder.build(saved, folder, open_lengths, simd=self.simd, target=target, records=records)
        strict = ["-std=c11", "-I.", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]
        command([*COMPILER, *strict, "-Werror", "-c", "-o", "strict.o", "tables.c"], folder)
        own = ["tables.c"]
        own += [f"mlvm/build/src/{name}.c" for name in ("command", "step", "lanes")]
        plan = [*builder.PLAN, *["formulas"] * (saved.open is not None)]
        own += [f"mlvm/machines/native/src/plan/{name}.c" for name in plan]
        out = ["-o", "step", str(self.folder / "libkernels.a"), "-lm"]
        arguments: list[str | Path] = [*COMPILER, *FLAGS, self.optimize, *own, *out]
        command(arguments, folder)
        return folder / "step"


def inputs_for(saved: SavedStep, runs: int) -> list[Array]:
    """Return values for each input and the given number of runs, one behind the other."""
    rng = np.random.default_rng(SEED)
    inputs = []
    for type in saved.inputs:
        shape = (runs, *type.shape)
        if type.dtype.kind in ("float", "complex") and type.dtype.name != "bf16":
            x = rng.normal(size=shape).astype(type.dtype.numpy)
        elif type.dtype.name == "bf16":
            x = (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            x = x.view(type.dtype.numpy)
        elif type.dtype.name == "u64":
            x = rng.integers(0, 1 << 63, shape, dtype=np.uint64)
        else:
            x = rng.integers(0, 2, shape).astype(type.dtype.numpy)
            # Trees, as models/tree_lstm.py has them: others have no end.
            if type.shape[-2:] == (5, 3):
                x[..., 1:] = -1
                x[..., :2, 1:] = [[1, 2], [3, 4]]
        inputs.append(np.ascontiguousarray(x))
    return inputs


def difference(saved: SavedStep, program: Path, runs: int = 2) -> str | None:
    """Return how the program's results of some runs differ from Python's, if they do."""
    folder, inputs = program.parent, inputs_for(saved, runs)
    loaded, results, error = LoadedStep(saved, LocalVM(native=True)), [], None
    try:
        for run in range(runs):
            results.append(loaded(*[x[run] for x in inputs]))
    except MlvmError as raised:
        error = raised
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for i, x in enumerate(inputs):
        (out / f"in{i}").write_bytes(x.tobytes())
    files = [f"out/in{i}" for i in range(len(inputs))]
    options = [
        "--weights", "weights.bin", "--steps", str(runs), "--out", "out", "--save", "out/state",
    ]  # fmt: skip
    done = subprocess.run(
        [*RUNNER, str(program), *options, *files],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if error is not None or done.returncode:
        if error is not None and done.returncode == 1:
            return None
        return f"Python: {error}; C: {done.returncode} {done.stderr}"
    for i, result in enumerate(saved.results):
        nbytes = result.type.nbytes * runs
        got = (out / f"{i}.npy").read_bytes()
        exact = b"".join([np.ascontiguousarray(each[i]).tobytes() for each in results])
        if got[len(got) - nbytes :] != exact:
            return f"result {i}, {result.type}: {exact[:64].hex()}, not {got[-nbytes:][:64].hex()}"
    state, at = (out / "state").read_bytes(), 64
    for i, x in enumerate(loaded.states()):
        if state[at : at + x.nbytes] != x.tobytes():
            return f"state {i}, {TensorType.of(x)}"
        at += -(-x.nbytes // 64) * 64
    return None
