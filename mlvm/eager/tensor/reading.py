"""Copying values between a tensor's memory and arrays; errors for handles without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlvm.arena.arena import STALE, Allocation, stale_of, tracer_of
from mlvm.arena.context import current
from mlvm.core.errors import CaptureError, HandleError, MlvmError, user_line, with_article
from mlvm.core.program.program import Program
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array
from mlvm.eager.tensor.templates import opaque


def note_read(x: Any) -> None:
    """Record on the tape of x the line that reads values of x, for a `NoEffectWarning`.

    If a tensor without a gradient is read, the program may depend on it, so the gradient is not
    considered lost."""
    if x.tape is None:
        tape = current().tape
        if tape is not None:
            tape.has_lost = False
    elif x.tape.read_at is None:
        x.tape.read_at = user_line()


def values_of(x: Allocation) -> Array:
    """Return a copy of the values, in the tensor's dtype.

    Raises `StaleTensorError` for a tensor that was freed, and `CaptureError` in a captured
    function, for a tensor on any VM."""
    opaque()
    recorder = current().recorder
    try:
        array = (x.arena.vm if recorder is None else recorder).read(x.handle)
    except HandleError as error:
        raise explain(error, x.arena.vm, (x,)) from None
    if x.handle == STALE:  # another thread has freed it
        raise x.stale()
    return array


def write(x: Allocation, array: Array) -> None:
    """Copy an array of the tensor's own type to the tensor.

    Raises `StaleTensorError`."""
    opaque()
    vm = x.arena.vm
    try:
        vm.write(x.handle, array)
    except HandleError as error:
        raise explain(error, vm, (x,)) from None


def launch_for_values(
    program: Program, vm: VMProtocol, operands: Sequence[Allocation]
) -> list[Array]:
    """Launch a program on operands and return the outputs.

    Raises `StaleTensorError` for an operand that was freed."""
    opaque()
    try:
        outputs = vm.launch(program, [x.handle for x in operands])
    except HandleError as error:
        raise explain(error, vm, operands) from None
    stale = stale_of(operands)
    if stale is not None:
        raise stale
    return outputs


def closed_vm_of(x: Allocation) -> str | None:
    """Return the error of the tensor's VM, for example that it was closed; None for an open VM."""
    try:
        x.arena.vm.require_open()
    except MlvmError as error:
        return str(error)
    return None


def explain(
    error: HandleError, vm: VMProtocol, operands: Sequence[Allocation], *, in_place: bool = False
) -> MlvmError:
    """Return the error for a handle that the VM does not know, with the operand and the reason.

    A call `in_place` writes to the first operand."""
    stale = stale_of(operands)
    if stale is not None:
        return stale
    for x in operands:
        traced = tracer_of(x)
        if traced and current().recorder is None:
            return CaptureError(
                f"{user_line() or 'here'}: cannot compute with {with_article(x.type)} in a "
                f"different thread: it belongs to the trace of {traced}, which records only the "
                f"thread that called it. Compute with it in that thread"
            )
        closed = closed_vm_of(x)
        if closed is not None:
            return HandleError(f"an operand {x.type} has ended: {closed}; copy it before")
        if not x.arena.vm.is_same(vm):
            if in_place:
                return HandleError(
                    f"an update of {operands[0].type} on {vm.name} reads {x.type} on "
                    f"{x.arena.vm.name}, where the current arena lies; run the update inside "
                    f"`with arena:` of an arena on {vm.name}"
                )
            return HandleError(
                f"an operand {x.type} is on the VM {x.arena.vm.name}, but the call runs on "
                f"{vm.name}; call inside `with ml.use(vm):` or `with arena:` of the operand's VM, "
                f"or move the operand with x.to_device(vm)"
            )
    return error
