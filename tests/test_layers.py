"""Imports go strictly downward, and files never import each other in a circle.

Every import counts, also those inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import lines
from tests.brief import ROOT, cases

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FLOORS = [
    ["mlvm.renamed"],
    ["mlvm.core"],
    ["mlvm.machines"],
    ["mlvm.arena"],
    ["mlvm.show", "mlvm.input", "mlvm.step", "mlvm.parallel"],
    ["mlvm.build"],
    ["mlvm.eager"],
    ["mlvm.onnx"],
    ["mlvm"],  # __init__ and __main__
    ["models"],
]
"""From the ground up. A folder imports from itself and from the floors below its own."""

MAY_IMPORT = {
    room: {room, *(below for floor in FLOORS[:height] for below in floor)}
    for height, floor in enumerate(FLOORS)
    for room in floor
}
MAY_IMPORT["models"] = {"models", "mlvm.eager", "mlvm.show"}  # as a reader's own models would
SHARED = ("mlvm.machines.files.", "mlvm.machines.terminal.")
"""Output files and standard streams, which all commands treat alike: `models` imports them, too."""


ROOMS = [
    "tensor",
    "functions",
    "recording",
    "tree",
    "autodiff",
    "control",
    "transform",
    "nn",
    "optim",
    "parallel",
    "files",
    "interop",
    "capture",
    "runs",
    "public",
]
"""Those of `mlvm.eager`, from the floor up: each imports from itself and from those before it.
Others (`__init__`, `stub`) import from all."""

CEILING = {
    "mlvm/core": 8_500,
    "mlvm/machines": 3_000,
    "mlvm/machines/native": 3_500,
    "mlvm/machines/gpu": 3_500,
    "mlvm/machines/remote": 4_500,
    "mlvm/arena": 2_000,
    "mlvm/show": 2_000,
    "mlvm/input": 2_000,
    "mlvm/step": 5_000,
    "mlvm/build": 2_000,
    "mlvm/parallel": 4_000,
    "mlvm/eager": 1_500,
    "mlvm/eager/tensor": 3_500,
    "mlvm/eager/functions": 6_500,
    "mlvm/eager/recording": 1_500,
    "mlvm/eager/autodiff": 3_000,
    "mlvm/eager/control": 2_000,
    "mlvm/eager/transform": 2_500,
    "mlvm/eager/nn": 2_500,
    "mlvm/eager/parallel": 1_000,
    "mlvm/eager/optim": 2_000,
    "mlvm/eager/files": 1_000,
    "mlvm/eager/interop": 1_000,
    "mlvm/eager/capture": 5_500,
    "mlvm/eager/runs": 4_500,
    "mlvm/onnx": 6_500,
    "mlvm": 2_000,
    "models": 4_000,
    "bench": 7_000,
    "tests": 72_000,
}
"""The most lines of code of each package (`make lines` counts them), rounded up to the next 500."""


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
    """An import statement: the module, the line, and whether it runs only when a function is
    called."""

    module: str
    line: int
    in_function: bool


@cache
def imports(source: str, package: str) -> tuple[Import, ...]:
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
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                yield from visit(child, inside)

    return tuple(visit(ast.parse(source), False))


def layer(module: str) -> str:
    """The entry of MAY_IMPORT that a module of the project belongs to."""
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in MAY_IMPORT else module.split(".")[0]


def eager_room(module: str) -> str:
    """The room of `mlvm.eager` that one of its modules belongs to, "" for none."""
    name = [*module.removeprefix("mlvm.eager.").split("."), ""][0]
    return name if module.startswith("mlvm.eager.") and name in ROOMS else ""


def violations(source: str, package: str) -> list[str]:
    """Return the imports against the rules by a module in `package`."""
    here = layer(package)
    own = eager_room(package)
    wrong = []
    for entry in imports(source, package):
        top = entry.module.split(".")[0]
        if top in ("mlvm", "models"):
            is_shared = here == "models" and entry.module.startswith(SHARED)
            if layer(entry.module) not in MAY_IMPORT[here] and not is_shared:
                wrong.append(f"line {entry.line}: {here} may not import {entry.module}")
            other = eager_room(entry.module)
            if own and other and ROOMS.index(other) > ROOMS.index(own):
                wrong.append(f"line {entry.line}: {own} may not import {entry.module}")
        elif top in sys.stdlib_module_names or top in HARD:
            continue
        elif here == "mlvm.core":
            wrong.append(f"line {entry.line}: mlvm.core may not import {top}")
        elif not entry.in_function:
            wrong.append(f"line {entry.line}: {top} is no hard dependency; import it in a function")
        elif top not in EXTRAS:
            wrong.append(f"line {entry.line}: {top} is no optional dependency of pyproject.toml")
    return wrong


FILES = [file for top in ("mlvm", "models") for file in sorted((ROOT / top).rglob("*.py"))]


def module_of(file: Path) -> str:
    """The dotted name of a file of the project; of a folder's `__init__.py` the folder's."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each one imports, given their sources by name."""
    graph = {}
    for module, source in files.items():
        is_folder = any(other.startswith(f"{module}.") for other in files)
        package = module if is_folder else module.rpartition(".")[0]
        names = set()
        for each in imports(source, package):
            name = each.module
            while name and name not in files:
                name = name.rpartition(".")[0]
            names.add(name)
        graph[module] = names - {module, ""}
    return graph


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other in a ring, the first one also last; empty if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_downward(file: Path) -> None:
    folder = file.relative_to(ROOT).parent
    package = module_of(file) if folder == Path("mlvm/eager") else ".".join(folder.parts)
    assert violations(file.read_text(), package) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(imported_files({module_of(file): file.read_text() for file in FILES})) == []


def test_every_file_of_the_language_is_in_a_room() -> None:
    for file in (ROOT / "mlvm" / "eager").rglob("*.py"):
        assert eager_room(module_of(file)) or file.stem in ("__init__", "stub"), file


def test_no_package_is_above_its_ceiling() -> None:
    counted = lines.by_room()
    assert set(counted) == set(CEILING)
    above = {room: (n, CEILING[room]) for room, n in counted.items() if n > CEILING[room]}
    assert not above, "above `CEILING`: delete code, or raise it by 500 and say why in the commit"


def test_no_language_is_above_its_ceiling() -> None:
    counted = lines.by_language()
    assert set(counted) == set(lines.C_CEILING)
    above = {name: n for name, n in counted.items() if n > lines.C_CEILING[name]}
    assert not above, "above `C_CEILING`: delete code, or raise it by 500 and say why in the commit"


def test_every_folder_says_its_job_in_one_sentence() -> None:
    for file in FILES:
        if file.name == "__init__.py":
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            first, *_ = text.split("\n\n")
            assert first.endswith("."), file
            assert len(re.findall(r"\.(\s|$)", first)) == 1, file


def test_core_without_its_kernels_is_small() -> None:
    """The kernels are the op rooms, and `fused`, which runs them block by block. Examples in
    docstrings are no part of it."""
    core = ROOT / "mlvm" / "core"
    kernels = {*(core / "ops").rglob("*.py"), core / "machine" / "fused.py"}
    files = set(core.rglob("*.py")) - kernels
    assert sum(lines_without_examples(file.read_text()) for file in files) <= 6600


def lines_without_examples(source: str) -> int:
    """Count the lines of a file, without docstrings from their first example on."""
    lines = source.splitlines()
    shown = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            start, end = node.body[0].lineno - 1, node.body[0].end_lineno
            text = lines[start:end]
            starts = (">>>", "Invalid calls:")
            first = next((i for i, x in enumerate(text) if x.lstrip().startswith(starts)), None)
            if first is not None:
                shown += len(text) - first + 1  # and the empty line before
    return len(lines) - shown


def test_the_hard_dependencies_are_numpy_and_typing_extensions() -> None:
    assert {"numpy", "typing_extensions"} == HARD


@cases(
    "package, source",
    ("mlvm.core", "import mlvm.eager"),
    ("mlvm.core", "import mlvm"),
    ("mlvm.core", "import mlvm.arena.planner as p"),
    ("mlvm.core.ops", "from ...eager import tensor"),
    ("mlvm.core.ops", "from mlvm import arena"),
    ("mlvm.core", "def f():\n    from mlvm.arena import planner"),
    ("mlvm.core", "class C:\n    async def f(self):\n        import models.mlp"),
    (
        "mlvm.arena",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlvm.eager.tree",
    ),
    ("mlvm.arena", "from ..eager.tensor.tensor import Tensor"),
    ("mlvm.machines", "from mlvm.arena.arena import Arena"),
    ("mlvm.step", "from mlvm.input.queue import QueueTensor"),
    ("mlvm.step", "from mlvm.build.targets import CannotBuild"),
    ("mlvm.parallel", "from mlvm.eager.tensor.tensor import Tensor"),
    ("mlvm.eager", "import models"),
    ("mlvm.eager.tensor", "from mlvm.eager.functions import creation"),
    ("mlvm.eager.tree", "from mlvm.eager import nn"),
    ("mlvm", "import models.mlp_mixer"),
    ("models", "from mlvm.core.types import TensorType"),
    ("models", "import mlvm"),
    ("mlvm.core", "import tqdm"),
    ("mlvm.core", "def f():\n    import tqdm"),
    ("mlvm.eager", "import tqdm"),
    ("mlvm.eager", "try:\n    import tqdm\nexcept ImportError:\n    pass"),
    ("models", "def f():\n    import torch"),
)
def test_the_checker_flags_a_wrong_import(package: str, source: str) -> None:
    assert len(violations(source, package)) == 1


@cases(
    "sources, ring",
    ({"m.a": "import m.b", "m.b": "from m import a"}, {"m.a", "m.b"}),
    ({"m.a": "import m.b", "m.b": "def f():\n    from m.a import f"}, {"m.a", "m.b"}),
    ({"m": "from m.a import f", "m.a": "from . import g"}, {"m", "m.a"}),
    ({"m": "from m.a import f", "m.a": "from m.b import g", "m.b": ""}, set()),
)
def test_the_checker_finds_circles(sources: dict[str, str], ring: set[str]) -> None:
    assert set(circle(imported_files(sources))) == ring


@cases(
    "package, source",
    ("mlvm.core", "import numpy as np\nfrom typing_extensions import Self\nimport os.path"),
    ("mlvm.core.ops", "from ..op import op\nfrom . import erf\nfrom mlvm.core import types"),
    ("mlvm.arena", "from mlvm.core.types import TensorType\nfrom . import planner"),
    ("mlvm.eager", "from mlvm.arena.arena import Arena\nimport mlvm.core.vm"),
    ("mlvm.eager.nn", "from mlvm.eager import hints\nfrom mlvm.eager.tensor import dtypes"),
    ("mlvm", "from mlvm import eager\nfrom .core import assembly"),
    ("models", "import mlvm.eager as ml\nfrom mlvm.eager import nn\nfrom models import data"),
    ("models", "def f():\n    from tqdm import tqdm"),
)
def test_the_checker_passes_a_right_import(package: str, source: str) -> None:
    assert violations(source, package) == []
