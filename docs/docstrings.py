"""Extension of the site generator that converts docstrings to Markdown.

Examples become code blocks, because `>>>` would be a quotation. Ops get their complete docstring
instead of the first sentence in the stub.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
import types
from typing import Any, Final

import griffe

from mlvm.eager.tensor import primitives

_EXAMPLE: Final = re.compile(r"^ *>>> .*\n?(?:^.*\S.*\n?)*", re.MULTILINE)

_INVALID: Final = re.compile(r"^ *Invalid calls:\n((?:^ +\S.*\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Extension that griffe calls for each name in the reference."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None and (text := _assigned_docstring(obj.path)):
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if obj.parent is not None and obj.parent.path == primitives.__name__:
            text = getattr(primitives, obj.name).__doc__
        text = _INVALID.sub(_fenced_calls, text)
        obj.docstring.value = _EXAMPLE.sub(_fenced, text)


def _assigned_docstring(path: str) -> str | None:
    """Return the docstring of a class or function, also if it was assigned to `__doc__`."""
    try:
        value = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
    text = value.__doc__ if isinstance(value, type | types.FunctionType) else None
    return inspect.cleandoc(text) if text else None


def _fenced_calls(block: re.Match[str]) -> str:
    """Return a block of invalid calls as a heading and fenced code."""
    return f"Invalid calls:\n\n```python\n{textwrap.dedent(block[1]).rstrip()}\n```\n"


def _fenced(example: re.Match[str]) -> str:
    """Return an example, from `>>>` to the next empty line, as a fenced block."""
    lines = example.group().rstrip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "\n".join(line[indent:] for line in lines)
    return f"```pycon\n{code}\n```\n"
