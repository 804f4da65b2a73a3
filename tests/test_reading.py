"""The page docs/architecture.md: the lines it refers to exist, and it lists each cache."""

from __future__ import annotations

import re

from docs import reading
from mlvm.eager.capture.capture_limits import LIMITS
from tests.brief import cases, refuses

TEXT = reading.PAGE.read_text()
WALKS = TEXT[TEXT.index("## Three walks") :]


def test_the_site_shows_the_lines_of_the_walks() -> None:
    assert len(reading.places(WALKS)) > 30
    assert reading.with_lines(TEXT).count(" (lines ") == len(reading.places(WALKS))


def test_the_decisions_are_made_in_functions_that_exist() -> None:
    rows = re.findall(r"^\| .+ \| (.+) \|$", TEXT, re.MULTILINE)
    named = [each for row in rows for each in re.findall(r"`(mlvm/[\w/]+\.\w+)`, `([\w.]+)`", row)]
    assert len(named) > 12
    for file, name in named:
        assert reading.lines_of(file, name)


@cases("start, most", ("## Three walks", 2400), ("## Walk 3", 600))
def test_the_walks_are_short(start: str, most: int) -> None:
    places = reading.places(TEXT[TEXT.index(start) :])
    assert len({(at.file, i) for at in places for i in range(at.first, at.last + 1)}) <= most


def test_the_page_lists_the_caches_with_a_limit() -> None:
    made = re.compile(r"^(?!class ).*(?<!Leaf)Memo(\[.*\])?\(\s*[\dL]|^ *@memoized\(", re.MULTILINE)
    section = TEXT[TEXT.index("## Caches") : TEXT.index("## The file")]
    paths = [*(reading.ROOT / "mlvm").rglob("*.py")]
    files = {str(x.relative_to(reading.ROOT)) for x in paths if made.search(x.read_text("utf-8"))}
    listed = re.findall(r"`(mlvm/\S+)`", section)
    assert sorted(files - {*listed}) == [
        f"mlvm/eager/capture/{name}.py" for name in ("guards/signature", "opened")
    ]
    limits = [row.split(" | ")[2] for row in section.split("|---|\n")[1].splitlines()[:5]]
    names = "matchers", "guard_sets", "programs", "programs", "families", "traces", "plans"
    numbers = [int(each) for each in re.findall(r"\d+", " ".join(limits))]
    assert numbers == [getattr(LIMITS, name) for name in names]


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


@cases("file", "core/vm.py", "machines/native/src/machine/loop.c")
def test_what_a_file_does_not_have_is_named(file: str) -> None:
    refuses(LookupError, rf"{file} has no .*nothing", reading.lines_of, f"mlvm/{file}", "nothing")
