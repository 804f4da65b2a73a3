"""The part of the standard's own tests that needs no checkout of them: names and signatures,
promotions, special values. `freeze.py` has written them."""

from __future__ import annotations

import inspect
import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest

import mlvm.eager as ml

FROZEN: Final = json.loads(Path(__file__).with_name("standard.json").read_text())
SPECIAL: Final = {name: list(each) for name, each in groupby(FROZEN["special"], lambda e: e[0])}


def test_it_says_which_standard_it_has() -> None:
    assert ml.__array_api_version__ == FROZEN["version"]
    assert ml.asarray(1.0).__array_namespace__(api_version=FROZEN["version"]) is ml


@pytest.mark.parametrize("name", FROZEN["signatures"])
def test_signatures(name: str) -> None:
    """Parameters are positional or by keyword wherever the standard's are."""
    function: Any = ml
    for part in name.split("."):
        function = getattr(function, part)
    has = list(inspect.signature(function).parameters.values())
    wants = FROZEN["signatures"][name]
    for place, (parameter, kind) in enumerate(wants):
        if kind == "KEYWORD_ONLY":
            matches = [p for p in has if p.name == parameter]
            assert matches, f"no keyword {parameter}"
            assert matches[0].kind.name in (kind, "POSITIONAL_OR_KEYWORD")
        elif kind == "POSITIONAL_ONLY":
            assert has[place].kind.name in (kind, "POSITIONAL_OR_KEYWORD")
        else:
            assert has[place].kind.name == kind
            assert has[place].name == parameter or kind == "VAR_POSITIONAL"


def test_promotions() -> None:
    for x, y, result in FROZEN["promotions"]:
        assert ml.result_type(getattr(ml, x), getattr(ml, y)) == getattr(ml, result), (x, y)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str) -> None:
    for _, arguments, expected in SPECIAL[name]:
        dtype = ml.complex128 if isinstance(arguments[0], list) else ml.float64
        operands = [ml.asarray(_value(x), dtype=dtype) for x in arguments]
        result = getattr(ml, name)(*operands).item()
        assert _alike(result, _value(expected)), f"{name}{arguments}: {result}, not {expected}"


def _value(x: Any) -> Any:
    return complex(*x) if isinstance(x, list) else x


def _alike(x: Any, y: Any) -> bool:
    """Equal as the standard means it: nan is nan, and 0.0 is not -0.0."""
    if isinstance(y, complex):
        return _alike(x.real, y.real) and _alike(x.imag, y.imag)
    if isinstance(y, bool) or isinstance(x, bool):
        return x is y
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    return math.isclose(x, y, rel_tol=1e-15) and math.copysign(1, x) == math.copysign(1, y)
