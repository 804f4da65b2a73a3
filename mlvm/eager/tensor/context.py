"""What an eager call finds around it: the arena for its result, and the tape, if any.

Interactive use needs no arena of its own: results then live in the default VM's `default`
arena for as long as Python refers to them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

from mlvm.arena.arena import Arena, scope
from mlvm.core.errors import MachineError, brief
from mlvm.core.locks import new_lock
from mlvm.core.protocol import TensorHandle, VMProtocol
from mlvm.core.types import Array, TensorType
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import default_threads


class Tape(Protocol):
    """What eager calls are recorded on while a gradient is taken; `autodiff` has one.

    `call` is a `OneOp`; operands and results are Tensors. `within` is the recorder that was on when
    the tape was made.
    """

    within: object

    @property
    def nodes(self) -> Sequence[Any]: ...

    def record(
        self, call: Any, operands: tuple[Any, ...], types: tuple[TensorType, ...], out: Any
    ) -> None: ...
    def needs_operand(
        self, call: Any, operands: tuple[Any, ...], types: tuple[TensorType, ...], out: Any
    ) -> bool: ...
    def keeps(self, x: Any, stop: int | None = None) -> bool: ...
    def exchange(self, others: Mapping[int, Any], x: Any) -> None: ...


current_tape: ContextVar[Tape | None] = ContextVar("current_tape", default=None)
"""The tape that differentiable calls are recorded on, for each thread or task."""


@contextmanager
def taped(tape: Tape | None) -> Iterator[None]:
    """Inside the block that tape is on, or none."""
    before = current_tape.set(tape)
    try:
        yield
    finally:
        current_tape.reset(before)


class Capture(Protocol):
    """What launches are recorded by while a function is captured; `mlvm.eager.recording.recorder`
    has one. A tensor of a tape in `outer` is used by another, its `lifted` one."""

    outer: frozenset[Tape]

    def lifted(self, xs: tuple[Any, ...]) -> tuple[Any, ...]: ...
    def update(
        self,
        call: Any,
        operands: tuple[Any, ...],
        types: tuple[TensorType, ...],
        out: Any,
        tapes: Sequence[Tape],
    ) -> None: ...
    def require_own_tape(self, x: Any, tape: Tape) -> None: ...
    def read(self, handle: TensorHandle) -> Array: ...


current_capture: ContextVar[Capture | None] = ContextVar("current_capture", default=None)
"""The recorder of a captured function that is on, for each thread or task."""


@cache
def _make_default_vm() -> VMProtocol:
    return LocalVM("default", threads=default_threads())


_lock = new_lock()
_chosen: list[VMProtocol] = []  # by `use`, the last one at the end
_version = [0]  # counts the changes of the default VM


def default_vm() -> VMProtocol:
    """The VM that eager calls run on outside of any arena: the one in `use`, or a VM of this
    process, made when first needed, with as many threads as the environment's MLVM_THREADS says.

        >>> ml.default_vm() is ml.zeros(1).device
        True
    """
    with _lock:
        return _chosen[-1] if _chosen else _make_default_vm()


class use:
    """Let eager calls outside of any arena run on `vm` from now on, in all threads; as a context
    manager, till the end of the block:

        with ml.connect("unix:/run/me/mlvm") as vm, ml.use(vm):
            train()

    Raises `MachineError` for what is no VM.

        >>> with ml.use(ml.VM("there")): x = ml.ones(2)
        >>> x.device.name
        'there'
    """

    def __init__(self, vm: VMProtocol) -> None:
        if not callable(getattr(vm, "launch", None)):
            raise MachineError(f"a VM is wanted to use, not {brief(vm)}")
        self.vm = vm
        with _lock:
            _chosen.append(vm)
            _version[0] += 1

    def __enter__(self) -> VMProtocol:
        return self.vm

    def __exit__(self, *_: object) -> None:
        with _lock:
            last = max((i for i, vm in enumerate(_chosen) if vm is self.vm), default=None)
            if last is not None:
                del _chosen[last]
                _version[0] += 1


class _Default(threading.local):
    """A thread's own arena on the default VM: an arena serves one thread at a time."""

    version = -1
    arena: Arena


class _Arenas(threading.local):
    """A thread's own arena on a VM, kept while another VM is in use."""

    def __init__(self, vm: VMProtocol) -> None:
        self.arena = Arena(vm, "default", trims=True)


_default = _Default()


def default_arena() -> Arena:
    """The arena of interactive use, on the default VM; each thread has one.

    >>> ml.default_arena().name
    'default'
    """
    if _default.version != _version[0]:
        version = _version[0]
        _default.arena = default_vm().attached(_Arenas).arena
        _default.version = version
    return _default.arena


def current_arena() -> Arena:
    """The arena that results are allocated in now."""
    return scope.get() or default_arena()


def arena_on(vm: VMProtocol) -> Arena:
    """The arena for results on that VM: the current one if it is there, else the thread's own
    `default` arena of the VM."""
    arena = current_arena()
    return arena if arena.vm.is_same(vm) else vm.attached(_Arenas).arena
