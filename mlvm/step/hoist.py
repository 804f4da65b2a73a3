"""What a step computes of its states alone, taken out of it: a program of its own makes it once.

Such calls give the same at each launch, for as long as nobody writes to the states: a weight that
is converted, transposed or dequantized, a batch norm's factor, a mask. The step then reads what
they make as further states. The same ops run on the same operands, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from mlvm.core.types import TensorType
from mlvm.step.blocks import free, renewed, with_blocks
from mlvm.step.flow import Block, Call, Flow, Home, Use, Value
from mlvm.step.panels import packing

LARGER: Final = 4
"""What is kept has at most so many times the bytes of the states it depends on: a weight of u8 is
kept as f32, and one of four bits is not."""

SMALL: Final = 1 << 14
"""Bytes that are kept whatever they depend on."""


class Hoist(NamedTuple):
    """What may be taken out of a step: what depends on its `states`, so many of them, but for those
    that are `varying`, by number."""

    states: int
    varying: Container[int] = frozenset()


class Hoisted(NamedTuple):
    """A step in two: `ahead` makes its outputs, of these `types`, of the states alone; `rest` has
    each of them as a state, numbered behind the others."""

    ahead: Flow
    rest: Flow
    types: tuple[TensorType, ...]


def hoisted(flow: Flow, hoist: Hoist, *, panels: bool = False) -> Hoisted | None:
    """The step in two, or None where nothing can be taken out of it. With `panels`, products get
    their weights packed (`mlvm.step.panels`)."""
    steady = _steady(flow, hoist)
    maker = _pure(flow, steady)
    if panels:
        flow = Flow(_Packer(steady, maker).calls(flow.calls), flow.results)
    if not maker:
        return None
    kept = _kept(flow, maker)
    if not kept:
        return None
    rest = _without(flow.calls, maker, kept)
    seen = {use.value: use.type for call in with_blocks(rest) for use in (*call.ins, *call.outs)}
    types = tuple([seen.get(value) or maker[value].call.outs[0].type for value in kept])
    outs: dict[Value, Value] = {}
    states: dict[Value, Value] = {}
    for number, (value, type) in enumerate(zip(kept, types, strict=True)):
        outs[value] = Value(value.nbytes, Home("output", number, type))
        states[value] = Value(value.nbytes, Home("state", hoist.states + number, type))
    needed = _closure(kept, maker)
    ahead = [made.call for value, made in maker.items() if value in needed]
    return Hoisted(
        Flow(renewed(ahead, outs), list(outs.values())),
        Flow(renewed(rest, states), flow.results),
        types,
    )


class _Made(NamedTuple):
    """A call that depends on states alone, and on which."""

    call: Call
    states: frozenset[Home]


def _steady(flow: Flow, hoist: Hoist) -> set[Home]:
    """The states that no call writes to, and that do not vary."""
    every = list(with_blocks(flow.calls))
    written = {use.value.home for call in every for use in call.outs}
    homes = {use.value.home for call in every for use in _read_by(call)} - written - {None}
    return {
        home
        for home in homes
        if home is not None and home.role == "state" and home.index not in hoist.varying
    }


def _states_of(use: Use, steady: set[Home], maker: dict[Value, _Made]) -> frozenset[Home] | None:
    """What the value depends on, if that is steady states alone."""
    home = use.value.home
    if home is None:
        return maker[use.value].states if use.value in maker else None
    return frozenset({home}) if home in steady else None


def _is_worth(nbytes: int, states: frozenset[Home]) -> bool:
    """Whether so many bytes are kept of what is made of these states."""
    return nbytes <= max(SMALL, LARGER * sum(home.type.nbytes for home in states))


def _pure(flow: Flow, steady: set[Home]) -> dict[Value, _Made]:
    """What calls make of the states alone, in order. Inside blocks, which may run never, it is
    calls that cannot fail."""
    results, outermost = set(flow.results), set(map(id, flow.calls))
    made: dict[Value, _Made] = {}
    for call in with_blocks(flow.calls):
        if call.op is None or call.again or call.guards or call.sized:
            continue
        moves = call.op.copies_only and len(call.ins) == 1
        if id(call) not in outermost and not (moves or call.op.elementwise):
            continue
        [out], read = call.outs, [_states_of(use, steady, made) for use in call.ins]
        if out.value.home is None and out.value not in results and None not in read:
            made[out.value] = _Made(call, frozenset().union(*filter(None, read)))
    return made


class _Packer:
    """Puts products of panels in the place of others whose weights are `steady`, or made of that:
    `maker` gets what packs them."""

    def __init__(self, steady: set[Home], maker: dict[Value, _Made]) -> None:
        self.steady, self.maker = steady, maker
        self._panels: dict[tuple[Use, TensorType, bool], Use] = {}

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        return [self._with_blocks(call) if call.blocks else self._call(call) for call in calls]

    def _call(self, call: Call) -> Call:
        found = None if _makes(call, self.maker) else packing(call)
        if found is None:
            return call
        pack, product = found
        [weights], [panels] = pack.ins, pack.outs
        states = _states_of(weights, self.steady, self.maker)
        if states is None or not _is_worth(panels.type.nbytes, states):
            return call
        key = weights, panels.type, pack.attributes["transpose_y"]
        if key not in self._panels:
            self._panels[key] = panels
            self.maker[panels.value] = _Made(pack, states)
        return replace(product, ins=[product.ins[0], self._panels[key]])

    def _with_blocks(self, call: Call) -> Call:
        def packed(block: Block) -> Block:
            return replace(block, calls=self.calls(block.calls))

        blocks = tuple(map(packed, call.blocks))
        more = [use for use in free(blocks) if use.value in self.maker and use not in call.ins]
        return replace(call, blocks=blocks, ins=[*call.ins, *more])


def _kept(flow: Flow, maker: dict[Value, _Made]) -> list[Value]:
    """What is made of the states, and read by the rest of the step, in which the calls stay that
    make too much of too little."""
    found: dict[Value, None] = {}
    stays = [call for call in with_blocks(flow.calls) if not _makes(call, maker)]
    seen: set[Value] = set()
    while stays:
        for use in _read_by(stays.pop()):
            if use.value not in maker or use.value in seen:
                continue
            seen.add(use.value)
            call, states = maker[use.value]
            if _is_worth(use.value.nbytes, states):
                found[use.value] = None
            else:
                stays.append(call)
    return [value for value in maker if value in found]


def _makes(call: Call, maker: dict[Value, _Made]) -> bool:
    return len(call.outs) == 1 and call.outs[0].value in maker


def _read_by(call: Call) -> Iterable[Use]:
    """What the call itself reads: of control flow, what its blocks' calls do not."""
    if not call.blocks:
        return call.ins
    results = [block.result for block in call.blocks if block.result is not None]
    return [*(call.ins[:1] if call.name == "cond" else ()), *call.passed, *results]


def _closure(values: Iterable[Value], maker: dict[Value, _Made]) -> set[Value]:
    """These values, and all that is made on the way to them."""
    needed: set[Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if value in maker and value not in needed:
            needed.add(value)
            stack += [use.value for use in maker[value].call.ins]
    return needed


def _without(calls: Sequence[Call], maker: dict[Value, _Made], kept: Iterable[Value]) -> list[Call]:
    """The calls without those whose results are kept, or that nobody else needs any more."""
    ahead = set(kept)
    alive: set[Value] = set()
    for call in with_blocks(calls):
        if not _makes(call, maker):
            alive.update(use.value for use in _read_by(call))
    stack = [value for value in alive if value in maker]
    while stack:
        value = stack.pop()
        if value not in ahead:
            more = [use.value for use in maker[value].call.ins if use.value in maker]
            stack += [each for each in more if each not in alive]
            alive.update(more)
    gone = maker.keys() - (alive - ahead)

    def left(row: Sequence[Call]) -> list[Call]:
        found = [call for call in row if not _makes(call, maker) or call.outs[0].value not in gone]
        return [_without_in(call, left, gone - ahead) if call.blocks else call for call in found]

    return left(calls)


def _without_in(
    call: Call, left: Callable[[Sequence[Call]], list[Call]], gone: Container[Value]
) -> Call:
    """Control flow with what is left of its blocks, which reads nothing that is gone."""
    blocks = tuple([replace(block, calls=left(block.calls)) for block in call.blocks])
    return replace(call, blocks=blocks, ins=[use for use in call.ins if use.value not in gone])
