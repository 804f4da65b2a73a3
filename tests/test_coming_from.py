"""Both sides of each row in docs/coming-from.md run and return the same values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import cases
from tests.one_liners.__main__ import ARRAYS, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from.md"
ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (.*?) ?\|$", re.MULTILINE)
INPUTS = {
    name: ARRAYS[name].astype("f4" if ARRAYS[name].dtype == "f8" else ARRAYS[name].dtype)
    for name in ("x", "y", "a", "i", "mask", "logits", "labels")
}


def rows(library: str) -> list[tuple[str, str, str]]:
    """Return the page's rows: their code, ours, and the difference."""
    section = PAGE.read_text("utf-8").partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    return ROW.findall(section)


def ours() -> dict[str, Any]:
    model = ml.nn.Linear(3, 1)
    tensors = {name: ml.asarray(array) for name, array in INPUTS.items()}
    return {"ml": ml, "model": model, "optimizer": ml.optim.SGD(model, 0.1), **tensors}


def of_torch() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 1)
    tensors = {name: torch.tensor(array) for name, array in INPUTS.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"F": torch.nn.functional, "model": model, "optimizer": optimizer}
    return {"torch": torch, **names, **tensors}


def of_jax() -> dict[str, Any]:
    jax = pytest.importorskip("jax")
    tensors = {name: jax.numpy.asarray(array) for name, array in INPUTS.items()}
    return {"jax": jax, "jnp": jax.numpy, **tensors}


pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("library", ["numpy", "PyTorch", "JAX"])
def test_what_one_writes_here_runs(library: str) -> None:
    table, names = rows(library), ours()
    section = PAGE.read_text("utf-8").partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    assert len(table) == section.count("\n| `") > 15
    for _, code, _ in table:
        run(code, names)


@cases(
    "library, theirs",
    ("numpy", lambda: {"np": np, **INPUTS}), ("PyTorch", of_torch), ("JAX", of_jax),
)  # fmt: skip
def test_both_sides_give_the_same(library: str, theirs: Callable[[], dict[str, Any]]) -> None:
    there, here = theirs(), ours()
    compared = 0
    for their_code, our_code, differs in rows(library):
        expected, actual = run(their_code, there), run(our_code, here)
        if isinstance(actual, ml.Tensor):
            if hasattr(expected, "detach"):
                expected = expected.detach()
            if differs.startswith("other values"):
                continue
            np.testing.assert_allclose(
                np.asarray(actual, np.float64),
                np.asarray(expected, np.float64),
                rtol=1e-5,
                atol=1e-6,
                err_msg=our_code,
            )
            compared += 1
    assert compared >= 12


def test_the_names_that_the_rest_of_the_page_has_are_there() -> None:
    names = set(re.findall(r"`ml\.((?:\w+\.)*\w+)", PAGE.read_text("utf-8")))
    assert len(names) > 50
    for name in names - {"cat"}:
        value: Any = ml
        for part in name.split("."):
            value = getattr(value, part)
    with pytest.raises(AttributeError, match=r"mlvm\.eager has no cat; use ml\.concat$"):
        ml.cat  # type: ignore[attr-defined]  # noqa: B018
