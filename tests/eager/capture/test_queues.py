"""Captured functions that take from queues: each launch its element, in a loop until they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.errors import (
    CaptureError,
    OperandValueError,
    ProgramError,
    QueueClosedError,
    StaleTensorError,
)
from mlvm.eager import optim
from mlvm.machines.wire import WireVM
from tests.brief import cases, refuses
from tests.threads import PATIENCE, start
from tests.wired import machine

pytestmark = pytest.mark.usefixtures("weights")

HERE = Path(__file__).name
QUEUES: list[ml.QueueTensor] = []


@pytest.fixture
def q(vm: Any) -> ml.QueueTensor:
    return ml.QueueTensor(vm, ["f32[2,3]", "i64[2]"], 2)


def put(q: ml.QueueTensor, value: float, label: int = 0) -> None:
    with q.reserve() as (x, y):
        x[...] = value
        y[...] = label


def producer(q: ml.QueueTensor, values: range) -> Future[None]:
    """A thread that puts these values, and closes the queue."""

    def produce() -> None:
        for value in values:
            put(q, value, value % 3)
        q.close()

    return start(produce)


class Training:
    """Weights, and a step that takes what they are trained on from a queue."""

    def __init__(self, q: ml.QueueTensor) -> None:
        self.params = {"w": ml.ones((3, 3)), "count": ml.zeros(())}
        self.optimizer = optim.SGD({"w": self.params["w"]}, 0.1, momentum=0.9)
        self.q = q

    def step(self) -> ml.Tensor:
        x, labels = self.q.get()

        def loss_of(params: dict[str, ml.Tensor]) -> ml.Tensor:
            logits = ml.tanh(x * 0.1) @ params["w"]
            return ml.mean(ml.softmax_cross_entropy(logits, labels))

        loss, grads = ml.value_and_grad(loss_of)({"w": self.params["w"]})
        self.optimizer.update(grads)
        self.params["count"] += 1.0
        return loss

    def state(self) -> list[bytes]:
        return [
            x.numpy().tobytes() for x in (*self.params.values(), *self.optimizer.state().values())
        ]


@pytest.fixture
def far() -> Iterator[ml.QueueTensor]:
    vm = WireVM(machine(ml.VM("far")))
    with ml.Arena(vm, "weights").allocating():
        yield ml.QueueTensor(vm, ["f32[2,3]", "i64[2]"], 2)


@pytest.fixture(params=["q", "far"])
def either(request: pytest.FixtureRequest) -> Any:
    """A queue here, or on a VM elsewhere, which gets elements ahead of a launch."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("fuse", [False, True])
def test_each_call_takes_an_element(either: ml.QueueTensor, fuse: bool) -> None:
    q = either
    eager, replayed = Training(q), Training(q)
    step = ml.capture(replayed.step, fuse=fuse)
    batch = ml.Arena(q.vm, "batch")
    usage = []
    for i in range(10):
        put(q, i, i % 3)
        put(q, i, i % 3)
        with batch:
            assert step().numpy().tobytes() == eager.step().numpy().tobytes()
        assert q.empty()
        usage.append((q.vm.consumed_size_in_mib(), q.arena.views_created, batch.views_created))
    assert replayed.state() == eager.state()
    assert step.signatures == 1
    assert len(set(usage[1:])) == 1


@pytest.mark.parametrize("fuse", [False, True])
def test_drain_is_as_many_calls_as_there_are_elements(either: ml.QueueTensor, fuse: bool) -> None:
    q = either
    one_by_one, drained = Training(q), Training(q)
    thread = producer(q, range(12))
    for _ in range(12):
        loss = one_by_one.step()
    thread.result(PATIENCE)
    drained.q = ml.QueueTensor(q.arena.vm, q.types, 3)
    step = ml.capture(drained.step, fuse=fuse)
    thread = producer(drained.q, range(12))
    last = step.drain()
    thread.result(PATIENCE)
    assert last.numpy().tobytes() == loss.numpy().tobytes()
    assert drained.state() == one_by_one.state()
    for again in (step, step.drain):
        refuses(QueueClosedError, "", again)
    assert drained.state() == one_by_one.state()


def test_an_element_of_another_vm_is_refused_and_stays(q: ml.QueueTensor) -> None:
    put(q, 1)
    step = ml.capture(lambda: q.get()[0] * 2.0)
    with ml.Arena(ml.VM("other"), "there"):
        for call in (step, step.drain):
            refuses(CaptureError, r"the queue is on .*, the function runs on", call)
    assert step()[0, 0].item() == 2.0


def test_program_and_plan_are_those_of_the_drain(q: ml.QueueTensor) -> None:
    weight = ml.ones((64, 64), device=q.arena.vm)
    step = ml.capture(lambda: q.get()[0] @ (weight.T * 2.0)[:3])
    for _ in range(4):  # as the weight changes before each call, a second program is launched
        weight += 1.0
        put(q, 0)
        step()
    second = ml.disassemble(step.program)
    put(q, 0)
    q.close()
    step.drain()
    assert ml.disassemble(step.program).count("cfunc") < second.count("cfunc")


@pytest.mark.parametrize("drains", [False, True])
def test_a_producer_may_launch_on_the_vm(q: ml.QueueTensor, vm: Any, drains: bool) -> None:
    step = ml.capture(lambda: q.get()[0] * 2.0)

    def produce() -> None:
        with ml.Arena(vm, "producer").allocating():
            for value in range(5):
                time.sleep(0.01)  # for the consumer, which then waits
                put(q, float(ml.sum(ml.ones(3) * value)))
            q.close()

    def consume() -> Any:
        with ml.Arena(vm, "consumer").allocating():
            results = [step.drain()] if drains else [step() for _ in range(5)]
            return results[-1].tolist()

    producer, consumer = start(produce), start(consume)
    producer.result(PATIENCE)
    assert consumer.result(PATIENCE) == [[24] * 3] * 2


def test_an_element_for_a_launch_that_fails_is_used_up(q: ml.QueueTensor) -> None:
    w = ml.ones((2, 3))
    step = ml.capture(lambda: q.get()[0] * w)
    put(q, 1)
    assert step().tolist() == [[1] * 3] * 2
    w.arena.free(w)
    put(q, 1)
    refuses(StaleTensorError, "", step)
    assert q.empty()
    for value in range(q.maxsize):  # all slots are free again
        q.put([np.full((2, 3), value, np.float32), np.zeros(2, np.int64)], timeout=0)


def test_an_element_seen_as_another_shape_and_changed(q: ml.QueueTensor) -> None:
    @ml.capture
    def step() -> Any:
        x, labels = q.get()
        flat = ml.reshape(x, (6,))
        x += 1.0
        return flat * 2, ml.copy(labels), ml.sum(x.T, axis=0)

    for i in range(3):
        put(q, i, i)
        doubled, labels, total = step()
        assert doubled.tolist() == [2 * i] * 6
        assert labels.tolist() == [i, i]
        assert total.tolist() == [3 * (i + 1)] * 2


def test_two_queues_and_two_elements_of_one(q: ml.QueueTensor, vm: Any) -> None:
    other = ml.QueueTensor(vm, ["f32[2,3]"], 2)

    @ml.capture
    def step() -> Any:
        first, _ = q.get()
        (x,) = other.get()
        second, _ = q.get()
        return first - second + x

    for i in range(4):
        put(q, i + 1)
        put(q, 1)
        with other.reserve() as (x,):
            x[...] = 10
        assert step().tolist() == [[10 + i] * 3] * 2
        assert q.empty()
        assert other.empty()
    refuses(ProgramError, "taken from at the start; this takes 3 times", step.drain)


def test_only_what_begins_by_taking_an_element_is_drained(q: ml.QueueTensor) -> None:
    refuses(ProgramError, "this takes 0 times", ml.capture(lambda x: x + 1).drain, ml.ones((1,)))


def test_another_queue_is_another_signature(q: ml.QueueTensor, vm: Any) -> None:
    other = ml.QueueTensor(vm, q.types, 2)
    by_argument = ml.capture(lambda q: q.get()[0] * 2)
    QUEUES[:] = [q]
    by_itself = ml.capture(lambda: QUEUES[-1].get()[0] * 2)
    for i, queue in enumerate([q, other, q]):
        for _ in range(2):
            put(queue, i)
        QUEUES[:] = [queue]
        assert by_argument(queue).tolist() == [[2 * i] * 3] * 2
        assert by_itself().tolist() == [[2 * i] * 3] * 2
    assert (by_argument.signatures, by_itself.signatures) == (2, 2)
    QUEUES.clear()


@cases(
    "fn, message",
    (lambda: QUEUES[-1].get_nowait()[0] + 1, "take an element without waiting"),
    (lambda: [x + 1 for x, _ in QUEUES[-1]], "iterate over a queue"),
    (lambda: QUEUES[-1].get()[0], "in the slot of a queue"),
    (lambda: ml.reshape(QUEUES[-1].get()[0], (6,)), "in the slot of a queue"),
)
def test_what_a_replay_could_not_do_is_refused(
    fn: Any, message: str, q: ml.QueueTensor, tmp_path: Path
) -> None:
    QUEUES[:] = [q]
    put(q, 1)
    refuses(CaptureError, message, lambda: ml.capture(fn)())
    assert not q.empty()  # recording takes nothing
    step = ml.capture(lambda: QUEUES[-1].get()[0] + 1)
    assert step().tolist() == [[2] * 3] * 2
    with pytest.raises(CaptureError, match="reads from a queue, which cannot be saved"):
        step.save(tmp_path / "step.mlvm")
    QUEUES.clear()


def test_a_closed_queue_is_shut_down_for_the_first_call_too(q: ml.QueueTensor) -> None:
    q.close()
    step = ml.capture(lambda: q.get()[0] + 1)
    for call in (step, step.drain, step):
        refuses(QueueClosedError, "", call)


def test_what_cannot_be_taken_ahead_is_refused(far: ml.QueueTensor) -> None:
    count = ml.zeros((2, 3))

    def after_an_update() -> ml.Tensor:
        ml.add(count, count, out=count)
        return far.get()[0] + count

    def in_a_loop(n: ml.Tensor) -> Any:
        return ml.fori_loop(0, n, lambda i, s: s + far.get()[0], ml.zeros((2, 3)))

    text = rf"{HERE}.* after an update: far has separate memory"
    refuses(CaptureError, text, ml.capture(after_an_update))
    with pytest.raises(CaptureError, match=rf"{HERE}.* in a branch or loop: far .*an argument"):
        ml.capture(in_a_loop)(ml.asarray(3))
    refuses(CaptureError, "in the slot of a queue", lambda: ml.capture(lambda: far.get()[0])())
    twice = ml.capture(lambda: far.get()[0] + far.get()[0])
    put(far, 1)
    put(far, 2)
    assert twice().tolist() == [[3] * 3] * 2
    refuses(ProgramError, "taken from at the start; this takes 2 times", twice.drain)
    element = ml.capture(lambda x: x * 2)
    put(far, 3)
    assert element(far.get()[0]).tolist() == [[6] * 3] * 2


@pytest.mark.processor(reason="a device has changed the state when it tells of the value")
@pytest.mark.parametrize("drain", [False, True])
def test_an_element_that_an_op_refuses_is_used_up(q: ml.QueueTensor, drain: bool) -> None:
    training = Training(q)
    step = ml.capture(training.step)
    before = training.state()
    put(q, 1, 3)
    caught = refuses(OperandValueError, "", step.drain if drain else step)
    assert any("recorded at" in note and HERE in note for note in caught.__notes__)
    del caught  # its traceback holds what the op was given
    assert training.state() == before
    assert q.empty()
    for _ in range(2):
        with q.reserve(timeout=10) as (x, labels):  # there are two slots again
            x[...] = labels[...] = 1
    assert float(step()) > 0
