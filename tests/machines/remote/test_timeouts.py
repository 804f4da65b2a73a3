"""Ends of a client's waiting: by Ctrl-C, and by a timeout for its calls."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlvm.core.errors import (
    AccessDeniedError,
    CallTimeoutError,
    ConnectionLostError,
    LimitExceededError,
    MachineError,
)
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import _Endpoint
from mlvm.machines.remote.handshake import Hello
from mlvm.machines.remote.limits import Limits
from mlvm.machines.remote.stream import Stream
from tests.brief import cases, refuses
from tests.core.programs import f32s, put
from tests.machines.remote.serving import CERTIFICATE, FOR_EVER, KINDS, SECRET, Served
from tests.threads import PATIENCE, start, wait_for, within


@pytest.fixture(scope="module", params=["here", "processes", "tls"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(limits=Limits(), **KINDS[request.param]) as server:
        yield server


@contextmanager
def client(server: Served) -> Iterator[tuple[RemoteVM, int]]:
    """A client, and a tensor of it whose values are 1."""
    with server.vm() as vm:
        x = put(vm, f32s(1, 1, 1))
        yield vm, x


@contextmanager
def interrupted(server: Served) -> Iterator[None]:
    """In the block Ctrl-C comes, once a launch runs, and the block ends by it."""

    def interrupt() -> None:
        wait_for(lambda: any(each["busy"] for each in server.status()["clients"]))
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    came = start(interrupt)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        came.result(PATIENCE)
    pytest.fail("it was not interrupted")


def test_an_interrupt_ends_the_launch_and_leaves_the_vm(server: Served) -> None:
    with within(PATIENCE), client(server) as (vm, x):
        with interrupted(server):
            vm.launch(FOR_EVER, max_steps=10**15)
        assert vm.read(x).tolist() == [1, 1, 1]
        with interrupted(server):
            vm.launch(FOR_EVER)
            vm.launch(FOR_EVER)
            vm.synchronize()
        caught = refuses(LimitExceededError, "the client has ended this launch", vm.read, x)
        assert caught.__notes__[-1].startswith(f"called from {__file__}")
        assert vm.read(x).tolist() == [1, 1, 1]


def test_a_call_that_takes_too_long_ends_its_launch(server: Served) -> None:
    with within(PATIENCE), client(server) as (vm, x):
        vm.call_timeout = 0.1
        with pytest.raises(
            CallTimeoutError, match=r"exceeded the timeout of 0\.1 seconds"
        ) as caught:
            vm.launch(FOR_EVER, max_steps=10**15)
        assert isinstance(caught.value, TimeoutError)
        vm.call_timeout = None
        assert vm.read(x).tolist() == [1, 1, 1]
        vm.launch(FOR_EVER)  # is not waited for
        vm.call_timeout = 0.1
        refuses(CallTimeoutError, "", vm.read, x)
        vm.call_timeout = None
        refuses(LimitExceededError, "the client has ended this launch", vm.read, x)
        assert vm.read(x).tolist() == [1, 1, 1]


def test_no_other_launch_is_ended(server: Served) -> None:
    with client(server) as (vm, _), client(server) as (other, y):
        working = server.launch_for_ever(other)
        vm.call_timeout = 0.05
        refuses(CallTimeoutError, "", vm.launch, FOR_EVER, max_steps=10**15)
        assert not working.done()
        other._end_launches()
        refuses(LimitExceededError, "has ended this launch", working.result, PATIENCE)
        assert other.read(y).tolist() == [1, 1, 1]


def test_who_has_no_key_ends_nothing(server: Served) -> None:
    end = _Endpoint(str(server.address), SECRET, None, server._context is not None and CERTIFICATE)
    for key in ("", "0" * 32):
        hello = Hello("interrupt", key, "1")
        refuses(AccessDeniedError, "does not belong to a connected client", end.open, hello, 5.0)


@cases("reply", b"", b"MLVM\1\0", ids=["nothing", "a part of an answer"])
def test_a_server_that_stops_is_lost_in_time(reply: bytes) -> None:
    """It does not hear that the launch is to end, either."""

    def interrupt(last: int) -> None:
        raise refused

    for refused in (
        AccessDeniedError("does not belong to a connected client"),
        ConnectionLostError("no server there"),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            vm = RemoteVM(Stream(ours), "far", interrupt=interrupt)
            vm.call_timeout = 0.05
            theirs.send(reply)
            why = "is lost: timeout" if reply else str(refused)
            for _ in range(2):
                refuses(ConnectionLostError, f"far: .*{why}", vm.synchronize)


@cases("option", "call_timeout", "retry")
def test_timeouts_are_numbers_above_0(option: str) -> None:
    with Served() as server:
        assert type(server.vm()._stream) is Stream  # without a lease
        for seconds in (0, -1.0, "1", float("nan")):
            refuses(
                MachineError, f"expected {option}= in seconds > 0", server.vm, **{option: seconds}
            )
