"""Shared libraries compiled from C text, for the tests of C functions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from mlvm.machines.c_functions import include_dir

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "examples" / "c" / "functions.c"

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def compile_c(source: Path, library: Path, *flags: str, compiler: str = "cc") -> Path:
    """The shared library of one C file, compiled without a warning."""
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared"]
    command = [
        compiler,
        *strict,
        *flags,
        "-I",
        include_dir(),
        "-o",
        str(library),
        str(source),
        "-lm",
    ]
    subprocess.run(command, check=True)
    return library


def compile_text(text: str, folder: Path, name: str, *flags: str) -> Path:
    """The shared library of a C text that includes `mlvm.h`, under a name of its own: a process
    never loads two libraries from one path."""
    source = folder / f"{name}.c"
    source.write_text(f"#include <mlvm.h>\n{text}\n")
    return compile_c(source, folder / f"{name}.so", "-std=c99", *flags)
