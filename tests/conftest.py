"""`--wire`: run the tests on VMs behind the protocol's byte encoding. `--native`: give the plain
VMs, which the tests of `mlvm.core` make, the native kernels and loop.

    python -m pytest --wire tests/eager tests/arena

Every call of the protocol to a VM of this process then goes to it, and back, as bytes.
tests/machines/test_wire.py runs these two folders so.
"""

from __future__ import annotations

import signal
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from mlvm.core.observe import Layer, observe
from mlvm.core.protocol import VMProtocol
from mlvm.core.vm import VM
from mlvm.machines.wire import WireVM

LOCAL = {"attached", "is_same"}
"""What is asked of a VM, but is no call to it."""

CALLS = {name for name, each in vars(VMProtocol).items() if callable(each)} - LOCAL
CALLS = {name for name in CALLS if not name.startswith("_")}


def wire(vm: VM) -> None:
    """Have all calls of the protocol to the VM pass as bytes."""
    calls = {name: getattr(vm, name) for name in CALLS}
    behind: Any = SimpleNamespace(name=vm.name, functions=vm.functions, **calls)
    client = WireVM(behind)

    def layer(name: str) -> Layer:
        return lambda proceed, *args, **options: getattr(client, name)(*args, **options)

    observe(vm, **{name: layer(name) for name in CALLS})


def make_native() -> None:
    """Have every VM that is no other machine's run natively."""
    from mlvm.machines.native._native import Pool
    from mlvm.machines.native.kernels import native_kernels
    from mlvm.machines.native.loop import NativeLoop

    init = VM.__init__

    @wraps(init)
    def native(vm: VM, *args: Any, **options: Any) -> None:
        if type(vm) is VM and not {"run", "kernels"} & options.keys():
            pool = Pool(2)
            options = {**options, "kernels": native_kernels(pool), "run": NativeLoop(pool)}
        init(vm, *args, **options)

    VM.__init__ = native  # type: ignore[method-assign,assignment]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wire", action="store_true", help="run on VMs behind the protocol's byte encoding"
    )
    parser.addoption("--native", action="store_true", help="run on native kernels and loop")


def pytest_configure(config: pytest.Config) -> None:
    """Give examples all the time they take; with `--wire` wire every VM that is made."""
    # Half of hypothesis' examples: the whole suite is to take five minutes on two cores.
    settings.register_profile("untimed", deadline=None, max_examples=50)
    settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As under nohup, or in the background of a script: the processes of tests would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--native"):
        make_native()
    if config.getoption("--wire"):
        init = VM.__init__

        @wraps(init)
        def wired(vm: VM, *args: Any, **options: Any) -> None:
            init(vm, *args, **options)
            wire(vm)

        VM.__init__ = wired  # type: ignore[method-assign,assignment]
