"""Updates in place: calls that assign a new value to a tensor, `x += y`, `x[i] = v`, `out=x`.

In: the tensor, an op and operands. Out: the tensor with the new value; no other value changes. The
result is written to the tensor's bytes if no other object needs them. Otherwise the tensor moves to
new memory, and views, tapes and recorders keep the old memory with the old value (copy on write).

Callers: operators, indexing, `out=`, optimizers. No lock is held: a tensor belongs to one thread at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from mlvm.arena.arena import STALE, Allocation, Arena, exchange
from mlvm.arena.context import Tape, current
from mlvm.core.errors import DTypeError, HandleError, ShapeError
from mlvm.core.types import TensorType
from mlvm.eager.tensor.apply import COPY, OneOp, apply, one_op
from mlvm.eager.tensor.constants import is_same_kind
from mlvm.eager.tensor.context import current_arena, lifted
from mlvm.eager.tensor.reading import explain
from mlvm.eager.tensor.templates import call_into
from mlvm.eager.tensor.tensor import Tensor
from mlvm.machines.native.extension import EXTENSION

_SIGNS: Final = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//",
    "remainder": "%", "pow": "**", "matmul": "@", "bitwise_and": "&", "bitwise_or": "|",
    "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
}  # fmt: skip
"""Operators in place, by op."""

live_tapes: set[Tape] = set()
"""Tapes that may still be differentiated.

An update in place asks each whether it has saved the value."""


def apply_into_in_python(out: Tensor, call: OneOp, *operands: Tensor) -> Tensor:
    """Run one op and assign the result to the tensor `out`.

    A result of the same kind with a different dtype is cast, as in numpy: f64 to f32, i64 to i32,
    but neither f32 to i32 nor i8 to u8. With the C extension, `apply_into` does this in C for the
    common case, and calls this function for all other cases.

    If a view or a tape needs the old value, or the op cannot overwrite the operand, `out` moves to
    new memory in the same arena. Otherwise the result is written to the bytes of `out`.

    Raises `ShapeError` or `DTypeError` for a result of a different shape or kind, and the errors of
    `apply`.
    """
    operands = lifted(operands)
    types = tuple([x.type for x in operands])
    type = call.types[types] if types in call.types else call.infer(types)
    if type is not out.type:
        if type is not None and type.shape == out.shape and is_same_kind(type.dtype, out.dtype):
            return apply_into(out, one_op("astype", dtype=out.dtype.name), apply(call, *operands))
        kind = DTypeError if type is not None and type.dtype is not out.dtype else ShapeError
        cast = " without a cast to another kind" if kind is DTypeError else ""
        sign = _SIGNS.get(call.op.name)
        remedy = f", or write x = x {sign} y instead of x {sign}= y" if sign else ""
        raise kind(
            f"the result is {type}, which cannot be written to {out.type}{cast}; to create a new "
            f"tensor, omit out={remedy}"
        ).at(call.op.name, types)
    region = out.region
    if live_tapes or region is None or region.views or _reads(call, operands, out):
        _update(out, call, operands, types)
    else:
        overwrite(out, call, *operands)
    return out


apply_into: Final[Callable[..., Tensor]] = (
    apply_into_in_python if EXTENSION is None else EXTENSION.apply_into
)


def _update(
    out: Tensor, call: OneOp, operands: tuple[Tensor, ...], types: tuple[TensorType, ...]
) -> None:
    """Update `out`, which has the result's type, after checking if its old value is needed."""
    if out.handle == STALE:
        raise out.stale()
    recorder, tape = current().recorder, current().tape
    tapes = [each for each in live_tapes.copy() if each.within is recorder]
    tracked = tape is not None and any(x.tape is tape for x in (out, *operands))
    if recorder is not None and tape is not None and tracked:
        recorder.require_own_tape(out, tape)
    if (
        _is_shared(out, tapes)
        or _reads(call, operands, out)
        or (tape is not None and tracked and tape.needs_operand(call, operands, types, out))
    ):
        if recorder is not None:
            recorder.update(call, operands, types, out, tapes)
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
    """Return whether x shares bytes.

    It does if it is a view, if it has views, or if a tape has saved the value."""
    region = x.region
    return region is None or bool(region.views) or any(tape.keeps(x) for tape in tapes)


def _reads(call: OneOp, operands: tuple[Tensor, ...], out: Tensor) -> bool:
    """Return whether `out` is an operand that the op must not overwrite."""
    return any(x is out for x in operands[call.op.in_place :])


def make_exclusive(x: Allocation) -> None:
    """Move x to new memory if it shares bytes, so that a launch may write to the handle of x.

    Raises `StaleTensorError` if x was freed."""
    if x.handle == STALE:
        raise x.stale()
    recorder = current().recorder
    if isinstance(x, Tensor) and _is_shared(
        x, [each for each in live_tapes.copy() if each.within is recorder]
    ):
        apply_into(x, COPY, x)


def overwrite(out: Tensor, call: OneOp, *operands: Tensor) -> None:
    """Write the result of an op to the bytes of `out`, which has this type and shares no bytes."""
    if not call_into(out, call.op, operands, call.attributes):
        launch_into(out, call, *operands)


def launch_into(out: Tensor, call: OneOp, *operands: Tensor) -> None:
    """Launch what `overwrite` computes."""
    used = (out, *lifted(operands))
    try:
        out.arena.vm.launch(call.program(len(operands)), [x.handle for x in used])
    except HandleError as error:
        raise explain(error, out.arena.vm, used, in_place=True) from None
