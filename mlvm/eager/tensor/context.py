"""VM and arena of an eager call outside of blocks, and helpers that set a value for a block.

Interactive use needs no arena: results are then allocated in the `default` arena of the default VM,
and freed when Python no longer refers to them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mlvm.arena.arena import Arena, scope
from mlvm.arena.context import current
from mlvm.core.errors import MachineError, brief
from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol
from mlvm.eager.tensor.context_blocks import OpenBlocks
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import default_threads

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set the variable inside the block, and restore the previous value afterwards."""
    before = variable.get()
    try:  # an interrupt may occur immediately after this
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def overriding(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute inside the block, and restore the previous value afterwards."""
    before = getattr(owner, name)
    try:
        setattr(owner, name, value)
        yield
    finally:
        setattr(owner, name, before)


class _ProcessVM(LocalVM):
    """VM of this process; a `with` statement does not close it, because other code also uses it."""

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<LocalVM {self.name!r}>"


def _make_default_vm() -> VMProtocol:
    return _ProcessVM("default", threads=default_threads())


def lifted(xs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors, or the tensors that the traced function uses instead of them."""
    recorder = current().recorder
    return xs if recorder is None or not recorder.outer else recorder.lifted(xs)


_lock = new_lock()
_default_vms: list[VMProtocol] = []  # the VM of this process, created on demand


def default_vm() -> VMProtocol:
    """Return the VM of eager calls outside of any arena.

    It is the VM in `use` in this thread or task, or else a VM of this process. The latter is
    created on demand, with the number of threads from the environment variable MLVM_THREADS, and
    stays open after `with ml.default_vm():`.

        >>> ml.default_vm() is ml.zeros(1).device
        True
    """
    chosen = current().vms
    if chosen:
        return chosen[-1][1]
    if _default_vms:
        return _default_vms[-1]
    with _lock:  # the first of several threads creates it
        if not _default_vms:
            _default_vms.append(_make_default_vm())
    return _default_vms[-1]


class use(OpenBlocks):
    """Run eager calls of this thread or task that are outside of any arena on `vm`.

    As a context manager, it applies until the end of the block:

        with ml.connect("unix:/run/me/mlvm") as vm, ml.use(vm):
            train()

    Threads that are started later start with the VM of this process, and asyncio tasks with the VM
    of the task that creates them. Raises `MachineError` if `vm` is not a VM.

        >>> with ml.use(ml.VM("there")): x = ml.ones(2)
        >>> x.device.name
        'there'

    Invalid calls:
        ml.use("cpu")  # MachineError
    """

    _blocks = "vms"

    def __init__(self, vm: VMProtocol) -> None:
        if not callable(getattr(vm, "launch", None)):
            raise MachineError(f"ml.use: expected a VM, got {brief(vm)}")
        self.vm = vm
        self._is_entered = False
        self._enter(vm)

    def __enter__(self) -> VMProtocol:
        if self._is_entered or all(block is not self for block, _ in self._open()):
            self._enter(self.vm)  # entered again, or in a different thread
        self._is_entered = True
        return self.vm

    @classmethod
    def _set(cls, *blocks: tuple[object, VMProtocol]) -> None:
        super()._set(*blocks)
        own_arenas.forget()


class _OwnArenas(threading.local):
    """A thread's own arena on the default VM, because an arena serves only one thread at a time.

    latest: the VMs in use at the last call of `default_arena`, and the arena.
    """

    latest: tuple[tuple[tuple[object, VMProtocol], ...], Arena] | tuple[None, None] = None, None

    def __init__(self) -> None:
        self.key = _ThreadKey()

    def forget(self) -> None:
        """Remove the reference to the arena, which would keep the VM alive."""
        self.latest = None, None


class _ThreadKey:
    """Key of a thread, which is deleted together with it."""


class _Arenas:
    """A VM's arenas of interactive use, one per thread.

    They are freed with the thread or the VM. A `threading.local` of arenas would keep the VM alive,
    because arenas refer to the VM."""

    def __init__(self, vm: VMProtocol) -> None:
        self._vm = vm
        self._by_thread = WeakKeyDictionary[_ThreadKey, Arena]()

    @property
    def arena(self) -> Arena:
        """The calling thread's own arena."""
        arena = self._by_thread.get(own_arenas.key)
        if arena is None:
            arena = self._by_thread[own_arenas.key] = Arena(self._vm, "default", trims=True)
        return arena


own_arenas = _OwnArenas()


def default_arena() -> Arena:
    """Return the arena of interactive use, on the default VM; each thread has a separate arena.

    >>> ml.default_arena().name
    'default'
    """
    chosen = current().vms
    latest, arena = own_arenas.latest
    if arena is None or latest is not chosen:
        arena = default_vm().attached(_Arenas).arena
        own_arenas.latest = chosen, arena
    return arena


def current_arena() -> Arena:
    """Return the arena in which results are currently allocated."""
    return scope() or default_arena()


def is_vm_chosen() -> bool:
    """Return whether this thread or task is in an arena, or has a VM in `use`."""
    return scope() is not None or bool(current().vms)


def arena_on(vm: VMProtocol) -> Arena:
    """Return the arena for results on that VM.

    It is the current arena if it is on that VM, else the thread's `default` arena of the VM."""
    arena = current_arena()
    return arena if arena.vm.is_same(vm) else vm.attached(_Arenas).arena
