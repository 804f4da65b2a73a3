"""Output files replace earlier ones only when they are complete, and all code writes them so."""

from __future__ import annotations

import ast
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.machines.files import (
    require_writable,
    write_array,
    write_file,
    write_files,
)
from tests.brief import ROOT, Patch, refuses


def fails(*_: object, **__: object) -> None:
    raise MemoryError


def test_a_file_replaces_another_only_when_it_is_complete(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        refuses(MemoryError, "", write_file, page, "new")
    assert page.read_text() == "old"
    write_file(link, "new \udcff")
    assert page.read_text("utf-8") == "new \\udcff"
    assert link.is_symlink()
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [link, page]


def test_of_several_files_none_is_replaced_before_all_are_complete(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_files({a: "1", b: b"2"})
    assert (a.read_text(), b.read_text()) == ("1", "2")
    refuses(FileNotFoundError, "no", write_files, {a: "3", tmp_path / "no" / "c": "4"})
    assert sorted(tmp_path.iterdir()) == [a, b]
    assert a.read_text() == "1"
    replaced: list[str] = []
    replace = Path.replace

    def replace_and_note(self: Path, target: Path) -> Path:
        replaced.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_and_note)
    write_files({a: "5", b: "6"})
    assert replaced == ["a", "b"]


def test_an_array_is_written_as_numpy_does(tmp_path: Path) -> None:
    for x in (np.arange(6.0).reshape(2, 3).T, np.array(3), np.zeros((0, 2), np.int8)):
        write_array(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", x)
        assert (tmp_path / "x.npy").read_bytes() == (tmp_path / "y.npy").read_bytes()


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    require_writable(tmp_path / "another.html")
    require_writable(os.devnull)
    refuses(FileNotFoundError, r"x\.html", require_writable, tmp_path / "no" / "x.html")
    refuses(IsADirectoryError, "", require_writable, tmp_path)
    refuses(OSError, "regular", require_writable, os.devnull, is_stream_allowed=False)
    refuses(OSError, "embedded null", write_file, "a\0b", "")
    assert not any(tmp_path.iterdir())


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    try:
        os.mkfifo(pipe)
    except (AttributeError, OSError):
        pytest.skip("no named pipes")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_the_temporary_file_of_a_killed_process_is_removed_later(tmp_path: Path) -> None:
    left, new = (tmp_path / f".mlvm-{i:016x}" for i in range(2))
    for draft in (left, new):
        draft.write_bytes(b"half")
    os.utime(left, (time.time() - 60,) * 2)
    write_file(tmp_path / "x", "")
    assert sorted(tmp_path.iterdir()) == [new, tmp_path / "x"]


# --- all code -----------------------------------------------------------------------------


_WRITING = {"write_text", "write_bytes", "copyfile", "savez", "tofile", "mkstemp"}
_ELSEWHERE = {
    "mlvm/machines/files.py": "is what writes files",
    "mlvm/show/scalars.py": "appends rows",
    "mlvm/machines/remote/worker.py": "writes to /proc",
    "mlvm/machines/terminal.py": "opens the null device",
}


def writing(source: str) -> Iterator[str]:
    """Yield the calls that write to a file by its name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function: Any = node.func
        is_method = isinstance(function, ast.Attribute)
        name = function.attr if is_method else getattr(function, "id", "")
        of_numpy = is_method and getattr(function.value, "id", "") == "np"
        mode = [x.value for x in node.args if isinstance(x, ast.Constant)]
        mode += [x.value.value for x in node.keywords if isinstance(x.value, ast.Constant)]
        opens = name == "open" and any(str(x)[:1] in "wax" for x in mode if str(x).strip("bt+"))
        if (is_method and name in _WRITING) or opens or (of_numpy and name == "save"):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("top", ["mlvm", "models"])
def test_all_files_are_written_by_one_function(top: str) -> None:
    for file in sorted((ROOT / top).rglob("*.py")):
        if str(file.relative_to(ROOT)) not in _ELSEWHERE:
            assert not [*writing(file.read_text("utf-8"))], file


def test_a_call_that_writes_is_seen() -> None:
    for call in ("p.write_text(x)", 'open(p, "w")', 'p.open("xb")', "np.save(p, x)"):
        assert [*writing(call)], call
    assert not [*writing('p.open("rb"); open(p); ml.save(p, x)')]
