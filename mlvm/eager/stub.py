"""Stub files for editors and type checkers: `python -m mlvm.eager.stub` writes them.

They describe names that are not visible in the code: the functions of ops, the methods of a tensor
and the modules that define the public names. `setup.py` and `make lint` run this module.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mlvm.core.op import OPS
from mlvm.eager import public
from mlvm.eager.functions.methods import METHODS, PROPERTIES
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.operators import OPERATORS
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.files import write_file

_INDENT: Final = "    "
_SENTENCE: Final = re.compile(r".*?[^.]\.(?= |$)|.*")
_HEAD: Final = """\
from collections.abc import Sequence
from typing import Literal

from mlvm.core.rules import Axis
from mlvm.eager.functions.arguments import Ints
from mlvm.eager.functions.creation import Device
from mlvm.eager.functions.indexing import At
from mlvm.eager.tensor.operands import Operand
from mlvm.eager.tensor.tensor import Tensor

"""


def functions() -> str:
    """Return the text of `tensor/primitives.pyi`."""
    named = f"__all__ = {[name for name in primitives.__all__ if name not in public.__all__]}\n\n"
    return _HEAD + named + "".join(_definition(getattr(primitives, name)) for name in sorted(OPS))


def methods() -> str:
    """Return the text of `tensor/methods.pyi`."""
    of_methods = {name: getattr(Tensor, name) for name in METHODS}
    every = sorted({**OPERATORS, **of_methods, **PROPERTIES}.items())
    texts = [_definition(function, name) for name, function in every]
    return _HEAD + "class Methods:\n    __slots__ = ()\n" + textwrap.indent("".join(texts), _INDENT)


def names() -> str:
    """Return the text of `names.pyi`: each public name, imported from where it is defined."""
    lines = [
        f"from {room} import {there} as {name}\n" for name, (room, there) in public.PLACES.items()
    ]
    for name, room in public.SHOWN.items():
        above, _, module = room.rpartition(".")
        lines.append(f"from {above} import {module} as {name}\n")
    return f"{''.join(sorted(lines))}__all__ = {public.__all__}\n"


def _definition(function: Callable[..., Tensor], method: str | None = None) -> str:
    """Return the stub of a function, with the signature and first sentence.

    In a method the first parameter is self."""
    whole = inspect.signature(function)
    if method:
        first, *others = whole.parameters.values()
        parameter = first.replace(name="self", annotation=inspect.Parameter.empty)
        if method in PROPERTIES:
            parameter = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        whole = whole.replace(parameters=[parameter, *others])
    signature = str(whole).replace("'Operand'", "Operand").replace("'", "" if method else '"')
    signature = signature.replace(f"{Tensor.__module__}.{Tensor.__qualname__}", Tensor.__name__)
    property_ = "@property\n" if method in PROPERTIES else ""
    ignored = "  # type: ignore[override]" if method in ("__eq__", "__ne__") else ""
    doc = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    body = f'"""{_SENTENCE.findall(doc)[0]}"""' if doc else "..."
    return f"{property_}def {method or function.__name__}{signature}:{ignored}\n{_INDENT}{body}\n"


def write(folder: Path) -> None:
    """Write the files to the project folder or the build folder."""
    texts = {"tensor/primitives": functions(), "tensor/methods": methods(), "names": names()}
    for name, text in texts.items():
        file = folder / "mlvm" / "eager" / f"{name}.pyi"
        if not file.exists() or file.read_text("utf-8") != text:
            write_file(file, text)


if __name__ == "__main__":
    write(Path(*sys.argv[1:]))
