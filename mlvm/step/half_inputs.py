"""Removal of casts to f32 before row functions that read half precision.

Under `ml.autocast` a LayerNorm of half-precision x is computed in f32 after a cast, and a second
cast rounds the gradient. Kernels that widen rows while reading, and round them while writing,
compute the same bits without the f32 copy. Otherwise the step would save that copy for the backward
pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mlvm.core.types import f32
from mlvm.step.flow import Call, Flow, Use, readers_of

_READ: Final = {"layer_norm": 0, "layer_norm_scale_vjp": 1, "layer_norm_vjp": 1}
"""Ops with the position of the operand that may be in half precision while the others are f32."""
_ROUNDED: Final = "layer_norm_vjp"
"""Op with a result of the dtype of that operand."""


def in_halves(flow: Flow) -> list[Call]:
    """Return the calls without casts that only these ops read; they read the cast's operand."""
    casts = [call for call in flow.calls if call.op is not None and call.op.name == "astype"]
    readers = readers_of(flow.calls if casts else ())
    live_out = flow.live_out()

    def cast_of(call: Call) -> Call | None:
        """Return the cast that is the only reader of the call's result, if there is one."""
        value = call.outs[0].value
        if value in live_out or len(readers.get(value, ())) != 1:
            return None
        [reader] = readers[value]
        return reader if reader.op is not None and reader.op.name == "astype" else None

    def reads(call: Call, widened: Use, narrow: Use) -> bool:
        """Return whether the call may read the half instead."""
        place = None if call.op is None else _READ.get(call.op.name)
        if place is None or [i for i, use in enumerate(call.ins) if use == widened] != [place]:
            return False
        if call.op is None or call.op.name != _ROUNDED:
            return True
        cast = cast_of(call)
        return cast is not None and cast.outs[0].type is narrow.type and _is_free(cast.outs[0])

    changed: dict[Call, Call | None] = {}
    for call in casts:
        [wide], [narrow] = call.outs, call.ins
        users = readers.get(wide.value, ())
        if not users or wide.value in live_out or not (_is_free(wide) and _is_free(narrow)):
            continue
        if wide.type.dtype is not f32 or not narrow.type.dtype.is_half:
            continue
        if not all(reads(user, wide, narrow) for user in users):
            continue
        changed[call] = None
        for user in users:
            ins, outs = [narrow if use == wide else use for use in user.ins], user.outs
            if user.op is not None and user.op.name == _ROUNDED:
                cast = cast_of(user)
                assert cast is not None  # half precision is read only after a cast
                changed[cast], outs = None, cast.outs
            changed[user] = replace(user, ins=ins, outs=outs)
    return [new for call in flow.calls if (new := changed.get(call, call)) is not None]


def _is_free(use: Use) -> bool:
    """Return whether the value is never overwritten."""
    return use.value.home is None
