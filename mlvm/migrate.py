"""The command `python -m mlvm migrate`, which rewrites old public names in files.

Only the names change: comments and formatting stay. In Markdown files the command rewrites the
Python blocks, in notebooks the code cells, and in docstrings the doctests.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.core.errors import MlvmError
from mlvm.machines.files import write_files
from mlvm.old_uses import Doubt, Edit, OldUses
from mlvm.renamed import ATTRIBUTES, KEYWORDS, NAMES

_SUFFIXES: Final = (".py", ".pyi", ".md", ".ipynb")
_NO_SOURCES: Final = {"__pycache__", "node_modules", "site-packages"}
_PYTHON: Final = {"py", "python", "python3", "pycon", "pyi"}
_FENCE: Final = re.compile(r"(\s*)(```+|~~~+)\s*(\w*)")
_PROMPT: Final = re.compile(r"\s*(>>>|\.\.\.)( |$)")
_MAGIC: Final = re.compile(r"(\s*)[%!?].*")
_KNOWN: Final = {"ml": "mlvm.eager", "mlvm": "mlvm"}
"""What documentation and doctests use without an import."""
_TABLES: Final = (*NAMES.values(), *ATTRIBUTES.values(), *KEYWORDS.values())
_OLD: Final = re.compile(rf"\b({'|'.join({name for table in _TABLES for name in table})})\b")


class MigrateError(MlvmError):
    """A file cannot be read, parsed or backed up; the text names it."""


class _Line(NamedTuple):
    """A line of Python code: its number in the file, its code, and the offset of the code in it."""

    number: int
    code: str
    offset: int = 0


class _Rewritten(NamedTuple):
    """A text with new names, the edits that made it, and the uses that are not clear."""

    text: str
    edits: list[Edit]
    doubts: list[Doubt]


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    text = "rewrite old names of mlvm in Python files, Markdown files and notebooks"
    add = commands.add_parser("migrate", help=text, description=text).add_argument
    what = f"a file, or a folder, of which the {', '.join(_SUFFIXES)} files are rewritten"
    add("files", nargs="+", type=Path, metavar="FILE", help=what)
    add(
        "--check", action="store_true", help="only list the old names; exit with 1 if there are any"
    )
    add("--diff", action="store_true", help="only print the changes, as a unified diff")
    add("--no-backup", action="store_true", help="do not keep the old text as FILE.orig")


def migrate(options: argparse.Namespace) -> int:
    """Rewrite files, print what changes and what is not clear, and return the exit status.

    All files are read and parsed before the first one is written. Raises `MigrateError`, and
    `OSError`.
    """
    texts = {file: _read(file) for file in _files(options.files)}
    results = {file: rewrite(file, text) for file, (text, _) in texts.items()}
    contents: dict[Path, str | bytes] = {}
    for file, result in results.items():
        text, encoding = texts[file]
        if options.diff:
            print(_diff(str(file), text, result.text), end="")
        else:
            for edit in result.edits:
                print(f"{file}:{edit.line}: {edit.old} -> {edit.new}")
        for doubt in result.doubts:
            print(f"{file}:{doubt.line}: not changed, because it is not clear: {doubt.text}")
        if result.edits:
            backup = file.with_name(f"{file.name}.orig")
            if not options.no_backup:
                contents[backup] = text.encode(encoding)
            contents[file] = result.text.encode(encoding)
    if not options.check and not options.diff:
        _refuse_to_replace(each for each in contents if each not in texts)
        write_files(contents)
    return int(options.check and bool(contents))


def _refuse_to_replace(backups: Iterable[Path]) -> None:
    for backup in backups:
        if backup.exists():
            raise MigrateError(
                f"{backup} exists, and may be the backup of an earlier run: remove it, or add "
                "--no-backup"
            )


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, and the source files in the folders, without hidden ones."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for each in sorted(path.iterdir()):
            if each.is_dir():
                is_source = each.name not in _NO_SOURCES and not (each / "pyvenv.cfg").exists()
                if is_source and each.name[0] != "." and not each.is_symlink():
                    yield from _files([each])
            elif each.suffix in _SUFFIXES:
                yield each


def _read(file: Path) -> tuple[str, str]:
    """Return the text of a file, with its own line endings, and its encoding."""
    data = file.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError) as error:
        raise MigrateError(f"{file}: not a text file: {error}") from None


def _diff(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Return the lines as Python counts them, with their line endings."""
    return [*io.StringIO(text, newline="")]


def rewrite(file: Path, text: str) -> _Rewritten:
    """Rewrite the text of a file. Raises `MigrateError` if it is not valid."""
    if file.suffix == ".ipynb":
        return _in_notebook(file, text)
    if file.suffix == ".md":
        return _in_blocks(text, _fenced(_lines(text)), _KNOWN)
    try:
        tree = ast.parse(text)
        uses = OldUses(tree)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise MigrateError(f"{file}{line}: not valid Python: {error}") from None
    paths = {**_KNOWN, **uses.imported}
    lines = [_Line(i, line) for i, line in enumerate(_lines(text), 1)]
    edits, doubts = uses.edits, uses.doubts
    for first, last in _docstrings(tree):
        inner = _uses_in([_prompted(lines[first - 1 : last])], paths)
        edits, doubts = edits + inner.edits, doubts + inner.doubts
    return _edited(text, edits, doubts)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each text that is a statement."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str())):
                yield node.lineno, node.end_lineno or node.lineno


def _prompted(lines: Iterable[_Line]) -> list[_Line]:
    """Return the code of the lines that begin with a prompt of Python."""
    matches = ((line, _PROMPT.match(line.code)) for line in lines)
    return [
        _Line(line.number, line.code[match.end() :], line.offset + len(match[0].encode()))
        for line, match in matches
        if match
    ]


def _fenced(lines: list[str]) -> Iterator[list[_Line]]:
    """Yield the Python blocks of a Markdown file."""
    fence, margin = "", 0
    block: list[_Line] | None = None
    for number, text in enumerate(lines, 1):
        match = _FENCE.match(text)
        if fence and match and match[2].startswith(fence) and not match[3]:
            if block is not None:
                prompted = _prompted(block)
                yield prompted or block
            fence, block = "", None
        elif fence and block is not None:
            cut = min(margin, len(text) - len(text.lstrip()))
            block.append(_Line(number, text[cut:], cut))
        elif not fence and match:
            fence, margin = match[2], len(match[1])
            block = [] if match[3] in _PYTHON else None


def _uses_in(blocks: Iterable[list[_Line]], paths: Mapping[str, str]) -> OldUses:
    """Find the uses in blocks of code, which share their names.

    What is not valid Python, and has an old name, is not clear.
    """
    code: dict[int, _Line] = {}
    doubts = []
    for block in blocks:
        try:
            ast.parse("".join(line.code.rstrip("\r\n") + "\n" for line in block))
        except (SyntaxError, ValueError, RecursionError):
            matches = ((line.number, _OLD.search(line.code)) for line in block)
            doubts += [Doubt(n, f"{match[0]} in invalid Python") for n, match in matches if match]
        else:
            code.update((line.number, line) for line in block)
    texts = [
        code[i].code.rstrip("\r\n") if i in code else "" for i in range(1, max(code, default=0) + 1)
    ]
    uses = OldUses(ast.parse("\n".join(texts)), paths)
    uses.edits = [each._replace(offset=each.offset + code[each.line].offset) for each in uses.edits]
    uses.doubts = sorted(uses.doubts + doubts)
    return uses


def _in_blocks(text: str, blocks: Iterable[list[_Line]], paths: Mapping[str, str]) -> _Rewritten:
    uses = _uses_in(blocks, paths)
    return _edited(text, uses.edits, uses.doubts)


def _edited(text: str, edits: list[Edit], doubts: list[Doubt]) -> _Rewritten:
    """Apply the edits to a text.

    An edit whose old name is not at its place becomes a doubt: Python 3.11 has no positions in
    formatted strings.
    """
    lines = [line.encode() for line in _lines(text)]
    applied, missed = [], []
    for edit in sorted({*edits}, reverse=True):
        line, end = lines[edit.line - 1], edit.offset + len(edit.old.encode())
        if line[edit.offset : end] != edit.old.encode():
            missed.append(Doubt(edit.line, f"{edit.old}, which is now {edit.new}"))
            continue
        lines[edit.line - 1] = line[: edit.offset] + edit.new.encode() + line[end:]
        applied.append(edit)
    return _Rewritten(b"".join(lines).decode(), applied[::-1], sorted({*doubts, *missed}))


def _in_notebook(file: Path, text: str) -> _Rewritten:
    """Rewrite the code cells of a notebook. Line numbers count the lines of all these cells."""
    try:
        notebook = json.loads(text)
        cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
        sources = ["".join(each["source"]) for each in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise MigrateError(f"{file}: not a notebook: {error!r}") from None
    joined = "".join(f"{source}\n" for source in sources)
    ends = [0]
    blocks = []
    for source in sources:
        lines = _lines(f"{source}\n")
        code = [_MAGIC.sub(r"\1pass", line) for line in lines]
        blocks.append([_Line(ends[-1] + i, line) for i, line in enumerate(code, 1)])
        ends.append(ends[-1] + len(lines))
    result = _in_blocks(joined, blocks, {})
    lines = _lines(result.text)
    for cell, first, last in zip(cells, ends, ends[1:], strict=False):
        source = "".join(lines[first:last])[:-1]
        cell["source"] = _lines(source) if isinstance(cell["source"], list) else source
    new = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" * text.endswith("\n")
    return result._replace(text=new if result.edits else text)
