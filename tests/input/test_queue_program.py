"""`queue.get` inside programs: loops, ends, futures, errors with their place."""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import HandleError, MlvmError, QueueClosedError, QueueEmptyError
from mlvm.core.program.assembly import assemble
from mlvm.core.program.builder import ProgramBuilder
from mlvm.core.program.program import Program
from mlvm.core.types import Array, TensorType
from mlvm.input.queue import QueueTensor
from mlvm.machines.local import LocalVM as VM
from tests.alarms import require_interruptible
from tests.brief import cases, refuses
from tests.cases.claim_tests import claims
from tests.core.programs import put
from tests.threads import PATIENCE, start

SUMS = """
.const zero f64[] 0
.func main 0 *                  ; ( -- s ): the sum over all elements of sum(x) * w
    push_const zero
next:
    {queue}
    push_str "queue.get"
    cfunc 1 3                   ; s x w ok
    jump_if_false end
    get 0
    get 1
    push_str "sum"
    cfunc 1 1 {{"axis": null, "keepdims": false}}
    get 2
    push_str "multiply"
    cfunc 2 1
    push_str "add"
    cfunc 2 1
    set 0
    pop 2
    jump next
end:
    pop 2
    halt
"""


def sums(queue: str) -> Program:
    return assemble(SUMS.format(queue=queue))


def fill(q: QueueTensor, elements: int, size: int = 100) -> float:
    """Put the given number of random elements, close, and return the program's result for them."""
    generator = np.random.default_rng(0)
    total = 0.0
    for _ in range(elements):
        x, w = generator.standard_normal(size), np.array(generator.standard_normal())
        q.put((x, w))
        total += float(x.sum() * w)
    q.close()
    return total


@pytest.fixture(params=[0, 2], ids=["", "2 workers"])
def vm(request: pytest.FixtureRequest) -> Iterator[VM]:
    vm = VM(workers=request.param)
    yield vm
    vm.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@cases("maxsize", 1, 3)
@cases("elements", 0, 1, 2, 50)
def test_a_program_loops_to_the_end(
    vm: VM, pool: ThreadPoolExecutor, maxsize: int, elements: int
) -> None:
    q = QueueTensor(vm, ["f64[100]", "f64[]"], maxsize)
    filled = pool.submit(fill, q, elements)
    [total] = vm.launch(sums(f"push_int {q.handle}"))
    assert total == pytest.approx(filled.result())
    vm.synchronize()
    assert q._free.qsize() == maxsize + 1
    assert q.stats()[:2] == (elements, elements)


def test_one_program_serves_the_queue_that_its_argument_names(vm: VM) -> None:
    program = sums("load_arg 0")
    handle = vm.alloc_tensor(TensorType("i64"))
    for elements in (3, 5):
        q = QueueTensor(vm, ["f64[100]", "f64[]"], 8)
        total = fill(q, elements)
        vm.write(handle, np.array(q.handle))
        assert vm.launch(program, [handle])[0] == pytest.approx(total)


def test_a_slot_waits_for_the_ops_that_read_it() -> None:
    """The program is far ahead of its workers; no element is overwritten before it was read."""
    vm = VM(workers=2)
    q = QueueTensor(vm, ["f64[300,300]"], 2)
    b = ProgramBuilder()
    with b.function("main"):
        for _ in range(6):
            q.emit(b, raises=True)
            b.host("mean", 1, 1, axis=None, keepdims=False)
        b.halt()

    def produce() -> None:
        for i in range(6):
            q.put((np.full((300, 300), i, np.float64),))

    producer = start(produce)
    means = vm.launch(b.build())
    producer.result(PATIENCE)
    assert [float(x) for x in means] == [0, 1, 2, 3, 4, 5]
    vm.close()


def test_a_producer_waits_for_the_workers_that_read_a_dropped_tensor() -> None:
    """Outside of programs: the tensor is dropped while its reader is still to run."""
    vm = VM(workers=1)
    type = TensorType("f64", (500, 500))
    q = QueueTensor(vm, [type], 1)
    product = Program.of_op("matmul.out", 3, {}, 0)
    copy = Program.of_op("copy.out", 2, {}, 0)
    x, into, *copies = [vm.alloc_tensor(type) for _ in range(5)]
    for i, copied in enumerate(copies):
        q.put((np.full(type.shape, i, np.float64),))
        [element] = q.get()
        for _ in range(5):
            vm.launch(product, [into, x, x])  # keeps the one worker from the copy
        vm.launch(copy, [copied, element.handle])
        del element
    for i, copied in enumerate(copies):
        assert (vm.read(copied) == i).all()
    vm.close()


def test_a_waiting_program_keeps_no_producer_from_filling_a_slot(
    vm: VM, pool: ThreadPoolExecutor
) -> None:
    """It has the VM's lock all the while: every call of a producer gets along without."""
    q = QueueTensor(vm, ["f64[100]", "f64[]"], 1)
    launched = pool.submit(vm.launch, sums(f"push_int {q.handle}"))
    time.sleep(0.02)
    total = fill(q, 10)
    assert launched.result(30)[0] == pytest.approx(total)


def test_an_element_may_be_an_output_or_a_global(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[3]"], 1)
    target = vm.alloc_tensor(TensorType("f32", (3,)))
    b = ProgramBuilder()
    with b.function("main"):
        q.emit(b)
        b.pop(1).get(0).push_int(target).store_global().halt()
    program = b.build()
    q.put((np.arange(3, dtype=np.float32),))
    [out] = vm.launch(program)
    np.testing.assert_array_equal(out, [0, 1, 2])
    assert q.full()  # a global names the slot's memory
    np.testing.assert_array_equal(vm.read(target), [0, 1, 2])
    vm.dealloc_tensor(target)
    assert not q.full()


def test_a_program_may_write_over_an_element(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[3]"], 1)
    b = ProgramBuilder()
    with b.function("main"):
        q.emit(b, raises=True)
        b.get(0).get(0).get(0).host("add.out", 3, 0).halt()
    q.put((np.arange(3, dtype=np.float32),))
    np.testing.assert_array_equal(vm.launch(b.build())[0], [0, 2, 4])


def test_the_ends_are_empty_tensors_of_the_same_dtypes(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[3,4]", "u8[]"], 1)
    q.close()
    b = ProgramBuilder()
    with b.function("main"):
        q.emit(b)
        b.pop(1).halt()
    outputs = vm.launch(b.build())
    assert [TensorType.of(x) for x in outputs] == [TensorType("f32", (0,)), TensorType("u8", (0,))]


def test_raises_gets_without_a_flag_and_raises_at_the_end(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[2]"], 1)
    b = ProgramBuilder()
    with b.function("main"):
        q.emit(b, raises=True)
        b.halt()
    program = b.build()
    q.put((np.ones(2, np.float32),))
    np.testing.assert_array_equal(vm.launch(program)[0], [1, 1])
    q.close()
    caught = refuses(QueueClosedError, "", vm.launch, program)
    assert "at main, pc 2: cfunc 1 1" in caught.__notes__[0]


# --- what goes wrong ------------------------------------------------------------------


def launch_text(vm: VM, text: str, *args: Array) -> Any:
    handles = [put(vm, array) for array in args]
    return vm.launch(assemble(f".func main 0 *\n{text}\n halt"), handles)


def test_a_program_that_does_not_wait_goes_on_without_an_element(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[2]"], 1)
    text = f'push_int {q.handle}\n push_str "queue.get"\n cfunc 1 2 {{"wait": false}}'
    [x] = launch_text(vm, text)
    assert x.size == 0
    q.put((np.ones(2, np.float32),))
    [x] = launch_text(vm, text)
    assert x.tolist() == [1.0, 1.0]


def test_a_queue_that_is_gone_is_named(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[2]"], 1)
    program = sums(f"push_int {q.handle}")
    del q
    refuses(
        HandleError, "expected the handle of a live queue tensor of this VM", vm.launch, program
    )


def test_a_program_that_keeps_all_slots_does_not_wait_for_itself(vm: VM) -> None:
    q = QueueTensor(vm, ["f32[2]"], 2)
    b = ProgramBuilder()
    with b.function("main"):
        for _ in range(3):
            q.emit(b, raises=True)
        b.halt()
    for _ in range(2):
        q.put((np.ones(2, np.float32),))
    e = refuses(QueueEmptyError, "lent as tensors to this thread", vm.launch, b.build())
    assert "at main, pc 8" in e.__notes__[0]
    del e
    assert q._free.qsize() == 2


def test_cancel_ends_a_waiting_program(vm: VM, pool: ThreadPoolExecutor) -> None:
    q = QueueTensor(vm, ["f64[100]", "f64[]"], 1)
    launched = pool.submit(vm.launch, sums(f"push_int {q.handle}"))
    time.sleep(0.02)
    q.cancel(OSError("the source is gone"))
    caught = refuses(OSError, "the source is gone", launched.result, 30)
    assert "cfunc 1 3" in caught.__notes__[0]
    assert vm.consumed_size_in_mib() == q.arena.capacity / 2**20


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
def test_control_c_ends_a_waiting_program(vm: VM) -> None:
    q = QueueTensor(vm, ["f64[100]", "f64[]"], 1)
    require_interruptible(0.05, vm.launch, sums(f"push_int {q.handle}"))
    total = fill(q, 1)
    assert vm.launch(sums(f"push_int {q.handle}"))[0] == pytest.approx(total)


def test_a_vm_with_queues_is_free_to_die() -> None:
    vm = VM()
    q = QueueTensor(vm, ["f32[2]"], 1)
    reference = weakref.ref(vm)
    del vm, q
    assert reference() is None


test_rows = claims("queue_program", globals())


def called(vm: VM, text: str) -> None:
    """A wrong call of a queue's function: its error has the place, and the queue goes on."""
    q = QueueTensor(vm, ["f32[2]"], 1)
    q.put((np.ones(2, np.float32),))
    try:
        launch_text(vm, text.format(q=q.handle), np.zeros(2), np.array(-1))
    except MlvmError as error:
        places = "".join([str(error), *error.__notes__])
        raise error if "main, pc" in places else AssertionError(places) from None
    finally:
        vm.close()
