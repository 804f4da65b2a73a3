"""Python's garbage collector rests while much is made, and works again afterwards."""

from __future__ import annotations

import gc
import os
from threading import Event, Thread

import pytest

import mlvm.eager as ml
from mlvm.core.collecting import uncollected
from tests.brief import refuses
from tests.threads import in_child


def other_inside() -> tuple[Thread, Event]:
    """A thread that is in a block, until the event is set."""
    inside, go_on = Event(), Event()

    def other() -> None:
        with uncollected():
            inside.set()
            go_on.wait()

    thread = Thread(target=other)
    thread.start()
    inside.wait()
    return thread, go_on


def test_the_collector_rests_until_the_last_block_has_ended() -> None:
    assert gc.isenabled()
    with uncollected():
        thread, go_on = other_inside()
    assert not gc.isenabled()
    go_on.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:gc.isenabled")
def test_a_function_is_recorded_without_collections_and_whatever_it_raises_they_go_on() -> None:
    states = []

    @ml.capture
    def step(x: ml.Tensor) -> ml.Tensor:
        states.append(gc.isenabled())
        return x + 1 if x.ndim else x[0]

    step(ml.ones(3))
    refuses(IndexError, "", lambda: step(ml.ones(())))
    assert states == [False, False]
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_waits_for_no_block_of_another_thread() -> None:
    thread, go_on = other_inside()
    status = in_child(gc.isenabled)
    go_on.set()
    thread.join()
    assert status == 0
