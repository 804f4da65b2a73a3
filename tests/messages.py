"""Print every message of the package with its place: `python -m tests.messages [WORD...]`.

A message is the first text with words among the arguments of a `raise` or a call of `warn`. In C it
is the text of `PyErr_Format` or `PyErr_SetString`. With words, the command prints only messages
that contain one of them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_IN_C = re.compile(r'PyErr_(?:Format|SetString)\(\s*([^,]+),\s*((?:"(?:[^"\\]|\\.)*"[\s\w]*)+)')


class Message(NamedTuple):
    """A text that users read.

    place: file and line
    kind: name of the exception, or "warn"
    text: with `{expression}` for values
    """

    place: str
    kind: str
    text: str


def messages() -> Iterator[Message]:
    """Yield the messages of `mlvm`, file by file."""
    for file in sorted((ROOT / "mlvm").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for line, kind, text in of_python(file.read_text("utf-8")):
            yield Message(f"{name}:{line}", kind, text)
    for file in sorted((ROOT / "mlvm").rglob("*.[ch]")):
        source = file.read_text("utf-8")
        for match in _IN_C.finditer(source):
            line = source.count("\n", 0, match.start()) + 1
            text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', match[2]))
            yield Message(f"{file.relative_to(ROOT)}:{line}", match[1].removeprefix("PyExc_"), text)


def of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each message of a module."""
    tree = ast.parse(source)
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    places = (node for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.Call))
    for node in sorted(places, key=lambda node: node.lineno):
        call = node.exc if isinstance(node, ast.Raise) else node
        while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if not isinstance(call.func.value, ast.Call):
                break
            call = call.func.value  # Error(text).at(op): the text belongs to the inner call
        if not isinstance(call, ast.Call):
            continue
        kind = ast.unparse(call.func).rpartition(".")[2]
        if isinstance(node, ast.Raise) or kind == "warn":
            texts = (assigned.get(x.id, x) if isinstance(x, ast.Name) else x for x in call.args)
            for text in map(template, texts):
                if re.search(r"[a-z] | [a-z]", re.sub(r"{.*?}", "", text)):
                    yield node.lineno, kind, text
                    break


def template(text: ast.expr) -> str:
    """Return the text of a message, with `{expression}` for its values."""
    match text:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return f"{{{ast.unparse(text)}}}"


def main(words: Sequence[str]) -> None:
    """Print the messages that contain one of the words, or all."""
    for place, kind, text in messages():
        if not words or any(word in text for word in words):
            print(f"{place}: {kind}: {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.messages", description=__doc__)
    parser.add_argument("words", nargs="*", help="print messages with one of these; by default all")
    main(parser.parse_args().words)
