"""The native sources' folders: what may include what; plan/ is a library without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from os.path import dirname, join, normpath
from pathlib import Path
from typing import Final

import pytest

from tests.brief import ROOT
from tests.cases.claim_tests import claims
from tests.test_layers import circle

SOURCE: Final = ROOT / "mlvm" / "machines" / "native" / "src"  # a built package has none
FLOORS: Final = ["plan", "python", "machine", "language", "module"]
"""From the ground up."""

FILES: Final = {"python.c": "python", "limited_api.h": "python", "module.c": "module"}
"""The floors of what lies in no folder."""

COMPILER: Final = sysconfig.get_config_var("CC").split()[0]

MAIN: Final = Path(__file__).with_name("alone.c").read_text("utf-8")


def sources() -> dict[str, str]:
    files = [file for file in SOURCE.rglob("*") if file.suffix in (".c", ".h", ".def")]
    return {str(file.relative_to(SOURCE)): file.read_text() for file in files}


def included(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the sources that each one includes; Python's header is one of them, the C library's
    are not."""
    graph: dict[str, set[str]] = {}
    for name, text in files.items():
        includes = re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|<(Python\.h)>)', text, re.MULTILINE)
        places = [python or normpath(join(dirname(name), own)) for own, python in includes]
        graph[name] = {place for place in places if not place.startswith("..")}
    return graph


def floor(name: str) -> int:
    first, *inside = name.split("/")
    return FLOORS.index(first if inside else FILES[first])


def upward(graph: Mapping[str, set[str]]) -> list[str]:
    """The includes that break the rules."""
    return [
        f"{name} includes {other}"
        for name, others in graph.items()
        for other in others
        if (name != "limited_api.h" if other == "Python.h" else floor(other) > floor(name))
    ]


def test_no_sources_include_each_other_in_a_circle() -> None:
    """A source and its header are one."""
    graph: dict[str, set[str]] = {}
    for name, others in included(sources()).items():
        whole = name.rpartition(".")[0]
        graph.setdefault(whole, set()).update({other.rpartition(".")[0] for other in others})
    assert circle({whole: others - {whole} for whole, others in graph.items()}) == []


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C compiler")
def test_kernel_calls_run_in_a_program_without_python(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(MAIN)
    files = [*(SOURCE / "plan").rglob("*.c"), tmp_path / "main.c"]
    flags = ["-std=c11", "-O0", "-w", "-DTARGET=plain", f"-I{SOURCE}", "-lm", "-pthread"]
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    compiling = [COMPILER, *files, *flags, "-o", tmp_path / "main"]
    subprocess.run(compiling, check=True, env=alone)
    main = [tmp_path / "main"]
    done = subprocess.run(main, capture_output=True, text=True, check=True, env=alone)
    assert done.stdout == "2 of 2 calls, 0, 5, plain\n"


test_rows = claims("sources", globals())
