"""Calls that may raise, and the updates of arguments and states that wait for them.

A captured step that raises leaves arguments and states unchanged. Each update therefore runs after
all calls that may raise, whatever the recorded order. Two kinds of updates keep the order of eager
code. The first are updates with a new value that such a call reads. The second are updates that may
raise themselves, such as `w[indices] = v`. A call cannot raise if an earlier call checked the same
indices against the same limit. So the backward passes of `take` and `softmax_cross_entropy` do not
delay updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlvm.core.dynamic_sizes import Length
from mlvm.step.blocks import with_inner_calls
from mlvm.step.flow import Call, Flow, Unit


def with_raising(flow: Flow) -> Flow:
    """Return the flow with `may_raise` set for calls of ops that may raise for some values."""
    return Flow(_marked(flow.calls, set()), flow.results)


def _marked(calls: Sequence[Call], checked: set[Any]) -> list[Call]:
    marked = []
    for call in calls:
        if call.blocks:
            call = with_inner_calls(call, lambda block: _marked(block.calls, set()))
        elif call.op is not None and call.op.may_raise and not call.again:
            checks = _checks(call)
            if checks is None or checks not in checked:
                is_float = call.op.elementwise and call.outs[0].type.dtype.is_inexact
                call = call if is_float else replace(call, may_raise=True)  # integer pow may raise
                checked.add(checks)
        marked.append(call)
    return marked


def _checks(call: Call) -> Any:
    """Return the values that a call checks: indices, and the upper limit."""
    assert call.op is not None
    types = [use.type for use in call.ins]
    values = [use.value for use in call.ins]
    axis: Any = call.attributes.get("axis", 0)
    limit: Any
    match call.op.name:
        case "take" | "take_along_axis":
            at, limit = 1, types[0].shape[axis]
        case "scatter_add" | "scatter_add_along_axis":
            at, limit = 1, call.attributes["length"]
        case "index_add" | "index_reduce":
            at, limit = 2, types[0].shape[axis]
        case "index_set":
            first = axis % max(types[0].ndim, 1)
            at, limit = 2, types[0].shape[first : first + call.attributes["axes"]]
            limit = limit[0] if len(limit) == 1 else limit
        case "dequantize_rows":
            at, limit = 0, types[1].shape[0]
        case "softmax_cross_entropy":
            at, limit = 1, ("classes", types[0].shape[-1])
        case "softmax_cross_entropy_vjp":
            at, limit = 2, ("classes", types[1].shape[-1])
        case "dynamic_update":
            at, limit = 2, ("rows", types[0].shape[axis], types[1].shape[axis])
        case _:
            return None
    return values[at], _key(limit)


def _key(limit: Any) -> Any:
    """Return a key for a limit. A dynamic size is only equal to itself, without a guard."""
    if isinstance(limit, tuple):
        return tuple(map(_key, limit))
    return (id(limit),) if issubclass(type(limit), Length) else limit


def updates_last(flow: Flow) -> Flow:
    """Return the flow with each update after the calls that may raise and do not need it."""
    units = [Unit([call]) for call in flow.calls]
    end = max((i + 1 for i, unit in enumerate(units) if unit.may_raise), default=0)
    stays = _needed(units[:end])
    later = Unit([])
    before, after = list[Call](), list[Call]()
    for unit, call, stay in zip(units, flow.calls[:end], stays, strict=False):
        if not stay and (unit.updates or later.must_precede(unit)):
            after.append(call)
            later.extend(unit)
        else:
            before.append(call)
    return Flow([*before, *after, *flow.calls[end:]], flow.results) if after else flow


def _needed(units: Sequence[Unit]) -> list[bool]:
    """Return which units may raise, or must run before a unit that may raise."""
    needed, stays = Unit([]), []
    for unit in reversed(units):
        stays.append(unit.may_raise or unit.must_precede(needed))
        if stays[-1]:
            needed.extend(unit)
    return stays[::-1]
