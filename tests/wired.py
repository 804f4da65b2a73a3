"""VMs that tests reach by the protocol alone, such as remote ones, and the machines behind them."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from typing import Any

import pytest

from mlvm.core.errors import ConnectionLostError
from mlvm.core.vm import VM
from mlvm.machines.dry import DryVM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.session import Session
from mlvm.machines.remote.stream import Stream

_MOST_ERRORS = 4
"""A call may make several launches, each of which has an error of its own."""

_behind: weakref.WeakKeyDictionary[object, VM | None] = weakref.WeakKeyDictionary()


def connect_to(machine: VM) -> RemoteVM:
    """A VM at the other end of a socket, with a thread that serves it."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=_serve, args=(machine, theirs), daemon=True).start()
    vm = RemoteVM(Stream(ours))
    vm.memory_limit = machine.memory_limit  # as after `limit_memory`
    if not getattr(machine, "native", True):
        vm.fast_path = None  # some tests look at what the way through Python does
    weakref.finalize(vm, ours.close).atexit = False  # the VM closes it itself
    return vm


def on_device(name: str) -> Callable[[VM], Any]:
    """Return a function that makes a VM on that device in the place of a plain one."""

    vm_on_device = import_module("mlvm.machines.gpu.vm").GpuVM

    def attach(machine: VM) -> Any:
        if isinstance(machine, DryVM):  # which computes nothing
            return machine
        limit = machine.memory_limit
        return vm_on_device(machine.name, device=name, checked=machine.checked, memory=limit)

    return attach


@contextmanager
def raising_late() -> Iterator[None]:
    """In the block `pytest.raises` also waits for what was posted to VMs elsewhere: its error is
    raised by the next call that waits, which a test may not have."""
    ends = pytest.RaisesExc.__exit__

    def end(raises: Any, kind: Any, error: Any, traceback: Any) -> bool:
        vms: list[Any] = [each for each in _behind if not isinstance(each, DryVM)]
        for vm in vms * _MOST_ERRORS:
            try:
                vm.synchronize()
            except Exception as late:
                if kind is None:
                    kind, error, traceback = type(late), late, late.__traceback__
        return ends(raises, kind, error, traceback)

    pytest.RaisesExc.__exit__ = end  # type: ignore[method-assign]
    try:
        yield
    finally:
        pytest.RaisesExc.__exit__ = ends  # type: ignore[method-assign]


def _serve(machine: VM, sock: socket.socket) -> None:
    session = Session(machine)
    with sock, suppress(ConnectionLostError):
        session.serve(Stream(sock))
    session.close()


def elsewhere(kind: Callable[..., VM], connect: Callable[[VM], Any]) -> Callable[..., Any]:
    """Return a function that makes a VM of that kind, and returns `connect`'s VM in its place."""

    @wraps(kind)
    def make(*args: Any, **options: Any) -> Any:
        machine = kind(*args, **options)
        vm = connect(machine)
        _behind[vm] = machine if isinstance(vm, RemoteVM) else None
        return vm

    return make


def machine(vm: Any) -> Any:
    """The VM that runs the programs: itself, or the one elsewhere. It is for what a server does,
    such as registering host functions."""
    return _behind.get(vm) or vm
