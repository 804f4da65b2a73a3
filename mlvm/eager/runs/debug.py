"""`ml.debug`: values of captured functions while they run, the first nan, caches, the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlvm.core.errors import ArgumentError, HostFunctionError, MachineError, brief, user_line
from mlvm.core.protocol import VMProtocol
from mlvm.core.types import Array
from mlvm.core.vm import VM
from mlvm.eager.functions.creation import asarray
from mlvm.eager.functions.elements import stop_gradient
from mlvm.eager.recording.debug import caches, context, nans
from mlvm.eager.recording.recorder import current_recorder
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.number import class_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.transform.host import host_call
from mlvm.machines import printing

__all__ = ["caches", "context", "nans", "print", "watch", "watched"]


def print(format: str, /, *values: Tensor | float, **named: Tensor | float) -> None:
    """Print tensors with the line of this call, as `format.format(*values, **named)`.

    Eager code prints immediately. In a captured function each launch prints, including each
    iteration of a loop and each branch that runs, in the order of the program. `vmap` prints once
    per row. Gradients are not affected; `checkpoint` prints again when it recomputes. The bits of
    the results do not change. The values must be stored, so chains of fused ops are split there,
    and a plan may be larger.

    A format specification, as in `{:.3f}`, applies to each element.

    Raises `ArgumentError` for a value that is neither a tensor nor a number, and for a format that
    does not fit the values. Raises `MachineError` on a VM of another process.

        >>> step = ml.capture(lambda x: ml.debug.print("twice {:.1f}", x * 2.0))
        >>> step(ml.ones(2))  # doctest: +ELLIPSIS
        <...>:1: twice [2.0 2.0]

    Invalid calls:
        ml.debug.print("{} {}", v)  # ArgumentError
        ml.debug.print("{}", "text")  # ArgumentError
        ml.debug.print(v)  # ArgumentError
    """
    if not isinstance(format, str):
        raise ArgumentError(f'debug.print: expected a format such as "q {{}}", got {brief(format)}')
    operands = _operands("debug.print", [*values, *named.values()])
    try:
        printing.formatted(format, [*named], [np.zeros(x.shape, _sample(x)) for x in operands])
    except HostFunctionError as error:
        raise ArgumentError(str(error)) from None
    names, line = [*named], str(user_line() or "here")
    host_call(printing.PRINT, *operands, format=format, names=names, line=line)


def watch(x: Tensor, name: str) -> None:
    """Add a copy of the tensor to the named series, which `watched` returns.

    Each launch of a captured function, and each iteration of a loop, adds a value. See `print` for
    branches, transformations, gradients and bits. A series keeps the latest 10,000 values.

    Raises `ArgumentError` unless the name is a str and x is a tensor, and `MachineError` on a VM of
    another process.

        >>> step = ml.capture(lambda x: ml.debug.watch(x + 1.0, "y"))
        >>> for i in range(3): step(ml.full((), float(i)))
        >>> [float(y) for y in ml.debug.watched("y", clear=True)]
        [1.0, 2.0, 3.0]

    Invalid calls:
        ml.debug.watch(v, 3)  # ArgumentError
        ml.debug.watch("v", "v")  # ArgumentError
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f'debug.watch: expected a name as str, got {brief(name)}; write debug.watch(x, "x")'
        )
    [operand] = _operands("debug.watch", [x])
    host_call(printing.WATCH, operand, name=name)


def watched(name: str, *, clear: bool = False) -> list[Array]:
    """Return the values that `watch` has collected under a name, oldest first.

    The list is empty if there are none. With `clear` the series is then emptied.

        >>> ml.debug.watched("nothing")
        []
    """
    return printing.take_series(name, clear=clear)


def _operands(what: str, values: Sequence[Any]) -> list[Tensor]:
    """Return values as tensors without gradients. Register the functions on the current VM."""
    active = current_recorder()
    vm: VMProtocol = current_arena().vm if active is None else active.recorders[-1].vm
    if not isinstance(vm, VM):
        raise MachineError(f"{what}: expected a VM of this process, got {vm.name}")
    vm.attached(_Registered)
    for x in values:
        if not issubclass(class_of(x), (Tensor, int, float, np.number)):
            remedy = "; write other values into the format" if what == "debug.print" else ""
            raise ArgumentError(f"{what}: expected tensors and numbers, got {brief(x)}{remedy}")
    return [stop_gradient(x if isinstance(x, Tensor) else asarray(x)) for x in values]


def _sample(x: Tensor) -> Any:
    """Return a numpy dtype with elements that are formatted like the elements of x."""
    return {"bool": bool, "float": float, "complex": complex}.get(x.dtype.kind, int)


class _Registered:
    """The host functions of a VM, registered once."""

    def __init__(self, vm: VMProtocol) -> None:
        assert isinstance(vm, VM)  # `_operands` has checked it
        printing.register(vm)
