"""VM and arena of an eager call outside of blocks, and helpers that set a value for a block.

Interactive use needs no arena: results then live in the default VM's `default` arena for as long as
Python refers to them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mlvm.arena.arena import Arena, scope
from mlvm.arena.context import current, set_context
from mlvm.core.errors import MachineError, brief
from mlvm.core.locks import new_lock
from mlvm.core.protocol import VMProtocol
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import default_threads

T = TypeVar("T")


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set the variable inside the block, and put its previous value back after it."""
    before = variable.get()
    try:  # an interrupt may come as soon as it is set
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def overriding(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute inside the block, and put its previous value back after it."""
    before = getattr(owner, name)
    try:
        setattr(owner, name, value)
        yield
    finally:
        setattr(owner, name, before)


def without_last(entries: tuple[T, ...], entry: T) -> tuple[T, ...]:
    """Return the entries without the last one that is `entry`."""
    last = max([i for i, each in enumerate(entries) if each is entry], default=len(entries))
    return entries[:last] + entries[last + 1 :]


class _ProcessVM(LocalVM):
    """VM of this process, which a `with` statement leaves open: other code uses it, too."""

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<LocalVM {self.name!r}>"


def _make_default_vm() -> VMProtocol:
    return _ProcessVM("default", threads=default_threads())


def lifted(xs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors, or those that the traced function uses in their place."""
    recorder = current().recorder
    return xs if recorder is None or not recorder.outer else recorder.lifted(xs)


_lock = new_lock()
_default_vms: list[VMProtocol] = []  # the VM of this process, once it is needed


def default_vm() -> VMProtocol:
    """Return the VM of eager calls outside of any arena: the one in `use` in this thread or task,
    or else a VM of this process. That is created when first needed, with as many threads as the
    environment's MLVM_THREADS says, and stays open at the end of `with ml.default_vm():`.

        >>> ml.default_vm() is ml.zeros(1).device
        True
    """
    vms = current().vms or _default_vms
    if vms:
        return vms[-1]
    with _lock:  # of several threads the first one creates it
        if not _default_vms:
            _default_vms.append(_make_default_vm())
    return _default_vms[-1]


class use:
    """Let eager calls of this thread or task, outside of any arena, run on `vm` from now on; as a
    context manager, till the end of the block:

        with ml.connect("unix:/run/me/mlvm") as vm, ml.use(vm):
            train()

    Threads that are started later begin with the VM of this process, and tasks of asyncio with that
    of the task that creates them. Raises `MachineError` for anything but a VM.

        >>> with ml.use(ml.VM("there")): x = ml.ones(2)
        >>> x.device.name
        'there'

    Refuses:
        ml.use("cpu")  # MachineError
    """

    def __init__(self, vm: VMProtocol) -> None:
        if not callable(getattr(vm, "launch", None)):
            raise MachineError(f"ml.use: expected a VM, got {brief(vm)}")
        self.vm = vm
        set_context(vms=(*current().vms, vm))

    def __enter__(self) -> VMProtocol:
        return self.vm

    def __exit__(self, *_: object) -> None:
        set_context(vms=without_last(current().vms, self.vm))
        own_arenas.forget()


class _OwnArenas(threading.local):
    """A thread's own arena on the default VM: an arena serves one thread at a time.

    latest: the VMs in use at the last call of `default_arena`, and the arena.
    """

    latest: tuple[tuple[VMProtocol, ...], Arena] | tuple[None, None] = None, None

    def __init__(self) -> None:
        self.key = _ThreadKey()

    def forget(self) -> None:
        """Drop the arena, which would keep its VM alive."""
        self.latest = None, None


class _ThreadKey:
    """Key of a thread, which ends with it."""


class _Arenas:
    """A VM's arenas of interactive use, one for each thread. They end with the thread or the VM: a
    `threading.local` of arenas would keep the VM alive, which they refer to."""

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
    """Return the arena of interactive use, on the default VM; each thread has one.

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
    """Return the arena that results are allocated in now."""
    return scope() or default_arena()


def is_vm_chosen() -> bool:
    """Tell if this thread or task is in an arena, or has a VM in `use`."""
    return scope() is not None or bool(current().vms)


def arena_on(vm: VMProtocol) -> Arena:
    """Return the arena for results on that VM: the current one if it is there, else the thread's
    `default` arena of the VM."""
    arena = current_arena()
    return arena if arena.vm.is_same(vm) else vm.attached(_Arenas).arena
