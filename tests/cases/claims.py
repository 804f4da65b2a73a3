"""Tables of claims, `claims/NAME.txt`: a row a line.

    expression  =>  value                 # words: signs (of zeros, too), a tolerance
    call  # Error: pattern of its text

A line `== title ==` opens a section: rows, and statements that they need, one after the other.
`<a|b>` makes a row of each choice.
"""

from __future__ import annotations

import builtins
import math
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.brief import refuses
from tests.cases.tables import lines

_MODULES = """
    mlvm.core.errors mlvm.core.ops.half mlvm.core.types mlvm.core.op mlvm.core.rules mlvm.core.vm
    mlvm.core.program.program mlvm.core.program.assembly mlvm.core.machine.verify
    tests.core.programs
"""
SPACE: dict[str, Any] = {"math": math, "np": np, "inf": math.inf, "nan": math.nan}
"""Names that the rows of every table may use."""

for _module in _MODULES.split():
    SPACE |= {k: v for k, v in vars(import_module(_module)).items() if k[0] != "_"}


class Section(NamedTuple):
    """A title, and lines: rows and statements."""

    title: str
    lines: list[str]

    def check(self, space: dict[str, Any]) -> None:
        """Run the statements and check the rows, with these names for both."""
        names = SPACE | space
        for line in self.lines:
            try:
                _check(line, names)
            except BaseException as error:
                error.add_note(f"in the row {line}")
                raise


def _check(line: str, names: dict[str, Any]) -> None:
    row, has_words, words = line.partition("  # ")
    call, has_value, value = row.partition("  =>  ")
    if not has_value and not has_words:
        exec(line, names)
        return
    if not has_value:
        name, _, pattern = words.partition(": ")
        refuses(eval(name, vars(builtins) | names), pattern, exec, call, names)
        return
    actual: Any = eval(call, names)
    expected: Any = eval(value, names)
    if not isinstance(actual, np.ndarray | np.generic):
        assert type(actual) is type(expected)
        np.testing.assert_equal(actual, expected)
        return
    if isinstance(expected, np.ndarray | np.generic):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if words.strip() in ("", "signs"):
        np.testing.assert_array_equal(actual, expected)
    else:
        tolerance = float(words)
        np.testing.assert_allclose(np.asarray(actual), expected, tolerance, tolerance)
    if "signs" in words:
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def sections_of(name: str) -> list[Section]:
    """The sections of a table."""
    sections: list[Section] = []
    for line, _ in lines(f"claims/{name}.txt"):
        if line.startswith("== "):
            sections.append(Section(line.strip("= "), []))
        else:
            sections[-1].lines.append(line)
    return sections


def claims(name: str, space: dict[str, Any]) -> Any:
    """A test of each section of a table, with the names of SPACE and of the test's module."""
    sections = sections_of(name)

    @pytest.mark.parametrize("section", sections, ids=[each.title for each in sections])
    def test_the_rows_of_a_section_hold(section: Section) -> None:
        section.check(space)

    return test_the_rows_of_a_section_hold
