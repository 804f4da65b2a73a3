"""Blocks: the calls inside a call, a branch or the body of a loop, and the step around them.

What a block leaves lies in homes from outside: a loop's state, a branch's results. A value made in
a block is seen in it alone. Here a step loses the calls that nobody needs, inside its blocks too,
and those that only move a value to its home; and a block is taken out of its step, to be planned by
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from mlvm.core.types import TensorType
from mlvm.step.flow import Block, Call, Flow, Home, Use, Value


def free(blocks: Iterable[Block]) -> list[Use]:
    """What the blocks read from outside, each once."""
    found: dict[Use, None] = {}
    for block in blocks:
        made = {use.value for call in block.calls for use in call.outs}
        read = [use for call in block.calls for use in call.ins]
        if block.result is not None:
            read.append(block.result)
        found.update(
            (use, None)
            for use in read
            if use.value not in made and use.value.home not in block.homes
        )
    return list(found)


# --- what nobody needs ---------------------------------------------------------------


def without_dead_calls(flow: Flow, *, inside: bool = True) -> list[Call]:
    """The calls whose results somebody reads, or that have to be there at the end. Blocks lose
    theirs too, if `inside`."""
    return _alive(flow.calls, flow.wanted(), inside=inside)


def _alive(calls: Sequence[Call], wanted: Iterable[Value], *, inside: bool = True) -> list[Call]:
    alive = set(wanted)
    kept: list[Call] = []
    for call in reversed(calls):
        needed = [use for use in call.outs if use.value in alive]
        if not needed and not call.fixed:
            continue
        if call.blocks and inside:
            call = _pruned(call, needed)
        kept.append(call)
        alive.update(use.value for use in call.ins)
    return kept[::-1]


def without_dead_calls_in(block: Block) -> Block:
    """The block of a function without the calls whose results nobody reads."""
    return _kept(block, None)


def _pruned(call: Call, needed: Sequence[Use]) -> Call:
    """The control flow, without what only serves results that are not needed."""
    if call.callee is not None:
        return replace(call, blocks=tuple([_kept(block, None) for block in call.blocks]))
    homes = {use.value.home for use in needed}
    all_homes = {use.value.home for use in call.outs}
    while True:
        blocks = tuple([_kept(block, homes) for block in call.blocks])
        read = free(blocks)
        written = {use.value.home for b in blocks for c in b.calls for use in c.outs}
        more = {use.value.home for use in read} & all_homes if call.name == "while" else set()
        more |= written & all_homes  # by a call that has to stay
        if more <= homes:
            break
        homes |= more
    outs = [use for use in call.outs if use.value.home in homes]
    first = call.ins[:1] if call.name == "cond" else []
    before = [use for use in call.ins if use.value.home in homes]
    return replace(
        call, blocks=blocks, outs=outs, ins=list(dict.fromkeys([*first, *read, *before]))
    )


def _kept(block: Block, homes: set[Home | None] | None) -> Block:
    """The block, without what it leaves in other homes than these; None: in homes of its own."""
    last = {use.value.home: use.value for call in block.calls for use in call.outs}
    wanted = {
        value
        for home, value in last.items()
        if home is not None and (home in homes if homes is not None else _is_outside(home, block))
    }
    if block.result is not None:
        wanted.add(block.result.value)
    return replace(block, calls=_alive(block.calls, wanted))


def _is_outside(home: Home, block: Block) -> bool:
    return home.role not in ("scratch", "element") or home not in block.homes


# --- what only moves a value ---------------------------------------------------------


_GIVEN: Final = frozenset({"input", "state"})


def without_moves(flow: Flow) -> Flow:
    """The flow, in which a value that is copied to its home is made there, where nothing needs what
    lies there before, and a copy of an input or state that nothing writes to is read there."""
    uses = [use for call in with_blocks(flow.calls) for use in call.ins]
    written = {use.value.home for call in with_blocks(flow.calls) for use in call.outs}
    given = {use.value.home for use in uses if use.value.home and use.value.home.role in _GIVEN}
    renamed: dict[Value, Value] = {}
    calls = _settled(flow, renamed, given - written)
    return Flow(renewed(calls, renamed), [renamed.get(value, value) for value in flow.results])


def _settled(flow: Flow, renamed: dict[Value, Value], steady: Container[Home | None]) -> list[Call]:
    """The calls without such copies. `renamed` gets the values that lie elsewhere now; nothing
    writes to the homes that are `steady`."""

    def settled(block: Block) -> Block:
        return replace(block, calls=_settled(block.flow, renamed, steady))

    calls = [
        replace(call, blocks=tuple(map(settled, call.blocks))) if call.blocks else call
        for call in flow.calls
    ]
    maker = {use.value: i for i, call in enumerate(calls) for use in call.outs}
    gone: set[int] = set()
    for at, call in enumerate(calls):
        if call.op is None or call.op.name != "copy":
            continue
        [out], [source] = call.outs, call.ins
        home, made = out.value.home, maker.get(source.value)
        read = renamed.get(source.value, source.value)
        if home is None and read.home in steady and out.value not in flow.results:
            renamed[out.value] = read
            gone.add(at)
        if home is None or source.value.home is not None or made is None:
            continue
        if source.value in renamed or out.type is not source.type:
            continue
        if not _may_lie(calls, made, at, source, home, source.value in flow.results):
            continue
        renamed[source.value] = out.value
        gone.add(at)
    return [call for i, call in enumerate(calls) if i not in gone]


def _may_lie(
    calls: Sequence[Call], made: int, at: int, source: Use, home: Home, is_result: bool
) -> bool:
    """Whether the value that call `made` makes, and call `at` copies home, may lie there from the
    beginning, and until nobody reads it."""
    maker = calls[made]
    if maker.op is None or maker.outs[0].type is not source.type:
        return False
    for i, use in enumerate(maker.ins):
        if use.value.home is home and (i >= maker.op.in_place or use.type is not source.type):
            return False
    between = calls[made + 1 : at]
    if any(use.value.home is home for call in between for use in (*call.ins, *call.outs)):
        return False
    overwritten = False
    for call in calls[at + 1 :]:
        if overwritten and any(use.value is source.value for use in call.ins):
            return False
        writes = any(use.value.home is home for use in call.outs)
        if writes and any(use.value is source.value for use in call.ins):
            return False
        overwritten = overwritten or writes
    return not (overwritten and is_result)


def renewed(calls: Sequence[Call], names: Mapping[Value, Value]) -> list[Call]:
    """The calls with other values in the place of those in `names`, inside blocks too. Those that
    have none of these are the same."""

    def stays(call: Call) -> bool:
        uses = (*call.outs, *call.ins, *call.passed)
        return not call.blocks and not any(use.value in names for use in uses)

    return [
        call
        if stays(call)
        else replace(
            call,
            outs=[_named(use, names) for use in call.outs],
            ins=[_named(use, names) for use in call.ins],
            passed=[_named(use, names) for use in call.passed],
            blocks=tuple([_renewed(block, names) for block in call.blocks]),
        )
        for call in calls
    ]


def _renewed(block: Block, names: Mapping[Value, Value]) -> Block:
    result = None if block.result is None else _named(block.result, names)
    return Block(renewed(block.calls, names), block.homes, result)


def _named(use: Use, names: Mapping[Value, Value]) -> Use:
    return Use(names[use.value], use.type) if use.value in names else use


# --- taken out of its step -----------------------------------------------------------


class Taken(NamedTuple):
    """Blocks taken out of a step. `outer` are the values outside that they work on, by the index of
    the home that stands for each."""

    blocks: tuple[Block, ...]
    outer: dict[int, Value]


outer_index = itertools.count()
"""Numbers for homes that are `outer`."""


def taken(call: Call) -> Taken:
    """The blocks of control flow, with `outer` homes for what the step around them has to place."""
    homes: dict[Home | Value, Home] = {}
    outer: dict[int, Value] = {}
    names: dict[Value, Value] = {}

    def name(value: Value, type: TensorType) -> None:
        if value in names or (value.home is not None and value.home.role != "scratch"):
            return
        place = value.home or value
        if place not in homes:
            type = value.home.type if value.home is not None else type
            homes[place] = Home("outer", next(outer_index), type)
            outer[homes[place].index] = value
        names[value] = Value(value.nbytes, homes[place])

    for use in (*call.ins, *call.outs):
        name(*use)
    for inner in with_blocks([call]):
        for use in inner.outs:
            if use.value.home in homes:
                name(*use)
    return Taken(tuple([_renewed(block, names) for block in call.blocks]), outer)


def with_blocks(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls, and those inside them."""
    for call in calls:
        yield call
        for block in call.blocks:
            yield from with_blocks(block.calls)
