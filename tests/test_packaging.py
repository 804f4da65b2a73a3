"""What a release holds, and that it works where the checkout is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import numpy
import pytest
import typing_extensions

import mlvm

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
README: Final = (ROOT / "README.md").read_text("utf-8")
IGNORED: Final = (ROOT / ".gitignore").read_text("utf-8").split()


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints, run with nothing of this environment's that Python heeds."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without what git ignores, for a build writes beside its sources."""
    copy = tmp_path_factory.mktemp("release") / "checkout"
    ignored = shutil.ignore_patterns(".git", *(pattern.strip("/") for pattern in IGNORED))
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def dist(checkout: Path) -> Path:
    """The folder that `make wheel` fills: the source distribution, and the wheel made from it."""
    built = checkout.parent / "dist"
    [command] = re.findall(r"\$\(BIN\)/python (-m build .*)", (ROOT / "Makefile").read_text())
    run(sys.executable, *command.split(), "--outdir", built, cwd=checkout)
    return built


@pytest.fixture(scope="module")
def environment(dist: Path) -> Path:
    """A virtual environment with the wheel. The dependencies are those installed here."""
    venv = dist.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=dist)
    [wheel] = dist.glob("*.whl")
    offline = ("--quiet", "--no-index", "--no-deps")
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=dist)
    [installed] = venv.glob("lib/*/site-packages")
    dependencies = Path(numpy.__file__).parents[1], Path(typing_extensions.__file__).parent
    (installed / "dependencies.pth").write_text("\n".join(map(str, dependencies)))
    return venv


def test_the_wheel_holds_the_package_alone(dist: Path, checkout: Path) -> None:
    [wheel] = dist.glob("*.whl")
    assert wheel.name == f"mlvm-{mlvm.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"mlvm-{mlvm.__version__}.dist-info/")}
    assert names - about == {f"mlvm/{name}" for name in files(checkout / "mlvm")}
    assert {"mlvm/py.typed", "mlvm/eager/primitives.pyi", "mlvm/machines/mlvm.h"} <= names


def test_the_source_distribution_holds_the_checkout(dist: Path, checkout: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    name = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        held = {path.removeprefix(f"{name}/") for path in opened.getnames()}
    folders = "mlvm", "models", "bench", "tests", "docs", "examples", ".ci", ".github"
    needed = {f"{top}/{file}" for top in folders for file in files(checkout / top)}
    assert needed - held == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", ".gitignore"} <= held


def test_the_installed_package_works_elsewhere(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    [installed] = environment.glob("lib/*/site-packages/mlvm")
    where = run(python, "-c", "import mlvm; print(mlvm.__file__)", cwd=tmp_path)
    assert Path(where.strip()).parent == installed
    header = "from mlvm.machines.c_functions import include_dir; print(include_dir())"
    assert (Path(run(python, "-c", header, cwd=tmp_path).strip()) / "mlvm.h").is_file()


def test_the_first_program_of_the_readme_runs_installed(environment: Path, tmp_path: Path) -> None:
    first = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)
    assert first
    python = environment / "bin" / "python"
    assert run(python, "-W", "error", "-c", first[1], cwd=tmp_path) == first[2]


def test_the_command_is_the_module(environment: Path, tmp_path: Path) -> None:
    info = run(environment / "bin" / "python", "-m", "mlvm", "info", cwd=tmp_path)
    assert f"mlvm {mlvm.__version__}," in info
    assert run(environment / "bin" / "mlvm", "info", cwd=tmp_path) == info


def test_the_readme_lists_the_extras() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", README, re.MULTILINE)
    assert [name for name, _ in rows] == list(PROJECT["optional-dependencies"])
    for name, brings in rows:
        for requirement in PROJECT["optional-dependencies"][name]:
            assert re.split(r"[<>=]", requirement)[0] in brings


def test_public_ci_runs_the_pythons_that_the_package_claims() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert "\t" not in workflow  # which YAML refuses
    [matrix] = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    versions = re.findall(r'"([\d.]+)"', matrix)
    prefix = "Programming Language :: Python :: "
    claimed = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert versions == [version for version in claimed if version != "3 :: Only"]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert re.search(r"^ +- run: \.ci/run$", workflow, re.MULTILINE)
    assert set(re.findall(r"uses: (.*)", workflow)) == {
        "actions/checkout@v4",
        "actions/setup-python@v5",
    }
