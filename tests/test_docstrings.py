"""Docstrings of public names have examples, which run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import mlvm.eager as ml
from docs import pages
from tests.brief import ROOT, Capsys

ROOMS = [name for name in pages.MODULES if name not in ("debug", "onnx")]
IMPORT = re.compile(r"^from (mlvm\.[a-z]+\.[\w.]+) import ([\w, ]+)$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)")


class Nearly(doctest.OutputChecker):
    """Numbers may differ in their last digits, as they do from one processor to another."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        def text(printed: str) -> str:
            return "".join(NUMBER.sub("#", printed).split())

        def numbers(printed: str) -> list[float]:
            return [float(x) for x in NUMBER.findall(printed)]

        return text(want) == text(got) and np.allclose(
            numbers(want), numbers(got), rtol=1e-5, atol=1e-6, equal_nan=True
        )


def public() -> dict[str, Any]:
    """The functions and classes that users call by name."""
    members = {name: getattr(ml, name) for name in dir(ml)}
    for room in ROOMS:
        module = attrgetter(room)(ml)
        members |= {f"{room}.{name}": getattr(module, name) for name in dir(module)}
    return {
        name: value
        for name, value in members.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and "__" not in name
    }


def beneath() -> dict[str, Any]:
    """Return the names that the documentation imports from modules of mlvm beneath the language,
    except in passes.md, which runs passes of the compiler."""
    members = {}
    for page in {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/passes.md"}:
        for module, names in IMPORT.findall(page.read_text("utf-8")):
            for name in names.split(", "):
                members[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    return members


def test_what_pages_import_has_examples() -> None:
    members = beneath()
    assert len(members) > 8
    assert [name for name, value in members.items() if ">>>" not in (value.__doc__ or "")] == []


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name, value in public().items() if not inspect.getdoc(value)] == []
    for module in (ml, *(attrgetter(room)(ml) for room in ROOMS)):
        assert module.__doc__
        assert sorted({*module.__all__}) == sorted(module.__all__)


def test_the_examples_print_what_they_show(capsys: Capsys, folder: Path) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(Nearly(), verbose=False)
    for name, value in {**public(), **beneath()}.items():
        runner.run(parser.get_doctest(value.__doc__ or "", {"ml": ml}, name, None, 0))
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out
    assert runner.tries > 200


def test_every_public_name_has_an_example_unless_it_cannot_run() -> None:
    without = {name for name, value in public().items() if ">>>" not in (value.__doc__ or "")}
    assert without == set(WITHOUT)


WITHOUT = {
    "errors.HostFunctionError": "it takes a function in C that was compiled",
    "parallel.MpiGroup": "it takes processes that mpiexec has started, see tests/parallel",
    "parallel.ProcessGroup": "it starts processes, which takes a second, see tests/parallel",
    "parallel.RayGroup": "it takes Ray, see examples/ray_actors.py",
}
"""Public names whose docstring has no example that runs here, and why."""
