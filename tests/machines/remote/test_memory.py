"""The memory of a remote VM, which `memory=` of `ml.connect` limits."""

from __future__ import annotations

from typing import Any

import pytest

import mlvm.eager as ml
from mlvm.machines import wire
from mlvm.machines.remote import session
from tests.brief import Patch, cases, refuses
from tests.machines.remote.serving import KINDS, Served, limits

BOTH = r"limit is 1,048,576 \(memory= of ml.connect; --held-bytes of the server is 17,179,869,184\)"


@cases("kind", *KINDS)
@cases("limit", "1 MiB", 1 << 20)
def test_a_remote_vm_holds_no_more_than_its_memory(kind: str, limit: int | str) -> None:
    """Weights, arenas, scratch memory of captured functions and results count."""
    with Served(**KINDS[kind]) as server, server.vm(memory=limit) as vm:
        step = ml.capture(lambda x: ml.sum(ml.sort(x)))
        with ml.Arena(vm, "weights") as arena:
            x = ml.ones(100_000)
            for call in (
                lambda: ml.zeros(1 << 19),
                lambda: [ml.sort(x), ml.sort(x)],
                lambda: step(ml.concat([x, x[:60_000]])),
                lambda: vm.alloc_storage(1 << 20),
                lambda: vm.alloc_tensor(ml.TensorType("f32", (1 << 18,))),
            ):
                refuses(ml.errors.OutOfMemoryError, BOTH, call)
                assert vm.consumed_size_in_mib() <= 1
            assert x.numpy().sum() == 100_000.0
        arena.close()
        step.close()
        assert ml.ones(1000, device=vm).tolist() == [1.0] * 1000
        with server.vm() as other:  # another client has its own memory
            assert ml.ones(1 << 19, device=other).size == 1 << 19


def test_the_smaller_of_the_two_limits_holds() -> None:
    with Served(limits=limits(held_bytes=1 << 19)) as server, server.vm(memory="1 MiB") as vm:
        with pytest.raises(
            ml.errors.OutOfMemoryError, match=r"524,288 \(--held-bytes .*though memory= is 1,048"
        ):
            vm.alloc_storage(600_000)
        vm.alloc_storage(500_000)


def test_a_lost_connection_keeps_the_limit() -> None:
    with Served() as server, server.vm(memory="1 MiB", retry=5.0) as vm:
        vm._stream.socket.close()
        refuses(ml.errors.OutOfMemoryError, "memory=", vm.alloc_storage, 2 << 20)


def test_a_shared_vm_is_limited_by_its_server_alone() -> None:
    with Served(shared=["ours"]) as server:
        refuses(ml.errors.ArgumentError, "vm='ours'", server.vm, vm="ours", memory="1 MiB")
        with server.vm(vm="ours") as vm:
            refuses(ml.errors.MachineError, "got a shared VM", vm.limit_memory, 1 << 20)
            vm.alloc_storage(2 << 20)


@cases("memory", 0, -1, "all", "1 PiB", 1 << 63, True, 1.5)
def test_what_is_no_size_is_refused_before_connecting(memory: Any) -> None:
    with pytest.raises(ml.errors.ArgumentError, match=r"^ml.connect\(memory=\): expected a size"):
        ml.connect(":1", memory=memory)


def test_a_server_without_the_call_is_named_as_the_reason(monkeypatch: Patch) -> None:
    def read_name(reader: Any) -> str:
        name = wire.read_name(reader)
        if name == "limit_memory":
            raise ml.errors.EncodingError("no call 'limit_memory'")
        return name

    monkeypatch.setattr(session, "read_name", read_name)
    with Served() as server:
        refuses(ml.errors.AccessDeniedError, "does not support memory=", server.vm, memory="1 MiB")
        assert server.vm().name
