"""Tests of the tables of claims, `claims/NAME.txt`: sections of rows (`tests.cases.tables.Section`)
that use the names of a room's test file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.cases.tables import Section, sections

_MODULES = """
    mlvm.core.errors mlvm.core.ops.half mlvm.core.types mlvm.core.op mlvm.core.rules mlvm.core.vm
    mlvm.core.program.program mlvm.core.program.assembly mlvm.core.machine.verify
    tests.core.programs
"""
SPACE: dict[str, Any] = {}
"""Names that the rows of every table may use."""

for _module in _MODULES.split():
    SPACE |= {k: v for k, v in vars(import_module(_module)).items() if k[0] != "_"}


def claims(name: str, space: dict[str, Any]) -> Any:
    """A test of each section of a table, with the names of SPACE and of the test's module."""
    parts = sections(f"claims/{name}.txt")

    @pytest.mark.parametrize("section", parts, ids=[each.title for each in parts])
    def test_the_rows_of_a_section_hold(section: Section) -> None:
        section.check(SPACE | space)

    return test_the_rows_of_a_section_hold
