"""Print every message of the package with its place: `python -m tests.messages [WORD...]`.

A message is the first text with words among the arguments of a `raise` or a call of `warn`,
completed by the function that creates the error, if any, such as `damaged`. In C it is the text of
`PyErr_Format` or `PyErr_SetString`. With words, the command prints only messages that contain one
of them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
    forms = _forms(tree)
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
                    yield node.lineno, *_completed(kind, [*map(template, call.args)], text, forms)
                    break


Form: TypeAlias = tuple[str, str, list[str]]


def _completed(
    kind: str, arguments: list[str], text: str, forms: Mapping[str, Form]
) -> tuple[str, str]:
    """Replace the name of a function that returns an error, and the text, by the error's."""
    while kind in forms:
        kind, text, parameters = forms[kind]
        if arguments[0].startswith("{*"):  # the arguments before the last one
            arguments = [f"{{{name}}}" for name in parameters[:-1]] + arguments[-1:]
        for name, argument in zip(parameters, [*arguments, "", ""], strict=False):
            text = text.replace(f"{{{name}}}", argument)
        arguments = [text]
    return kind, text


@cache
def _source_forms(file: Path) -> dict[str, dict[str, Form]]:
    """Return the functions of a file that return an error, by the name of the class or function."""
    return _by_owner(ast.parse(file.read_text("utf-8"))) if file.exists() else {}


def _by_owner(tree: ast.Module) -> dict[str, dict[str, Form]]:
    return {
        owner.name: found
        for owner in tree.body
        if isinstance(owner, ast.ClassDef | ast.FunctionDef)
        if (found := dict(_returned(owner)))
    }


def _forms(tree: ast.Module) -> dict[str, Form]:
    """Return the functions that return an error, of the module or imported."""
    forms: dict[str, Form] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            source = _source_forms(ROOT / f"{str(node.module).replace('.', '/')}.py")
            for each in node.names:
                found = source.get(each.name, {})
                for kind, _, _ in found.values():
                    forms |= source.get(kind, {})
                forms |= found
    for found in _by_owner(tree).values():
        forms |= found
    return forms


def _returned(owner: ast.AST) -> Iterator[tuple[str, Form]]:
    """Yield the functions that return an error with their argument in its text."""
    for node in ast.walk(owner):
        match node:
            case ast.FunctionDef(body=[*_, ast.Return(ast.Call(func, [text, *_]))]):
                names = [each.arg for each in node.args.args if each.arg != "self"]
                form = template(text)
                if any(f"{{{name}}}" in form for name in names) and " " in form:
                    yield node.name, (ast.unparse(func).rpartition(".")[2], form, names)


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
