"""Targets: the processors and systems that a step is compiled for."""

from __future__ import annotations

import platform
from typing import Final, NamedTuple

from mlvm.core.errors import MlvmError


class CannotBuild(MlvmError):
    """Error of a step that cannot run without Python.

    The text has the op, its line and the cause.
    """


OPTIONS: Final = {
    "plain": "",
    "avx2": "-mavx2 -mfma",
    "avx512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512",
    "neon": "-DUSE_NEON",
}
"""Compiler options of an instruction set, as in setup.py."""


class Target(NamedTuple):
    """Processor and operating system of a build.

    It has the compiler, options for the compiler and the linker, the suffix of the program, and the
    instruction sets, best first.
    """

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
"""Targets of `--target`. Any other compiler is `make CC=...`."""


def sets_for(target: str, simd: str) -> tuple[str, ...]:
    """Return the instruction sets of a build. Raises `CannotBuild`."""
    if target not in TARGETS:
        raise CannotBuild(f"expected a target of {', '.join(TARGETS)}, got {target}")
    sets = TARGETS[target].sets
    if target == "host":
        machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
        sets = TARGETS[machine].sets if machine in TARGETS else sets
    if simd == "auto":
        return tuple([name for name in sets if name != "plain" or "neon" not in sets])
    if simd not in sets:
        raise CannotBuild(f"{target}: expected instruction sets of {', '.join(sets)}, got {simd}")
    return (simd,)
