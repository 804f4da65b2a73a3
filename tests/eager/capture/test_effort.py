"""`ml.capture(effort=n)`: the planner may search longer for a smaller plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.arena import planner
from mlvm.core.errors import ArgumentError
from tests.brief import Patch, cases, refuses
from tests.trees import bits

pytestmark = pytest.mark.usefixtures("weights")


@cases("effort", 1, 7, 2**32)
def test_effort_changes_no_result(effort: int) -> None:
    """The planner has more nodes; where it needs none, the plan is the same, too."""

    def fn(x: ml.Tensor) -> ml.Tensor:
        return ml.sum(ml.tanh(x @ x) @ x, axis=0)

    x = ml.reshape(ml.arange(9.0), (3, 3))
    plain, captured = ml.capture(fn), ml.capture(effort=effort)(fn)
    assert bits(captured(x)) == bits(plain(x)) == bits(fn(x))
    assert captured.effort == effort
    assert captured.plan.nbytes == plain.plan.nbytes
    assert copy.copy(captured).effort == effort


@cases("effort", 0, -1, 1.0, True, "2", None, 2**32 + 1)
def test_effort_is_a_whole_number(effort: Any) -> None:
    refuses(
        ArgumentError, "capture: expected effort as an int from 1 to", ml.capture, effort=effort
    )


def test_the_planner_is_told(monkeypatch: Patch) -> None:
    """More work is allowed for each plan of the step, also that of a block."""
    allowed: list[int] = []
    best = planner._best

    def noted(*arguments: Any) -> Any:
        allowed.append(arguments[-1])
        return best(*arguments)

    monkeypatch.setattr(planner, "_best", noted)

    def fn(x: ml.Tensor) -> ml.Tensor:
        return ml.fori_loop(0, 3, lambda _, y: ml.tanh(y @ y), x)

    ml.capture(fn, effort=5)(ml.ones((3, 3)))
    assert len(allowed) >= 2
    assert {*allowed} == {5 * planner.WORK}
