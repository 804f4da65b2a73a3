"""Detection of the op that computes the first nan or infinity: `ml.debug.nans`.

A VM of this process gets an instrument, which checks the results of each function. For a remote VM,
a local VM first runs each launch with the same values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from inspect import isfunction
from typing import Any, Final, NamedTuple

import numpy as np

from mlvm.arena.arena import Allocation
from mlvm.arena.context import current
from mlvm.core import memo
from mlvm.core.errors import (
    EncodingError,
    MachineError,
    NonFiniteError,
    UnknownFunctionError,
    brief,
)
from mlvm.core.machine.callee import OUT, Fused, Value, is_tensor
from mlvm.core.memo import CacheInfo
from mlvm.core.memory import Memory
from mlvm.core.observe import observed
from mlvm.core.op import OPS, Attributes
from mlvm.core.ops.half import shown
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.tables import table
from mlvm.core.types import Array, TensorType
from mlvm.core.vm import VM
from mlvm.eager.recording.recorder import refuse_captured
from mlvm.eager.tensor.context import current_arena
from mlvm.machines.local import LocalVM
from mlvm.show.calls import calls_in, is_straight
from mlvm.step.saved import LoadedStep, SavedStep

__all__ = ["caches", "context", "nans"]

watched: Final[dict[VMProtocol, LocalVM | None]] = {}
"""The VMs inside `nans`, each with the rehearsing VM if it is remote."""


class nans(ContextDecorator):
    """Raise `NonFiniteError` at the first launch inside the block that computes a nan or infinity.

    The error contains the op, the operand types, the index of the first such element, and the line.
    The block checks these VMs, or the current VM. An integer that is divided by 0 also raises;
    outside of the block the quotient is 0. An op that only copies never raises, and neither does an
    infinity that an operand already contains, such as a mask of -inf. A tensor that the launch
    would have overwritten keeps the old value.

    A captured function runs call by call inside the block, by a separate program without fusion. If
    it raises, all tensors that it updates are restored to the values before the step; an element
    that it took from a queue is lost. On a remote VM, programs with functions that the server
    registered are not checked. Outside of the block there is no cost.

    Raises `MachineError` for a VM that already has an instrument, such as a trace, and for any
    argument that is not a VM; `CaptureError` inside a captured function.

        >>> with ml.debug.nans():
        ...     try: ml.sqrt(ml.asarray([4.0, -4.0])) + 1.0
        ...     except ml.errors.NonFiniteError as error: print(error)
        sqrt(f32[2]): the result, f32[2], is nan at [1]; the operands are finite

    Invalid calls:
        ml.debug.nans(ml.sqrt)  # MachineError
    """

    def __init__(self, *vms: VMProtocol) -> None:
        for vm in vms:
            if not callable(getattr(vm, "launch", None)):
                remedy = "; write @ml.debug.nans()" if isfunction(vm) else ""
                raise MachineError(f"ml.debug.nans: expected VMs, got {brief(vm)}{remedy}")
        self.vms = vms
        self._entered: list[ExitStack] = []

    def __repr__(self) -> str:
        return f"nans({', '.join([vm.name for vm in self.vms])})"

    def __enter__(self) -> None:
        refuse_captured("enter ml.debug.nans")
        with ExitStack() as stack:
            for vm in self.vms or (current_arena().vm,):
                if vm not in watched:
                    stack.enter_context(_watching(vm))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def caches() -> None:
    """Print the caches of this process that have been used.

    Each name has the number of caches, and the total entries, limits, hits and misses.

    A full cache evicts the least recently used entry. Lookups at each eager call are not counted as
    hits.

        >>> ml.debug.caches()  # doctest: +ELLIPSIS
        number ... size ... limit ... hits ... misses  name
        ...
    """
    rows = [[*[f"{n:,}" for n in numbers], name] for name, *numbers in memo.caches()]
    head = [*CacheInfo._fields[1:], "name"]
    print("\n".join(table([head, *rows], right=len(head) - 1)))


def context() -> None:
    """Print the context of calls in this thread or task.

    The context is everything other than arguments that calls depend on, such as the arena for
    results, the tape and the default dtype.

        >>> ml.debug.context()  # doctest: +ELLIPSIS
        arena            None
        arena_blocks     ()
        vms              ()
        tape             None
        default_dtype    f32
        ...
    """
    rows = [[name, brief(value)] for name, value in current()._asdict().items()]
    print("\n".join(table(rows, right=0)))


def is_watched(vm: VMProtocol) -> bool:
    """Return whether launches on the VM are checked."""
    return bool(watched) and vm in watched


@contextmanager
def _watching(vm: VMProtocol) -> Iterator[None]:
    here = vm if isinstance(vm, VM) else LocalVM(f"rehearsal for {vm.name}")
    local = here if isinstance(here, LocalVM) and here is not vm else None
    with ExitStack() as stack:
        stack.enter_context(here.instrumented(_Watch(here.memory)))
        if local is not None:
            stack.enter_context(observed(vm, launch=_rehearsing(vm, local)))
        watched[vm] = local
        try:
            yield
        finally:
            del watched[vm]


def launch_watched(
    vm: VMProtocol,
    program: Program,
    handles: Sequence[TensorHandle],
    updated: Sequence[Allocation],
    saved: Callable[[], tuple[SavedStep, list[Array]]],
) -> None:
    """Launch the program of a step that updates these tensors, and check it.

    If it raises `NonFiniteError`, restore the tensors. `saved` returns the step with the present
    state, and the inputs."""
    rehearsal = watched[vm]
    if rehearsal is not None:
        step, inputs = saved()
        loaded = LoadedStep(step, rehearsal)
        try:
            loaded(*inputs)
        except UnknownFunctionError:
            pass  # registered by the server
        finally:
            loaded.close()
    before = [(x, vm.read(x.handle)) for x in updated] if rehearsal is None else []
    try:
        vm.launch(program, handles)
        vm.synchronize()
    except NonFiniteError:
        for x, array in before:
            vm.write(x.handle, array)
        raise


def _rehearsing(vm: VMProtocol, local: LocalVM) -> Callable[..., list[Array]]:
    """Return a layer around `launch` that first runs a launch of a single op on the local VM."""

    def launch(
        proceed: Callable[..., list[Array]],
        program: Program,
        args: Sequence[TensorHandle] = (),
        **options: Any,
    ) -> list[Array]:
        calls, args = calls_in(program), tuple(args)
        is_one = len(calls) == 1 and len(program.functions) == 1 and is_straight(program)
        if is_one and calls[0][1].removesuffix(OUT) in OPS:
            handles = {}
            try:
                for handle in dict.fromkeys(args):
                    array = vm.read(handle)
                    handles[handle] = local.alloc_tensor(TensorType.of(array))
                    local.write(handles[handle], array)
                local.launch(program, [handles[handle] for handle in args])
            except EncodingError:
                pass  # a result with old bytes that are not bools contains no nan
            finally:
                for each in handles.values():
                    local.dealloc_tensor(each)
        return proceed(program, args, **options)

    return launch


class NonFinite(NamedTuple):
    """Tensor with nans or infinities.

    value: the first nan or infinity. place: the index of this element. is_nan: whether it is nan.
    is_infinite: whether any element is infinite.
    """

    value: complex
    place: list[int]
    is_nan: bool
    is_infinite: bool

    def __str__(self) -> str:
        return f"{self.value} at {self.place}"


class _Started(NamedTuple):
    """A running function.

    name: the name of the function. operands: the operands that are not finite, None for all others.
    overwritten: the old value of the tensor that it overwrites.
    """

    name: str
    operands: list[NonFinite | None]
    overwritten: Array | None


class _Watch:
    """Instrument of a VM that checks operands and results of each function."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._local = threading.local()

    def before(self, name: str, params: Sequence[Value], attributes: Attributes) -> None:
        count = _written(name, attributes)
        if name.removesuffix(OUT) in ("floor_divide", "remainder"):
            self._require_divisors(params[-1])
        operands = [self._non_finite(x) for x in params[count:]]
        old = self._memory.read(params[0]) if count == 1 and is_tensor(params[0]) else None
        stack: list[_Started] = vars(self._local).setdefault("stack", [])
        stack.append(_Started(name, operands, old))

    def after(
        self, name: str, params: Sequence[Value], attributes: Attributes, results: Sequence[Value]
    ) -> None:
        stack: list[_Started] = self._local.stack
        while (started := stack.pop()).name != name:
            pass  # a nested function raised, and so did not finish
        written = params[: _written(name, attributes)]
        for x in (*written, *results):
            bad = self._non_finite(x)
            if bad is None or not is_new(name, bad, started.operands, attributes):
                continue
            type = TensorType.of(x)  # type: ignore[arg-type]
            if started.overwritten is not None and is_tensor(params[0]):
                self._memory.write(params[0], started.overwritten)
            raise NonFiniteError(f"the result, {type}, is {bad}; {_described(started.operands)}")

    def _require_divisors(self, x: Value) -> None:
        """Raise `NonFiniteError` for an integer divisor of 0."""
        if is_tensor(x) and TensorType.of(x).dtype.is_integer:
            places = np.argwhere(self._memory.read(x) == 0)
            if len(places):
                raise NonFiniteError(
                    f"integer division by 0 at index {places[0].tolist()}; "
                    "divide where the divisor is not 0, with ml.where"
                )

    def _non_finite(self, x: Value) -> NonFinite | None:
        if not is_tensor(x) or not TensorType.of(x).dtype.is_inexact:
            return None
        return non_finite(self._memory.read(x))


def non_finite(array: Array) -> NonFinite | None:
    """Return the first nan, or the first infinity, of a tensor; None if all elements are finite."""
    values = shown(array)
    if not TensorType.of(array).dtype.is_inexact or (finite := np.isfinite(values)).all():
        return None
    is_nan = np.isnan(values)
    where = is_nan if is_nan.any() else ~finite
    index = np.unravel_index(int(np.argmax(where)), values.shape)
    place = [int(i) for i in index]
    infinite = bool(np.isinf(values).any())
    return NonFinite(values[index].item(), place, bool(is_nan[index]), infinite)


def _written(name: str, attributes: Attributes) -> int:
    """Return the number of leading parameters that a function is known to write."""
    if name == Fused.name:
        return int(attributes["chain"].outputs)
    return int(name.endswith(OUT) and name.removesuffix(OUT) in OPS)


def is_new(
    name: str, bad: NonFinite, operands: Sequence[NonFinite | None], attributes: Attributes
) -> bool:
    """Return whether the function has computed the value itself.

    This is a nan, or an infinity without one among operands and attributes. It is not the result of
    an op that only copies."""
    op = OPS.get(name.removesuffix(OUT))
    if op is not None and op.copies_only:
        return False
    has_infinity = any(isinstance(x, float) and math.isinf(x) for x in attributes.values())
    has_infinity = has_infinity or any(x.is_infinite for x in operands if x is not None)
    return not has_infinity or bad.is_nan


def _described(operands: Sequence[NonFinite | None]) -> str:
    bad = [f"operand {i} is {x}" for i, x in enumerate(operands) if x is not None]
    return ", ".join(bad) or "the operands are finite"
