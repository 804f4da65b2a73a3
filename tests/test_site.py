"""The site of `make docs`: its pages, and that it builds without a warning."""

from __future__ import annotations

import re
import shutil
from inspect import isclass, isroutine
from pathlib import Path

import pytest

import mlvm.eager as ml
from docs import pages
from tests.brief import ROOT, run_python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "build" / "pages"
    pages.write(folder)
    return folder


def test_every_link_between_pages_leads_to_one(folder: Path) -> None:
    links = 0
    for page in folder.rglob("*.md"):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
        if page.parent.name != "reference" and not page.stem.endswith((".py", ".h", ".c")):
            for link in re.findall(r"\]\(([^)#\s]+)", prose):
                if "://" not in link:
                    assert (page.parent / link).is_file(), f"{page}: {link}"
                    links += 1
    assert links > 60


def test_the_reference_has_every_public_name(folder: Path) -> None:
    documented = {
        name
        for page in (folder / "reference").iterdir()
        for name in re.findall(r'heading: "ml\.(\S+)"', page.read_text("utf-8"))
    }
    values = {name: getattr(ml, name) for name in dir(ml)}
    named = {x for x, value in values.items() if isclass(value) or isroutine(value)}
    assert named <= documented
    assert {"nn.Linear", "optim.Adam", "linalg.solve", "errors.ShapeError"} <= documented


def test_a_class_is_found_by_its_public_path(folder: Path) -> None:
    classes = (folder / "reference" / "classes.md").read_text("utf-8")
    assert (
        '<a id="mlvm.eager.Pipeline"></a>\n\n::: mlvm.eager.recording.inputs.Pipeline\n' in classes
    )
    assert "<a id=" not in (folder / "reference" / "nn.md").read_text("utf-8")


def test_every_page_can_be_chosen(folder: Path) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", navigation, re.MULTILINE)
    written = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    assert sorted(listed) == sorted(x for x in written if not x.startswith("repository/"))


def test_guides_are_chosen_in_their_reading_order() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("- guides.md\n")[2]
    guides = navigation.partition("- Reference:")[0]
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text("utf-8"))
    assert re.findall(r"- ([\w-]+\.md)$", guides, re.MULTILINE) == listed


def test_it_builds_without_a_warning(folder: Path) -> None:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings_handlers.python")
    root = folder.parent.parent
    shutil.copy(ROOT / "mkdocs.yml", root)  # a link would have it build in the checkout
    (root / "docs").symlink_to(ROOT / "docs")
    (root / "mlvm").symlink_to(ROOT / "mlvm")
    done = run_python("-m", "zensical", "build", "--strict", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    site = root / "build" / "site" / "reference"
    functions = "".join((site / f"{page}.html").read_text("utf-8") for page in pages._GROUPS)
    assert functions.count("doc-contents first") > 150
    assert functions.count("&gt;&gt;&gt; ") > 150  # examples, those of ops too
    assert not re.search(r'(src|href)="?https?://[^" >]+\.(js|css|woff2?)', functions)
    guides = (root / "build" / "site" / "guides.html").read_text("utf-8")
    numbers = re.findall(r"^(\d+)\. ", (ROOT / "docs" / "README.md").read_text("utf-8"), re.M)
    starts = [int(start or 1) for start in re.findall(r'<ol(?: start="?(\d+)"?)?>', guides)]
    assert len(starts) == 3
    assert set(map(str, starts)) < set(numbers)  # lists that go on keep their numbers
    assert starts == sorted(set(starts))
    assert re.search(r'<link[^>]* href="?(\./)?site\.css', guides)
    assert (root / "build" / "site" / "site.css").is_file()
