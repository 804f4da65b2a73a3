"""Chains of a template: successive elementwise steps that one kernel computes.

In: the steps of a template, in order, and the operand types. Out: the kernels with which C
runs some of these steps together (`run_chain` in `language/templates.c`). A chain computes the same
bits as the steps, but needs no launch, and no tensor for a result that only the chain reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from mlvm.core.machine.callee import Fused, Kernels
from mlvm.core.machine.fused import LONGEST_CHAIN, Chain, Link
from mlvm.core.types import TensorType, u64
from mlvm.eager.tensor.context import current_arena

MOST_CHAINED: Final = 12  # results and operands of a chain
_APPLY, _ALIAS, _, _UPDATE, _NEXT_KEY = range(5)  # `StepKind` in dispatch.h


class Step(NamedTuple):
    """Step of a template; `last` is the last step that reads the result."""

    kind: int
    call: Any
    extra: Any
    operands: tuple[int, ...]
    last: int


class Row(NamedTuple):
    """Chain of the steps from `first` up to `end`.

    It has a kernel, the result types, and the numbers of results and operands.
    """

    first: int
    end: int
    call: Any
    types: tuple[TensorType, ...]
    values: tuple[int, ...]


def chains_of(types: Sequence[TensorType], steps: Sequence[Any], noperands: int) -> list[Row]:
    """Return the chains of a template.

    The types are those of the operands, then of the constants in reverse order.
    """
    vm: Any = current_arena().vm
    fused = vm.functions.binding(Fused.name).callee
    plan = getattr(getattr(fused, "kernel", None), "plan", None)
    if plan is None or not isinstance(fused, Fused):
        return []
    planner = _Planner(types, [Step(*step) for step in steps], noperands)
    rows = []
    first = 0
    while first < len(steps):
        row, end = None, first
        while end < first + LONGEST_CHAIN and planner.may_join(first, end):
            end += 1
        while end > first + 1 and row is None:
            row = planner.planned(first, end, plan, fused.kernels)
            if row is None:  # too many operands, or an op without such a kernel
                end = first + (end - first) // 2
        if row is not None:
            rows.append(row)
        first = max(end, first + 1)
    return rows


class _Planner:
    """Steps of a template, and the types of values by number; None for an unknown type."""

    def __init__(self, types: Sequence[TensorType], steps: list[Step], noperands: int) -> None:
        self.steps, self.noperands = steps, noperands
        self.types: dict[int, TensorType | None] = dict(enumerate(types[:noperands]))
        self.types |= {-1 - i: type for i, type in enumerate(reversed(types[noperands:]))}
        for i, step in enumerate(steps):
            self.types[noperands + i] = self._result_of(step)

    def _result_of(self, step: Step) -> TensorType | None:
        if step.kind == _ALIAS:
            return step.extra  # type: ignore[no-any-return]
        if step.kind == _UPDATE:
            return self.types[step.operands[0]]
        if step.kind == _NEXT_KEY:
            return TensorType(u64, (2,))
        types = tuple([self.types[number] for number in step.operands])
        if step.kind != _APPLY or None in types:
            return None
        call = step.call
        inferred: TensorType | None = call.types.get(types)
        return call.op.infer(types, call.attributes) if inferred is None else inferred

    def may_join(self, first: int, at: int) -> bool:
        """Return whether a step is elementwise on the shape of the chain that begins at `first`."""
        if at >= len(self.steps) or self.steps[at].kind != _APPLY:
            return False
        type, shaped = self.types[self.noperands + at], self.types[self.noperands + first]
        if type is None or shaped is None or type.shape != shaped.shape or not type.size:
            return False
        op = self.steps[at].call.op
        return bool(op.links and not op.may_raise and not type.dtype.is_storage)

    def planned(
        self, first: int, end: int, plan: Callable[..., Any], kernels: Kernels
    ) -> Row | None:
        """Plan the chain of these steps; None if there is no such kernel."""
        steps, before = self.steps[first:end], self.noperands + first
        produced = range(before, before + len(steps))
        results = [number for number, step in zip(produced, steps, strict=True) if step.last >= end]
        read = [number for step in steps for number in step.operands]
        values = [*results, *dict.fromkeys(number for number in read if number not in produced)]
        if len(values) > MOST_CHAINED or not results:
            return None
        types: list[Any] = [self.types[number] for number in values]
        numbers = {number: -1 - i for i, number in enumerate(produced)}
        numbers |= {number: i for i, number in enumerate(values)}
        links = [
            Link(
                step.call.op,
                numbers[number],
                tuple([numbers[operand] for operand in step.operands]),
                step.call.attributes,
            )
            for number, step in zip(produced, steps, strict=True)
        ]
        call = plan(types, {"chain": Chain(links, len(results), kernels)})
        if call is None:
            return None
        call = getattr(call, "call", call)
        return Row(first, end, call, tuple(types[: len(results)]), tuple(values))
