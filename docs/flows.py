"""Recorded calls of a function, which docs/passes.md prints before and after each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlvm.eager as ml
from mlvm.step.compile import Planned, on_planned
from mlvm.step.flow import Call, Flow, Use, Value


def flow_of(fn: Callable[..., Any], *args: Any) -> Flow:
    """Trace a function and return its calls, as the passes receive them."""
    plans: list[Planned] = []
    on_planned.append(plans.append)
    try:
        ml.measure(fn, *args)
    finally:
        on_planned.remove(plans.append)
    curve: Any = plans[-1].curve
    [flow] = curve.args
    assert isinstance(flow, Flow)
    return flow


def show(*titled: tuple[str, Iterable[Call]]) -> None:
    """Print calls below their titles, one call per line.

    A value without memory outside of the step is a number: `%2`. The same value has the same
    number below all titles.
    """
    numbers: dict[Value, int] = {}

    def name(use: Use) -> str:
        home = use.value.home
        if home is not None and home.role != "scratch":
            return f"{home.role}{home.index}"
        return f"%{numbers.setdefault(use.value, len(numbers))}"

    def line(call: Call) -> str:
        operands = [*map(name, call.ins)]
        operands += [f"{key}={value}" for key, value in call.attributes.items() if value]
        results = ", ".join(f"{name(use)}: {use.type}" for use in call.outs)
        return f"{results} = {call.name.removesuffix('.out')}({', '.join(operands)})"

    for title, calls in titled:
        print(f"{title}:")
        for call in calls:
            print(f"    {line(call)}")
            for inner in (inner for block in call.blocks for inner in block.calls):
                print(f"        {line(inner)}")
