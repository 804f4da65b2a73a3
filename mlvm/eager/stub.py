"""`python -m mlvm.eager.stub > mlvm/eager/primitives.pyi`: the derived functions for editors.

The text is as `ruff format` would leave it; a test compares it with the file.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Final

from mlvm.core.op import OPS, Op
from mlvm.eager import primitives
from mlvm.eager.tensor import Tensor

WIDTH: Final = 100
INDENT: Final = "    "

_HEAD: Final = '''\
"""The public function of every op; written by `python -m mlvm.eager.stub`."""

from typing import Literal

from mlvm.eager.tensor import Tensor

__all__ = [  # noqa: RUF022 - in the order of the functions
'''
_SENTENCE: Final = re.compile(r".*?[^.]\.(?= |$)|.*")


def stub() -> str:
    """The text of `primitives.pyi`: every function with its signature and first sentence."""
    names = "".join(f'{INDENT}"{name}",\n' for name in primitives.__all__)
    functions = ("\n".join(["", *_lines(OPS[name]), ""]) for name in sorted(OPS))
    return _HEAD + names + "]\n" + "".join(functions)


def _lines(op: Op) -> Iterator[str]:
    signature = str(inspect.signature(vars(primitives)[op.name])).replace("'", '"')
    signature = signature.replace(f"{Tensor.__module__}.{Tensor.__qualname__}", Tensor.__name__)
    line = f"def {op.name}{signature}:"
    if len(line) <= WIDTH:
        yield line
    else:
        inside, _, result = signature[1:].rpartition(")")
        yield f"def {op.name}("
        if len(INDENT + inside) <= WIDTH:
            yield INDENT + inside
        else:
            yield from (f"{INDENT}{parameter}," for parameter in _parts(inside))
        yield f"){result}:"
    sentence = _SENTENCE.findall(" ".join(op.doc.split("\n\n")[0].split()))[0]
    yield from textwrap.indent(
        textwrap.fill(f'"""{sentence}"""', WIDTH - len(INDENT)), INDENT
    ).splitlines()


def _parts(text: str) -> Iterator[str]:
    """The text cut at the commas that are in no bracket."""
    depth = start = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


if __name__ == "__main__":
    print(stub(), end="")
