"""The code in docs/ and in both READMEs runs and prints the shown output."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import linecache
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from docs import figures, instructions
from mlvm.core import errors
from mlvm.core.op import Op
from mlvm.core.program.program import Opcode
from mlvm.machines.native.extension import is_native
from tests.brief import ROOT

MACHINE = ROOT / "docs" / "machine.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```", re.DOTALL)


def plainly(printed: str) -> str:
    """Return the output without plans where numpy kernels run, for which other chains are made than
    the pages show."""
    plan = r"^[\d,]+ bytes, lower bound .*$"
    return (printed if is_native(None) else re.sub(plan, "a plan", printed, flags=re.M)).strip()


def shown(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Each block in that language, with the text block that follows it, or nothing."""
    blocks = [*BLOCK.findall(page.read_text("utf-8")), ("", "")]
    for (kind, body), (next_kind, output) in itertools.pairwise(blocks):
        if kind == language:
            yield body, output if next_kind == "text" else ""


ELSEWHERE = {
    "docs/functions.md": "tests/machines/test_c_functions.py",
    "docs/gpu.md": "it takes a GPU",
}
"""Pages whose Python other tests run, or none can."""

HANDLE = re.compile(r"(?<=push_int )\d+(?=\n +load_global)")
"""A number that depends on what the process has made before."""

PAGES = {
    str(page.relative_to(ROOT)): [*shown(page, "python")]
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}


def test_pages_have_examples() -> None:
    assert sum(map(len, PAGES.values())) > 160


@pytest.mark.usefixtures("folder")  # pages write files
@pytest.mark.parametrize("page", [x for x in PAGES if PAGES[x] and x not in ELSEWHERE])
def test_the_python_prints_what_the_page_says(page: str) -> None:
    if "parallel.Group(" in (ROOT / page).read_text("utf-8"):
        pytest.importorskip("threadpoolctl")
    namespace: dict[str, Any] = {}
    for body, expected in PAGES[page]:
        linecache.cache[page] = len(body), None, body.splitlines(True), page
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(body, page, "exec"), namespace)
        ours, theirs = (HANDLE.sub("n", plainly(x)) for x in (printed.getvalue(), expected))
        assert ours == theirs


def test_the_script_for_pytorch_trains_there() -> None:
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "from-pytorch.md").read_text("utf-8")
    [script] = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "from-pytorch.md", "exec"), {})
    assert printed.getvalue() == "True\n"


@pytest.mark.parametrize("page", ["examples/README.md", "docs/machine.md", "docs/runs.md"])
def test_the_commands_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    examples = list(shown(ROOT / page, "sh"))
    assert examples
    for body, expected in examples:
        done = subprocess.run(
            ["sh", "-c", f'python() {{ "{sys.executable}" "$@"; }}\n{body}'],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.stdout == expected


def test_the_instruction_table_is_that_of_the_code() -> None:
    page = MACHINE.read_text("utf-8")
    assert instructions.written(page) == page, "run python -m docs.instructions"
    for opcode in Opcode:
        assert f"\n| `{opcode.text}` |" in page


def test_an_eager_addition_takes_the_path_that_the_page_walks() -> None:
    section = MACHINE.read_text("utf-8").partition("\n## From `a + b` to the kernel\n")[2]
    rows = re.findall(r"^\| \d \| `(.*?)` \| `(.*?)` \|", section, re.MULTILINE)
    assert 2 <= len(rows) <= 6
    with ml.Arena(ml.VM(native=False), "reference").allocating():
        a = ml.asarray([1.0, 2.0])
        b = ml.asarray([3.0, 4.0])
        calls = calls_that_lead_to(code_of(*rows[-1]), lambda: a + b)
        np.testing.assert_array_equal(np.asarray(a + b), [4, 6])
    assert calls == [code_of(*row) for row in rows]


def code_of(name: str, file: str) -> CodeType:
    """The code of a function as the page names it: `VM.launch` in `mlvm/core/vm.py`."""
    obj: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        obj = getattr(obj, part)
    code: CodeType = (obj.kernel if isinstance(obj, Op) else obj).__code__
    assert code.co_filename == str(ROOT / file)
    return code


def calls_that_lead_to(target: CodeType, call: Any) -> list[CodeType]:
    """The codes on Python's stack, from `call` on, when `target` runs; the second time round."""
    chains: list[list[CodeType]] = []

    def profile(frame: FrameType | None, event: str, _: Any) -> None:
        if event == "call" and frame is not None and frame.f_code is target:
            chain = []
            while frame is not None and frame.f_code is not call.__code__:
                chain.append(frame.f_code)
                frame = frame.f_back
            chains.append(chain[::-1])

    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    [chain] = chains
    return chain


SHARED_WORDS = {
    "arena": 2,
    "batch": 2,
    "block": 3,
    "buffer": 2,
    "chain": 2,
    "check": 2,
    "checkpoint": 2,
    "collective": 2,
    "frame": 4,
    "function": 3,
    "group": 2,
    "hoisted": 2,
    "instrument": 2,
    "kernel": 2,
    "lane": 5,
    "launch": 2,
    "link": 3,
    "node": 2,
    "number": 3,
    "op": 2,
    "pipeline": 2,
    "place": 2,
    "plan": 2,
    "planner": 2,
    "region": 2,
    "scratch": 3,
    "scratchpad": 2,
    "signature": 2,
    "slot": 3,
    "state": 2,
    "step": 7,
    "storage": 2,
    "tape": 2,
    "trace": 3,
    "type": 2,
    "vm": 2,
    "wire": 2,
    "worker": 3,
}
"""Glossary words with several classes or several modules, and their number, which may only fall."""


def glossary() -> list[str]:
    """Return the words of the glossary in the order of the page."""
    return re.findall(r"^\| \[\*\*(.+?)\*\*\]", GLOSSARY.read_text("utf-8"), re.MULTILINE)


def test_the_glossary_has_each_word_once_and_sorted() -> None:
    words = [word.lower().replace("_", " ") for word in glossary()]
    assert len(words) > 100
    assert words == sorted(set(words))


def test_a_word_of_the_glossary_has_one_definition() -> None:
    files = sorted((ROOT / "mlvm").rglob("*.py"))
    text = "\n".join([file.read_text("utf-8") for file in files])
    classes = re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE)
    modules = Counter(singular(file.stem) for file in files)
    definitions = modules | Counter(map(singular, classes))
    shared = {word: definitions[word] for word in map(singular, glossary())}
    several = {word: count for word, count in shared.items() if count > SHARED_WORDS.get(word, 1)}
    assert not several, "rename one of them: a glossary word has one meaning"


def singular(name: str) -> str:
    """Return the glossary word that a class or module name stands for."""
    return name.strip("_").lower().replace("_", "").replace(" ", "").removesuffix("s")


ERRORS = {
    each.__name__: each
    for each in vars(errors).values()
    if isinstance(each, type) and errors.MlvmError in each.__mro__[1:]
}


def test_the_error_tree_is_drawn_whole() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted(drawn) == sorted(ERRORS)


def test_the_figures_of_both_pages_are_those_of_the_reports() -> None:
    data = json.loads(figures.DATA.read_text())
    for page in figures.PAGES:
        text = page.read_text("utf-8")
        assert "<!-- figures: training -->" in text
        assert figures.written(text, data) == text, "run python -m docs.figures"


def test_the_errors_page_has_a_row_for_each_exception_and_warning() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)`(?: \((.*?)\))? \|", page, re.MULTILINE))
    bases = {
        name: [base for base in each.__bases__ if not issubclass(base, errors.MlvmError)]
        for name, each in ERRORS.items()
    }
    warned = {name for name in dir(ml) if name.endswith("Warning")}
    assert rows.keys() == bases.keys() | {f"ml.{name}" for name in warned}
    for name, builtin in bases.items():
        named = [base.rpartition(".")[2] for base in re.findall(r"`([\w.]+)`", rows[name])]
        assert named == [base.__name__ for base in builtin if base is not Exception], name


def test_every_page_is_in_the_reading_order() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text("utf-8"))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)


def test_links_lead_to_files() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", prose):
            if not link.startswith(("https://", "http://")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
