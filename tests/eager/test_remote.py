"""The eager language on a VM elsewhere: `ml.connect` and `ml.use`."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from tests.brief import refuses
from tests.machines.remote.serving import Served
from tests.threads import PATIENCE, in_threads, wait_for

pytestmark = pytest.mark.processor(reason="what it serves is in memory of the host")


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as server:
        yield server


def train(_: object = None) -> list[Any]:
    """A few steps of a small net, eagerly and captured: the weights after them."""
    w = ml.random.normal((8, 4), key=ml.random.key(7))
    x = ml.random.normal((16, 8), key=ml.random.key(8))

    def step(w: ml.Tensor) -> None:
        w -= 0.1 * ml.grad(lambda w: ml.mean(ml.square(ml.tanh(x @ w))))(w)

    for _ in range(3):
        step(w)
    captured = ml.capture(step)
    for _ in range(3):
        captured(w)
    return w.numpy().tolist()


def test_the_vm_in_use_has_the_same_bits(server: Served) -> None:
    expected = train()
    with server.vm() as vm, ml.use(vm):
        assert ml.default_vm() is vm
        assert ml.default_arena().vm is vm
        assert train() == expected
        assert server.status()["clients"][0]["launches"] > 0
    assert ml.default_vm() is not vm
    assert train() == expected
    wait_for(lambda: not server.status()["clients"])
    assert server.events("disconnected", 1)[0]["left"] == 0


def test_threads_and_tasks_use_vms_of_their_own(server: Served) -> None:
    expected = train()

    def train_on(vm: ml.RemoteVM) -> list[Any]:
        with ml.use(vm):
            both.wait()
            assert ml.default_vm() is vm
            return train()

    async def task(vm: Any) -> None:
        with ml.use(vm):
            await asyncio.sleep(0)
            assert ml.ones(1).device is vm
            await asyncio.sleep(0)
            assert ml.default_arena().vm is vm

    async def tasks() -> None:
        await asyncio.gather(*map(task, vms))

    here = ml.default_vm()
    both = threading.Barrier(2, timeout=PATIENCE)
    with server.vm() as one, server.vm() as two:
        vms = [one, two]
        assert in_threads(train_on, vms) == [expected] * 2
        asyncio.run(tasks())
        with ml.use(one):
            assert in_threads(lambda _: ml.default_vm(), [0]) == [here]
        assert all(each["launches"] > 0 for each in server.status()["clients"])
    assert ml.default_vm() is here


def test_a_vm_is_used_till_the_end_of_the_block() -> None:
    first = ml.default_vm()
    here = ml.default_arena()
    with ml.use(ml.VM("outer")) as outer:
        assert ml.default_vm() is outer
        with ml.use(ml.VM("inner")):
            assert ml.default_arena().vm.name == "inner"
        assert ml.default_arena().vm is outer
        assert ml.zeros((2,)).device is outer
    assert ml.default_vm() is first
    assert ml.default_arena() is here


def test_a_vm_that_was_used_ends_with_its_last_reference() -> None:
    def use(_: object) -> weakref.ref[ml.VM]:
        vm = ml.VM("gone")
        with ml.use(vm):
            assert (ml.ones((2,)) + 1).device is vm
        return weakref.ref(vm)

    vms = [use(None), *in_threads(use, [0])]
    gc.collect()
    assert [vm() for vm in vms] == [None, None]


def test_a_block_leaves_the_vm_of_this_process_open() -> None:
    x = ml.ones((2,))
    vm: Any = ml.default_vm()
    with vm:
        assert repr(vm) == "<LocalVM 'default'>"
    assert (x + 1).tolist() == [2.0, 2.0]


def test_a_vm_is_used_from_now_on_without_a_block() -> None:
    first = ml.default_vm()
    using = ml.use(ml.VM("mine"))
    try:
        assert ml.ones((1,)).device.name == "mine"
    finally:
        using.__exit__()
    assert ml.default_vm() is first


def test_what_is_no_vm_is_not_used() -> None:
    refuses(ml.errors.MachineError, "expected a VM", ml.use, "unix:/run/me")  # type: ignore[arg-type]


def test_an_error_of_a_vm_elsewhere_names_the_line_here(server: Served) -> None:
    with server.vm() as vm, ml.Arena(vm, "here"):
        x = ml.asarray(np.arange(3))
        with pytest.raises(ml.errors.OperandValueError) as caught:
            ml.take(x, ml.asarray([5]), axis=0).numpy()
    assert any("test_remote.py" in note for note in caught.value.__notes__)


def test_a_lost_vm_is_no_end_of_the_language(server: Served) -> None:
    with server.vm() as vm:
        with ml.use(vm):
            x = ml.ones((2,))
            server.close()
            with pytest.raises(ml.errors.ConnectionLostError):
                (x + x).numpy()
            refuses(ml.errors.ConnectionLostError, "", lambda: ml.zeros((100, 100)).numpy())
        assert ml.ones((2,)).numpy().tolist() == [1, 1]
    del x
