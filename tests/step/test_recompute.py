"""Calls that run again, and that they make the same once more."""

from __future__ import annotations

from unittest import mock

from hypothesis import given

from mlvm.step import recompute
from mlvm.step.blocks import without_dead_calls
from mlvm.step.flow import Home, Value
from mlvm.step.recompute import recomputed
from tests.step.flows import Step, mlp, steps


def test_a_backward_pass_finds_activations_made_again() -> None:
    calls = recomputed(without_dead_calls(mlp(layers=20).flow))
    again = [each for each in calls if each.again]
    assert {each.name for each in again} == {"gelu.out"}
    for each in again:
        twin = each.outs[0].value
        [original] = [
            other for other in calls if other.ins == each.ins and not other.again
        ]  # on the same operand
        assert any(use.value is twin for other in calls for use in other.ins)
        assert calls.index(original) < calls.index(each)


@given(steps())
def test_what_is_made_again_finds_its_operands_as_they_were(step: Step) -> None:
    with mock.patch.object(recompute, "FAR", 1):
        calls = recomputed(step.calls)
    assert [each.name for each in calls if not each.again] == [each.name for each in step.calls]
    holds: dict[Home, Value] = {}
    for each in calls:
        for use in each.ins:
            home = use.value.home
            if home is not None:
                assert holds.setdefault(home, use.value) is use.value
        holds.update({use.value.home: use.value for use in each.outs if use.value.home})
