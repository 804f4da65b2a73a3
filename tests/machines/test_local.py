"""The memory of a VM of this process, which `memory=` limits."""

from __future__ import annotations

import pytest

import mlvm.eager as ml
from mlvm.core.errors import OutOfMemoryError
from mlvm.core.types import aligned_zeros
from mlvm.machines.native.extension import is_native
from tests.brief import cases, refuses


@cases("limit", "1 MiB", 1 << 20)
def test_a_vm_holds_no_more_than_its_memory(limit: int | str) -> None:
    """Weights, arenas, scratch memory of captured functions and shared tensors count."""
    vm = ml.VM(memory=limit)
    step = ml.capture(lambda x: ml.sum(ml.sort(x)))
    with ml.Arena(vm, "weights") as arena:
        x = ml.ones(100_000)
        before = vm.consumed_size_in_mib()
        for call in (
            lambda: ml.zeros(1 << 19),
            lambda: [ml.sort(x), ml.sort(x)],
            lambda: step(ml.concat([x, x[:60_000]])),
            lambda: vm.alloc_storage(1 << 20),
            lambda: vm.alloc_tensor(ml.TensorType("f32", (1 << 18,))),
            lambda: vm.storage_over(aligned_zeros(1 << 20)),
        ):
            with pytest.raises(
                OutOfMemoryError, match=r"the VM holds .*, and its limit is 1,048,576"
            ):
                call()
            assert vm.consumed_size_in_mib() <= 1
        assert x.numpy().sum() == 100_000.0
        assert before < 1
    arena.close()
    step.close()
    assert ml.ones(1000, device=vm).tolist() == [1.0] * 1000


def test_tensors_of_another_vm_count_where_they_are_shared() -> None:
    small, large = ml.VM(memory="64 KiB"), ml.VM()
    handle = large.alloc_tensor(ml.TensorType("f32", (1 << 15,)))
    refuses(
        OutOfMemoryError,
        "cannot allocate 131,072 bytes: the VM holds 0",
        large.share,
        handle,
        small,
    )
    fitting = large.alloc_tensor(ml.TensorType("f32", (1 << 10,)))
    shared = large.share(fitting, small)
    assert small.consumed_size_in_mib() * 2**20 == 4096
    again = large.share(fitting, small)
    assert small.consumed_size_in_mib() * 2**20 == 4096
    small.dealloc_tensor(shared)
    small.dealloc_tensor(again)
    assert small.consumed_size_in_mib() == 0


@cases("native", True, False)
def test_an_arena_takes_what_is_left_and_gives_back_what_is_empty(native: bool) -> None:
    """It grows by large chunks only where the limit admits these."""
    if native and not is_native(None):
        pytest.skip("the extension is not built")
    with ml.use(ml.VM(memory="160 KiB", native=native)):
        small = [ml.ones(1000) for _ in range(20)]  # a chunk of a default arena has 64 KiB
        with pytest.raises(OutOfMemoryError):
            ml.ones(10_000)
        del small
        assert ml.sum(ml.ones(20_000)).tolist() == 20_000.0
