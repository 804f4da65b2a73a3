"""VMs of which tests have nothing but the protocol, and the machines behind them."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

from mlvm.core.errors import ConnectionLost
from mlvm.core.program.program import Program
from mlvm.core.protocol import TensorHandle
from mlvm.core.types import Array
from mlvm.core.vm import VM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.session import Session
from mlvm.machines.remote.stream import Stream
from mlvm.machines.wire import WireVM

_behind: weakref.WeakKeyDictionary[object, VM] = weakref.WeakKeyDictionary()


def wire_to(machine: VM) -> WireVM:
    """A VM that passes each call on as bytes, and waits for the answer."""
    return WireVM(machine)


def connect_to(machine: VM, kind: type[RemoteVM] = RemoteVM) -> RemoteVM:
    """A VM at the other end of a socket, with a thread that serves it."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=_serve, args=(machine, theirs), daemon=True).start()
    vm = kind(Stream(ours))
    weakref.finalize(vm, ours.close)
    return vm


class PromptVM(RemoteVM):
    """A remote VM that waits for what it posts, so that an error is raised by the call itself."""

    __module__ = RemoteVM.__module__  # a captured function does not look into a library's objects

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.door = None  # the short way of eager calls, which waits for nothing

    def launch(
        self,
        program: Program,
        args: Sequence[TensorHandle] = (),
        *,
        max_steps: int | None = None,
    ) -> list[Array]:
        outputs = super().launch(program, args, max_steps=max_steps)
        self.synchronize()
        return outputs

    def write(self, handle: TensorHandle, array: Array) -> None:
        super().write(handle, array)
        self.synchronize()


def connect_promptly_to(machine: VM) -> RemoteVM:
    """A `PromptVM` at the other end of a socket."""
    return connect_to(machine, PromptVM)


def _serve(machine: VM, sock: socket.socket) -> None:
    session = Session(machine)
    with sock, suppress(ConnectionLost):
        session.serve(Stream(sock))
    session.close()


def elsewhere(kind: Callable[..., VM], way: Callable[[VM], Any]) -> Callable[..., Any]:
    """What makes a VM of that kind, and gives the way to it in its place."""

    @wraps(kind)
    def make(*args: Any, **options: Any) -> Any:
        machine = kind(*args, **options)
        vm = way(machine)
        _behind[vm] = machine
        return vm

    return make


def machine(vm: Any) -> Any:
    """The VM that runs the programs: itself, or the one elsewhere. It is for what a server does,
    such as registering host functions."""
    return _behind.get(vm, vm)
