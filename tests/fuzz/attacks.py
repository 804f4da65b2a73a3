"""Attacks on a server: a client, or a peer that is none, tries to take from all others.

Each attack has its bound, and raises `Wrong` where it is passed. A witness is another client of the
server, which computes all the while: it has to be answered within a second, and right.

    verifying messages      memory that no limit would count
    coming_and_going        connections, from whomever
    kernels                 the interpreter's lock

`tests/machines/remote` has attacks that are no worse on a larger scale.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

from mlvm.core.errors import AccessDeniedError, MlvmError
from mlvm.core.program.assembly import assemble
from mlvm.core.program.encoding import HEADER, Kind, Writer
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.server import Server
from tests.fuzz.command import Wrong
from tests.threads import wait_for

SECRET: Final = "a secret for attacks"
LIMITS: Final = Limits(
    message_bytes=1 << 26,
    program_bytes=1 << 25,
    held_bytes=1 << 24,
    launch_bytes=1 << 22,
    launch_seconds=5.0,
    idle_seconds=0.5,
    send_seconds=0.5,
    handshake_seconds=2.0,
)
MOST_MIB: Final = 256
"""By which the process may grow in an attack: what the limits allow, and what Python keeps."""

MOST_SECONDS: Final = 1.0
"""For which another client may have to wait."""

_ADD: Final = Program.of_op("add.out", 3, {}, 0)


def _mib() -> float:
    """The memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _connect(server: Server, **options: Any) -> RemoteVM:
    return connect(str(server.address), secret=SECRET, **options)


@contextmanager
def _attacked(name: str, *, limits: Limits = LIMITS, **options: Any) -> Iterator[Server]:
    """A server that is attacked in the block, while a witness computes. Raises `Wrong` for memory,
    for time, for a wrong value, and for what is left."""
    over = threading.Event()
    longest, wrong = [0.0], list[str]()

    def witness() -> None:
        try:
            with _connect(server, name="witness") as vm:
                x, y = (vm.alloc_tensor(TensorType("f32", (8,))) for _ in range(2))
                vm.write(x, np.arange(8, dtype=np.float32))
                while not over.wait(0.01):
                    begun = time.monotonic()
                    vm.launch(_ADD, [y, x, x])
                    if vm.read(y).tolist() != [2.0 * n for n in range(8)]:
                        wrong.append("the witness reads other values")
                    longest[0] = max(longest[0], time.monotonic() - begun)
        except Exception as error:
            wrong.append(f"the witness: {error!r}")

    before = _mib()
    with Server("127.0.0.1:0", secret=SECRET, limits=limits, **options) as server:
        thread = threading.Thread(target=witness)
        thread.start()
        try:
            yield server
        finally:
            over.set()
            thread.join(30)
        with suppress(AssertionError):
            wait_for(lambda: not server.status()["clients"])
        status = server.status()
    if status["clients"] or status["bytes"]:
        wrong.append(f"{len(status['clients'])} clients and {status['bytes']} bytes are left")
    if longest[0] > MOST_SECONDS:
        wrong.append(f"another client waited {longest[0]:.2f} s")
    if _mib() - before > MOST_MIB:
        wrong.append(f"the process has grown by {_mib() - before:.0f} MiB")
    if wrong:
        raise Wrong(f"{name}: {'; '.join(dict.fromkeys(wrong))}")


def _run(vm: RemoteVM, program: Program, *args: int) -> None:
    vm.launch(program, args)
    vm.synchronize()


def verifying(scale: int) -> None:
    """Stacks that are high wherever paths meet."""
    step = "    push_int 1\n    push_int 1\n    jump_if_false L{0}\n"
    near = "".join(f"{step.format(n)}L{n}:\n" for n in range(200 * scale))
    far = "".join(step.format(n) for n in range(200 * scale)) + "    halt\n"
    far += "".join(f"L{n}:\n    halt\n" for n in range(200 * scale))
    with _attacked("verifying") as server, _connect(server) as vm:
        for text in (near, far):
            _run(vm, assemble(f".func main 0 *\n{text}    halt\n"))


def messages(scale: int) -> None:
    """Messages of many small fields, and programs of them."""
    many = (1 << 14) * scale
    head = Writer()
    head.text("launch")
    head.integer(1)
    fields = [b"\x01\x01" * many + b"n", b"\0" * 4 + b"(" + many.to_bytes(4, "little")]
    fields[0] = many.to_bytes(4, "little") + fields[0]
    fields[1] += b"i\x01\x01" * many
    with _attacked("messages") as server, _connect(server) as vm:
        for each in fields:
            body = bytes(head._data[HEADER.size :]) + each
            begun = time.monotonic()
            vm._stream.socket.sendall(HEADER.pack(b"MLVM", 1, Kind.call.value, len(body)) + body)
            kind, _ = vm._stream.receive()
            if kind is not Kind.error or time.monotonic() - begun > 1 + many * 1e-4:
                raise Wrong(f"a message of {len(body)} bytes: {kind}")


def coming_and_going(scale: int) -> None:
    """Connections, of which some are clients, one after the other: memory stays as it is."""
    with _attacked("coming and going") as server:
        host, _, port = str(server.address).rpartition(":")
        grown, before = 0.0, 0.0
        for n in range(100 * scale):
            if n == 50 * min(scale, 20):
                before = _mib()
            if n % 10:
                with suppress(OSError), socket.create_connection((host, int(port)), 5) as sock:
                    sock.sendall(b"MLVM" if n % 2 else b"")
            else:
                _connect(server).close()
            grown = _mib() - before if before else 0.0
        if grown > 16:
            raise Wrong(f"{100 * scale} connections have left {grown:.1f} MiB")


def kernels(scale: int) -> None:
    """A sum of integers, for which numpy keeps the interpreter's lock."""
    limits = Limits(held_bytes=1 << 28, launch_bytes=1 << 28, launch_seconds=60.0)
    with _attacked("kernels", limits=limits) as server, _connect(server) as vm:
        k = (1 << 14) * scale
        shapes = (16, 16), (16, k), (k, 16)
        out, x, y = (vm.alloc_tensor(TensorType("i64", shape)) for shape in shapes)
        _run(vm, Program.of_op("matmul.out", 3, {}, 0), out, x, y)


ATTACKS: Final[Sequence[Callable[[int], None]]] = (verifying, messages, coming_and_going, kernels)


def attack(scale: int, names: Sequence[str] = ()) -> list[str]:
    """All attacks, or those of these names. Returns what went wrong."""
    failures = []
    for each in ATTACKS:
        if names and each.__name__ not in names:
            continue
        begun = time.monotonic()
        try:
            each(scale)
        except (Wrong, MlvmError, AccessDeniedError) as error:
            failures.append(f"{each.__name__}: {error}")
        print(f"{time.monotonic() - begun:6.1f} s  {each.__name__}", flush=True)
    return failures
