"""Shared libraries compiled from C text, for the tests of C functions, and one such text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from mlvm.machines.c_functions import include_dir
from mlvm.machines.native import extension
from tests.brief import ROOT

EXAMPLE: Final = ROOT / "examples" / "c" / "functions.c"

MACHINES: Final = [
    pytest.param(False, id="reference"),
    pytest.param(
        True,
        id="native",
        marks=pytest.mark.skipif(extension.EXTENSION is None, reason=extension.REASON),
    ),
]
"""What the option `native` of a VM may be."""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def compile_c(source: Path, library: Path, *flags: str, compiler: str = "cc") -> Path:
    """The shared library of one C file, compiled without a warning."""
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared"]
    command = [
        compiler, *strict, *flags, "-I", include_dir(), "-o", str(library), str(source), "-lm",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library


def compile_text(text: str, folder: Path, name: str, *flags: str) -> Path:
    """Compile a C text that includes `mlvm.h` to a shared library under a new name: a process never
    loads two libraries from one path."""
    source = folder / f"{name}.c"
    source.write_text(f"#include <mlvm.h>\n{text}\n")
    return compile_c(source, folder / f"{name}.so", "-std=c99", *flags)


FUNCTIONS: Final = Path(__file__).with_name("functions.c").read_text("utf-8")
"""Functions that say what they see, and misuse their frame."""
