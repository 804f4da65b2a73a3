"""Pipelines: the same batches whoever makes them, and every fault an error at `get`.

tests/input/test_pipeline_processes.py has what only processes can do.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import signal
import textwrap
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlvm.eager as ml
from mlvm.arena.arena import Allocation
from mlvm.core.errors import (
    MachineError,
    PipelineError,
    QueueClosedError,
    QueueEmptyError,
    StaleTensorError,
    WorkerDiedError,
)
from mlvm.core.observe import observed
from mlvm.core.vm import VM
from mlvm.input import workers as crew_module
from mlvm.input.pipeline import Pipeline
from mlvm.input.queue import QueueTensor
from mlvm.input.sampling import SampleRandom
from mlvm.machines.wire import WireVM
from tests.brief import Patch, cases, line_of, refuses, start_python
from tests.cases.claim_tests import claims
from tests.input.datasets import Numbers, noisy
from tests.threads import PATIENCE, in_child, start


def failing_at(sample: int, error: BaseException) -> Any:
    def transform(arrays: Any, random: SampleRandom) -> Any:
        if (arrays[1] == sample).any():
            raise error
        return arrays

    return transform


def pipeline(dataset: Any = None, batch_size: int = 5, **options: Any) -> Pipeline[Allocation]:
    options = {"epochs": 1, "vm": VM(), **options}
    return Pipeline(dataset or Numbers(), batch_size, **options)


def remaining(pipeline: Pipeline[Any]) -> Iterator[Any]:
    """The batches of all epochs that are left."""
    while pipeline._next is not None:
        yield pipeline.get()


def values(pipeline: Pipeline[Any], tensors: Any) -> tuple[bytes, ...]:
    return tuple(pipeline._vm.read(tensor.handle).tobytes() for tensor in tensors)


def digests(pipeline: Pipeline[Any], count: int | None = None) -> list[str]:
    """A digest of each of the next batches, of all epochs that are left."""
    hashes = []
    for tensors in remaining(pipeline):
        hashes.append(hashlib.sha256(b"".join(values(pipeline, tensors))).hexdigest())
        if len(hashes) == count:
            break
    return hashes


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that a test's threads have ended afterwards."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) <= before


OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 5, "epochs": 3, "transform": noisy}


# --- the same batches ----------------------------------------------------------------


@cases("drop_last", False, True)
def test_any_number_of_workers_gives_the_same_batches(drop_last: bool) -> None:
    results = []
    for workers in (0, 1, 3):
        with pipeline(**OPTIONS, drop_last=drop_last, workers=workers) as batches:
            results.append(digests(batches))
    assert len(results[0]) == len(set(results[0])) == (12 if drop_last else 15)
    assert results[0] == results[1] == results[2]


def test_samples_and_types() -> None:
    with pipeline(epochs=2) as batches:
        got = [
            [str(x.type) for x in tensors]
            + np.frombuffer(values(batches, tensors)[1], np.int64).tolist()
            for tensors in remaining(batches)
        ]
    assert got[0] == ["f32[5,2]", "i64[5]", 0, 1, 2, 3, 4]
    assert got[4] == ["f32[3,2]", "i64[3]", 20, 21, 22]
    assert got[5:] == got[:5]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 40),
)
def test_a_state_is_gone_on_from(
    length: int, batch_size: int, epochs: int, workers: int, prefetch: int, stop: int
) -> None:
    options: dict[str, Any] = OPTIONS | {"epochs": epochs}
    with pipeline(Numbers(length), batch_size, **options) as batches:
        whole = digests(batches)
        assert batches.state() == {"epoch": epochs, "next_index": 0, "seed": 5}
    options |= {"workers": workers, "prefetch": prefetch}
    with pipeline(Numbers(length), batch_size, **options) as batches:
        first = digests(batches, stop) if stop else []
        state = batches.state()
    with pipeline(Numbers(length), batch_size, **(options | {"seed": 0})) as batches:
        batches.restore(state)
        assert batches.state() == state
        assert first + digests(batches) == whole


@cases("workers", 0, 1, 3)
def test_restoring_in_the_middle_drops_what_was_made_ahead(workers: int) -> None:
    with pipeline(**OPTIONS, workers=workers) as batches:
        start = batches.state()
        first = digests(batches, 3)
        middle = batches.state()
        assert middle == {"epoch": 0, "next_index": 15, "seed": 5}
        rest = digests(batches)
        batches.restore(middle)
        assert digests(batches) == rest
        batches.restore(start)
        assert digests(batches) == first + rest


# --- epochs --------------------------------------------------------------------------


def indices(batches: Pipeline[Any]) -> list[list[int]]:
    return [np.frombuffer(values(batches, x)[1], np.int64).tolist() for x in batches]


@cases("workers", 0, 2)
def test_each_loop_goes_over_the_next_epoch(workers: int) -> None:
    """The second one was over nothing: `for epoch: for batch in pipe` trained one epoch."""
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "workers": workers}
    with Pipeline(Numbers(), 5, vm=VM(), **options) as batches:
        assert len(batches) == 5
        in_loops = [indices(batches) for _ in range(3)]
        assert batches.state() == {"epoch": 3, "next_index": 0, "seed": 5}
    assert [len(epoch) for epoch in in_loops] == [5, 5, 5]
    assert all(sorted(itertools.chain(*epoch)) == [*range(23)] for epoch in in_loops)
    assert in_loops[0] != in_loops[1] != in_loops[2]
    with pipeline(**options, epochs=2) as batches:
        assert [indices(batches), indices(batches)] == in_loops[:2]
        refuses(QueueClosedError, "finished after 2 epochs", indices, batches)


@cases("workers", 0, 2)
@cases("drop_last", False, True)
def test_a_loop_after_one_that_was_left_has_its_batches_again(
    drop_last: bool, workers: int
) -> None:
    whole = 4 if drop_last else 5
    with pipeline(epochs=None, drop_last=drop_last, workers=workers) as batches:
        assert len(batches) == whole
        for _ in range(2):
            next(iter(batches))
            assert batches.state()["next_index"] == 5
        epoch = indices(batches)
        assert (len(epoch), epoch[0]) == (whole, [0, 1, 2, 3, 4])
        for _ in zip(range(2), batches, strict=False):
            state = batches.state()
        assert state == {"epoch": 1, "next_index": 10, "seed": 0}
        with pytest.warns(UserWarning, match="left at position 10 of epoch 1, .* position 0"):
            assert indices(batches) == epoch
        batches.restore(state)
        next(iter(batches))
        assert indices(batches) == epoch[2:]
        assert batches.state() == {"epoch": 2, "next_index": 0, "seed": 0}
    refuses(QueueClosedError, "pipeline was closed", list, batches)


def test_a_pipeline_and_a_queue_are_shown_in_a_line_and_as_tables() -> None:
    with ml.Pipeline(Numbers(), 5, vm=ml.VM(), epochs=1) as batches:
        text = "batches f32[5,2] i64[5], in an epoch 5, workers 0, at position"
        assert repr(batches) == f"<Pipeline 'pipeline': {text} 0 of epoch 0>"
        batches.get()
        assert "position 5 of epoch 0" in batches._repr_html_()
        digests(batches)
        assert repr(batches).endswith("at the end>")
    assert "closed" in batches._repr_html_()
    shown = ml.QueueTensor(ml.VM(), ["f32[2]"], 3, name="a<b")._repr_html_()
    assert all(text in shown for text in ("a&lt;b", "f32[2]", "elements_in"))


def test_a_loop_after_get_or_a_whole_epoch_goes_on() -> None:
    with pipeline(epochs=3) as batches:
        next(iter(batches))
        batches.get()
        assert indices(batches)[0] == [10, 11, 12, 13, 14]
        for _ in zip(batches, range(5), strict=False):  # left after the last batch
            pass
        assert batches.state()["epoch"] == 2
        assert len(indices(batches)) == 5


def test_one_loop_over_several_epochs_is_told() -> None:
    text = r"1 of 3 epochs, .* `for epoch in range\(3\)`"
    with pytest.warns(UserWarning, match=text) as records, pipeline(epochs=3) as batches:
        indices(batches)
    assert records[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        for epochs, loops, last in ((3, 2, 0), (3, 1, 2), (1, 1, 0), (None, 1, 0), (3, 0, 2)):
            with pipeline(epochs=epochs) as batches:
                for _ in range(loops):
                    indices(batches)
                for _ in range(last):
                    batches.get()
        with suppress(ZeroDivisionError), pipeline(epochs=3) as batches:
            indices(batches)
            raise ZeroDivisionError


# --- the tensors ---------------------------------------------------------------------


def test_a_batch_lasts_as_long_as_its_tensors_or_the_step() -> None:
    vm = ml.VM()
    batch = ml.Arena(vm, "batch")
    with ml.Pipeline(Numbers(), 5, vm=vm, epochs=None, workers=1, prefetch=1) as batches:
        for _ in range(20):
            with batch:
                numbers, indices = batches.get(timeout=10)
                assert bool(ml.all(ml.astype(numbers[:, 0], ml.int64) == indices))
        refuses(StaleTensorError, "", lambda: numbers + 1)
        first, _ = batches.get()
    assert first.shape == (5, 2)
    assert (first.numpy() >= 0).all()


def test_the_eager_pipeline_takes_the_vm_of_the_current_arena() -> None:
    vm = ml.VM("mine")
    with ml.Arena(vm, "a").allocating(), ml.Pipeline(Numbers(), 5) as batches:
        assert batches.get()[0].arena.vm is vm
    with ml.Pipeline(Numbers(), 5) as batches:
        assert batches.get()[0].arena.vm is ml.default_vm()
    refuses(PipelineError, "expected vm=", Pipeline, Numbers(), 5)


@cases("workers", 0, 2)
def test_a_vm_elsewhere_gets_the_same_batches(workers: int) -> None:
    with pipeline(transform=noisy, shuffle=True) as batches:
        here = digests(batches)
    vm = WireVM(VM())
    with pipeline(transform=noisy, shuffle=True, vm=vm, workers=workers) as batches:
        assert digests(batches) == here
    del batches
    gc.collect()
    assert vm.consumed_size_in_mib() == 0


@cases("workers", 0, 2)
def test_a_vm_that_cannot_be_written_to_ends_the_pipeline(workers: int) -> None:
    vm = WireVM(VM())
    lines = itertools.count()

    def write(proceed: Callable[..., None], handle: int, array: Any) -> None:
        if next(lines) == 5:
            raise OSError("the line is cut")
        proceed(handle, array)

    with observed(vm, write=write), pipeline(vm=vm, workers=workers) as batches:
        for _ in range(2):
            refuses(OSError, "is cut", digests, batches)


@cases("workers", 0, 2)
def test_keeping_every_batch_is_an_error_and_no_hang(workers: int) -> None:
    with (
        pipeline(workers=workers, prefetch=1, epochs=3) as batches,
        pytest.raises(PipelineError, match="all slots are in use"),
    ):
        list(remaining(batches))


def test_steady_batches_take_no_new_memory(vm: VM) -> None:
    with pipeline(vm=vm, epochs=None, workers=2) as batches:
        digests(batches, 6)
        before = vm.consumed_size_in_mib()
        digests(batches, 60)
        assert vm.consumed_size_in_mib() == before
    del batches
    gc.collect()
    assert vm.consumed_size_in_mib() == 0


def test_statistics_tell_who_waits() -> None:
    def slow(arrays: Any, random: SampleRandom) -> Any:
        time.sleep(0.01)
        return arrays

    with pipeline(transform=slow, workers=1) as batches:
        digests(batches)
        slow_producer = batches.stats()
    assert slow_producer.batches == 5
    assert slow_producer.consumer_waited > 0.03
    with pipeline(workers=1, prefetch=1, epochs=2) as batches:
        for _ in remaining(batches):
            time.sleep(0.01)
        slow_consumer = batches.stats()
    assert slow_consumer.producers_waited > 0.03
    assert slow_consumer.producers_waited > slow_consumer.consumer_waited
    with pipeline(transform=slow) as batches:
        digests(batches)
        assert batches.stats().consumer_waited > 0.03


# --- faults --------------------------------------------------------------------------


@cases("workers", 0, 1, 3)
def test_an_exception_takes_the_place_of_its_batch(workers: int) -> None:
    error = ZeroDivisionError("no seven")
    with pipeline(transform=failing_at(7, error), workers=workers) as batches:
        assert len(digests(batches, 1)) == 1
        for _ in range(2):
            caught = refuses(ZeroDivisionError, "no seven", batches.get, timeout=10)
        assert caught is error
        assert error.__notes__ == ["at sample 7, position 7 of epoch 0"]
        assert "in transform" in "".join(traceback.format_exception(error))
        assert batches.state()["next_index"] == 5
        batches.restore({"epoch": 0, "next_index": 10, "seed": 0})
        assert len(digests(batches)) == 3


@cases("workers", 1, 3)
def test_a_thread_that_exits_is_an_error(workers: int) -> None:
    with pipeline(transform=failing_at(12, SystemExit(3)), workers=workers) as batches:
        assert len(digests(batches, 2)) == 2
        refuses(WorkerDiedError, r"stopped by SystemExit\(3\)", batches.get, timeout=10)


@cases("workers", 1, 3)
def test_an_error_that_looks_like_the_end_is_none(workers: int) -> None:
    for error in (QueueClosedError("mine"), StopIteration("mine")):
        with (
            pipeline(transform=failing_at(2, error), workers=workers) as batches,
            pytest.raises(type(error), match="mine"),
        ):
            batches.get(timeout=10)


def test_an_interrupt_without_workers_loses_no_batch() -> None:
    interrupts = [KeyboardInterrupt()]

    def transform(arrays: Any, random: SampleRandom) -> Any:
        if len(arrays[1]) > 1 and interrupts and arrays[1][0] == 5:
            raise interrupts.pop()
        return arrays

    with pipeline(transform=transform) as batches:
        refuses(KeyboardInterrupt, "", digests, batches)
        assert batches.state()["next_index"] == 5
        assert len(digests(batches)) == 4


class Gate:
    """A transform that waits till it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, arrays: Any, random: SampleRandom) -> Any:
        if len(arrays[1]) > 1:
            self.reached.set()
            assert self.opened.wait(20)
        return arrays


def test_a_timeout_changes_nothing() -> None:
    gate = Gate()
    with pipeline(transform=gate, workers=1) as batches:
        refuses(QueueEmptyError, "", batches.get, timeout=0.01)
        assert batches.state()["next_index"] == 0
        gate.opened.set()
        assert len(digests(batches)) == 5


def test_a_pipeline_that_is_dropped_ends_its_threads() -> None:
    batches = pipeline(epochs=None, workers=2)
    digests(batches, 3)
    reference = weakref.ref(batches)
    del batches
    gc.collect()
    assert reference() is None  # and `nothing_left` sees to the threads


def test_close_is_idempotent_and_ends_a_blocked_get() -> None:
    gate = Gate()
    batches = pipeline(transform=gate, workers=1)
    consumer = start(batches.get)
    assert gate.reached.wait(10)
    closer = start(batches.close)
    refuses(QueueClosedError, "", consumer.result, PATIENCE)
    gate.opened.set()
    closer.result(PATIENCE)
    batches.close()
    for call in (batches.get, lambda: batches.restore({})):
        refuses(QueueClosedError, "pipeline was closed", call)


@cases("workers", 0, 2)
def test_a_closed_vm_ends_its_pipelines(workers: int) -> None:
    vm = VM("mine")
    with pipeline(vm=vm, epochs=None, workers=workers) as batches:
        batches.get()
        vm.close()
        refuses(MachineError, "VM 'mine' was closed", list, batches)
        refuses(MachineError, "VM 'mine' was closed", batches.get)


@cases("is_get", True, False)
def test_a_closed_vm_wakes_calls_that_wait_for_its_queue(is_get: bool) -> None:
    vm = VM("mine")
    queue = QueueTensor(vm, ["f32[2]"], 1)
    array = np.ones(2, np.float32)
    if not is_get:
        queue.put([array])
    waiting = start(queue.get if is_get else lambda: queue.put([array]))
    time.sleep(0.05)
    assert not waiting.done()
    vm.close()
    refuses(MachineError, "queue 'queue': VM 'mine' was closed", waiting.result, PATIENCE)


def test_close_ends_producers_that_wait_for_a_slot() -> None:
    batches = pipeline(epochs=None, workers=3, prefetch=1)
    element = batches.get()
    time.sleep(0.05)
    batches.close()
    assert len(element) == 2


def test_close_does_not_wait_for_ever_for_a_thread(monkeypatch: Patch) -> None:
    monkeypatch.setattr(crew_module, "_PATIENCE", 0.05)
    gate = Gate()
    batches = pipeline(transform=gate, workers=1)
    refuses(QueueEmptyError, "", batches.get, timeout=0)
    assert gate.reached.wait(10)
    with pytest.warns(RuntimeWarning, match="run after close: pipeline worker 0"):
        batches.close()
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name == "pipeline worker 0":
            thread.join(10)


@cases("epochs", 0, 1, 2)
def test_the_end_of_the_last_epoch(epochs: int) -> None:
    with pipeline(workers=1, epochs=epochs) as batches:
        assert len(digests(batches)) == 5 * epochs
        for call in (batches.get, lambda: list(batches), lambda: next(iter(batches))):
            refuses(QueueClosedError, f"finished after {epochs} epochs?; go back with", call)


# --- other processes -----------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_harms_nobody() -> None:
    with pipeline(**OPTIONS, workers=2) as batches:
        first = digests(batches, 2)

        def is_told() -> bool:
            refuses(PipelineError, "create a pipeline in each process", batches.get)
            batches.close()
            return True

        assert in_child(is_told) == 0
        whole = first + digests(batches)
    with pipeline(**OPTIONS) as batches:
        assert digests(batches) == whole


@cases("workers", 0, 2)
def test_an_interrupt_ends_all_with_one_traceback(workers: int) -> None:
    body = f"""
    import time
    import mlvm.eager as ml
    from tests.input.datasets import Numbers, noisy

    def slow(arrays, random):
        time.sleep(0.02)
        return arrays

    with ml.Pipeline(Numbers(1000), 4, epochs=None, workers={workers}, transform=slow) as pipeline:
        pipeline.get()
        print("ready", flush=True)
        while True:
            for _ in pipeline:
                pass
    """
    child = start_python("-c", textwrap.dedent(body))
    assert line_of(child) == "ready\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")


@cases("workers", 0, 2)
def test_peek_takes_nothing(workers: int) -> None:
    with pipeline(**OPTIONS, workers=workers) as batches:
        first, state = values(batches, batches.peek()), batches.state()
        assert state["next_index"] == 0
        assert values(batches, batches.get()) == first


def test_close_after_an_interrupted_start(monkeypatch: Patch) -> None:
    def start(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    batches = pipeline(workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        refuses(KeyboardInterrupt, "", batches.get)
    batches.close()


test_rows = claims("pipeline", globals())


def restored(state: Any) -> None:
    with pipeline(**OPTIONS) as batches:
        digests(batches, 2)
        before = batches.state()
        try:
            batches.restore(state)
        finally:
            assert batches.state() == before
            assert len(digests(batches)) == 13
