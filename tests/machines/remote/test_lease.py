"""Clients that go on with another connection: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import CallTimeoutError, ConnectionLostError, MachineError, ShapeError
from mlvm.core.program.encoding import Kind
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType
from mlvm.machines.local import LocalVM
from mlvm.machines.native.extension import EXTENSION
from mlvm.machines.remote.client import RemoteVM, _Sent
from mlvm.machines.remote.lease import LeasedStream, _messages_after, _Unconfirmed
from mlvm.machines.remote.lender import LeasedConnection
from mlvm.machines.remote.limits import FIXED
from tests.brief import Patch, refuses
from tests.core.programs import f32s, put
from tests.fuzz.mutations import framed
from tests.fuzz.remote import train
from tests.interrupting import interrupted
from tests.machines.remote.serving import F32X3, FOR_EVER, KINDS, Served, limits
from tests.threads import PATIENCE, start, wait_for, within

ADD = Program.of_op("add.out", 3, {}, 0)
STEPS = 10**6 if EXTENSION is None else 3 * 10**7  # of some tenths of a second
ROOMY = limits(launch_seconds=60.0, lease_seconds=20.0)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(limits=ROOMY, **KINDS[request.param]) as server:
        yield server
        assert server.events("error") == []


@contextmanager
def client(server: Served, **options: Any) -> Iterator[RemoteVM]:
    """A client that comes again, and leaves nothing."""
    with server.vm(**{"retry": 10.0, **options}) as vm:
        yield vm
        vm.synchronize()
    wait_for(lambda: not server.status()["clients"])
    assert server.status()["bytes"] == 0


def cut(vm: RemoteVM) -> None:
    """The connection breaks."""
    with suppress(OSError):
        socket.socket.shutdown(vm._stream.socket, socket.SHUT_RDWR)


@contextmanager
def often_cut(vm: RemoteVM, pause: float = 0.01) -> Iterator[Callable[[], int]]:
    """In the block the connection breaks at random moments; a function says how often it came
    again."""
    over = threading.Event()
    moments = random.Random(0)

    def cut_again() -> None:
        while not over.wait(moments.random() * pause):
            cut(vm)

    cutting = start(cut_again)
    assert isinstance(vm._stream, LeasedStream)
    try:
        yield lambda: vm._stream._connection  # type: ignore[attr-defined]
    finally:
        over.set()
        cutting.result(PATIENCE)


def test_what_is_computed_has_the_same_bits(server: Served) -> None:
    expected = train(LocalVM("here"), 10)  # type: ignore[arg-type]
    with client(server) as vm, often_cut(vm, 0.03) as count:
        while count() < 5:
            assert train(vm, 10) == expected


def test_each_message_is_done_once(server: Served) -> None:
    large = np.arange(1 << 17, dtype=np.float32)
    with client(server) as vm:
        one, total = put(vm, f32s(1, 1, 1)), put(vm, f32s(0, 0, 0))
        moved = vm.alloc_tensor(TensorType.of(large))
        rounds = 0
        with often_cut(vm) as count:
            while count() < 10:
                rounds += 1
                for _ in range(100):
                    vm.launch(ADD, [total, total, one])
                vm.write(moved, large + rounds)
                assert vm.read(moved)[-1] == large[-1] + rounds
        assert vm.read(total).tolist() == [100 * rounds] * 3


def test_a_launch_goes_on_while_nobody_is_there(server: Served) -> None:
    with client(server) as vm:
        x = vm.alloc_tensor(F32X3)
        vm.launch(ADD, [x, x, x])
        vm.synchronize()
        working = start(partial(vm.launch, FOR_EVER, max_steps=STEPS))
        wait_for(lambda: any(each["busy"] for each in server.status()["clients"]))
        cut(vm)
        refuses(
            MachineError, "exceeded its limit of instructions", working.result, PATIENCE
        )  # it ran to its end


def test_the_error_of_a_post_is_told_though_its_answer_is_lost(server: Served) -> None:
    with client(server) as vm:
        x, short = vm.alloc_tensor(F32X3), vm.alloc_tensor(TensorType("f32", (1,)))
        vm.write(short, np.ones(3, np.float32))
        vm._stream.flush()
        cut(vm)
        refuses(ShapeError, "", vm.read, x)
        assert vm.read(x).tolist() == [0, 0, 0]


def test_who_says_goodbye_leaves_nothing_and_who_does_not_has_some_time(server: Served) -> None:
    with client(server) as vm:
        vm.alloc_storage(1000)
    with client(server) as vm:
        storage = vm.alloc_storage(1000)
        cut(vm)
        time.sleep(0.1)
        assert server.status()["bytes"] == 1000
        vm.dealloc_storage(storage)


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_silent_for_too_long_comes_again_at_once(kind: str) -> None:
    short = limits(idle_seconds=0.3, lease_seconds=30.0)
    with Served(limits=short, **KINDS[kind]) as server, client(server) as vm:
        x = put(vm, f32s(1, 1, 1))
        vm.synchronize()
        time.sleep(0.6)
        with within(5):
            assert vm.read(x).tolist() == [1, 1, 1]


def test_a_call_ends_in_time_though_its_connection_is_lost() -> None:
    with Served(limits=ROOMY) as server, client(server, retry=3.0) as vm:
        x = vm.alloc_tensor(F32X3)
        vm.call_timeout = 0.5
        with within(2):
            working = server.launch_for_ever(vm)
            cut(vm)
            refuses(CallTimeoutError, "", working.result, PATIENCE)
        vm.call_timeout = None
        assert vm.read(x).tolist() == [0, 0, 0]


def test_a_server_that_has_let_a_client_in_and_says_nothing_is_asked_again() -> None:
    with Served(limits=limits(lease_seconds=20.0)) as server, client(server, retry=0.5) as vm:
        ours, silent = socket.socketpair()
        original = vm._stream._reconnect  # type: ignore[attr-defined]
        places = [lambda seconds: ours, original]
        vm._stream._reconnect = lambda seconds: places.pop(0)(seconds)  # type: ignore[attr-defined]
        cut(vm)
        assert start(vm.alloc_storage, 8).result(10) is not None
        assert not places
        assert ours.fileno() == -1
        vm.dealloc_storage(next(iter(vm._live)))
        silent.close()


def test_who_has_ended_goes_on_with_no_connection() -> None:
    for first in (True, False):
        ours, theirs = socket.socketpair()
        fresh, other = socket.socketpair()
        ended = LeasedConnection(ours, 20.0)
        ended.leased = True
        if first:
            assert ended.replace(fresh)
        ended.end()
        assert ended.replace(other) is False
        assert (fresh.fileno() == -1) == first
        for each in (ours, theirs, fresh, other):
            each.close()


def test_a_lease_ends() -> None:
    with Served(limits=limits(lease_seconds=0.1)) as server:
        vm = server.vm(retry=5.0)
        vm.alloc_storage(1000)
        cut(vm)
        wait_for(lambda: not server.status()["clients"])
        assert server.status()["bytes"] == 0
        for _ in range(2):
            with within(1):
                text = "was refused: the key does not belong to a connected client"
                refuses(ConnectionLostError, text, vm.synchronize)


def test_a_server_that_stops_is_not_waited_for() -> None:
    with Served() as server:
        vm = server.vm(retry=60.0)
        server.close()
        with within(5):
            refuses(ConnectionLostError, "the server is shutting down", vm.synchronize)


def test_a_server_that_is_gone_is_tried_for_so_long() -> None:
    with Served() as server:
        vm = server.vm(retry=0.3)
        server._socket.close()
        cut(vm)
        begun = time.monotonic()
        vm._stream._reconnect = lambda seconds: refused()  # type: ignore[attr-defined]
        refuses(ConnectionLostError, "", vm.synchronize)
        assert 0.25 < time.monotonic() - begun < 3


def refused() -> socket.socket:
    raise ConnectionLostError("no server")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what was begun
def test_interrupts_while_a_connection_comes_again() -> None:
    with Served(limits=limits(lease_seconds=20.0)) as server, server.vm(retry=10.0) as vm:
        x = put(vm, f32s(1, 1, 1))
        n, went_on = 0, True
        while went_on:
            n += 9
            cut(vm)
            went_on = interrupted(lambda: vm.read(x), n)
            assert vm.read(x).tolist() == [1, 1, 1]
        assert n > 50


def test_much_that_may_be_lost_is_asked_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr("mlvm.machines.remote.lease.FIXED", FIXED._replace(unconfirmed=10_000))
    with Served() as server, server.vm(retry=1.0) as vm:
        x = vm.alloc_tensor(TensorType("u8", (4000,)))
        for n in range(20):
            vm.write(x, np.full(4000, n, np.uint8))
            vm.flush()
            unconfirmed: list[_Unconfirmed] = vm._stream._sending.unconfirmed  # type: ignore[attr-defined]
            assert sum(len(data) for each in unconfirmed for data in each.data) < 16_000


def test_messages_are_sent_again_from_any_one_on() -> None:
    ours, theirs = socket.socketpair()
    stream = LeasedStream(ours, lambda seconds: refused(), 1.0)
    messages = [framed(Kind.post)(bytes([n]) * n) for n in range(9)]
    stream.add((), _Sent(0, 0, 0, []))
    stream.add([b"".join(messages[:3])], _Sent(3, 3, 0, []))
    stream.add([b"".join(messages[3:5]), messages[5]], _Sent(5, 5, 1, []))
    stream.add([b"".join(messages[6:])], _Sent(8, 8, 1, []))
    unconfirmed: list[_Unconfirmed] = stream._sending.unconfirmed
    for arrived in range(10):
        assert b"".join(_messages_after(unconfirmed, arrived)) == b"".join(messages[arrived:])
    stream.flush()
    assert theirs.recv(1 << 12) == b"".join(messages)
    theirs.sendall(framed(Kind.answer)(b""))
    stream.receive()
    stream.add((), _Sent(8, 8, 1, []))
    assert [each.first for each in stream._sending.unconfirmed] == [7]
    stream.close()
    theirs.close()
