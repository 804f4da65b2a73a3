"""What a step is compiled for."""

from __future__ import annotations

import platform
from typing import Final, NamedTuple

from mlvm.core.errors import MlvmError


class CannotBuild(MlvmError):
    """A step that cannot run without Python; the text says which op, in which line, and why."""


OPTIONS: Final = {
    "plain": "",
    "avx2": "-mavx2 -mfma",
    "avx512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512",
    "neon": "-DUSE_NEON",
}
"""What the kernels of an instruction set are compiled with, as setup.py says it for Python."""


class Target(NamedTuple):
    """A processor and system: the compiler, what it and the linker are told besides, the suffix of
    the program, and the instruction sets, the best first."""

    compiler: str
    flags: str = ""
    linking: str = "-Wl,--gc-sections"
    suffix: str = ""
    sets: tuple[str, ...] = ("plain",)


X86: Final = ("avx512", "avx2", "plain")
TARGETS: Final = {
    "host": Target("cc"),
    "x86_64": Target("gcc", sets=X86),
    "x86_64-musl": Target("musl-gcc", linking="-static -Wl,--gc-sections", sets=X86),
    "aarch64": Target("aarch64-linux-gnu-gcc", sets=("neon", "plain")),
    "arm": Target("arm-linux-gnueabihf-gcc"),
    "riscv64": Target("riscv64-linux-gnu-gcc"),
    "wasm32": Target("$(ZIG) cc -target wasm32-wasi", "-msimd128", suffix=".wasm"),
    "aarch64-macos": Target(
        "$(ZIG) cc -target aarch64-macos", linking="-Wl,-dead_strip", sets=("neon", "plain")
    ),
    "x86_64-windows": Target("$(ZIG) cc -target x86_64-windows-gnu", suffix=".exe", sets=X86),
}
"""What `--target` knows. Any other compiler is `make CC=...`."""


def sets_for(target: str, simd: str) -> tuple[str, ...]:
    """The instruction sets of a build. Raises `CannotBuild`."""
    if target not in TARGETS:
        raise CannotBuild(f"no target {target}; there are {', '.join(TARGETS)}")
    found = TARGETS[target].sets
    if target == "host":
        machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
        found = TARGETS[machine].sets if machine in TARGETS else found
    if simd == "auto":
        return tuple([name for name in found if name != "plain" or "neon" not in found])
    if simd not in found:
        raise CannotBuild(f"{target} has no {simd}; there are {', '.join(found)}")
    return (simd,)
