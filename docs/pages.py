"""Pages of the site that `make docs` builds, as Markdown.

They are the pages of docs/, the README as the start page, a page for each other linked file of the
repository, and the reference of the public names.

`python -m docs.pages FOLDER` writes them there; links lead from page to page.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Final

import mlvm.eager as ml
from docs import reading
from mlvm.core.op import OPS
from mlvm.eager import public
from mlvm.eager.tensor import primitives

ROOT: Final = Path(__file__).resolve().parent.parent

MODULES: Final = (
    "nn",
    "nn.init",
    "onnx",
    "optim",
    "random",
    "linalg",
    "fft",
    "parallel",
    "tree",
    "testing",
    "debug",
    "errors",
)
"""Modules of `mlvm.eager` whose names are public."""

_INHERITED: Final = {"classes": "true", "nn": "[__call__]"}
"""Inherited members that each page of classes shows."""
_GROUPS: Final = {
    "creation": ("Making tensors, dtypes", "creation dtypes exchange"),
    "elementwise": (
        "Elementwise functions",
        "elementwise elements elementary special bessel incomplete",
    ),
    "shapes": ("Shapes, indexing, sorting", "shapes pieces layout indexing sorting segments"),
    "reductions": ("Sums and statistics", "reduction sums statistics"),
    "products": ("Products", "contraction matmul linalg matrices products quantized quantization"),
    "signals": ("Signals", "signal"),
    "neural": (
        "Layers as functions, losses",
        "neural activations convolution pooling sliding windows images attention losses ctc",
    ),
    "transformations": (
        "Gradients, capture, control flow",
        "grad vmap jvp jacobians custom host_call host captured measuring branches checking "
        "checkpoint functions loops batch",
    ),
    "machines": (
        "Memory, machines, files",
        "context default connect devices checkpoints listing assembly record",
    ),
}
"""Title of each page of functions, and the files whose functions it lists."""
_CLASSES: Final = "Tensors, arenas, machines"
_CODE: Final = re.compile(
    r"(```.*?```|^#.*?$|\[[^\]]*\]\([^)]*\))|`(ml\.[\w.]+)(\([^`]*\))?`", re.DOTALL | re.MULTILINE
)
"""Match code that is a public name, with or without arguments, or text without links."""
_LINK: Final = re.compile(
    r"(```.*?```|`[^`\n]*`)|(\[(?:docs/)?[\w-]+\.md)?\]\(([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL
)
_UNSOUGHT: Final = (
    "---\nsearch:\n  exclude: true\n---\n\n"  # the search covers only documentation pages
)
_LANGUAGES: Final = {".py": "python", ".c": "c", ".h": "c"}


def write(folder: Path) -> None:
    """Write all pages, pictures and styles to that folder, and remove its old files."""
    shutil.rmtree(folder, ignore_errors=True)
    queue = ["README.md", *(f"docs/{each.name}" for each in (ROOT / "docs").glob("*.md"))]
    names = reference()
    pages = dict(names)
    while queue:
        path = queue.pop()
        if place(path) not in pages:
            text = relinked(content(path), path, queue.append)
            pages[place(path)] = crossed(text, place(path), names) if path.endswith(".md") else text
    for page, text in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, "utf-8")
    for file in (ROOT / "docs").rglob("*"):
        if file.suffix in (".svg", ".png", ".css"):
            to = folder / file.relative_to(ROOT / "docs")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)


def place(path: str) -> str:
    """Return the site's page for a file or folder of the repository."""
    if path in ("README.md", "docs/README.md"):
        return "index.md" if path == "README.md" else "guides.md"
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return f"repository/{path.removesuffix('.md')}.md"


def relinked(text: str, path: str, visit: Callable[[str], None]) -> str:
    """Return the text of that file with links to pages of the site.

    A link whose text is a file's name gets the page's title. `visit` is called with each linked
    file.
    """
    here = PurePosixPath(place(path)).parent

    def link(match: re.Match[str]) -> str:
        code, name, target, anchor = match.groups()
        if code or "://" in target or target.startswith("mailto:"):
            return match.group()
        of_repository = os.path.normpath(str(PurePosixPath(path).parent / target))
        if of_repository.startswith("docs/") and not of_repository.endswith(".md"):
            goal = of_repository.removeprefix("docs/")  # a picture
        else:
            visit(of_repository)
            goal = place(of_repository)
            if name:
                name = "[" + content(of_repository).partition("\n")[0].removeprefix("# ")
        return f"{name or ''}]({os.path.relpath(goal, here)}{anchor or ''})"

    return _LINK.sub(link, text)


def content(path: str) -> str:
    """Return the page of a file: Markdown unchanged, other files as code, a folder as a list."""
    file = ROOT / path
    if file == reading.PAGE:
        return reading.with_lines(file.read_text("utf-8"))
    if file.suffix == ".md":
        return file.read_text("utf-8")
    if file.is_dir():
        inside = sorted(each for each in file.iterdir() if each.is_file() and each.suffix != ".so")
        return f"# {path}/\n\n" + "".join(f"- [{f.name}]({file.name}/{f.name})\n" for f in inside)
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{_UNSOUGHT}# {path}\n\n````{language}\n{file.read_text('utf-8')}\n````\n"


def reference() -> dict[str, str]:
    """Return the pages of the public names, which mkdocstrings fills from the docstrings.

    Each page begins with a table of its names.
    """
    pages = {
        page: (_CLASSES if page == "classes" else _GROUPS[page][0], "", names)
        for page, names in _of_language().items()
    }
    for module in MODULES:
        shown = attrgetter(module)(ml)
        names = [
            (f"{vars(shown)['__wrapped__'].__name__}.{name}", f"ml.{module}.{name}")
            for name in dir(shown)
            if not name.startswith("_") and not isinstance(getattr(shown, name), types.ModuleType)
        ]
        pages[module] = f"ml.{module}", f"{shown.__doc__}\n\n", names
    return {
        f"reference/{page}.md": "\n".join(
            [
                f"# {title}\n\n{about}| | |\n|---|---|",
                *(
                    f"| [`{name}`](#{_anchor(name)}) | {_first_sentence(name)} |"
                    for _, name in names
                ),
                "",
                *(_entry(path, name, _INHERITED.get(page, "false")) for path, name in names),
            ]
        )
        for page, (title, about, names) in pages.items()
    }


def _of_language() -> dict[str, list[tuple[str, str]]]:
    """Return, for each page, the path and public name of each function and class of `ml`."""
    named: dict[str, list[tuple[str, str]]] = {page: [] for page in (*_GROUPS, "classes")}
    page_of = {file: page for page, (_, files) in _GROUPS.items() for file in files.split()}
    for name in dir(ml):
        value = getattr(ml, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        room, there = public.PLACES.get(name, (primitives.__name__, name))
        defined = OPS[there].kernel.__module__ if room == primitives.__name__ else room
        file = defined.rpartition(".")[2]
        page = "classes" if isinstance(value, type) else page_of[file]
        named[page].append((f"{room}.{there}", f"ml.{name}"))
    return named


def _first_sentence(name: str) -> str:
    """Return the first sentence of a public name's docstring."""
    value = functools.reduce(getattr, name.split(".")[1:], ml)
    doc = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s", doc, maxsplit=1)[0].replace("|", "\\|")


def _anchor(name: str) -> str:
    """Return the anchor of a public name."""
    return name.replace("ml.", "mlvm.eager.", 1)


def crossed(text: str, path: str, pages: dict[str, str]) -> str:
    """Return the text of that page with a link to the reference at each public name in code."""
    places = {
        name: page
        for page, entries in pages.items()
        for name in re.findall(r'heading: "(\S+)"', entries)
    }
    here = PurePosixPath(path).parent

    def link(match: re.Match[str]) -> str:
        other, name, _ = match.groups()
        if other or name not in places:
            return match.group()
        return f"[{match.group()}]({os.path.relpath(places[name], here)}#{_anchor(name)})"

    return _CODE.sub(link, text)


def _entry(path: str, name: str, inherited: str) -> str:
    public = _anchor(name)
    anchor = f'<a id="{public}"></a>\n\n' if public != path else ""  # mkdocstrings knows the path
    return (
        f'{anchor}::: {path}\n    options:\n      heading: "{name}"\n      toc_label: "{name}"\n'
        f"      inherited_members: {inherited}\n"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
