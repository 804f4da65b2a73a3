"""The lines that docs/architecture.md refers to exist, and there are at most 3,100."""

from __future__ import annotations

import re

import pytest

from docs import reading
from tests.brief import cases

TEXT = reading.PAGE.read_text()


def test_the_places_are_where_the_page_says() -> None:
    assert len(reading.places(TEXT)) > 30
    assert TEXT.count("(lines ") == len(reading.places(TEXT))
    assert reading.renumbered(TEXT) == TEXT, "run: python -m docs.reading"


def test_the_decisions_are_made_in_functions_that_exist() -> None:
    rows = re.findall(r"^\| .+ \| (.+) \|$", TEXT, re.MULTILINE)
    named = [each for row in rows for each in re.findall(r"`(mlvm/[\w/]+\.\w+)`, `([\w.]+)`", row)]
    assert len(named) > 12
    for file, name in named:
        assert reading.lines_of(file, name)


def test_the_walks_visit_at_most_3000_lines() -> None:
    visited = {
        (place.file, line)
        for place in reading.places(TEXT)
        for line in range(place.first, place.last + 1)
    }
    assert len(visited) <= 3100


@cases("file, name, begin, end",
    ("mlvm/core/types.py", "TensorType", "@final", ""),
    ("mlvm/core/vm.py", "VM.launch", "    def launch(", ""),
    ("mlvm/machines/native/src/plan/loop.c", "run_machine", "int run_machine(", "}"),
)  # fmt: skip
def test_a_place_is_the_whole_of_what_it_names(file: str, name: str, begin: str, end: str) -> None:
    first, last = reading.lines_of(file, name)
    lines = (reading.ROOT / file).read_text().splitlines()
    assert lines[first - 1].startswith(begin)
    assert lines[last - 1].startswith(end)


def test_what_a_file_does_not_have_is_named() -> None:
    with pytest.raises(LookupError, match=r"mlvm/core/vm\.py has no nothing"):
        reading.lines_of("mlvm/core/vm.py", "nothing")
    with pytest.raises(LookupError, match=r"loop\.c has no function nothing"):
        reading.lines_of("mlvm/machines/native/src/machine/loop.c", "nothing")
