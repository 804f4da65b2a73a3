"""VMs of which tests have nothing but the protocol, and the machines behind them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from mlvm.core.vm import VM
from mlvm.machines.wire import WireVM

_behind: WeakKeyDictionary[object, VM] = WeakKeyDictionary()


def wired(kind: Callable[..., VM]) -> Callable[..., WireVM]:
    """What makes a VM of that kind behind the protocol's byte encoding."""

    @wraps(kind)
    def make(*args: Any, **options: Any) -> WireVM:
        machine = kind(*args, **options)
        vm = WireVM(machine)
        _behind[vm] = machine
        return vm

    return make


def machine(vm: Any) -> Any:
    """The VM that runs the programs: itself, or the one behind the wire. It is for what a server
    does, such as registering host functions."""
    return _behind.get(vm, vm)
