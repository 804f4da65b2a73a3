"""`python -m mlvm migrate` rewrites old names, and nothing else."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import tokenize
from pathlib import Path
from typing import Any

import pytest

from mlvm.__main__ import main
from mlvm.migrate import rewrite
from mlvm.renamed import ATTRIBUTES, KEYWORDS, NAMES
from tests.brief import ROOT, cases

Capsys = pytest.CaptureFixture[str]

TABLE = (ROOT / "tests" / "cases" / "old_names.txt").read_text("utf-8").splitlines()
OLD = "import mlvm.eager as ml\nml.nll(x)  # the loss\n"
NEW = OLD.replace("nll", "nll_loss")
EXAMPLES_OF_0_2 = "a25ec764"
"""The commit of the release 0.2.0."""


def test_a_script_with_every_kind_of_use() -> None:
    old: list[str] = []
    new: list[str] = []
    unclear = []
    for row in TABLE:
        if row.startswith("=> "):
            new[-1] = row[3:]
        elif row.startswith("?? "):
            unclear.append((len(old), row[3:]))
        else:
            old.append(row)
            new.append(row)
    result = rewrite(Path("old.py"), "\n".join(old))
    assert result.text.splitlines() == new
    assert result.doubts == sorted(unclear)
    assert not rewrite(Path("new.py"), result.text).edits


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
    script.write_text(NEW)
    assert migrate(script, "--check") == 0


def test_a_folder(script: Path) -> None:
    for name in (".venv/lib.py", "__pycache__/lib.py", "package/lib.py", "package/notes.txt"):
        script.parent.joinpath(name).parent.mkdir(exist_ok=True)
        script.parent.joinpath(name).write_text(OLD)
    assert migrate(script.parent, "--no-backup") == 0
    changed = [
        file for file in script.parent.rglob("*") if file.is_file() and "_loss" in file.read_text()
    ]
    assert sorted(changed) == [script.parent / "package" / "lib.py", script]


@cases(
    "data, message",
    (b"def f(:\n", "train.py:1: not valid Python"),
    (b"\xff\xfe", "not a text file"),
    (b"x = '\0'", "not valid Python"),
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


@cases("text", "{", "[]", '{"cells": [{"cell_type": "code"}]}')
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
