"""Shared by the tests of a server: a secret, programs, and a server with a log to look at."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from mlvm.core.program.assembly import assemble
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.log import Log
from mlvm.machines.remote.server import Server
from tests.core.programs import asm
from tests.threads import start, wait_for

SECRET: Final = "correct horse battery"
_HOME: Final = tempfile.TemporaryDirectory(prefix="mlvm-tests-")
CERTIFICATE: Final = str(Path(_HOME.name) / "localhost.pem")  # with a key, which is private
shutil.copyfile(Path(__file__).parent / "localhost.pem", CERTIFICATE)
os.chmod(CERTIFICATE, 0o600)
OTHER_CERTIFICATE: Final = str(Path(__file__).parent / "other.pem")
RENEWED_CERTIFICATE: Final = str(Path(__file__).parent / "renewed.pem")
F32X3: Final = TensorType("f32", (3,))

HALT: Final = assemble(".func main 0 *\n    halt\n")
FOR_EVER: Final = assemble(".func main 0 *\nagain:\n    jump again\n    halt\n")

DOUBLING: Final = asm(
    '.func main 0 * | load_arg 0 | again: | get 0 | get 0 | push_str "concat" | '
    'cfunc 2 1 {"axis": 0} | set 0 | jump again | halt'
)
"""A tensor that grows twice as long for ever."""

DEEP: Final = assemble(
    ".func f 0 0\n" + 600 * "    push_int 1\n" + "    call f\n    return 0\n"
    ".func main 0 *\n    call f\n    halt\n"
)
"""Calls within calls, which leave six million values on the stack before they are too many."""

COPIES: Final = assemble(".func main 0 *\n" + 40 * "    load_arg 0\n" + "    halt\n")
"""Returns its argument forty times."""

KINDS: Final[dict[str, dict[str, Any]]] = {
    "here": {}, "processes": {"processes": 4}, "tls": {"certificate": CERTIFICATE},
    "tls processes": {"processes": 4, "certificate": CERTIFICATE},
}  # fmt: skip
"""Options of servers that clients are to find alike."""


def connected(to: Any, **options: Any) -> socket.socket:
    """A connection to a port, on which nothing is said yet."""
    host, _, port = str(to.address).rpartition(":")
    return socket.create_connection((host, int(port)), **options)


class Served(Server):
    """A server on this host, whose `log` can be read."""

    def __init__(self, address: str | socket.socket = "127.0.0.1:0", **options: Any) -> None:
        self.stream = io.StringIO()
        self._vms: list[RemoteVM] = []
        options = {"secret": SECRET, "log": Log("json", self.stream), **options}
        super().__init__(address, **options)

    def vm(self, **options: Any) -> RemoteVM:
        """A client's VM, which trusts the server and ends with it at the latest."""
        tls = CERTIFICATE if self._context is not None else False
        vm = connect(str(self.address), **{"secret": SECRET, "tls": tls, **options})
        self._vms.append(vm)
        return vm

    def launch_for_ever(self, vm: RemoteVM) -> Future[Any]:
        """A launch without an end, which has begun, on a thread; its program is loaded before."""
        before = [each["launches"] for each in self.status()["clients"]]
        launching = start(partial(vm.launch, FOR_EVER, max_steps=10**15))
        wait_for(lambda: [each["launches"] for each in self.status()["clients"]] > before)
        return launching

    def __exit__(self, *error: object) -> None:
        for vm in self._vms:
            vm.close(wait=False)
        super().__exit__(*error)

    def events(self, event: str, least: int = 0) -> list[dict[str, Any]]:
        """Return the events of that name, once there are `least`: a log follows its events."""
        wait_for(lambda: len(self._events(event)) >= least)
        return self._events(event)

    def _events(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]


def is_launching(status: dict[str, Any]) -> bool:
    """Return whether a client has loaded a program, and is busy with the message after that."""
    return any(each["busy"] and each["messages"] == 2 for each in status["clients"])


def limits(**options: Any) -> Limits:
    """Limits with a second for a launch."""
    return Limits(**{"launch_seconds": 1.0, **options})


VM_KINDS: Final = "local", "numpy", "workers", "remote"


@contextmanager
def vm_of(kind: str) -> Iterator[Any]:
    """A VM of that kind."""
    if kind == "remote":
        with Served() as server, server.vm() as remote:
            yield remote
    else:
        workers = 2 * (kind == "workers")
        vm = LocalVM("here", native=False) if kind == "numpy" else LocalVM("here", workers=workers)
        yield vm
        vm.close()


@contextmanager
def waited(vm: Any) -> Iterator[None]:
    """Wait at the end of the block for all that was posted to a VM elsewhere, or to workers."""
    yield
    vm.synchronize()
