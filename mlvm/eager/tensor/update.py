"""A call whose result is the new value of a tensor: `x += y`, `x[i] = v`, `out=x`."""

from __future__ import annotations

from collections.abc import Iterable

from mlvm.arena.arena import STALE, Allocation, Arena, exchange
from mlvm.core.errors import DTypeError, HandleError, ShapeError
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import COPY, OneOp, apply
from mlvm.eager.tensor.context import Tape, current_arena, current_capture, current_tape, lifted
from mlvm.eager.tensor.reading import explain
from mlvm.eager.tensor.tensor import Tensor

live_tapes: set[Tape] = set()
"""Tapes that may still be walked. An update in place asks each whether it needs the value."""


def apply_into(out: Tensor, call: OneOp, *operands: Tensor) -> Tensor:
    """Run one op and give its result to the tensor `out`, whose type must fit exactly.

    The result is written over the bytes of `out`, where nobody else needs them. Where a view or a
    tape needs the old value, or the op cannot write over its operand, `out` moves to new memory of
    its arena, and what needs the old value keeps the old memory.

    Raises `ShapeError` or `DTypeError` for a result of another type, and what `apply` raises.
    """
    operands = lifted(operands)
    types = tuple([x.type for x in operands])
    type = call.types[types] if types in call.types else call.infer(types)
    if type is not out.type:
        refused = DTypeError if type is not None and type.dtype is not out.dtype else ShapeError
        raise refused(f"the result is {type} and does not fit into out={out.type}").at(
            call.op.name, types
        )
    region = out.region
    if live_tapes or region is None or region.views or _reads(call, operands, out):
        _update(out, call, operands, types)
    else:
        overwrite(out, call, *operands)
    return out


def _update(
    out: Tensor, call: OneOp, operands: tuple[Tensor, ...], types: tuple[TensorType, ...]
) -> None:
    """`apply_into` for a result whose type fits, where somebody may need the old value."""
    if out.handle == STALE:
        raise out.stale()
    on, tape = current_capture.get(), current_tape.get()
    tapes = [each for each in live_tapes.copy() if each.within is on]
    tracked = tape is not None and any(x.tape is tape for x in (out, *operands))
    if on is not None and tape is not None and tracked:
        on.require_own_tape(out, tape)
    if (
        _is_shared(out, tapes)
        or _reads(call, operands, out)
        or (tape is not None and tracked and tape.needs_operand(call, operands, types, out))
    ):
        if on is not None:
            on.update(call, operands, types, out, tapes)
            return
        with (out.arena if out.arena.__class__ is Arena else current_arena()).hosting():
            new = apply(call, *operands)
        exchange(out, new)
        out.tape, new.tape = new.tape, out.tape
        out.node, new.node = getattr(new, "node", 0), getattr(out, "node", 0)
        for each in tapes:
            each.exchange({id(out): new, id(new): out}, new)
    else:
        overwrite(out, call, *operands)
        if tape is not None and tracked:
            tape.record(call, operands, types, out)
        else:
            out.tape = None


def _is_shared(x: Tensor, tapes: Iterable[Tape]) -> bool:
    """Whether somebody else needs the bytes of x: it is a view, there are views of it, or one of
    the tapes keeps its value."""
    region = x.region
    return region is None or bool(region.views) or any(tape.keeps(x) for tape in tapes)


def _reads(call: OneOp, operands: tuple[Tensor, ...], out: Tensor) -> bool:
    """Whether the op reads `out` in another way than it may while it writes over it."""
    return any(x is out for x in operands[call.op.in_place :])


def make_exclusive(x: Allocation) -> None:
    """See to it that nobody else needs the bytes of x, which moves where somebody does: for what
    changes them by its handle. Raises `StaleTensor`."""
    if x.handle == STALE:
        raise x.stale()
    on = current_capture.get()
    if isinstance(x, Tensor) and _is_shared(
        x, [each for each in live_tapes.copy() if each.within is on]
    ):
        apply_into(x, COPY, x)


def overwrite(out: Tensor, call: OneOp, *operands: Tensor) -> None:
    """`apply_into` for a result whose type fits, over bytes that nobody else needs."""
    operands = lifted(operands)
    used = (out, *operands)
    if len(used) not in call.into:
        call.infer(tuple([x.type for x in operands]))
    try:
        out.arena.vm.launch(call.into[len(used)], [x.handle for x in used])
    except HandleError as error:
        raise explain(error, out.arena.vm, used, in_place=True) from None
