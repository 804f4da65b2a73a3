"""Rematerialization: cheap calls run again, instead of saving the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from mlvm.step.blocks import renewed
from mlvm.step.flow import Call, Home, Use, Value

FAR: Final = 16
"""Minimum number of calls between two uses of a value for which recomputation is considered."""


def recomputed(calls: Sequence[Call]) -> list[Call]:
    """Repeat cheap calls before a much later use of the result, if the operands are still live.

    A backward pass then needs the operand of a GELU, but not its result (Chen et al., arXiv
    1604.06174). The result has the same bits each time.
    """
    inside = {use.value for call in calls if call.blocks for use in call.ins}
    uses: dict[Value, list[int]] = {}
    overwritten: dict[Home, list[int]] = {}
    for i, call in enumerate(calls):
        for use in call.ins:
            uses.setdefault(use.value, []).append(i)
        for use in call.outs:
            if use.value.home is not None:
                overwritten.setdefault(use.value.home, []).append(i)

    def is_alive(value: Value, since: int, at: int) -> bool:
        if value.home is not None:
            return not any(since < i < at for i in overwritten.get(value.home, ()))
        return uses[value][-1] >= at

    again: dict[int, list[Call]] = {}
    replaced: dict[int, dict[Value, Value]] = {}
    for i, call in enumerate(calls):
        if call.op is None or not call.op.traits.is_cheap or call.outs[0].value.home is not None:
            continue
        value = call.outs[0].value
        if value in inside:  # read by control flow at any time
            continue
        times = uses.get(value, [])
        for before, at in zip([i, *times], times, strict=False):
            if at - before < FAR or not all(is_alive(use.value, i, at) for use in call.ins):
                continue
            twin = Value(value.nbytes)
            out = Use(twin, call.outs[0].type)
            again.setdefault(at, []).append(replace(call, outs=[out], again=True, may_raise=False))
            for later in times:
                if later >= at:
                    replaced.setdefault(later, {})[value] = twin
            break
    result: list[Call] = []
    for i, call in enumerate(calls):
        result += again.get(i, [])
        result += renewed([call], replaced[i]) if i in replaced else [call]
    return result
