"""The map of PyTorch's operators, and with PyTorch at hand a part of the walk over their samples.

`python -m tests.opinfo` is the whole walk.
"""

from __future__ import annotations

import builtins
from dataclasses import replace
from symtable import Function, symtable
from typing import Any, Final

import pytest

import mlvm.eager as ml
from tests.brief import cases, refuses
from tests.opinfo import adapters
from tests.opinfo.__main__ import names
from tests.opinfo.names import COUNT, SPACE, Entry, Refusals, entries

KNOWN: Final = entries()
PRESENT: Final = [each for each in KNOWN.values() if each.kind != "-"]


# --- the map -------------------------------------------------------------------------


def test_each_name_has_a_line_and_more_than_half_are_present() -> None:
    assert len(KNOWN) == COUNT
    assert sum(each.kind == "=" for each in KNOWN.values()) >= 330
    assert all(each.reason for each in KNOWN.values() if each.kind == "-")
    assert names(KNOWN).startswith("names: ")


@pytest.mark.parametrize("entry", PRESENT, ids=lambda each: each.name)
def test_each_expression_is_of_names_that_are_here(entry: Entry) -> None:
    for path in entry.ours():
        value: Any = ml
        for part in path.split(".")[1:]:
            value = getattr(value, part)
    assert entry.compared in (None, "type", *adapters.COMPARED)
    function = symtable(entry.function, "", "eval").get_children()[0]
    assert isinstance(function, Function)
    assert {*function.get_globals()} <= {*SPACE, *dir(builtins)}


def test_a_line_that_is_none_is_refused() -> None:
    assert entries("abs(x) = ml.abs(x)")["abs"].call(ml.asarray(-1.0)).item() == 1.0
    assert entries("sum(x, dim=(), p=1) ~ x || type")["sum"].compared == "type"
    refuses(ValueError, "line 1: abs", entries, "abs(x): ml.abs(x)")
    refuses(ValueError, "line 2", entries, "t - sparse\nt - in place")


def test_a_refusal_has_a_reason_by_its_text_and_its_class() -> None:
    refusals = Refusals()
    refused = refuses(ml.errors.DTypeError, "", lambda: ml.asarray(True) + ml.asarray(True))
    assert refusals.reason("add", refused) is not None
    assert refusals.reason("add", TypeError(str(refused))) is None
    assert refusals.reason("add", ml.errors.ShapeError("nobody knows why")) is None
    assert refusals.reason("add", adapters.NotHere("there is no p=")) == "there is no p="


# --- the walk ------------------------------------------------------------------------

A_PART: Final = {
    "add": "f32 i64 bool bf16",
    "var": "f64 c64",
    "matmul": "f32 c64",
    "softmax": "f16",
    "nn.functional.pad": "f32",
    "fft.rfft": "f64",
    "linalg.eigh": "f64",
    "bernoulli": "f32",
    "slice": "f32",
}
"""Operators, and the dtypes in which some of their samples are tried in every run."""


@pytest.fixture
def walk() -> Any:
    """The module, where there are PyTorch and what its tests need."""
    pytest.importorskip("torch", minversion="2.13")
    pytest.importorskip("expecttest")
    from tests.opinfo import walk

    return walk


def outcomes(walk: Any, entry: Entry, dtype: str, count: int = 4) -> list[Any]:
    walker = walk.Walk(samples=count, captured=True)
    return [each for op in walk.operators(entry.name) for each in walker.of(op, entry, dtype)]


def test_the_map_is_of_pytorch_s_names(walk: Any) -> None:
    assert {op.name for op in walk.operators()} == set(KNOWN)


@pytest.mark.parametrize("name", A_PART)
def test_samples(walk: Any, name: str) -> None:
    for dtype in A_PART[name].split():
        results = outcomes(walk, KNOWN[name], dtype)
        assert [each for each in results if each.verdict in ("wrong", "raw")] == []
        assert results


@cases("expression, what, verdict",
    ("ml.cos(x)", "value", "wrong"),
    ("ml.sin(x).astype(ml.float64)", "value", "wrong"),
    ("ml.sin(x)[0]", "value", "wrong"),
    ("ml.stop_gradient(ml.sin(x))", "gradient", "wrong"),
    ("ml.sin(x).numpy()", "value", "wrong"),
    ("x.nothing()", "value", "raw"),
    ("ml.sin(ml.reshape(x, 7))", "value", "wrong"),
    ("x + ml.random.uniform() * 1e-9 + ml.sin(x) - x", "captured", "wrong"),
)  # fmt: skip
def test_it_sees_what_is_wrong(walk: Any, expression: str, what: str, verdict: str) -> None:
    entry = replace(KNOWN["sin"], expression=expression)
    results = outcomes(walk, entry, "f32", 1)
    assert (what, verdict) in [(each.what, each.verdict) for each in results]
