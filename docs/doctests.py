"""For the site: an example in a docstring is code, though `>>>` is a quote to Markdown."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_EXAMPLE: Final = re.compile(r"^ *>>> .*\n?(?:^.*\S.*\n?)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences each example: from `>>>` to the next empty line, as doctest has it."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = example.group().rstrip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "\n".join(line[indent:] for line in lines)
    return f"```pycon\n{code}\n```\n"
