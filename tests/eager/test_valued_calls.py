"""Each call in the tables tests/cases/values/*.txt has its value, or raises its error."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

import mlvm.eager as ml
from tests import cases
from tests.cases.tables import Section, sections
from tests.slopes import check_slopes

FOLDER: Final = Path(cases.__file__).parent / "values"
SECTIONS: Final = [
    pytest.param(section, id=f"{file.stem}: {section.title}")
    for file in sorted(FOLDER.glob("*.txt"))
    for section in sections(f"values/{file.name}")
]


@pytest.mark.parametrize("section", SECTIONS)
def test_calls_have_their_values(section: Section) -> None:
    section.check({"ml": ml, "check_slopes": check_slopes})
