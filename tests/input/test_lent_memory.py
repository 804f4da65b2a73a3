"""Memory from outside: storages over given bytes, and results that are lent, not copied."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from mlvm.core.errors import HandleError, OperandValueError
from mlvm.core.machine.frame import Frame
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType, aligned_zeros
from mlvm.machines.local import LocalVM as VM
from tests.brief import Before, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import put
from tests.threads import PATIENCE, start, waits


def test_a_storage_over_given_bytes_is_a_storage_like_others() -> None:
    vm = VM()
    memory = aligned_zeros(256)
    storage = vm.storage_over(memory)
    assert vm.consumed_size_in_mib() == 256 / 2**20
    x = vm.tensor_from_storage(storage, TensorType("f32", (4,)), 64)
    memory[64:80].view(np.float32)[...] = 5
    np.testing.assert_array_equal(vm.read(x), [5, 5, 5, 5])
    vm.write(x, np.ones(4, np.float32))
    np.testing.assert_array_equal(memory[64:80].view(np.float32), [1, 1, 1, 1])
    refuses(HandleError, "belongs to a storage of this VM", vm.storage_over, memory[:128])
    vm.dealloc_storage(storage)
    assert vm.consumed_size_in_mib() == 0
    refuses(HandleError, "freed with storage", vm.read, x)
    vm.dealloc_storage(vm.storage_over(memory))


def read_only() -> Array:
    memory = aligned_zeros(64)
    memory.flags.writeable = False
    return memory


def test_make_writable_waits_for_the_ops_that_read() -> None:
    vm = VM(workers=1)
    memory = aligned_zeros(64)
    type = TensorType("i64", (2,))
    x = vm.tensor_from_storage(vm.storage_over(memory), type, 0)
    y = vm.alloc_tensor(type)
    memory.view(np.int64)[...] = 1
    gate = threading.Event()
    with vm.instrumented(Before(lambda *_: gate.wait(30))):
        vm.launch(Program.of_op("add.out", 3, {}, 0), (y, x, x))
        made_writable = start(vm.make_writable, [x])
        assert waits(made_writable)
        gate.set()
        made_writable.result(PATIENCE)
    memory[...] = 0
    np.testing.assert_array_equal(vm.read(y), [2, 2])
    refuses(HandleError, "", vm.make_writable, [0])
    vm.close()
    VM().make_writable([0])  # nobody to wait for


def test_make_writable_makes_bytes_whole_that_a_failed_op_left() -> None:
    vm = VM(workers=1)
    memory = aligned_zeros(64)
    x = vm.tensor_from_storage(vm.storage_over(memory), TensorType("f32", (2,)), 0)
    logits, labels = vm.alloc_tensor(TensorType("f32", (2, 3))), put(vm, np.array([0, 7]))
    vm.launch(Program.of_op("softmax_cross_entropy.out", 3, {}, 0), (x, logits, labels))
    refuses(OperandValueError, "", vm.read, x)
    vm.make_writable([x])
    memory[:8].view(np.float32)[...] = 3
    np.testing.assert_array_equal(vm.read(x), [3, 3])
    vm.close()


def test_what_is_lent_is_not_copied() -> None:
    vm = VM()
    memory = np.zeros(3, np.float32)

    def lend(frame: Frame) -> None:
        frame.lend(memory)

    vm.register("lend", lend, nparams=0, nresults=1)
    b = ProgramBuilder()
    with b.function("main"):
        b.host("lend", 0, 1).get(0).get(0).get(0).host("add.out", 3, 0).halt()
    memory[...] = 1
    np.testing.assert_array_equal(vm.launch(b.build())[0], [2, 2, 2])
    np.testing.assert_array_equal(memory, [2, 2, 2])


test_rows = claims("lent_memory", globals())


def lent_to_vm(memory: Any) -> None:
    vm = VM()
    try:
        vm.storage_over(memory)
    finally:
        assert vm.consumed_size_in_mib() == 0


def lent_by_host(array: Any) -> None:
    frame = Frame("lend", (), {})
    try:
        frame.lend(array)
    finally:
        assert frame.results == []
