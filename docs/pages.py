"""The pages of the site that `make docs` builds, as Markdown: those of docs/, the README as its
start, a page for each other file of the repository that is linked to, and the public names.

`python -m docs.pages FOLDER` writes them there; links lead from page to page.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

import mlvm.eager as ml
from mlvm.eager import public
from mlvm.eager.tensor import primitives

ROOT: Final = Path(__file__).resolve().parent.parent

_MODULES: Final = (
    "nn",
    "optim",
    "random",
    "linalg",
    "fft",
    "parallel",
    "tree",
    "testing",
    "errors",
)
_INHERITED: Final = {"classes": "true", "nn": "[__call__]"}
"""What a page shows of the bases of its classes."""
_TITLES: Final = {"classes": "Tensors, arenas, machines", "functions": "Functions"}
_LINK: Final = re.compile(
    r"(```.*?```|`[^`\n]*`)|(\[(?:docs/)?[\w-]+\.md)?\]\(([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL
)
_UNSOUGHT: Final = (
    "---\nsearch:\n  exclude: true\n---\n\n"  # the site's search is for what is written about
)
_LANGUAGES: Final = {".py": "python", ".c": "c", ".h": "c"}


def write(folder: Path) -> None:
    """Write all pages and pictures to that folder, in place of what it had."""
    shutil.rmtree(folder, ignore_errors=True)
    left = ["README.md", *(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md"))]
    pages = reference()
    while left:
        path = left.pop()
        if place(path) not in pages:
            pages[place(path)] = relinked(content(path), path, left.append)
    for page, text in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, "utf-8")
    for picture in [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.png")]:
        to = folder / picture.relative_to(ROOT / "docs")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, to)


def place(path: str) -> str:
    """The site's page for a file or folder of the repository."""
    if path in ("README.md", "docs/README.md"):
        return "index.md" if path == "README.md" else "guides.md"
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return f"repository/{path.removesuffix('.md')}.md"


def relinked(text: str, path: str, found: Callable[[str], None]) -> str:
    """The text of that file with links to pages of the site, by their titles where they have the
    name of a file; `found` gets each file linked to."""
    here = PurePosixPath(place(path)).parent

    def link(match: re.Match[str]) -> str:
        code, name, target, anchor = match.groups()
        if code or "://" in target or target.startswith("mailto:"):
            return match.group()
        of_repository = os.path.normpath(str(PurePosixPath(path).parent / target))
        if of_repository.startswith("docs/") and not of_repository.endswith(".md"):
            goal = of_repository.removeprefix("docs/")  # a picture
        else:
            found(of_repository)
            goal = place(of_repository)
            if name:
                name = "[" + content(of_repository).partition("\n")[0].removeprefix("# ")
        return f"{name or ''}]({os.path.relpath(goal, here)}{anchor or ''})"

    return _LINK.sub(link, text)


def content(path: str) -> str:
    """The page of a file: itself if it is Markdown, else its text; of a folder its files."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text("utf-8")
    if file.is_dir():
        inside = sorted(each for each in file.iterdir() if each.is_file() and each.suffix != ".so")
        return f"# {path}/\n\n" + "".join(f"- [{f.name}]({file.name}/{f.name})\n" for f in inside)
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{_UNSOUGHT}# {path}\n\n````{language}\n{file.read_text('utf-8')}\n````\n"


def reference() -> dict[str, str]:
    """The pages of the public names, which mkdocstrings fills from the docstrings."""
    names: dict[str, list[tuple[str, str]]] = {"functions": [], "classes": []}
    for name in dir(ml):
        value = getattr(ml, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            page = "classes" if isinstance(value, type) else "functions"
            op = (primitives.__name__, name)
            names[page].append((".".join(public.PLACES.get(name, op)), f"ml.{name}"))
    for module in _MODULES:
        shown = getattr(ml, module)
        names[module] = [
            (f"{vars(shown)['__wrapped__'].__name__}.{name}", f"ml.{module}.{name}")
            for name in dir(shown)
            if not name.startswith("_") and not isinstance(getattr(shown, name), types.ModuleType)
        ]
    return {
        f"reference/{page}.md": "\n".join(
            [
                f"# {_TITLES.get(page, f'ml.{page}')}\n",
                f"{getattr(ml, page).__doc__ if page in _MODULES else ''}\n",
                *(_entry(path, name, _INHERITED.get(page, "false")) for path, name in named),
            ]
        )
        for page, named in names.items()
    }


def _entry(path: str, name: str, inherited: str) -> str:
    public = name.replace("ml.", "mlvm.eager.", 1)
    anchor = f'<a id="{public}"></a>\n\n' if public != path else ""  # mkdocstrings knows the path
    return (
        f'{anchor}::: {path}\n    options:\n      heading: "{name}"\n      toc_label: "{name}"\n'
        f"      inherited_members: {inherited}\n"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
