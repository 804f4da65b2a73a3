"""The contents of a release, which works without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy
import pytest
import typing_extensions

import mlvm
from mlvm.machines.native import extension
from tests.brief import IGNORED, ROOT, copied

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
README: Final = (ROOT / "README.md").read_text("utf-8")
FIRST: Final = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)[0]
"""Its first program, and what that prints."""
SOURCES: Final = "machines/native/src/"
WITHOUT_PYTHON: Final = "machines/native/src/plan/"
"""Of which `python -m mlvm build` makes a step in C: a wheel has these."""

EXTENSION: Final = "mlvm/machines/native/_native.abi3.so"
STUBS: Final = {
    f"mlvm/eager/{name}.pyi" for name in ("tensor/primitives", "tensor/methods", "names")
}
QUICK: Final = {"MLVM_OPTIMIZE": "0", "MLVM_TARGETS": "plain"}
"""A thirtieth of the compiler's time; nothing is measured of what tests build."""

HAS_COMPILER: Final = shutil.which(sysconfig.get_config_var("CC").split()[0]) is not None


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return the command's output, run without the variables of this environment that Python and
    mlvm heed."""
    heeded = ("PYTHON", "MLVM_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(heeded)} | variables
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without what git ignores, for a build writes beside its sources."""
    return copied(ROOT, tmp_path_factory.mktemp("release") / "checkout", ".git", *IGNORED)


@pytest.fixture(scope="module")
def dist(checkout: Path) -> Path:
    """The folder that `make wheel` fills: the source distribution, and the wheel made from it."""
    built = checkout.parent / "dist"
    [command] = re.findall(r"\$\(BIN\)/python (-m build .*)", (ROOT / "Makefile").read_text())
    run(sys.executable, *command.split(), "--outdir", built, cwd=checkout, **QUICK)
    return built


def installed(venv: Path, wheel: Path) -> Path:
    """Make the folder a virtual environment with the wheel. The dependencies are those installed
    here."""
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    offline = ("--quiet", "--no-index", "--no-deps")
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=venv)
    [packages] = venv.glob("lib/*/site-packages")
    dependencies = Path(numpy.__file__).parents[1], Path(typing_extensions.__file__).parent
    (packages / "dependencies.pth").write_text("\n".join(map(str, dependencies)))
    return venv


@pytest.fixture(scope="module")
def environment(dist: Path) -> Path:
    """A virtual environment with the wheel."""
    [wheel] = dist.glob("*.whl")
    return installed(dist.parent / "venv", wheel)


@pytest.fixture(scope="module")
def without_compiler(dist: Path) -> Path:
    """A virtual environment with what pip makes of the source distribution without a compiler."""
    [archive] = dist.glob("*.tar.gz")
    folder = dist.parent / "without_compiler"
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    pip = (sys.executable, "-m", "pip", "wheel")
    run(*pip, *options, archive, cwd=dist, CC="/bin/false", **QUICK)
    [wheel] = folder.glob("*.whl")
    assert EXTENSION not in zipfile.ZipFile(wheel).namelist()
    return installed(folder / "venv", wheel)


def test_free_threaded_python_installs_without_the_limited_api(
    checkout: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    copied(checkout, clone, "*.so", "/build")
    flag = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
    (tmp_path / "sitecustomize.py").write_text(flag)
    build = ("sh", "-c", f"{sys.executable} setup.py -q bdist_wheel 2>&1")
    told = run(*build, cwd=clone, PYTHONPATH=str(tmp_path), CC="/bin/false", **QUICK)
    lines = [line for line in told.splitlines() if "/bin/false" in line]
    assert lines == [
        "mlvm: /bin/false cannot build the extension; the slower numpy kernels will run"
    ]
    [wheel] = (clone / "dist").glob("*.whl")
    assert "abi3" not in wheel.name
    installed(tmp_path / "venv", wheel)


def test_the_wheel_holds_the_package_alone(dist: Path, checkout: Path) -> None:
    [wheel] = dist.glob("*.whl")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"mlvm-{mlvm.__version__}-cp311-abi3-{platform}.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"mlvm-{mlvm.__version__}.dist-info/")}
    contents = {
        f"mlvm/{name}"
        for name in files(checkout / "mlvm")
        if name.startswith(WITHOUT_PYTHON) or not name.startswith(SOURCES)
    }
    assert names - about == contents | STUBS | ({EXTENSION} if HAS_COMPILER else set())
    assert {"mlvm/py.typed", "mlvm/machines/mlvm.h"} <= names


def test_the_source_distribution_holds_the_checkout(dist: Path, checkout: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    name = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        paths = {path.removeprefix(f"{name}/") for path in opened.getnames()}
    folders = "mlvm", "models", "bench", "tests", "docs", "examples", "deploy", ".ci", ".github"
    needed = {f"{top}/{file}" for top in folders for file in files(checkout / top)}
    assert needed - paths == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", ".gitignore", "setup.py"} <= paths
    some = ("module.c", "plan/plan.h", "plan/kernels/rows.c")
    assert {f"mlvm/{SOURCES}{name}" for name in some} <= paths
    assert not any(name.endswith((".so", ".o", ".pyc")) or name in STUBS for name in paths)


def test_the_installed_package_works_elsewhere(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    [installed] = environment.glob("lib/*/site-packages/mlvm")
    where = run(python, "-c", "import mlvm; print(mlvm.__file__)", cwd=tmp_path)
    assert Path(where.strip()).parent == installed
    header = "from mlvm.machines.c_functions import include_dir; print(include_dir())"
    assert (Path(run(python, "-c", header, cwd=tmp_path).strip()) / "mlvm.h").is_file()


def test_the_first_program_of_the_readme_runs_installed(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    assert run(python, "-W", "error", "-c", FIRST[0], cwd=tmp_path) == FIRST[1]


def test_the_command_is_the_module(environment: Path, tmp_path: Path) -> None:
    info = run(environment / "bin" / "python", "-m", "mlvm", "info", cwd=tmp_path)
    assert f"mlvm {mlvm.__version__}," in info
    assert run(environment / "bin" / "mlvm", "info", cwd=tmp_path) == info


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
def test_the_installed_package_is_native(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    assert "\nkernels: native, " in run(python, "-m", "mlvm", "info", cwd=tmp_path)
    assert "loss " in run(python, ROOT / "tests" / "captured_step.py", cwd=tmp_path)


def test_without_a_compiler_numpy_kernels_run(without_compiler: Path, tmp_path: Path) -> None:
    python = without_compiler / "bin" / "python"
    reason = "kernels: numpy (the native machine is not available: it was not built; "
    assert f"\n{reason}" in run(python, "-m", "mlvm", "info", cwd=tmp_path)
    assert "step 100: loss 0.07" in run(python, "-W", "error", "-c", FIRST[0], cwd=tmp_path)


@pytest.fixture(scope="module")
def clone(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project of which `pip install -e` has made its wheel, in the folder above."""
    clone = tmp_path_factory.mktemp("editable") / "clone"
    shutil.copytree(checkout, clone)
    assert not files(clone) & STUBS
    editable = "import setuptools.build_meta as backend; backend.build_editable('..')"
    run(sys.executable, "-c", editable, cwd=clone, CC="/bin/false")
    return clone


USERS_FILE: Final = """import mlvm.eager as ml

reveal_type(ml.relu(ml.ones(3)))
ml.nn.Linear("3", 4)
"""


def test_a_type_checker_follows_an_editable_install(clone: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    [wheel] = clone.parent.glob("*.whl")
    python = installed(tmp_path / "venv", wheel) / "bin" / "python"
    (tmp_path / "user.py").write_text(USERS_FILE)
    checker = (sys.executable, "-m", "mypy", "--python-executable", python, "user.py")
    done = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'type is "mlvm.eager.tensor.tensor.Tensor"' in done.stdout, done.stdout + done.stderr
    assert 'Argument 1 to "Linear" has incompatible type "str"' in done.stdout


def test_a_clone_has_the_stubs_once_it_is_installed_or_checked(clone: Path) -> None:
    assert files(clone) >= STUBS
    for stub in STUBS:
        (clone / stub).write_text("of ops as they were")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    [lint] = re.findall(r"^lint: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    [command] = re.findall(r"\$\(BIN\)/python (-m mlvm.*)\n\t\$\(BIN\)/mypy", lint)
    run(sys.executable, *command.split(), cwd=clone)
    assert "def expm1(x: Tensor, /" in (clone / "mlvm/eager/tensor/primitives.pyi").read_text()
    assert (
        "def __add__(self, other: Operand)" in (clone / "mlvm/eager/tensor/methods.pyi").read_text()
    )


def test_an_extension_that_could_not_be_built_anew_is_gone(checkout: Path) -> None:
    library = checkout / EXTENSION
    library.write_bytes(b"of sources as they were")
    os.utime(library, (0, 0))
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(*build, cwd=checkout, CC="/bin/false")
    assert not library.exists()
    with pytest.raises(AssertionError, match="returned non-zero exit status"):
        run(*build, cwd=checkout, CC="/bin/false", MLVM_NATIVE="1")


SIMD_IN_USE: Final = """import mlvm.eager as ml
ml.VM(native=True)
from mlvm.machines.native import _native
print(_native.simd(), *_native.simd_sets())
"""


@pytest.mark.skipif(
    not {"plain", "avx2"} <= extension.simd_sets().keys() or not extension.simd_sets()["avx2"],
    reason="this build or processor has no avx2",
)
def test_a_checkout_compiles_a_set_once_when_it_is_asked_for(
    checkout: Path, tmp_path: Path
) -> None:
    clone, log, compiler = tmp_path / "clone", tmp_path / "log", tmp_path / "cc"
    copied(checkout, clone, "*.so", "/build")
    cc = sysconfig.get_config_var("CC")
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {cc} "$@"\n')
    compiler.chmod(0o755)
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(*build, cwd=clone, CC=str(compiler), **QUICK)
    library = (clone / EXTENSION).read_bytes()
    (clone / "pyproject.toml").write_text("[project]")  # an old setuptools rejects its metadata
    use = (sys.executable, "-c", SIMD_IN_USE)
    with pytest.raises(AssertionError, match=r"no C compiler '/no/cc'; .* pip install -v -e "):
        run(*use, cwd=clone, MLVM_SIMD="avx2", CC="/no/cc")
    assert (clone / EXTENSION).read_bytes() == library
    variables = {"MLVM_SIMD": "avx2", "CC": str(compiler), "MLVM_OPTIMIZE": "0"}
    with ThreadPoolExecutor() as threads:  # at once, as workers of pytest-xdist
        running = [threads.submit(run, *use, cwd=clone, **variables) for _ in range(3)]
    assert {each.result() for each in running} == {"avx2 avx2 plain\n"}
    compiled = [line for line in log.read_text().splitlines() if " -c " in line]
    assert len(compiled) == len({*compiled}) > 0
    assert run(*use, cwd=clone, MLVM_SIMD="avx2", CC="/no/cc") == "avx2 avx2 plain\n"


@pytest.mark.skipif("amx_emulated" not in extension.simd_sets(), reason="not all was built")
def test_a_wheel_has_all_sets_and_a_checkout_those_of_its_processor(checkout: Path) -> None:
    code = "import sys; sys.argv += ['--name']; import setup; print(*setup.targets({}))"
    wheel, own = (
        {*run(sys.executable, "-c", code.format(in_place), cwd=checkout).split()[1:]}
        for in_place in (False, True)
    )
    assert wheel == extension.simd_sets().keys()
    assert "plain" in own
    assert own <= {name for name, here in extension.simd_sets().items() if here} | {"amx"}
    assert next(name for name, here in extension.simd_sets().items() if here) in own
    assert "amx_emulated" not in own


def test_an_extension_that_does_not_load_is_not_used(
    without_compiler: Path, tmp_path: Path
) -> None:
    [packages] = without_compiler.glob("lib/*/site-packages")
    broken = packages / EXTENSION
    broken.write_bytes(b"no library")
    info = run(without_compiler / "bin" / "python", "-m", "mlvm", "info", cwd=tmp_path)
    broken.unlink()
    assert "\nkernels: numpy (the native machine is not available: it cannot be loaded: " in info


def test_the_installation_page_lists_the_extras() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
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
        "pypa/cibuildwheel@v4.3.3 # [tool.cibuildwheel] in pyproject.toml",
        "actions/upload-artifact@v4",
    }


def test_wheels_are_built_for_the_oldest_python_and_tried() -> None:
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]
    oldest = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
    assert wheels["build"] == f"cp{oldest}-*"
    [tried] = re.findall(r"{project}/(.*)", wheels["test-command"])
    assert (ROOT / tried).is_file()
