"""Hoisting: calls of a step that depend only on states become a separate program.

Such calls have the same results at each launch until a write to the states. Examples are a weight
that is converted, transposed or dequantized, the scale of a batch norm, and a mask. The step reads
the results as additional states. The same ops run on the same operands, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from mlvm.core.types import TensorType
from mlvm.step.blocks import (
    free_variables,
    renewed,
    with_blocks,
    with_inner_calls,
    without_dead_calls,
)
from mlvm.step.flow import Call, Flow, Home, Use, Value
from mlvm.step.panels import packing

LARGER: Final = 4
"""Maximum ratio of the bytes of a hoisted value to those of the states that it depends on.

A weight of u8 is hoisted as f32, a 4-bit weight is not.
"""

SMALL: Final = 1 << 14
"""Bytes up to which a value is always hoisted."""


class Hoist(NamedTuple):
    """Limits of hoisting: values may depend on `states`, numbered from 0, but on no `varying`."""

    states: int
    varying: Container[int] = frozenset()


class SplitFlow(NamedTuple):
    """Step that is split in two.

    `hoisted` has outputs of these `types`, which depend only on states. `rest` reads each of them
    as a state, numbered after the other states.
    """

    hoisted: Flow
    rest: Flow
    types: tuple[TensorType, ...]


def split_flow(flow: Flow, hoist: Hoist, *, panels: bool = False) -> SplitFlow | None:
    """Split the step in two; return None if it has no call to hoist.

    With `panels`, weights of matrix products are packed (`mlvm.step.panels`).
    """
    steady = _steady(flow, hoist)
    producers = _pure(flow, steady)
    if panels:
        flow = Flow(_Packer(steady, producers).calls(flow.calls), flow.results)
    if not producers:
        return None
    worth = {value for value, (_, states) in producers.items() if _is_worth(value.nbytes, states)}
    rest = without_dead_calls(Flow(_without(flow.calls, producers, worth), flow.results))
    read = worth & {use.value for call in with_blocks(rest) for use in _read_by(call)}
    values = [value for value in producers if value in read]
    if not values:
        return None
    uses = {use.value: use.type for call in with_blocks(rest) for use in (*call.ins, *call.outs)}
    types = tuple([uses.get(value) or producers[value].call.outs[0].type for value in values])
    outs: dict[Value, Value] = {}
    states: dict[Value, Value] = {}
    for number, (value, type) in enumerate(zip(values, types, strict=True)):
        outs[value] = Value(value.nbytes, Home("output", number, type))
        states[value] = Value(value.nbytes, Home("state", hoist.states + number, type))
    calls = renewed([producer.call for producer in producers.values()], outs)
    hoisted = Flow(calls, list(outs.values()))
    return SplitFlow(
        Flow(without_dead_calls(hoisted), hoisted.results),
        Flow(renewed(rest, states), flow.results),
        types,
    )


class _Producer(NamedTuple):
    """Call that depends only on states, and these states."""

    call: Call
    states: frozenset[Home]


def _steady(flow: Flow, hoist: Hoist) -> set[Home]:
    """Return the states that no call writes to, and that do not vary."""
    every = list(with_blocks(flow.calls))
    written = {use.value.home for call in every for use in call.outs}
    homes = {use.value.home for call in every for use in _read_by(call)} - written - {None}
    return {
        home
        for home in homes
        if home is not None and home.role == "state" and home.index not in hoist.varying
    }


def _states_of(
    use: Use, steady: set[Home], producers: dict[Value, _Producer]
) -> frozenset[Home] | None:
    """Return the states that a value depends on, if it depends only on steady states."""
    home = use.value.home
    if home is None:
        return producers[use.value].states if use.value in producers else None
    return frozenset({home}) if home in steady else None


def _is_worth(nbytes: int, states: frozenset[Home]) -> bool:
    """Return whether a value of that size that depends on these states is hoisted."""
    return nbytes <= max(SMALL, LARGER * sum(home.type.nbytes for home in states))


def _pure(flow: Flow, steady: set[Home]) -> dict[Value, _Producer]:
    """Return the values that depend only on states, in order, with the calls that compute them.

    Blocks may never run, so calls in blocks count only if they cannot fail.
    """
    results, outermost = set(flow.results), set(map(id, flow.calls))
    producers: dict[Value, _Producer] = {}
    for call in with_blocks(flow.calls):
        if call.op is None or call.again or call.sized:
            continue
        moves = call.op.copies_only and len(call.ins) == 1
        if id(call) not in outermost and not (moves or call.op.elementwise):
            continue
        [out], read = call.outs, [_states_of(use, steady, producers) for use in call.ins]
        if out.value.home is None and out.value not in results and None not in read:
            producers[out.value] = _Producer(call, frozenset().union(*filter(None, read)))
    return producers


class _Packer:
    """Replacement of matrix products by products with panels.

    The weights are `steady` or depend only on steady states. The calls that pack panels are added
    to `producers`.
    """

    def __init__(self, steady: set[Home], producers: dict[Value, _Producer]) -> None:
        self.steady, self.producers = steady, producers
        self._panels: dict[tuple[Use, TensorType, bool], Use] = {}

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        return [self._with_blocks(call) if call.blocks else self._call(call) for call in calls]

    def _call(self, call: Call) -> Call:
        packed = None if _is_producer(call, self.producers) else packing(call)
        if packed is None:
            return call
        pack, product = packed
        [weights], [panels] = pack.ins, pack.outs
        states = _states_of(weights, self.steady, self.producers)
        if states is None or not _is_worth(panels.type.nbytes, states):
            return call
        key = weights, panels.type, pack.attributes["transpose_y"]
        if key not in self._panels:
            self._panels[key] = panels
            self.producers[panels.value] = _Producer(pack, states)
        return replace(product, ins=[product.ins[0], self._panels[key]])

    def _with_blocks(self, call: Call) -> Call:
        call = with_inner_calls(call, lambda block: self.calls(block.calls))
        more = [
            use
            for use in free_variables(call.blocks)
            if use.value in self.producers and use not in call.ins
        ]
        return replace(call, ins=[*call.ins, *more])


def _is_producer(call: Call, producers: dict[Value, _Producer]) -> bool:
    return len(call.outs) == 1 and call.outs[0].value in producers


def _read_by(call: Call) -> Iterable[Use]:
    """Return the uses that the call itself reads; for control flow, without calls in blocks."""
    if not call.blocks:
        return call.ins
    results = [block.result for block in call.blocks if block.result is not None]
    return [*(call.ins[:1] if call.name == "cond" else ()), *call.passed, *results]


def _without(
    calls: Sequence[Call], producers: dict[Value, _Producer], removed: Container[Value]
) -> list[Call]:
    """Return the calls, and those of their blocks, without producers of removed values.

    Calls with blocks lose the operands that only these producers read.
    """
    remaining = []
    for call in calls:
        if _is_producer(call, producers) and call.outs[0].value in removed:
            continue
        if call.blocks:
            call = with_inner_calls(call, lambda block: _without(block.calls, producers, removed))
            read = {use.value for use in (*free_variables(call.blocks), *_read_by(call))}
            ins = [use for use in call.ins if use.value in read or use.value not in producers]
            call = replace(call, ins=ins)
        remaining.append(call)
    return remaining
