"""Windows: slices that a chain reads in place, and slices that it writes into.

Each reader of a slice gets a separate slice, which can then join the reader's chain. In the chain
it is a window (`mlvm.core.machine.fused`), which is not copied.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from mlvm.core.dynamic_sizes import always_equal
from mlvm.core.machine.fused import READS_WINDOW, WRITES_WINDOW, is_apart
from mlvm.core.types import Shape
from mlvm.step.flow import Call, Home, Use, Value, readers_of


def written_shape(call: Call) -> Shape | None:
    """Return the shape of the values that a call writes into a window, if a chain supports it."""
    if call.op is None or call.op.name != WRITES_WINDOW:
        return None
    x, values = [use.type for use in call.ins]
    length = tuple(call.attributes["length"])
    is_part = not (always_equal(length, x.shape) or _is_empty(length))
    return length if is_part and values is x.with_shape(length) else None


def _is_empty(shape: Shape) -> bool:
    """Return whether a static size is 0. Kernels support empty windows of dynamic sizes."""
    return any(type(n) is int and n == 0 for n in shape)


def with_windows(calls: Sequence[Call], live_out: Container[Value]) -> Sequence[Call]:
    """Return the calls with a separate slice for each reader of a slice.

    This is done only if all readers can be in a chain with the slice. Without such a slice, the
    calls are returned unchanged.
    """
    readers = readers_of(calls)
    slices = {
        call.outs[0].value: call
        for call in calls
        if _may_be_window(call, live_out)
        and all(_can_read(each, call.outs[0]) for each in readers.get(call.outs[0].value, ()))
    }
    for value in _read_late(calls, slices):
        del slices[value]
    if not slices:
        return calls
    result: list[Call] = []
    for call in calls:
        if call.outs and call.outs[0].value in slices:
            continue
        own: dict[Use, Use] = {}
        for use in call.ins:
            if use.value in slices and use not in own:
                own[use] = Use(Value(use.value.nbytes), use.type)
                result.append(replace(slices[use.value], outs=[own[use]], window=True))
        result.append(replace(call, ins=[own.get(use, use) for use in call.ins]) if own else call)
    return result


def _may_be_window(call: Call, live_out: Container[Value]) -> bool:
    if call.op is None or call.op.name != READS_WINDOW or call.again:
        return False
    [out] = call.outs
    return (
        out.value.home is None
        and out.value not in live_out
        and not _is_empty(out.type.shape)
        and out.type.ndim > 0
        and not out.type.dtype.is_storage
    )


def _read_late(calls: Sequence[Call], slices: Mapping[Value, Call]) -> set[Value]:
    """Return the slices that a call reads after a write to the sliced memory.

    They must be copied before the write."""
    late, sliced_at, written_at = set[Value](), dict[Value, int](), dict[Home, int]()
    for number, call in enumerate(calls):
        for value in {use.value for use in call.ins} & slices.keys():
            home = slices[value].ins[0].value.home
            if home is not None and written_at.get(home, -1) > sliced_at[value]:
                late.add(value)
        for use in call.outs:
            if use.value in slices:
                sliced_at[use.value] = number
            if use.value.home is not None:
                written_at[use.value.home] = number
    return late


def _can_read(call: Call, use: Use) -> bool:
    """Return whether the call can be in a chain with the slice, and reads it only as a slice."""
    if call.op is None or any(x.value is use.value and x.type is not use.type for x in call.ins):
        return False
    if call.op.name == WRITES_WINDOW:
        return written_shape(call) is not None and call.ins[0].value is not use.value
    return call.op.links and always_equal(call.outs[0].type.shape, use.type.shape)


def may_write(call: Call, calls: Sequence[Call]) -> bool:
    """Return whether a call that writes to a window may join a chain of calls.

    Each window of this memory that the calls read must be the written window or disjoint from it.
    Otherwise the chain would have to copy the tensor of the written window.
    """
    shape, home = written_shape(call), call.outs[0].value.home
    x = call.ins[0].value if shape is not None else None
    for each in calls:
        if not each.window:
            continue
        read = each.ins[0].value
        if read is x or (home is not None and read.home is home):
            sets = x is not None and (read is x or x.home is home)
            if not sets or is_apart(each.attributes, call.attributes) is False:
                return False
    return True
