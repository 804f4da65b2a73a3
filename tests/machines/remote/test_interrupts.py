"""Interrupts and the garbage collector in the middle of a client's work."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import ConnectionLostError, HandleError, LimitExceededError
from mlvm.core.program.program import Program
from mlvm.machines.remote.client import RemoteVM, new_outbox
from mlvm.machines.remote.outbox import PythonOutbox
from tests.brief import Patch, cases, refuses, with_long
from tests.core.programs import f32s, put
from tests.interrupting import interrupted
from tests.machines.libraries import MACHINES
from tests.machines.remote.serving import F32X3, Served
from tests.threads import PATIENCE, start

ADD = Program.of_op("add.out", 3, {}, 0)


@cases("name", "read", "alloc_tensor")
def test_after_an_interrupt_answers_are_those_of_their_calls(name: str) -> None:
    add = Program.of_op("add", 2, {}, 1)
    calls: dict[str, Callable[[RemoteVM, int], Any]] = {
        "read": lambda vm, x: vm.read(x),
        "alloc_tensor": lambda vm, x: vm.alloc_tensor(F32X3),
    }
    with Served() as server:
        n, vm = 0, server.vm()
        while True:
            x = put(vm, f32s(1, 1, 1))
            vm.launch(add, [x, x])
            vm._stream.socket.settimeout(5)  # what hangs is lost
            n += with_long(3, 1)
            if not interrupted(lambda vm=vm, x=x: calls[name](vm, x), n):  # type: ignore[misc]
                break
            assert vm.read(x).tolist() == [1, 1, 1]
            assert vm.launch(add, [x, x])[0].tolist() == [2, 2, 2]
    assert n > 10


def test_an_interrupt_while_a_connection_is_given_up_keeps_no_other_thread_waiting() -> None:
    n = 0
    with Served() as server:
        while True:
            vm = server.vm()
            x = vm.alloc_tensor(F32X3)
            vm._stream.socket.shutdown(socket.SHUT_RDWR)
            n += with_long(3, 1)
            try:
                went_on = interrupted(lambda vm=vm, x=x: vm.read(x), n)  # type: ignore[misc]
            except ConnectionLostError:
                break
            assert went_on
            refuses(ConnectionLostError, "", start(vm.read, x).result, PATIENCE)
    assert n > 10


def test_an_error_of_a_post_outlives_an_interrupt_of_the_call_that_waits_for_it(
    monkeypatch: Patch,
) -> None:
    with Served() as server, server.vm() as vm:
        x, y = vm.alloc_tensor(F32X3), vm.alloc_tensor(F32X3)
        vm.loaded(ADD)
        vm._live.add(10**9)
        vm.dealloc_tensor(10**9)  # which is not there

        def receive() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(vm._stream, "receive", receive)
            refuses(KeyboardInterrupt, "", vm.read, x)
        vm.launch(ADD, [y, x, x])
        refuses(HandleError, str(10**9), vm.read, x)
        assert vm.read(x).tolist() == [0, 0, 0]


def test_an_interrupt_ends_launches_and_no_other_post() -> None:
    with Served() as server, server.vm() as vm:
        x, y = vm.alloc_tensor(F32X3), vm.alloc_tensor(F32X3)
        assert vm._interrupt is not None
        vm._interrupt(100)  # before what it is about, as it comes by a connection of its own
        vm.write(y, np.ones(3, np.float32))
        vm._live.add(10**9)
        vm.dealloc_tensor(10**9)  # which is not there
        refuses(HandleError, str(10**9), vm.read, x)
        vm.launch(ADD, [x, y, y])
        refuses(LimitExceededError, "the client has ended this launch", vm.read, y)
        assert vm.read(y).tolist() == [1, 1, 1]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects between two bytecodes only")
@pytest.mark.parametrize("native", MACHINES)
def test_a_finalizer_may_add_to_an_outbox_that_is_emptied(native: bool) -> None:
    class Garbage:
        def __del__(self) -> None:
            box.add(b"freed", None)

    numbers: list[Any] = []
    before = gc.get_threshold()
    try:
        for n in range(1, 8):
            box: Any = new_outbox() if native else PythonOutbox()
            gc.collect()
            gc.disable()
            box.add(b"post.", None)
            garbage = Garbage()
            garbage.me = garbage  # type: ignore[attr-defined]
            del garbage
            numbers += [(i, float(i)) for i in range(6000)]  # so that each new tuple is counted
            gc.set_threshold(gc.get_count()[0] + n - 1)
            gc.enable()
            first, places = box.take(0)
            gc.disable()
            gc.collect()
            rest, more = box.take(len(places))
            assert (len(first), len(rest)) == (5 * len(places), 5 * len(more))
            assert first + rest == b"post.freed"
    finally:
        gc.set_threshold(*before)
        gc.enable()
