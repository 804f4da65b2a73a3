"""Command `python -m mlvm migrate`, which rewrites deprecated public names in files.

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
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import accumulate
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Final, NamedTuple

from mlvm.core.errors import MlvmError
from mlvm.machines.files import write_files
from mlvm.old_uses import OLD_NAMES, Doubt, Edit, OldUses
from mlvm.renamed import ATTRIBUTES, KEYWORDS, NAMES

SUFFIXES: Final = (".py", ".pyi", ".md", ".ipynb")
_NO_SOURCES: Final = {"__pycache__", "node_modules", "site-packages"}
_PYTHON: Final = {"py", "python", "python3", "pycon", "pyi"}
_FENCE: Final = re.compile(r"(\s*)(```+|~~~+)\s*(\w*)")
_PROMPT: Final = re.compile(r"\s*(>>>|\.\.\.)( |$)")
_MAGIC: Final = re.compile(r"(\s*)(?:[%!?].*|(\w[\w\s,.]*=\s*)[%!].*|[%\w.*]+\?\??\s*)")
_CELL_MAGIC: Final = re.compile(r"\s*%%(?!time|capture|prun|memit|mprun)")
"""First line of a cell in a different language, or of text for a file."""
_WORD: Final = re.compile(r"\w+")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_KNOWN: Final = {"ml": "mlvm.eager", "mlvm": "mlvm"}
"""Names that documentation and doctests use without an import."""
_TABLES: Final = (*NAMES.values(), *ATTRIBUTES.values(), *KEYWORDS.values())
_OLD: Final = re.compile(rf"\b({'|'.join({name for table in _TABLES for name in table})})\b")


class MigrateError(MlvmError):
    """Error for a file that cannot be read, parsed or backed up; the text names it."""


class _Line(NamedTuple):
    """Line of Python code: line number in the file, code, and offset of the code in the line."""

    number: int
    code: str
    offset: int = 0


class _Rewritten(NamedTuple):
    """Text with new names, in pieces, the applied edits, and the unclear uses."""

    pieces: list[str]
    edits: list[Edit]
    doubts: list[Doubt]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def migrate(options: argparse.Namespace) -> int:
    """Rewrite old names of mlvm in Python files, Markdown files and notebooks.

    The command prints changes and unclear uses. All files are read and parsed before the first one
    is written.

    Example:
        python -m mlvm migrate --diff train.py
    """
    files = {file.resolve(): file for file in reversed([*_files(options.files)])}  # links once
    texts = {file: _read(file) for file in reversed(files.values())}
    preserved = set().union(*(_from_other_files(file, text) for file, (text, _) in texts.items()))
    results = {file: rewrite(file, text, preserved) for file, (text, _) in texts.items()}
    contents: dict[Path, str | bytes] = {}
    for file, result in results.items():
        text, encoding = texts[file]
        if options.diff:
            print(_diff(str(file), text, result.text), end="")
        else:
            for edit in result.edits:
                print(f"{file}:{edit.line}: {edit.old} -> {edit.new}")
        for doubt in result.doubts:
            print(f"{file}:{doubt.line}: unclear, not changed: {doubt.text}")
        if result.edits:
            backup = file.with_name(f"{file.name}.orig")
            if not options.no_backup:
                contents[backup] = text.encode(encoding)
            contents[file] = result.text.encode(encoding)
    if not options.check and not options.diff:
        backups = [each for each in contents if each not in texts and each.exists()]
        if backups:
            raise MigrateError(
                f"{backups[0]} exists, and may be the backup of an earlier run: remove it, or add "
                "--no-backup"
            )
        write_files(contents)
    return int(options.check and bool(contents))


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, and the source files in the folders, except hidden files."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for each in sorted(path.iterdir()):
            if each.is_dir():
                is_source = each.name not in _NO_SOURCES and not (each / "pyvenv.cfg").exists()
                if is_source and each.name[0] != "." and not each.is_symlink():
                    yield from _files([each])
            elif each.suffix in SUFFIXES and each.is_file():
                yield each


def _read(file: Path) -> tuple[str, str]:
    """Return the text of a file, with the original line endings, and the encoding."""
    data = file.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError) as error:
        raise MigrateError(f"{file}: not a text file: {error}; save it as UTF-8") from None


def _diff(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Return the lines as Python counts them, including line endings."""
    return [*io.StringIO(text, newline="")]


def rewrite(file: Path, text: str, preserved: Set[str] = frozenset()) -> _Rewritten:
    """Rewrite the text of a file. Raises `MigrateError` if it is not valid.

    Other files of the user import the names in `preserved`. An import of one of these names, or of
    any name in `__init__.py`, continues to bind the old name:
    `from mlvm.eager import l1_loss as l1`.
    """
    if file.suffix == ".ipynb":
        return _in_notebook(file, text)
    if file.suffix == ".md":
        uses = _uses_in(_fenced(_lines(text)), _KNOWN)
        return _edited([text], uses.edits, uses.doubts)
    tree, uses = _parsed(file, text)
    paths = {**_KNOWN, **uses.imported}
    lines = [_Line(i, line) for i, line in enumerate(_lines(text), 1)]
    doctests = [_prompted(lines[first - 1 : last]) for first, last in _docstrings(tree)]
    words = {word for each in doctests for line in each for word in _WORD.findall(line.code)}
    uses.find(OLD_NAMES if file.stem == "__init__" else preserved | words)
    edits, doubts = uses.edits, uses.doubts
    for each in doctests:
        inner = _uses_in([each], paths)
        edits, doubts = edits + inner.edits, doubts + inner.doubts
    return _edited([text], edits, doubts)


def _parsed(file: Path, text: str) -> tuple[ast.Module, OldUses]:
    try:
        tree = ast.parse(text)
        return tree, OldUses(tree)
    except (SyntaxError, ValueError, RecursionError) as error:
        number = getattr(error, "lineno", None)  # None if the text has a null byte
        line = f":{number}" if number else ""
        raise MigrateError(f"{file}{line}: not valid Python: {error}; correct it first") from None


def _from_other_files(file: Path, text: str) -> set[str]:
    """Return the names that a file imports from modules outside of mlvm."""
    if file.suffix == ".ipynb":
        uses = _uses_in_cells(_cells(file, text))
    elif file.suffix == ".md":
        uses = _uses_in(_fenced(_lines(text)), {})
    else:
        _, uses = _parsed(file, text)
    return uses.from_other_files


def _is_python(block: list[_Line]) -> bool:
    try:
        ast.parse("".join(line.code.rstrip("\r\n") + "\n" for line in block))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


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


def _uses_in(
    blocks: Iterable[list[_Line]], paths: Mapping[str, str], preserved: Set[str] = frozenset()
) -> OldUses:
    """Find the uses in blocks of code, which share their names.

    Invalid Python that contains an old name is unclear. Imports continue to bind these names and
    the names in `preserved`.
    """
    code: dict[int, _Line] = {}
    doubts = []
    for block in blocks:
        if _is_python(block):
            code.update((line.number, line) for line in block)
        else:
            matches = ((line.number, _OLD.search(line.code)) for line in block)
            old_names = [(number, match[0]) for number, match in matches if match]
            doubts += [Doubt(number, f"{name} in invalid Python") for number, name in old_names]
            preserved |= {name for _, name in old_names}
    texts = [
        code[i].code.rstrip("\r\n") if i in code else "" for i in range(1, max(code, default=0) + 1)
    ]
    uses = OldUses(ast.parse("\n".join(texts)), paths)
    uses.find(preserved)
    uses.edits = [each._replace(offset=each.offset + code[each.line].offset) for each in uses.edits]
    uses.doubts = sorted(uses.doubts + doubts)
    return uses


def _edited(pieces: list[str], edits: list[Edit], doubts: list[Doubt]) -> _Rewritten:
    """Apply the edits to the text that consists of the pieces.

    If the old name is not at the expected position, the edit becomes a doubt: Python 3.11 has no
    positions in formatted strings.
    """
    lines = _lines(_SURROGATE.sub("\ufffd", "".join(pieces)))
    starts = [0, *accumulate(map(len, lines))]
    ends = [*accumulate(map(len, pieces))]
    new = [*pieces]
    applied, missed = [], []
    for edit in sorted({*edits}, reverse=True):
        before = lines[edit.line - 1].encode()[: edit.offset].decode(errors="replace")
        start = starts[edit.line - 1] + len(before)
        i = bisect_right(ends, start)
        start -= ends[i] - len(pieces[i])
        if not new[i].startswith(edit.old, start):
            missed.append(Doubt(edit.line, f"{edit.old}, which is now {edit.new}"))
            continue
        new[i] = new[i][:start] + edit.new + new[i][start + len(edit.old) :]
        applied.append(edit)
    return _Rewritten(new, applied[::-1], sorted({*doubts, *missed}))


class _Text(str):
    """String of a JSON file; the literal is between `start` and `end`."""

    start: int
    end: int


def _text_of_json(text: str, begin: int, strict: bool) -> tuple[_Text, int]:
    value, end = scanstring(text, begin, strict)
    string = _Text(value)
    string.start, string.end = begin - 1, end
    return string, end


def _cells(file: Path, text: str) -> list[list[_Text]]:
    """Return the strings in the sources of a notebook's code cells."""
    decoder: Any = json.JSONDecoder()
    decoder.parse_string = _text_of_json
    decoder.scan_once = py_make_scanner(decoder)
    try:
        cells = [x["source"] for x in decoder.decode(text)["cells"] if x["cell_type"] == "code"]
        lists = [each if isinstance(each, list) else [each] for each in cells]
        [*map("".join, lists)]  # raises a TypeError unless all are strings
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MigrateError(f"{file}: not a notebook: {error!r}; save it in Jupyter") from None
    return lists


def _uses_in_cells(cells: list[list[_Text]]) -> OldUses:
    """Find the uses in code cells. IPython commands that contain old names are unclear."""
    blocks, commands, doubts, count = [], set(), [], 0
    for cell in cells:
        source = _SURROGATE.sub("\ufffd", "".join(cell) + "\n")
        block = [_Line(i, line) for i, line in enumerate(_lines(source), count + 1)]
        count += len(block)
        if not _CELL_MAGIC.match(source) and not _is_python(block):
            for i, line in enumerate(block):
                if match := _MAGIC.match(line.code):
                    block[i] = line._replace(code=f"{match[1]}{match[2] or ''}None")
                    commands |= {*_WORD.findall(line.code)}
                    if old := _OLD.search(line.code):
                        doubts.append(Doubt(line.number, f"{old[0]} in an IPython command"))
        blocks.append(block)
    uses = _uses_in(blocks, {}, commands)
    uses.doubts += doubts
    return uses


def _in_notebook(file: Path, text: str) -> _Rewritten:
    """Rewrite the code cells of a notebook. Line numbers count the lines of all these cells."""
    cells = _cells(file, text)
    uses = _uses_in_cells(cells)
    pieces = [piece for cell in cells for piece in (*cell, "\n")]
    result = _edited(pieces, uses.edits, uses.doubts)
    parts, end = [], 0
    for old, new in zip(pieces, result.pieces, strict=True):
        if isinstance(old, _Text) and old != new:
            encoded = json.dumps(new, ensure_ascii=text[old.start : old.end].isascii())
            encoded = _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded)
            parts += [text[end : old.start], encoded]
            end = old.end
    return result._replace(pieces=[*parts, text[end:]])
