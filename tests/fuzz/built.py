"""libFuzzer on what needs no Python, under the address and undefined behaviour sanitizers.

    python -m tests.fuzz built             # 60 seconds each
    python -m tests.fuzz built --seconds 5

`loop.c` gives the loop unverified programs; `weights.c` gives a built step weights,
and its command line .npy files. Where clang has no libFuzzer, `drive.c` stands for it, under gcc's
sanitizers: it draws inputs, and does not look at what they reach.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import mlvm.eager as ml
from mlvm.build import build as builder
from mlvm.eager.tensor.number import open_lengths
from mlvm.step.saved import SavedStep
from tests.fuzz.command import parser_of

HERE: Final = Path(__file__).parent / "c"
MACHINES: Final = builder.NATIVE.parent
FLAGS: Final = ["-std=c11", "-g", "-O1", "-w", "-fno-sanitize-recover=undefined"]


def small_step(folder: Path) -> None:
    """A built step that updates a table at an index."""
    table = ml.asarray(np.arange(12, dtype=np.float32).reshape(4, 3))

    @ml.capture
    def step(i: ml.Tensor) -> ml.Tensor:
        table[...] += 1
        return ml.take(table, i, axis=0)

    step(ml.asarray([0, 2]))
    step.save(folder / "step.mlvm")
    saved = SavedStep.from_bytes((folder / "step.mlvm").read_bytes())
    builder.build(saved, folder, open_lengths, simd="plain")


def compiled(program: Path, arguments: Sequence[str | Path]) -> bool:
    """Compile a target; whether it is libFuzzer's."""
    fuzzer = ["clang", *FLAGS, "-fsanitize=fuzzer,address,undefined", *arguments, "-o", program]
    if shutil.which("clang"):
        process = subprocess.run([str(each) for each in fuzzer], capture_output=True)
        if process.returncode == 0:
            return True
    sanitizers = ["-fsanitize=address,undefined", str(HERE / "drive.c")]
    plain = ["gcc", *FLAGS, *sanitizers, *map(str, arguments), "-o", str(program)]
    subprocess.run(plain, check=True)
    return False


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        small_step(folder)
        plan = MACHINES / "native" / "src" / "plan"
        loop = [HERE / "loop.c", plan / "loop.c", plan / "bound.c"]
        package = folder / "mlvm"
        kernels = sorted((package / "machines/native/src/plan/kernels").glob("*.c"))
        names = "loop", "bound", "records", "processor"
        runtime = [package / "machines/native/src/plan" / f"{name}.c" for name in names]
        runtime.append(package / "build/src/step.c")
        weights = [HERE / "weights.c", folder / "tables.c", *runtime, *kernels]
        programs: dict[str, list[str | Path]] = {
            "loop": [*loop, f"-I{MACHINES}"],
            "weights": [*weights, f"-I{folder}", "-DTARGET=plain", '-DWANTED="used.h"', "-lm"],
        }
        failed = 0
        for name, arguments in programs.items():
            program = folder / f"fuzz_{name}"
            fuzzer = compiled(program, arguments)
            seeds = folder / f"seeds_{name}"
            seeds.mkdir()
            if name == "weights":
                shutil.copy(folder / "weights.bin", seeds)
                np.save(seeds / "x.npy", np.zeros((2, 3), np.float32))
            limits = [f"-max_total_time={options.seconds}", "-max_len=2048", "-print_final_stats=1"]
            extra: list[str | Path] = [*limits, seeds]
            if not fuzzer:
                extra = [str(options.seconds), *seeds.iterdir()]
            done = subprocess.run([program, *extra], cwd=folder, capture_output=True, text=True)
            lines = [x for x in done.stderr.splitlines() if "executed_units" in x or "ERROR" in x]
            print(f"{name}: status {done.returncode}; {'; '.join(lines)}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stderr[-6000:])
        return int(failed > 0)
