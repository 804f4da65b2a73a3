"""Each line of tests/cases/refused_calls.txt raises its error, and leaves nothing allocated."""

from __future__ import annotations

import ast
import math
from typing import Any, Final

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import refuses
from tests.cases.tables import Section, WrongCall, sections
from tests.eager.tensor.test_tracebacks import assert_short


def _rows(section: Section) -> list[tuple[str, WrongCall]]:
    """Each wrong call of a section, behind its statements, of which none is a mere call."""
    calls = [WrongCall.of(line) for line in section.lines]
    lines = [line for line, call in zip(section.lines, calls, strict=True) if call is None]
    for line in lines:
        if isinstance(ast.parse(line).body[-1], ast.Expr):
            raise ValueError(f"{line.place}: expected `call  # Error: text`, got {line}")
    return [("\n".join(lines), call) for call in calls if call is not None]


WRONG: Final = [row for section in sections("refused_calls.txt") for row in _rows(section)]
"""The statements of a section, and a wrong call."""
INDEX: Final = (IndexError, ValueError)


@pytest.mark.parametrize(("setup", "row"), WRONG, ids=[row.call for _, row in WRONG])
def test_a_wrong_call_is_refused(setup: str, row: WrongCall) -> None:
    names: dict[str, Any] = {"ml": ml, "np": np, "math": math}
    exec(setup, names)
    with ml.Arena(ml.default_vm(), "refused") as arena:
        kind = row.error(names)
        error = refuses(kind, row.text, exec, row.call, names)
        assert kind not in INDEX or isinstance(error, ml.errors.MlvmError)
        has_own_frames = any(word in row.call for word in ("lambda", "optim", "batch"))
        assert_short(error, 13 if has_own_frames else 3)
        del error
        assert arena.used == 0


def test_an_axis_out_of_range_is_all_that_libraries_expect() -> None:
    refused = refuses(ml.errors.AxisError, "", ml.stack, [ml.ones(2)], axis=9)
    assert all(isinstance(refused, each) for each in (IndexError, ValueError, TypeError))
