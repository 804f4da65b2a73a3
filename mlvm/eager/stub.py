"""For editors: `python -m mlvm.eager.stub > mlvm/eager/tensor/primitives.pyi`, functions of ops;
`python -m mlvm.eager.stub methods > mlvm/eager/tensor/methods.pyi`: the methods of a tensor.

The text is as `ruff format` would leave it; a test compares it with the file.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Final

from mlvm.core.op import OPS
from mlvm.eager.functions.methods import METHODS, PROPERTIES
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.operators import OPERATORS
from mlvm.eager.tensor.tensor import Tensor

WIDTH: Final = 100
INDENT: Final = "    "

_HEAD: Final = '''\
"""The public function of every op; written by `python -m mlvm.eager.stub`."""

from typing import Literal

from mlvm.eager.tensor.operands import Operand
from mlvm.eager.tensor.tensor import Tensor

__all__ = [  # noqa: RUF022 - in the order of the functions
'''
_SENTENCE: Final = re.compile(r".*?[^.]\.(?= |$)|.*")


_METHODS_HEAD: Final = '''\
"""What a tensor has from the functions; written by `python -m mlvm.eager.stub methods`."""

from collections.abc import Sequence

from mlvm.core.protocol import VMProtocol
from mlvm.core.rules import Axis
from mlvm.eager.tensor.operands import Operand
from mlvm.eager.tensor.tensor import Tensor

class Methods:
    __slots__ = ()
'''


def stub() -> str:
    """The text of `primitives.pyi`: every function with its signature and first sentence."""
    names = "".join(f'{INDENT}"{name}",\n' for name in primitives.__all__)
    functions = ("\n".join(["", *_lines(getattr(primitives, name)), ""]) for name in sorted(OPS))
    return _HEAD + names + "]\n" + "".join(functions)


def methods_stub() -> str:
    """The text of `methods.pyi`: every method with its signature and first sentence."""
    texts = []
    for name, fn in sorted({**OPERATORS, **METHODS, **PROPERTIES}.items()):
        first, *doc = lines = list(_lines(fn, name))
        if name in PROPERTIES:
            lines = ["@property", f"def {name}(self) -> Tensor:", *doc]
        elif name in OPERATORS:
            override = "  # type: ignore[override]" if name in ("__eq__", "__ne__") else ""
            lines = [f"{first} ...{override}"]
        texts.append("\n".join(["", *lines, ""]))
    return _METHODS_HEAD + textwrap.indent("".join(texts), INDENT)


def _lines(function: Callable[..., Tensor], method: str | None = None) -> Iterator[str]:
    """The function's definition, or that of the method: its first parameter is then self."""
    found = inspect.signature(function)
    if method:
        first, *others = found.parameters.values()
        given = first.replace(name="self", annotation=inspect.Parameter.empty)
        found = found.replace(parameters=[given, *others])
    signature = str(found).replace("'Operand'", "Operand").replace("'", "" if method else '"')
    signature = signature.replace(f"{Tensor.__module__}.{Tensor.__qualname__}", Tensor.__name__)
    name, width = method or function.__name__, WIDTH - len(INDENT) * bool(method)
    line = f"def {name}{signature}:"
    if len(line) <= width:
        yield line
    else:
        inside, _, result = signature[1:].rpartition(")")
        yield f"def {name}("
        if len(INDENT + inside) <= width:
            yield INDENT + inside
        else:
            yield from (f"{INDENT}{parameter}," for parameter in _parts(inside))
        yield f"){result}:"
    doc = (function.__doc__ or "").split("\n\n")[0]
    sentence = _SENTENCE.findall(" ".join(doc.split()))[0]
    yield from textwrap.indent(
        textwrap.fill(f'"""{sentence}"""', width - len(INDENT)), INDENT
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
    print(methods_stub() if sys.argv[1:] == ["methods"] else stub(), end="")
