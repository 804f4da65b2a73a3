"""Attacks on a server: a client, or a peer that is none, tries to take from all others.

Each attack has its bound, and raises `Wrong` where it is passed. A witness is another client of the
server, which computes all the while: it has to be answered within a second, and right.

    verifying stacks handles messages programs      memory that no limit would count
    strangers slow coming_and_going                 connections, from whomever, and a byte at a time
    waiting kernels                                 a launch, and the interpreter's lock
    losing                                          posts that are lost, and values that are none
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mlvm.core.errors import AccessRefused, LimitExceeded, MlvmError, OutOfMemory, PositionRefused
from mlvm.core.program.assembly import assemble
from mlvm.core.program.encoding import HEADER, Kind, Writer
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.handshake import Greeting, pack
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.server import Server
from mlvm.machines.wire import encode_call

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


class Wrong(Exception):
    """An attack has taken more than it may."""


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
        deadline = time.monotonic() + 10
        while server.status()["clients"] and time.monotonic() < deadline:
            time.sleep(0.01)
        status = server.status()
    if status["clients"] or status["bytes"]:
        wrong.append(f"{len(status['clients'])} clients and {status['bytes']} bytes are left")
    if longest[0] > MOST_SECONDS:
        wrong.append(f"another client waited {longest[0]:.2f} s")
    if _mib() - before > MOST_MIB:
        wrong.append(f"the process has grown by {_mib() - before:.0f} MiB")
    if wrong:
        raise Wrong(f"{name}: {'; '.join(dict.fromkeys(wrong))}")


def _refused(errors: Any, does: Callable[..., object], *args: Any) -> None:
    try:
        does(*args)
    except errors:
        return
    raise Wrong(f"{does} was not refused")


def _run(vm: RemoteVM, program: Program, *args: int) -> None:
    vm.launch(program, args)
    vm.synchronize()


# --- memory ---------------------------------------------------------------------------


def verifying(scale: int) -> None:
    """Stacks that are high wherever paths meet."""
    step = "    push_int 1\n    push_int 1\n    jump_if_false L{0}\n"
    near = "".join(f"{step.format(n)}L{n}:\n" for n in range(200 * scale))
    far = "".join(step.format(n) for n in range(200 * scale)) + "    halt\n"
    far += "".join(f"L{n}:\n    halt\n" for n in range(200 * scale))
    with _attacked("verifying") as server, _connect(server) as vm:
        for text in (near, far):
            _run(vm, assemble(f".func main 0 *\n{text}    halt\n"))


def stacks(scale: int) -> None:
    """Values, frames and empty tensors in calls without end, and records in a loop."""
    value = "    push_int 4611686018427387904\n"
    empty = '    push_const none\n    push_str "negative"\n    cfunc 1 1\n'
    head = ".const none f32[0]\n"
    calls = [
        f"{head}.func f 0 0\n{body}    call f\n    return 0\n.func main 0 *\n    call f\n    halt\n"
        for body in (value * 20 * scale, empty, "")
    ]
    records = (
        f'{head}.func main 0 *\n    push_str "residuals.begin"\n    cfunc 0 0\nagain:\n'
        '    load_arg 0\n    push_const none\n    push_str "residuals.push"\n    cfunc 2 0\n'
        "    jump again\n    halt\n"
    )
    for native in (None, False):
        with _attacked("stacks", options={"native": native}) as server, _connect(server) as vm:
            number = vm.alloc_tensor(TensorType("i64", ()))
            for text in calls:
                _refused((OutOfMemory, LimitExceeded), _run, vm, assemble(text))
            _refused(OutOfMemory, _run, vm, assemble(records), number)


def handles(scale: int) -> None:
    """Tensors without elements."""
    limits = replace(LIMITS, held_bytes=(1 << 20) * scale)
    with _attacked("handles", limits=limits) as server, _connect(server) as vm:
        empty = TensorType("f32", (0,))
        _refused(
            OutOfMemory, lambda: [vm.alloc_tensor(empty) for _ in range(limits.held_bytes // 100)]
        )


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


def programs(scale: int) -> None:
    """Programs, more than there may be."""
    limits = replace(LIMITS, program_bytes=(1 << 20) * scale)
    with _attacked("programs", limits=limits) as server, _connect(server) as vm:
        programs_loaded = []
        text = ".func main 0 *\n" + "    push_int 1\n    pop 1\n" * 200 + "    halt\n"

        for n in range(limits.program_bytes // len(text)):
            try:
                programs_loaded.append(assemble(text.replace("push_int 1", f"push_int {n}", 1)))
                vm.loaded(programs_loaded[-1])
            except LimitExceeded:
                return
        raise Wrong("programs of any number are loaded")


# --- strangers and slow ones ----------------------------------------------------------


def strangers(scale: int) -> None:
    """Connections of two hosts, some of which say nothing, and some have a false proof."""
    hello = pack(Greeting.hello, (32).to_bytes(4, "little") + bytes(32) + b"t" + bytes(12))
    over, count = threading.Event(), [0]

    def attack(place: tuple[str, int], source: str) -> None:
        sockets: list[socket.socket] = []
        while not over.is_set():
            with suppress(OSError):
                each = socket.create_connection(place, 1, source_address=(source, 0))
                count[0] += 1
                sockets.append(each)
                if count[0] % 2:
                    each.sendall(hello + pack(Greeting.proof, bytes(32)))
            if len(sockets) > 100:
                sockets.pop(0).close()
            over.wait(0.005)
        for each in sockets:
            each.close()

    with _attacked("strangers") as server:
        host, _, port = str(server.address).rpartition(":")
        place = host, int(port)
        threads = [
            threading.Thread(target=attack, args=(place, source))
            for source in ("127.0.0.1", "127.0.0.1", "127.0.0.2")
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        try:
            for _ in range(5 * scale):
                begun = time.monotonic()
                with _connect(server) as vm:
                    vm.consumed_size_in_mib()
                if time.monotonic() - begun > 2 * MOST_SECONDS:
                    raise Wrong(f"a client was kept out for {time.monotonic() - begun:.2f} s")
        finally:
            over.set()
            for thread in threads:
                thread.join(30)


def slow(scale: int) -> None:
    """A byte at a time."""
    with _attacked("slow") as server:
        dripping, sipping = _connect(server), _connect(server)
        handle = sipping.alloc_tensor(TensorType("u8", (1 << 22,)))
        sipping._stream.socket.sendall(encode_call("read", [handle]))
        whole = HEADER.pack(b"MLVM", 1, Kind.call.value, 1 << 20)
        begun = time.monotonic()
        for at in range(10_000):
            try:
                dripping._stream.socket.send(whole[at : at + 1] or b"\0")
                sipping._stream.socket.recv(1)
            except OSError:
                pass
            if len(server.status()["clients"]) == 1:
                break
            time.sleep(0.02)
        if time.monotonic() - begun > 20 or len(server.status()["clients"]) > 1:
            raise Wrong("a byte at a time holds a connection")
        dripping.close(wait=False)
        sipping.close(wait=False)


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


# --- others' launches, kernels, and what is lost --------------------------------------


def waiting(scale: int) -> None:
    """Clients that are gone while they wait for another's launch."""
    endless = assemble(".func main 0 *\nagain:\n    jump again\n    halt\n")
    with _attacked("waiting", shared=["s"]) as server:
        one = _connect(server, vm="s")
        one.launch(endless)
        one.flush()
        for _ in range(4 * scale):
            other = _connect(server, vm="s")
            other._stream.socket.sendall(encode_call("alloc_storage", [64]))
            time.sleep(0.01)
            other.close(wait=False)
        deadline = time.monotonic() + MOST_SECONDS
        while len(server.status()["clients"]) > 2:
            if time.monotonic() > deadline:
                raise Wrong("who has gone keeps a place")
            time.sleep(0.01)
        one.close(wait=False)


def kernels(scale: int) -> None:
    """A sum of integers, for which numpy keeps the interpreter's lock."""
    limits = Limits(held_bytes=1 << 28, launch_bytes=1 << 28, launch_seconds=60.0)
    with _attacked("kernels", limits=limits) as server, _connect(server) as vm:
        k = (1 << 14) * scale
        shapes = (16, 16), (16, k), (k, 16)
        out, x, y = (vm.alloc_tensor(TensorType("i64", shape)) for shape in shapes)
        _run(vm, Program.of_op("matmul.out", 3, {}, 0), out, x, y)


def losing(scale: int) -> None:
    """The calls were made by the end, or their error is raised; a call that was passed over has no
    value."""
    take = Program.of_op("take.out", 3, {"axis": 0}, 0)
    with _attacked("losing", shared=["s"]) as server, _connect(server, vm="s") as reader:
        x, one = (reader.alloc_tensor(TensorType("f32", (3,))) for _ in range(2))
        reader.write(one, np.ones(3, np.float32))
        reader.synchronize()
        for n in range(scale):
            with _connect(server, vm="s") as vm:
                for _ in range(100):
                    vm.launch(_ADD, [x, x, one])
            if reader.read(x).tolist() != [100.0 * (n + 1)] * 3:
                raise Wrong(f"{100 * (n + 1)} launches have left {reader.read(x)}")
            vm = _connect(server)
            a, b = (vm.alloc_tensor(TensorType("f32", (3,))) for _ in range(2))
            index = vm.alloc_tensor(TensorType("i64", (3,)))
            vm.write(index, np.full(3, 9))
            vm.loaded(_ADD)
            vm.loaded(take)
            vm.launch(take, [b, a, index])
            vm.launch(_ADD, [b, a, a])
            _refused(PositionRefused, vm.synchronize)
            _refused(PositionRefused, vm.read, b)
            vm.launch(take, [b, a, index])
            _refused(PositionRefused, vm.close)


ATTACKS: Final[Sequence[Callable[[int], None]]] = (
    *(verifying, stacks, handles, messages, programs, strangers, slow, coming_and_going),
    *(waiting, kernels, losing),
)


def attack(scale: int, names: Sequence[str] = ()) -> list[str]:
    """All attacks, or those of these names. Returns what went wrong."""
    failures = []
    for each in ATTACKS:
        if names and each.__name__ not in names:
            continue
        begun = time.monotonic()
        try:
            each(scale)
        except (Wrong, MlvmError, AccessRefused) as error:
            failures.append(f"{each.__name__}: {error}")
        print(f"{time.monotonic() - begun:6.1f} s  {each.__name__}", flush=True)
    return failures
