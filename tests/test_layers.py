"""Imports go strictly downward: models, mlvm.eager, mlvm.arena, mlvm.core.

Every import counts, also those inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Which of the project's packages each one may import; "mlvm" itself is above them all.
MAY_IMPORT = {
    "mlvm.core": {"mlvm.core"},
    "mlvm.arena": {"mlvm.core", "mlvm.arena"},
    "mlvm.parallel": {"mlvm.core", "mlvm.arena", "mlvm.parallel"},
    "mlvm.eager": {"mlvm.core", "mlvm.arena", "mlvm.parallel", "mlvm.eager"},
    "models": {"mlvm.eager", "models"},
    "mlvm": {"mlvm.core", "mlvm.arena", "mlvm.parallel", "mlvm.eager", "mlvm"},
}


def modules_of(requirements: list[str]) -> set[str]:
    """The packages that requirements such as "numpy>=2.0" let one import."""
    names = (re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements)
    return {name.replace("-", "_") for name in names}


HARD = modules_of(PYPROJECT["dependencies"])
IMPORTED_AS = {"Pillow": "PIL"}  # where a package's name is not its module's
EXTRAS = {
    IMPORTED_AS.get(name, name)
    for extra in ("progress", "images")
    for name in modules_of(PYPROJECT["optional-dependencies"][extra])
}


@dataclass(frozen=True)
class Import:
    """What an import statement brings in, where, and whether only when a function is called."""

    module: str
    line: int
    in_function: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module that lies in `package`, relative ones made absolute.

    `from m import x` counts as m.x, since x may be a module.
    """

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, in_function)
        inside = in_function or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def layer(module: str) -> str:
    """The entry of MAY_IMPORT that a module of the project belongs to."""
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in MAY_IMPORT else module.split(".")[0]


def violations(source: str, package: str) -> list[str]:
    """What a module that lies in `package` imports against the rules."""
    here = layer(package)
    wrong = []
    for found in imports(source, package):
        top = found.module.split(".")[0]
        if top in ("mlvm", "models"):
            if layer(found.module) not in MAY_IMPORT[here]:
                wrong.append(f"line {found.line}: {here} may not import {found.module}")
        elif top in sys.stdlib_module_names or top in HARD:
            continue
        elif here == "mlvm.core":
            wrong.append(f"line {found.line}: mlvm.core may not import {top}")
        elif not found.in_function:
            wrong.append(f"line {found.line}: {top} is no hard dependency; import it in a function")
        elif top not in EXTRAS:
            wrong.append(f"line {found.line}: {top} is no optional dependency of pyproject.toml")
    return wrong


FILES = [file for top in ("mlvm", "models") for file in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_downward(file: Path) -> None:
    assert violations(file.read_text(), ".".join(file.relative_to(ROOT).parent.parts)) == []


def test_the_hard_dependencies_are_numpy_and_typing_extensions() -> None:
    assert {"numpy", "typing_extensions"} == HARD


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("mlvm.core", "import mlvm.eager"),
        ("mlvm.core", "import mlvm"),
        ("mlvm.core", "import mlvm.arena.planner as p"),
        ("mlvm.core.ops", "from ...eager import tensor"),
        ("mlvm.core.ops", "from mlvm import arena"),
        ("mlvm.core", "def f():\n    from mlvm.arena import planner"),
        ("mlvm.core", "class C:\n    async def f(self):\n        import models.mlp"),
        (
            "mlvm.arena",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlvm.eager.tensor",
        ),
        ("mlvm.arena", "from ..eager.tensor import Tensor"),
        ("mlvm.eager", "import models"),
        ("mlvm", "import models.mlp_mixer"),
        ("models", "from mlvm.core.types import TensorType"),
        ("models", "import mlvm"),
        ("mlvm.core", "import tqdm"),
        ("mlvm.core", "def f():\n    import tqdm"),
        ("mlvm.eager", "import tqdm"),
        ("mlvm.eager", "try:\n    import tqdm\nexcept ImportError:\n    pass"),
        ("models", "def f():\n    import torch"),
    ],
)
def test_the_checker_flags_a_wrong_import(package: str, source: str) -> None:
    assert len(violations(source, package)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("mlvm.core", "import numpy as np\nfrom typing_extensions import Self\nimport os.path"),
        ("mlvm.core.ops", "from ..op import op\nfrom . import erf\nfrom mlvm.core import types"),
        ("mlvm.arena", "from mlvm.core.types import TensorType\nfrom . import planner"),
        ("mlvm.eager", "from mlvm.arena.arena import Arena\nimport mlvm.core.vm"),
        ("mlvm", "from mlvm import eager\nfrom .core import assembly"),
        ("models", "import mlvm.eager as ml\nfrom mlvm.eager import nn\nfrom models import data"),
        ("models", "def f():\n    from tqdm import tqdm"),
    ],
)
def test_the_checker_passes_a_right_import(package: str, source: str) -> None:
    assert violations(source, package) == []
