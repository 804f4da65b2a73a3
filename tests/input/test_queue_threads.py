"""Queue tensors between threads: waiting, waking, and ends that come while others wait."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import QueueClosedError, QueueEmptyError, QueueFullError
from mlvm.core.vm import VM
from mlvm.input.queue import QueueTensor
from tests.alarms import require_interruptible
from tests.brief import cases, refuses
from tests.threads import PATIENCE, start, taking_turns


def until_they_wait() -> None:
    """Give the threads time to arrive where they wait. Too little of it fails no test."""
    time.sleep(0.05)


@pytest.fixture(params=[1, 3], ids=["one waits", "three wait"])
def waiters(request: pytest.FixtureRequest) -> int:
    return request.param


def full(vm: VM) -> QueueTensor:
    q = QueueTensor(vm, ["i64[]"], 2)
    q.put((np.array(0),))
    q.put((np.array(1),))
    return q


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    with taking_turns(1e-5):
        yield


def test_many_producers_and_consumers(vm: VM) -> None:
    """Every element comes out once, and those of one producer in its order."""
    q = QueueTensor(vm, ["i64[2]", "f32[3,100]"], 3)
    producers, consumers, each = 4, 3, 150

    def produce(number: int) -> None:
        for i in range(each):
            if i % 2:
                q.put((np.array([number, i]), np.full((3, 100), i, np.float32)))
            else:
                with q.reserve() as (head, body):
                    head[...] = number, i
                    body[...] = i

    def consume() -> list[tuple[int, int]]:
        pairs = []
        for head, body in q:
            number, i = vm.read(head.handle)
            assert (vm.read(body.handle) == i).all()
            pairs.append((int(number), int(i)))
            del head, body
        return pairs

    consuming = [start(consume) for _ in range(consumers)]
    producing = [start(produce, number) for number in range(producers)]
    for future in producing:
        future.result(PATIENCE)
    q.close()
    results = [future.result(PATIENCE) for future in consuming]
    everything = [pair for part in results for pair in part]
    assert sorted(everything) == [(p, i) for p in range(producers) for i in range(each)]
    for part in results:
        for number in range(producers):
            own = [i for p, i in part if p == number]
            assert own == sorted(own)
    stats = q.stats()
    assert stats[:2] == (producers * each,) * 2
    assert q._free.qsize() == q.maxsize + 1
    assert q.arena.used == 0


def test_tensors_may_end_in_any_thread(vm: VM) -> None:
    """The two tensors of an element end in two threads, at about the same time."""
    q = QueueTensor(vm, ["i64[1]", "i64[2]"], 2)
    ends: list[list[object]] = [[], []]

    def drop(end: list[object], go: threading.Barrier) -> None:
        for _ in range(300):
            go.wait(PATIENCE)
            end.clear()
            go.wait(PATIENCE)

    go = threading.Barrier(3)
    droppers = [start(drop, end, go) for end in ends]
    for _ in range(300):
        q.put((np.zeros(1, np.int64), np.zeros(2, np.int64)))
        x, y = q.get()
        ends[0].append(x)
        ends[1].append(y)
        del x, y
        go.wait(PATIENCE)
        go.wait(PATIENCE)
        assert q._free.qsize() == 2
    for dropper in droppers:
        dropper.result(PATIENCE)


# --- waking ---------------------------------------------------------------------------


def test_a_consumer_waits_for_an_element(vm: VM) -> None:
    q = QueueTensor(vm, ["i64[]"], 1)
    got = start(lambda: int(vm.read(q.get()[0].handle)))
    until_they_wait()
    assert not got.done()
    q.put((np.array(7),))
    assert got.result(PATIENCE) == 7
    assert q.stats().consumers_waited > 0
    assert q.stats().producers_waited == 0


def test_a_producer_waits_for_a_slot(vm: VM) -> None:
    q = full(vm)
    put = start(q.put, (np.array(2),))
    until_they_wait()
    assert not put.done()
    q.get()
    put.result(PATIENCE)
    assert q.stats().producers_waited > 0
    assert q.stats().consumers_waited == 0


def test_a_slot_given_back_by_a_reservation_wakes_a_producer(vm: VM) -> None:
    q = QueueTensor(vm, ["i64[]"], 1)
    r = q.reserve()
    put = start(q.put, (np.array(2),))
    until_they_wait()
    r.cancel()
    put.result(PATIENCE)


@cases("timeout", 0, 0.02)
def test_timeouts(vm: VM, timeout: float) -> None:
    q = full(vm)
    refuses(QueueFullError, "2 slots, 0 free, 2 waiting", q.put, (np.array(2),), timeout)
    refuses(QueueFullError, "", q.reserve, timeout)
    q.get()
    q.get()
    refuses(QueueEmptyError, "2 slots, 2 free, 0 waiting", q.get, timeout)
    q.put((np.array(3),), timeout)


# --- the end comes while others wait --------------------------------------------------


@cases(
    "end, error",
    (lambda q: q.close(), QueueClosedError),
    (lambda q: q.cancel(ConnectionError("the source is gone")), ConnectionError),
)
def test_an_end_wakes_both_sides(vm: VM, waiters: int, end: Any, error: Any) -> None:
    empty, blocked = QueueTensor(vm, ["i64[]"], 2), full(vm)
    waiting: list[Future[Any]] = [start(empty.get) for _ in range(waiters)]
    waiting += [start(blocked.put, (np.array(9),)) for _ in range(waiters)]
    waiting += [start(blocked.reserve) for _ in range(waiters)]
    until_they_wait()
    for q in (empty, blocked):
        end(q)
    for future in waiting:
        refuses(
            error,
            "" if error is QueueClosedError else "the source is gone",
            future.result,
            PATIENCE,
        )
    if error is QueueClosedError:
        assert [int(vm.read(x.handle)) for (x,) in blocked] == [0, 1]


def test_an_end_from_any_thread_at_any_time_leaves_nobody_waiting(vm: VM) -> None:
    """Close or cancel at random moments, amid two producers and two consumers."""
    generator = random.Random(0)
    for turn in range(30):
        q = QueueTensor(vm, ["i64[]"], generator.randint(1, 3))
        put, got = [0, 0], [0, 0]

        def produce(number: int, q: QueueTensor = q, put: list[int] = put) -> None:
            while True:
                q.put((np.array(number),))
                put[number] += 1

        def consume(number: int, q: QueueTensor = q, got: list[int] = got) -> None:
            while True:
                q.get()
                got[number] += 1

        threads = [start(work, number) for work in (produce, consume) for number in (0, 1)]
        time.sleep(generator.random() / 200)
        if turn % 2:
            q.cancel(ConnectionError())
        else:
            q.close()
        assert not wait(threads, PATIENCE).not_done
        if not turn % 2:
            assert all(isinstance(future.exception(), QueueClosedError) for future in threads)
            assert sum(put) == sum(got) == q.stats().elements_out


def test_a_consumer_that_leaves_early_keeps_no_producer(vm: VM) -> None:
    q = full(vm)
    put = start(q.put, (np.array(9),))

    def consume() -> None:
        for _ in q:
            raise ConnectionError("no more, thanks")

    consumer = start(consume)
    error = consumer.exception(PATIENCE)
    assert isinstance(error, ConnectionError)
    del consumer
    error.__traceback__ = None  # its frames held the element
    put.result(PATIENCE)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to threads")
@cases("side", "get", "put")
def test_control_c_ends_a_wait(vm: VM, side: str) -> None:
    q = QueueTensor(vm, ["i64[]"], 2) if side == "get" else full(vm)
    require_interruptible(0.05, lambda: q.get() if side == "get" else q.put((np.array(1),)))
    assert q.stats().consumers_waited + q.stats().producers_waited > 0
    while side == "put" and not q.empty():
        q.get()
    q.put((np.array(5),))
    assert int(vm.read(q.get()[0].handle)) == 5
