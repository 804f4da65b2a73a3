"""Blocks: the calls inside a call, a branch or the body of a loop.

The results of a block are in homes from outside: a loop's state, a branch's results. A value
computed in a block is visible only in the block. Passes here remove dead calls, also inside blocks,
and calls that only move a value to a home. `outline_blocks` prepares blocks for planning separately
from the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from mlvm.core.types import TensorType
from mlvm.step.flow import VISIBLE, Block, Call, Flow, Home, Use, Value


def free_variables(blocks: Iterable[Block]) -> list[Use]:
    """Return the uses of outer values in blocks, each once."""
    uses: dict[Use, None] = {}
    for block in blocks:
        computed = {use.value for call in block.calls for use in call.outs}
        read = [use for call in block.calls for use in call.ins]
        if block.result is not None:
            read.append(block.result)
        uses.update(
            (use, None)
            for use in read
            if use.value not in computed and use.value.home not in block.homes
        )
    return list(uses)


# --- dead-code elimination -----------------------------------------------------------


def without_dead_calls(flow: Flow, *, inside: bool = True) -> list[Call]:
    """Return the calls with effects or with results that are read or live at the end.

    With `inside`, dead calls in blocks are removed as well.
    """
    return _alive(flow.calls, flow.live_out(), inside=inside)


def _alive(calls: Sequence[Call], live_out: Iterable[Value], *, inside: bool = True) -> list[Call]:
    alive = set(live_out)
    remaining: list[Call] = []
    for call in reversed(calls):
        needed = [use for use in call.outs if use.value in alive]
        if not needed and not call.fixed:
            continue
        if call.blocks and inside:
            call = _pruned(call, needed)
        remaining.append(call)
        alive.update(use.value for use in call.ins)
    return remaining[::-1]


def _pruned(call: Call, needed: Sequence[Use]) -> Call:
    """Return control flow without calls that only serve results that are not needed."""
    if call.callee is not None:
        return replace(call, blocks=tuple(map(without_dead_calls_in, call.blocks)))
    homes = {use.value.home for use in needed}
    all_homes = {use.value.home for use in call.outs}
    while True:
        blocks = tuple([without_dead_calls_in(block, homes) for block in call.blocks])
        read = free_variables(blocks)
        written = {use.value.home for b in blocks for c in b.calls for use in c.outs}
        more = {use.value.home for use in read} & all_homes if call.name == "while" else set()
        more |= written & all_homes  # written by a call with effects
        if more <= homes:
            break
        homes |= more
    outs = [use for use in call.outs if use.value.home in homes]
    first = call.ins[:1] if call.name == "cond" else []
    before = [use for use in call.ins if use.value.home in homes]
    return replace(
        call, blocks=blocks, outs=outs, ins=list(dict.fromkeys([*first, *read, *before]))
    )


def without_dead_calls_in(block: Block, homes: set[Home | None] | None = None) -> Block:
    """Return the block without dead calls.

    Results in homes other than `homes` are dead. With None, results in homes of the block itself
    are dead, as for the block of a function.
    """
    last = {use.value.home: use.value for call in block.calls for use in call.outs}
    live_out = {
        value
        for home, value in last.items()
        if home is not None and (home in homes if homes is not None else _is_outside(home, block))
    }
    if block.result is not None:
        live_out.add(block.result.value)
    return replace(block, calls=_alive(block.calls, live_out))


def _is_outside(home: Home, block: Block) -> bool:
    return home.role not in ("scratch", "element") or home not in block.homes


# --- copies --------------------------------------------------------------------------


_INITIALIZED: Final = frozenset({"input", "state"})


def without_moves(flow: Flow) -> Flow:
    """Return the flow without copies that only move a value.

    A value that is copied to a home is computed there, if the home's old value is not needed. A
    copy of an input or state that no call writes to is replaced by the input or state.
    """
    uses = [use for call in with_blocks(flow.calls) for use in call.ins]
    written = {use.value.home for call in with_blocks(flow.calls) for use in call.outs}
    read = {
        use.value.home for use in uses if use.value.home and use.value.home.role in _INITIALIZED
    }
    renamed: dict[Value, Value] = {}
    calls = _settled(flow, renamed, read - written)
    return Flow(renewed(calls, renamed), [renamed.get(value, value) for value in flow.results])


def _settled(flow: Flow, renamed: dict[Value, Value], steady: Container[Home | None]) -> list[Call]:
    """Return the calls without such copies, and add the moved values to `renamed`.

    Nothing writes to the `steady` homes.
    """

    def settled(block: Block) -> list[Call]:
        return _settled(block.flow, renamed, steady)

    calls = [with_inner_calls(call, settled) if call.blocks else call for call in flow.calls]
    producers = {use.value: i for i, call in enumerate(calls) for use in call.outs}
    removed: set[int] = set()
    for at, call in enumerate(calls):
        if call.op is None or call.op.name != "copy":
            continue
        [out], [source] = call.outs, call.ins
        home, producer = out.value.home, producers.get(source.value)
        read = renamed.get(source.value, source.value)
        if home is None and read.home in steady and out.value not in flow.results:
            renamed[out.value] = read
            removed.add(at)
        if home is None or source.value.home is not None or producer is None:
            continue
        if source.value in renamed or out.type is not source.type:
            continue
        if not _may_lie(calls, producer, at, source, home, source.value in flow.results):
            continue
        renamed[source.value] = out.value
        removed.add(at)
    calls = [call for i, call in enumerate(calls) if i not in removed]
    return _updated_in_place(renewed(calls, renamed), flow.results)


def _updated_in_place(calls: list[Call], results: Container[Value]) -> list[Call]:
    """Compute a value in the home to which a later update writes it: `x[0] = a; x[1:] = b`."""
    producers = {use.value: i for i, call in enumerate(calls) for use in call.outs}
    last = {use.value: i for i, call in enumerate(calls) for use in (*call.ins, *call.passed)}
    for at in reversed(range(len(calls))):
        call = calls[at]
        if call.op is None or not (call.op.copies_only and call.op.in_place == 1):
            continue
        [out], [source, *rest] = call.outs, call.ins
        home, value, producer = out.value.home, source.value, producers.get(source.value)
        if home is None or home.role in VISIBLE or producer is None or value.home is not None:
            continue
        if last[value] != at or value in results or out.type is not source.type:
            continue
        if any(use.value is value or use.value.home is home for use in rest):
            continue
        live = calls[producer : at + 1]
        if _may_lie(live, 0, at - producer, source, home, is_result=False):
            calls[producer : at + 1] = renewed(live, {value: Value(value.nbytes, home)})
    return calls


def _may_lie(
    calls: Sequence[Call], producer: int, at: int, source: Use, home: Home, is_result: bool
) -> bool:
    """Return whether a value may be in a home for the whole live range.

    Call `producer` computes the value, and call `at` copies it to the home.
    """
    first = calls[producer]
    if first.op is None or first.outs[0].type is not source.type:
        return False
    for i, use in enumerate(first.ins):
        if use.value.home is home and (i >= first.op.in_place or use.type is not source.type):
            return False
    between = calls[producer + 1 : at]
    if any(use.value.home is home for call in between for use in (*call.ins, *call.outs)):
        return False
    if home.role in VISIBLE and _raises_after(between, source.value):
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


def _raises_after(calls: Iterable[Call], value: Value) -> bool:
    """Return whether a call that needs the value may raise."""
    needing = {value}
    for call in calls:
        if not needing.isdisjoint(use.value for use in call.ins):
            if any(each.may_raise for each in with_blocks([call])):
                return True
            needing.update(use.value for use in call.outs)
    return False


def renewed(calls: Sequence[Call], names: Mapping[Value, Value]) -> list[Call]:
    """Replace the values in `names`, also inside blocks.

    Calls without these values are returned as the same objects.
    """

    def is_unchanged(call: Call) -> bool:
        uses = (*call.outs, *call.ins, *call.passed)
        return not call.blocks and not any(use.value in names for use in uses)

    return [
        call
        if is_unchanged(call)
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


# --- outlining -----------------------------------------------------------------------


outer_index = itertools.count()
"""Numbers of `outer` homes."""


def outline_blocks(call: Call) -> tuple[tuple[Block, ...], dict[int, Value]]:
    """Return the blocks of control flow with `outer` homes for values of the surrounding step.

    Also return these values by home index.
    """
    homes: dict[Home | Value, Home] = {}
    outer: dict[int, Value] = {}
    names: dict[Value, Value] = {}

    def name(value: Value, type: TensorType) -> None:
        if value in names or (value.home is not None and value.home.role != "scratch"):
            return
        place = value.home or value
        if place not in homes:
            home = value.home or Home("outer", 0, type)
            homes[place] = replace(home, role="outer", index=next(outer_index))
            outer[homes[place].index] = value
        names[value] = Value(value.nbytes, homes[place])

    for use in (*call.ins, *call.outs):
        name(*use)
    for inner in with_blocks([call]):
        for use in inner.outs:
            if use.value.home in homes:
                name(*use)
    return tuple([_renewed(block, names) for block in call.blocks]), outer


def with_inner_calls(call: Call, changed: Callable[[Block], list[Call]]) -> Call:
    """Return control flow with changed calls in each block."""
    blocks = [replace(block, calls=changed(block)) for block in call.blocks]
    return replace(call, blocks=tuple(blocks))


def with_blocks(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls and, recursively, the calls inside them."""
    for call in calls:
        yield call
        for block in call.blocks:
            yield from with_blocks(block.calls)
