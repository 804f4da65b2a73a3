"""Common subexpressions: ops on one element that have equal operands run once.

Programs that index elements, such as `a[i - 1, j] + a[i - 1, j + 1]`, compute equal positions
several times. Larger values are not merged, because they would be live longer.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

from mlvm.core.memo import exact_repr
from mlvm.core.types import TensorType
from mlvm.step.blocks import renewed, with_inner_calls
from mlvm.step.flow import Call, Flow, Use, Value, is_one_element

_Key: TypeAlias = tuple[str, str, TensorType, *tuple[Use, ...]]


def without_repeats(flow: Flow) -> Flow:
    """Return the flow without ops on one element that an earlier op of the same block repeats."""
    names: dict[Value, Value] = {}
    calls = _once(flow.calls, names, set(flow.results))
    return Flow(renewed(calls, names), flow.results) if names else flow


def _once(
    calls: Sequence[Call], names: dict[Value, Value], results: Container[Value]
) -> list[Call]:
    """Return the calls without repeated ones, and add the values of these to `names`."""
    first: dict[_Key, Value] = {}
    unique: list[Call] = []
    for call in calls:
        if call.blocks:
            call = with_inner_calls(
                call, lambda block: _once(block.calls, names, set(block.flow.results))
            )
        elif _may_be_merged(call) and call.outs[0].value not in results:
            [out] = call.outs
            uses = [Use(names.get(use.value, use.value), use.type) for use in call.ins]
            value = first.setdefault(
                (call.name, exact_repr(call.attributes), out.type, *uses), out.value
            )
            if value is not out.value:
                names[out.value] = value
                continue
        unique.append(call)
    return unique


def _may_be_merged(call: Call) -> bool:
    if call.op is None or call.sized or call.again or len(call.outs) != 1:
        return False
    [(value, type)] = call.outs
    return value.home is None and is_one_element(type.shape)
