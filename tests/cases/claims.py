"""Tables of claims, `claims/NAME.txt`: a row a line.

    expression  =>  value                 # words: signs (of zeros, too), a tolerance
    call  # Error: pattern of its text

A line `== title ==` opens a section. Its other lines are short preparations, which run before each
of its rows. `<a|b>` makes a row of each choice.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
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


class Claim(NamedTuple):
    """A row: preparations, an expression, and its value, or an error and its text."""

    title: str
    setup: str
    call: str
    value: str | None
    words: str

    def check(self, space: dict[str, Any]) -> None:
        """Check the claim, with these names for its expressions."""
        names = SPACE | space
        exec(self.setup, names)
        if self.value is None:
            name, _, pattern = self.words.partition(": ")
            error = eval(name, vars(builtins) | names)
            refuses(error, pattern, exec, self.call, names)
            return
        actual: Any = eval(self.call, names)
        expected: Any = eval(self.value, names)
        if not isinstance(actual, np.ndarray | np.generic):
            assert type(actual) is type(expected)
            np.testing.assert_equal(actual, expected)
            return
        if isinstance(expected, np.ndarray | np.generic):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        if self.words.strip() in ("", "signs"):
            np.testing.assert_array_equal(actual, expected)
        else:
            tolerance = float(self.words)
            np.testing.assert_allclose(np.asarray(actual), expected, tolerance, tolerance)
        if "signs" in self.words:
            np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def rows_of(name: str) -> Iterator[Claim]:
    """The rows of a table."""
    title = setup = ""
    for line, _ in lines(f"claims/{name}.txt"):
        row, has_words, words = line.partition("  # ")
        call, has_value, value = row.partition("  =>  ")
        if line.startswith("== "):
            title, setup = line.strip("= "), ""
        elif has_value or has_words:
            yield Claim(title, setup, call, value if has_value else None, words)
        else:
            setup += line + "\n"


def claims(name: str, space: dict[str, Any]) -> Any:
    """A test of each row of a table, whose names are those of SPACE and of the test's module."""
    rows = [*rows_of(name)]

    @pytest.mark.parametrize("claim", rows, ids=[f"{row.title}: {row.call}" for row in rows])
    def test_a_row_of_the_table_holds(claim: Claim) -> None:
        claim.check(space)

    return test_a_row_of_the_table_holds
