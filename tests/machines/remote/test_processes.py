"""A process for each client: what one of them does to its own is no matter of the others."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import (
    AccessDeniedError,
    AddressError,
    ConnectionLostError,
    LimitExceededError,
    OutOfMemoryError,
)
from mlvm.core.types import TensorType
from mlvm.machines.remote.channel import Channel
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.server import Server
from tests.brief import cases, line_of, refuses, start_python
from tests.cases.claim_tests import claims
from tests.core.programs import put
from tests.machines.remote.serving import CERTIFICATE, DOUBLING, FOR_EVER, HALT, Served, limits
from tests.threads import wait_for, within

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    most = {"held_bytes": 1 << 40, "launch_bytes": 1 << 40, "launch_seconds": 60.0}
    roomy = limits(process_bytes=512 * MIB, **most)
    with Served(processes=3, shared=["weights"], limits=roomy) as server:
        yield server


@pytest.fixture(autouse=True)
def all_are_gone(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for vm in server._vms:
            vm.close()
        wait_for(lambda: not server.status()["clients"])
        wait_for(lambda: len(server.lender.processes._living) == 1)  # that of the shared VM


def pid_of(server: Served, name: str) -> int:
    """The process of the client of that name."""
    pid = 0

    def is_told() -> bool:
        nonlocal pid
        clients = [each for each in server.status()["clients"] if each["name"] == name]
        pid = clients[0]["pid"] if clients else os.getpid()
        return pid != os.getpid()

    wait_for(is_told)
    return pid


def holds(vm: RemoteVM, value: float) -> bool:
    """Return whether a VM keeps what is written to it."""
    handle = put(vm, np.full(3, value, np.float32))
    return bool(vm.read(handle).tolist() == [value] * 3)


def test_each_client_has_a_process(server: Served) -> None:
    one, two = server.vm(name="one"), server.vm(name="two")
    assert holds(one, 1)
    assert holds(two, 2)
    assert len({pid_of(server, "one"), pid_of(server, "two"), os.getpid()}) == 3
    refuses(
        LimitExceededError,
        "exceeded its limit of instructions",
        two.launch,
        FOR_EVER,
        max_steps=1000,
    )
    two.launch(HALT)
    two.synchronize()
    status = server.status()
    assert (status["bytes"], len(status["clients"])) == (24, 2)
    launches = next(each["launches"] for each in status["clients"] if each["name"] == "two")
    pid = pid_of(server, "two")
    two.close()
    wait_for(lambda: len(server.status()["clients"]) == 1)
    assert server.status()["launches"] == status["launches"] >= launches > 0
    ended = {"launches": launches, "left": 0}.items()
    wait_for(lambda: any(ended <= each.items() for each in server.events("disconnected")))
    wait_for(lambda: is_gone(pid))


def is_gone(pid: int) -> bool:
    """Return whether there is no such process, or only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pid: int, by: signal.Signals) -> None:
    """Send the signal, and wait till all threads are gone."""
    os.kill(pid, by)
    wait_for(lambda: is_gone(pid))


def test_a_shared_vm_has_one_process_for_all(server: Served) -> None:
    one, two = server.vm(vm="weights", name="one"), server.vm(vm="weights", name="two")
    handle = put(one, np.ones(3, np.float32))
    one.synchronize()
    assert two.read(handle).tolist() == [1, 1, 1]
    assert pid_of(server, "one") == pid_of(server, "two")
    assert server.status()["shared"] == [{"vm": "weights", "bytes": 12, "launches": 0}]
    kill(pid_of(server, "one"), signal.SIGKILL)
    for vm in (one, two):
        refuses(ConnectionLostError, "its process was killed by SIGKILL", vm.synchronize)
    assert holds(server.vm(vm="weights"), 3)  # another process has its place


def test_what_takes_the_memory_of_a_process_harms_nobody(server: Served) -> None:
    good, bad = server.vm(), server.vm()
    x = bad.alloc_tensor(TensorType("f32", (1 << 16,)))
    bad.launch(DOUBLING, [x])
    refuses(OutOfMemoryError, "", bad.synchronize)
    storage = bad.alloc_storage(200 * MIB)
    refuses(OutOfMemoryError, "cannot allocate", bad.alloc_storage, 400 * MIB)
    assert holds(good, 1)
    bad.dealloc_storage(storage)
    assert holds(bad, 2)


def test_memory_that_ends_where_no_limit_is_ends_the_connection() -> None:
    """Such as that of Python itself."""

    def prepare(vm: Any) -> None:
        vm.alloc_storage = lambda nbytes: bytearray(1 << 60)

    with Served(prepare=prepare) as server, server.vm() as vm:
        refuses(
            ConnectionLostError,
            "run out of memory; the limit is 25,769,803,776",
            vm.alloc_storage,
            1,
        )


@cases("tls", False, True)
def test_who_is_killed_is_told(tls: bool) -> None:
    with Served(processes=2, certificate=CERTIFICATE if tls else None) as server:
        good, bad = (server.vm(name=name) for name in ("good", "bad"))
        refuses(
            AccessDeniedError, "the server has reached its limit of 2 client processes", server.vm
        )
        large = np.random.default_rng(0).integers(255, size=3 * MIB, dtype=np.uint8)
        handle = good.alloc_tensor(TensorType.of(large))
        for _ in range(3):
            good.write(handle, large)
            assert good.read(handle).tobytes() == large.tobytes()
        kill(pid_of(server, "bad"), signal.SIGSEGV)
        refuses(ConnectionLostError, "its process was killed by SIGSEGV", bad.synchronize)
        assert holds(good, 1)
        good.launch(FOR_EVER)
        good._stream.flush()
        good._stream.close()  # hangs up, which ends the launch
        wait_for(lambda: not server.status()["clients"])


def test_a_server_that_stops_tells_all_and_leaves_no_process() -> None:
    with Served(processes=2) as server:
        vm = server.vm(name="here")
        pid = pid_of(server, "here")
        with within(4):
            server.close(grace=5.0)
        refuses(ConnectionLostError, "the server is shutting down", vm.synchronize)
        assert is_gone(pid)
        assert [each["reason"] for each in server.events("disconnected")] == [
            "the server is shutting down; connect again later"
        ]


def test_a_nursery_that_is_killed_is_replaced() -> None:
    with Served(processes=3) as server:
        before = server.vm()
        assert holds(before, 0)
        processes = server.lender.processes
        assert processes is not None
        nursery = processes._nursery
        assert nursery is not None
        nursery.kill()
        nursery.wait()
        assert holds(server.vm(), 1)
        assert holds(before, 2)


def test_a_channel_has_messages_and_sockets_in_order() -> None:
    ours, theirs = Channel.pair()
    one, two = socket.socketpair()
    for number in range(3):
        assert ours.send({"number": number}, *[one] * number)
    for number in range(3):
        message = theirs.listen()
        assert message is not None
        assert message.facts == {"number": number}
        assert len(message.sockets) == number
        for each in message.sockets:
            each.send(b"x")
            each.close()
    assert two.recv(9) == b"xxx"
    theirs.close()
    assert not ours.send({"number": 4})
    assert ours.listen() is None
    for end in (ours, one, two):
        end.close()


def test_a_server_that_is_killed_leaves_no_process() -> None:
    code = """if True:
        import time
        from tests.machines.remote.serving import Served
        server = Served(processes=2)
        vm = server.vm(name="a")
        vm.synchronize()
        while server.status()["clients"][0]["pid"] == __import__("os").getpid():
            pass
        nursery = server.lender.processes._nursery
        print(server.status()["clients"][0]["pid"], nursery.pid, flush=True)
        time.sleep(60)
    """
    with start_python("-c", code) as host:
        pids = [int(each) for each in line_of(host).split()]
        host.kill()
    assert len(pids) == 2
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


test_rows = claims("processes", globals())


def test_a_server_that_cannot_listen_leaves_no_process(tmp_path: Path) -> None:
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = pids.read_text()
    refuses(AddressError, "cannot listen", Server, f"unix:{tmp_path}/no/s", processes=1)
    wait_for(lambda: pids.read_text() == before)
