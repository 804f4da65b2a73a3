"""Other libraries on tensors: each of these calls is made on numpy's arrays and on tensors of them,
and gives the same values.

`python -m tests.test_interoperability` writes the cases as the table of docs/interoperability.md. A
case is skipped where its library is not installed.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases
from tests.cases.tables import Section, sections

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # SciPy reads it when it is imported

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "interoperability.md"
BEGIN: Final = "<!-- written by python -m tests.test_interoperability -->\n"
END: Final = "<!-- end -->\n"

RNG: Final = np.random.default_rng(0)
X: Final = RNG.normal(size=(20, 4))
V: Final = np.abs(RNG.normal(size=32)) + 0.1
W: Final = RNG.normal(size=32)
F: Final = RNG.normal(size=(2, 3, 4)).astype(np.float32)
M: Final = F[0, :, :3]
S: Final = M @ M.T + np.eye(3, dtype=np.float32)
SAMPLES: Final = RNG.normal(size=(60, 5)).astype(np.float32)
TARGETS: Final = SAMPLES @ np.arange(5, dtype=np.float32)
TO_3: Final = np.array([0, 1, 2], np.float32)
OPERANDS: Final[dict[str, Any]] = {
    "x": X, "v": V, "w": W, "f": F, "row": F[0, 0:1], "m": M, "m0": M[0], "m1": M[1],
    "s": S, "s_64": S.astype(np.float64), "to_3": TO_3, "from_1": TO_3 + 1,
    "again": np.array([3, 1, 3]), "places": np.array([3, 5]),
    "pixels": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "samples": SAMPLES, "labels": (SAMPLES[:, 0] + SAMPLES[:, 1] > 0).astype(np.int64),
    "guesses": (SAMPLES[:, 0] > 0).astype(np.int64), "chances": 1 / (1 + np.exp(-SAMPLES[:, 0])),
    "targets": TARGETS, "positive": abs(TARGETS) / 9,
    "near": abs(TARGETS) + 0.1, "other": abs(SAMPLES[:, 1]) + 0.1,
}  # fmt: skip
MODULES: Final = {
    "compat": "array_api_compat", "xpx": "array_api_extra", "einops": "einops",
    "of_array_api": "einops.array_api", "opt_einsum": "opt_einsum", "images": "PIL.Image",
    "pd": "pandas", "torch": "torch", "jnp": "jax.numpy",
}  # fmt: skip
"""Names of modules in the calls; of SciPy and scikit-learn each room is a name."""
OF_ROOMS: Final = ("scipy", "sklearn")
NAMESPACES: Final = ("mlvm", "array_api_compat")


class Case(NamedTuple):
    """A call of a library on arrays. `gives` is what comes of tensors: tensors, numpy's arrays,
    numbers, or something of the library's own."""

    library: str
    group: str
    name: str
    gives: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.library}: {self.group} {self.name}"

    @property
    def arrays(self) -> dict[str, Any]:
        """The operands of the call, by their names."""
        return {name: x for name, x in OPERANDS.items() if re.search(rf"\b{name}\b", self.text)}

    def call(self) -> Callable[..., Any]:
        """The call as a function of its operands. Imports the modules that it names."""
        roots = {*re.findall(r"(?<![\w.])([a-z]\w*)\.", self.text)}
        space: dict[str, Any] = dict(globals())
        for root in roots - OPERANDS.keys() - space.keys():
            rooms = f"{self.library}.{root}" if self.library in OF_ROOMS else ""
            if rooms or root in MODULES:
                space[root] = importlib.import_module(rooms or MODULES[root])
        return eval(f"lambda {', '.join(self.arrays)}: {self.text}", space)


def drawn(draw: Callable[[Any], Any]) -> Any:
    """Draw on new axes, and return what they have of the operands."""
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots()
    try:
        shown = draw(axes)
        figure.savefig(io.BytesIO(), dpi=20)
    finally:
        plt.close(figure)
    return np.asarray(shown, np.float64)


def saved(x: Any) -> Any:
    """Save a kernel by safetensors, and load it into a layer."""
    files = importlib.import_module("safetensors.numpy")
    model = ml.nn.Linear(3, 3)
    with ml.Arena(ml.default_vm(), "loaded").allocating():
        kernel, bias = ml.asarray(x).numpy(), np.ones(3, np.float32)
    data = files.save({"kernel": kernel, "bias": bias})
    model.load_state(files.load(data))
    return model.kernel.numpy()


def cases_of(section: Section) -> Iterator[Case]:
    library, _, gives = section.title.partition(": ")
    for line in section.lines:
        name, _, text = line.rpartition(" || ")
        path = re.search(r"([\w.]+)\.(\w+)\(", text)
        group = path[1] if path is not None and library in OF_ROOMS else ""
        yield Case(library, group, name or (path[2] if path is not None else ""), gives, text)


CASES: Final = [case for section in sections("libraries.txt") for case in cases_of(section)]

KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "tensors": lambda x: isinstance(x, (ml.Tensor, str, type(None))),
    "numpy's arrays": lambda x: isinstance(x, (np.ndarray, np.generic, int, type(None))),
    "numbers": lambda x: isinstance(x, (bool, int, float, np.generic)),
}


def parts(result: Any) -> list[Any]:
    """A result as a list of arrays and numbers: the items of tuples, the fields of an object."""
    if isinstance(result, (tuple, list)):
        return [part for each in result for part in parts(each)]
    if hasattr(result, "statistic") and hasattr(result, "pvalue"):
        return [result.statistic, result.pvalue]
    return [result]


def around(library: str) -> Any:
    if library != "sklearn":
        return nullcontext()
    return importlib.import_module("sklearn").config_context(array_api_dispatch=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_call_gives_what_it_gives_of_numpys_arrays(case: Case) -> None:
    pytest.importorskip(case.library)
    with around(case.library):
        call, arrays = case.call(), case.arrays.values()
        expected = parts(call(*[x.copy() for x in arrays]))  # `at` writes to its operand
        got = parts(call(*[ml.asarray(x) for x in arrays]))
    for each, theirs in zip(got, expected, strict=True):
        assert KINDS.get(case.gives, lambda _: True)(each), type(each)
        if each is not None and not isinstance(each, str):
            np.testing.assert_allclose(np.asarray(each), np.asarray(theirs), rtol=1e-5, atol=1e-5)


@cases("case", *[x for x in CASES if x.library in ("einops", "opt_einsum")], ids=lambda x: x.id)
def test_a_captured_call_gives_the_same_with_its_gradient(case: Case) -> None:
    pytest.importorskip(case.library)
    call, arrays = case.call(), [ml.asarray(x) for x in case.arrays.values()]

    def loss(*arrays: ml.Tensor) -> Any:
        return sum(ml.sum(each**2) for each in parts(call(*arrays)))

    step = ml.value_and_grad(loss)
    value, gradient = step(*arrays)
    captured = ml.capture(step)
    for _ in range(2):
        again, theirs = captured(*arrays)
        assert again.item() == value.item()
        np.testing.assert_array_equal(theirs.numpy(), gradient.numpy())
    assert captured.signatures == 1


def test_a_captured_reduction_of_ones_own_is_looked_into() -> None:
    einops = pytest.importorskip("einops")
    options = {"scale": 2.0}

    def scaled(x: Any, axes: Any) -> Any:
        return ml.sum(x, axis=tuple(axes)) * options["scale"]

    captured = ml.capture(lambda x: einops.reduce(x, "a b c -> a", scaled))
    x = ml.asarray(F)
    first = captured(x)
    options["scale"] = 3.0
    np.testing.assert_allclose(captured(x).numpy(), first.numpy() * 1.5, rtol=1e-6)


def test_array_api_libraries_are_captured() -> None:
    compat = pytest.importorskip("array_api_compat")
    xpx = pytest.importorskip("array_api_extra")

    def call(x: Any) -> Any:
        return compat.array_namespace(x).sum(xpx.at(xpx.pad(x, 1))[0].set(5.0), axis=0)

    x, captured = ml.asarray(M), ml.capture(call)
    for _ in range(2):
        np.testing.assert_array_equal(captured(x).numpy(), call(x).numpy())


# --- the page ------------------------------------------------------------------------------

TITLES: Final = {
    "array_api_compat": "array-api-compat",
    "array_api_extra": "array-api-extra",
    "einops": "einops",
    "opt_einsum": "opt_einsum",
    "scipy": "SciPy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "PIL": "Pillow",
    "safetensors": "safetensors",
    "torch": "PyTorch",
    "jax": "JAX",
}


def table() -> str:
    """The cases as a Markdown table: a row for each library, its parts, and what comes back."""
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in CASES:
        title = TITLES[case.library] + (f" `{case.group}`" if case.group else "")
        rows.setdefault((title, case.gives, case.library), {})[f"`{case.name}`"] = None
    lines = ["| library | calls | give |\n", "| --- | --- | --- |\n"]
    for (title, gives, _), names in rows.items():
        calls = ", ".join(names).replace("|", "\\|")
        lines.append(f"| {title} | {calls} | {gives} |\n")
    return "".join(lines)


def written(page: str) -> str:
    """The page with the table between its two marks, in place of what stood there."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def test_the_page_has_the_table_of_the_cases() -> None:
    page = PAGE.read_text("utf-8")
    assert written(page) == page, "run python -m tests.test_interoperability"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
