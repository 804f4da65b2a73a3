"""`python -m mlvm migrate` rewrites old names, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import tokenize
import warnings
from pathlib import Path
from typing import Any

import pytest

from mlvm.__main__ import main
from mlvm.migrate import rewrite
from mlvm.renamed import ATTRIBUTES, KEYWORDS, NAMES
from tests.brief import ROOT, cases

Capsys = pytest.CaptureFixture[str]

CASES = ROOT / "tests" / "cases"
TABLE = (CASES / "old_names.txt").read_text("utf-8").splitlines()
PROGRAMS = (CASES / "old_names_in_scopes.txt").read_text("utf-8").split("\n\n")[1:]
OLD = "import mlvm.eager as ml\nml.nll(x)  # the loss\n"
NEW = OLD.replace("nll", "nll_loss")
EXAMPLES_OF_0_2 = "a25ec764"
"""The commit of the release 0.2.0."""


def read_rows(rows: list[str]) -> tuple[str, str, list[tuple[int, str]]]:
    """Return the old code, the new code, and the uses that are not clear."""
    old: list[str] = []
    new: list[str] = []
    unclear = []
    for row in rows:
        if row.startswith("=> "):
            new[-1] = row[3:]
        elif row.startswith("?? "):
            unclear.append((len(old), row[3:]))
        else:
            old.append(row)
            new.append(row)
    return "\n".join(old), "\n".join(new), sorted(unclear)


def check_rows(rows: list[str]) -> tuple[str, str]:
    old, new, unclear = read_rows(rows)
    result = rewrite(Path("old.py"), old)
    assert result.text == new
    assert result.doubts == unclear
    assert not rewrite(Path("new.py"), new).edits
    return old, new


def test_a_script_with_every_kind_of_use() -> None:
    check_rows(TABLE)


def output(program: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(action="ignore"):
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    return out.getvalue()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_the_same_after_it(program: str) -> None:
    old, new = check_rows(program.splitlines())
    assert output(new) == output(old) != ""


def migrate(folder: Path, *options: str) -> int:
    return main(["migrate", str(folder), *options])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(OLD)
    file.chmod(0o755)
    return file


def test_a_backup_is_kept_beside_the_file(script: Path, capsys: Capsys) -> None:
    assert migrate(script) == 0
    assert capsys.readouterr().out == f"{script}:2: nll -> nll_loss\n"
    backup = script.with_name("train.py.orig")
    assert (script.read_text(), backup.read_text()) == (NEW, OLD)
    assert script.stat().st_mode & 0o777 == 0o755
    assert migrate(script) == 0  # nothing is left to change, so the backup stays
    script.write_text(OLD)
    assert migrate(script) == 1
    assert "train.py.orig exists" in capsys.readouterr().err
    assert migrate(script, "--no-backup") == 0
    assert script.read_text() == NEW


def test_check_and_diff_write_nothing(script: Path, capsys: Capsys) -> None:
    assert migrate(script, "--check") == 1
    assert migrate(script, "--diff") == 0
    assert "-ml.nll(x)  # the loss\n+ml.nll_loss(x)  # the loss\n" in capsys.readouterr().out
    assert [*script.parent.iterdir()] == [script]
    assert script.read_text() == OLD
    script.write_text(NEW + "def rate(optimizer): return optimizer.rate\n")
    assert migrate(script, "--check") == 0
    assert "train.py:3: unclear, not changed: " in capsys.readouterr().out


def test_an_import_that_never_worked_stays(script: Path, capsys: Capsys) -> None:
    script.write_text("from mlvm.eager.errors import StaleTensor\nStaleTensor\n")
    assert migrate(script, "--check") == 0
    unclear = "train.py:1: unclear, not changed: StaleTensor of mlvm.eager.errors, which cannot"
    assert unclear in capsys.readouterr().out


def test_a_folder(script: Path) -> None:
    for name in (".venv/lib.py", "__pycache__/lib.py", "package/lib.py", "package/notes.txt"):
        script.parent.joinpath(name).parent.mkdir(exist_ok=True)
        script.parent.joinpath(name).write_text(OLD)
    assert migrate(script.parent, "--no-backup") == 0
    changed = [
        file for file in script.parent.rglob("*") if file.is_file() and "_loss" in file.read_text()
    ]
    assert sorted(changed) == [script.parent / "package" / "lib.py", script]


def test_names_that_other_files_import_stay(tmp_path: Path) -> None:
    files = {
        "package/__init__.py": "from mlvm.eager import l1\n",
        "losses.py": "from mlvm.eager import hinge, nll, ctc, huber\nprint(hinge, nll, ctc)\n",
        "use.py": "from package import l1\nimport losses\nprint(l1, losses.nll)\n",
        "book.ipynb": json.dumps({"cells": [cell("code", "from losses import ctc")]}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert migrate(tmp_path, "--no-backup") == 0
    assert {name: (tmp_path / name).read_text() for name in files} == {
        **files,
        "package/__init__.py": "from mlvm.eager import l1_loss as l1\n",
        "losses.py": "from mlvm.eager import hinge_loss, nll_loss as nll, ctc_loss as ctc, "
        "huber_loss\nprint(hinge_loss, nll, ctc)\n",
    }


def test_links_of_a_folder(script: Path) -> None:
    """A file is rewritten once, and a link to no file is skipped."""
    for name, target in ("link.py", "train.py"), ("broken.py", "none.py"), ("loop", "."):
        script.with_name(name).symlink_to(target)
    os.mkfifo(script.with_name("pipe.py"))
    assert migrate(script.parent) == 0
    assert script.read_text() == NEW
    assert len([*script.parent.glob("*.orig")]) == 1


@cases(
    "data, message",
    (b"def f(:\n", "train.py:1: not valid Python"),
    (b"\xff\xfe", "not a text file"),
    (b"x = '\0'", "train.py: not valid Python"),
    (b"import mlvm\n" + b"x" + b".x" * 20000, "not valid Python"),
)
def test_a_file_that_is_no_python_is_an_error(
    data: bytes, message: str, script: Path, capsys: Capsys
) -> None:
    good = script.with_name("a.py")
    good.write_text(OLD)
    script.write_bytes(data)
    assert migrate(script.parent) == 1
    assert message in capsys.readouterr().err
    assert good.read_text() == OLD  # all files are read before one is written


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, capsys: Capsys) -> None:
    assert migrate(tmp_path / "none.py") == 1
    assert "none.py" in capsys.readouterr().err


@cases(
    "data",
    OLD.replace("\n", "\r\n").encode(),
    b"\xef\xbb\xbf" + OLD.encode(),
    b"# coding: latin-1\n# \xe9\n" + OLD.encode() + b"x = '\xe9'; ml.nll",
    OLD.encode() + b"\x0c\nif x:\n\tml.nll(x)\\\n(y)",
)
def test_line_ends_and_encodings_stay(data: bytes, script: Path) -> None:
    script.write_bytes(data)
    assert migrate(script, "--no-backup") == 0
    assert script.read_bytes() == data.replace(b"nll", b"nll_loss")


MARKDOWN = """\
`ml.nll` is text.

1. A block:

   ```python
   ml.nll(x)
   optimizer = ml.optim.SGD({}, 0.1)
   ```
~~~py
print(optimizer.rate)
~~~
```pycon
>>> ml.nll(x)
nll
```
```sh
ml.nll
```
```python
ml.nll(
```
"""


def test_the_python_blocks_of_markdown_share_their_names() -> None:
    result = rewrite(Path("page.md"), MARKDOWN)
    new = MARKDOWN.replace("ml.nll(x)", "ml.nll_loss(x)").replace(".rate", ".learning_rate")
    assert result.text == new
    assert result.doubts == [(20, "nll in invalid Python")]


def cell(kind: str, source: Any) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source}


def test_the_code_cells_of_a_notebook() -> None:
    cells = [
        cell("markdown", ["ml.nll"]),
        cell("code", ["%matplotlib inline\n", "import mlvm.eager as ml\n", "!ls"]),
        cell("code", "if é:\n    ml.nll(é)"),
        cell("code", []),
    ]
    text = json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n"
    result = rewrite(Path("book.ipynb"), text)
    assert result.text == text.replace("ml.nll(é)", "ml.nll_loss(é)")
    assert rewrite(Path("book.ipynb"), result.text).text == result.text


@cases(
    "source, new, doubts",
    ("if 3 % 2 != 0: ml.l1('done!')  # why?", "if 3 % 2 != 0: ml.l1_loss('done!')  # why?", []),
    ("z = !ls\nml.l1\nml.zeros?", "z = !ls\nml.l1_loss\nml.zeros?", []),
    (
        "if z:\n    %timeit ml.l1(x)\nml.nll",
        "if z:\n    %timeit ml.l1(x)\nml.nll_loss",
        [(3, "l1 in an IPython command")],
    ),
    ("%%time\nml.l1", "%%time\nml.l1_loss", []),
    ("%%bash\necho ml.l1", None, [(3, "l1 in invalid Python")]),
    ("x = '\ud83d', 'é', ml.l1", "x = '\ud83d', 'é', ml.l1_loss", []),
    ("x = (7\n% ml.l1)", "x = (7\n% ml.l1_loss)", []),
    (["", "ml.l1\n\nml", ".nll", "\n"], ["", "ml.l1_loss\n\nml", ".nll_loss", "\n"], []),
    (["ml.n", "ll"], None, [(2, "nll, which is now nll_loss")]),
    (
        "from mlvm.eager import l1, nll\n%timeit l1(x)\nnll",
        "from mlvm.eager import l1_loss as l1, nll_loss\n%timeit l1(x)\nnll_loss",
        [(3, "l1 in an IPython command")],
    ),
)
@cases("ascii", True, False)
def test_only_the_names_of_a_notebook_change(
    source: Any, new: Any, doubts: Any, ascii: bool
) -> None:
    def book(code: Any) -> str:
        cells = [cell("code", ["import mlvm.eager as ml"]), cell("code", code), cell("code", [""])]
        text = json.dumps({"cells": cells, "n": 1e5, "a": "\ud83d"}, ensure_ascii=ascii, indent=3)
        return text.replace("\ud83d", "\\ud83d")

    result = rewrite(Path("book.ipynb"), book(source))
    assert result.text == book(source if new is None else new)
    assert result.doubts == doubts


@cases(
    "text",
    "{",
    "[]",
    '{"cells": [{"cell_type": "code", "source": {"ml.l1": 1}}]}',
    '{"cells": [{"cell_type": "code"}]}',
)
def test_a_damaged_notebook_is_an_error(text: str, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "book.ipynb").write_text(text)
    assert migrate(tmp_path) == 1
    assert "not a notebook" in capsys.readouterr().err


def tokens(text: str) -> list[str]:
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the history of the repository is not there")
    return done.stdout


def test_the_examples_of_0_2() -> None:
    """Only names of the table change, and none is left."""
    renamed = {
        pair for of in (NAMES, ATTRIBUTES, KEYWORDS) for x in of.values() for pair in x.items()
    }
    listed = _git("ls-tree", "-r", "--name-only", EXAMPLES_OF_0_2, "examples", "models")
    seen = set()
    for name in listed.split():
        if not name.endswith(".py"):
            continue
        old = _git("show", f"{EXAMPLES_OF_0_2}:{name}")
        result = rewrite(Path(name), old)
        ast.parse(result.text)
        assert not rewrite(Path(name), result.text).edits
        pairs = zip(tokens(old), tokens(result.text), strict=True)
        changed = {(x, y) for x, y in pairs if x != y and '"""' not in x}
        assert changed <= renamed
        seen |= changed
    assert {("function", "subroutine"), ("StaleTensor", "StaleTensorError")} & seen
