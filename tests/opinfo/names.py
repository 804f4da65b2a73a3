"""The map from PyTorch's operators, as its OpInfo database names them, to what is written here.

`names.txt` has a line for each name:

    name(parameters) = expression   a name of ours with that meaning; the signature may differ
    name(parameters) ~ expression   no name of ours, but one expression that a user would write
    name - reason                   neither, and why

The parameters are PyTorch's; the expression is Python, with `ml`, `math` and the functions of
`adapters.py`. Behind ` || ` stands what of the results is compared (`COMPARED`), if not all.
`refused.toml` has what is refused by design: reasons, and what the errors say.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import mlvm.eager as ml
from tests.opinfo import adapters

HERE: Final = Path(__file__).parent
COUNT: Final = 636
"""The names of PyTorch 2.13."""

_LINE: Final = re.compile(
    r"(?P<name>[\w.]+)"
    r"(?:\((?P<parameters>.*?)\) (?P<kind>[=~]) (?P<expression>.+?)(?: \|\| (?P<compared>\w+))?"
    r"| - (?P<reason>.+))"
)
SPACE: Final = {
    **{name: value for name, value in vars(adapters).items() if name[0] != "_"},
    "math": math,
}


@dataclass(frozen=True)
class Entry:
    """A line of the map. `kind` is "=", "~" or "-"."""

    name: str
    kind: str
    parameters: str = ""
    expression: str = ""
    compared: str | None = None
    reason: str = ""

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function of PyTorch's arguments, with tensors of ours for its."""
        return eval(self.function, SPACE)

    @property
    def function(self) -> str:
        """The text of it."""
        return f"lambda {self.parameters}: ({self.expression})"

    def ours(self) -> Iterator[str]:
        """The names of ours in the expression, such as `ml.linalg.det`."""
        for node in ast.walk(ast.parse(self.expression, mode="eval")):
            if isinstance(node, ast.Attribute):
                path = ast.unparse(node)
                if re.fullmatch(r"ml(\.\w+)+", path):
                    yield path


def entries(text: str | None = None) -> dict[str, Entry]:
    """The map, by PyTorch's names. Raises `ValueError` for a line that is none."""
    table: dict[str, Entry] = {}
    lines = (HERE / "names.txt").read_text() if text is None else text
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match["name"] in table:
            raise ValueError(f"names.txt, line {number}: {line}")
        fields = {name: value for name, value in match.groupdict().items() if value is not None}
        table[match["name"]] = Entry(**{"kind": "-", **fields})
    return table


class Refusals:
    """Refusals by design. A reason has patterns of what errors say, as "Class: text". `gradients`
    and `gradients_of_halves` say why those of an operator are not compared, `tolerance` how exact
    PyTorch is where it is less so than it might be, `differs` what is another value by design; both
    by name and dtype."""

    def __init__(self) -> None:
        table = tomllib.loads((HERE / "refused.toml").read_text())
        self.everywhere: dict[str, list[str]] = table["everywhere"]
        self.gradients: dict[str, str] = table["gradients"]
        self.gradients_of_halves: dict[str, str] = table["gradients_of_halves"]
        self.tolerance: dict[str, float] = table["tolerance"]
        self.differs: dict[str, str] = table["differs"]
        self.of: dict[str, dict[str, list[str]]] = table["of"]

    def reason(self, name: str, error: BaseException) -> str | None:
        """Why that operator refuses so; None if that is not by design. An argument of PyTorch's
        that is not here is a reason, too."""
        if isinstance(error, adapters.NotHere):
            return str(error)
        if not isinstance(error, ml.errors.MlvmError):
            return None
        text = f"{type(error).__name__}: {error}"
        for reasons in (self.of.get(name, {}), self.everywhere):
            for reason, patterns in reasons.items():
                if any(re.search(pattern, text) for pattern in patterns):
                    return reason
        return None
