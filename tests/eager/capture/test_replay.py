"""Known launches run in C, on the same tensors, with the results and errors of those in Python."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.observe import observed
from mlvm.eager.capture.launch import Launch
from mlvm.machines.native.extension import EXTENSION
from tests.brief import Patch, cases, count_calls, refuses
from tests.threads import in_threads

pytestmark = [
    pytest.mark.skipif(EXTENSION is None, reason="the extension is not here"),
    pytest.mark.local(reason="a VM elsewhere launches by messages"),
]


@pytest.fixture(autouse=True)
def arena() -> Iterator[Any]:
    with ml.Arena(ml.VM("replay", native=True), "replay").allocating() as arena:
        yield arena


@pytest.fixture
def launches(monkeypatch: Patch) -> Counter[str]:
    """The numbers of launches that Python sends."""
    return count_calls(monkeypatch, Launch, "run")


def warmed(fn: Any, *args: Any) -> Any:
    captured = ml.capture(fn)
    for _ in range(5):
        captured(*args)
    return captured


def test_a_refused_value_raises_once_and_names_the_line(launches: Counter[str]) -> None:
    counts, table = ml.zeros(2), ml.asarray([1.0, 2.0, 3.0])

    def step(index: Any) -> Any:
        counts[...] = counts + 1.0
        return ml.take(table, index)

    index = ml.asarray([0, 2])
    captured = warmed(step, index)
    before = launches.total()
    index[...] = 7
    caught = refuses(ml.errors.MlvmError, "", captured, index)
    assert launches.total() == before
    line = step.__code__.co_firstlineno + 2
    assert any(f"test_replay.py:{line}" in note for note in caught.__notes__)
    assert counts.tolist() == [5.0, 5.0]  # though the update is before the take
    index[...] = 1
    assert captured(index).tolist() == [2.0, 2.0]
    assert counts.tolist() == [6.0, 6.0]


def test_launches_that_are_observed_pass_python(arena: Any, launches: Counter[str]) -> None:
    x = ml.ones(2)
    double = warmed(lambda x: x + x, x)
    programs = []

    def look(proceed: Any, program: Any, args: Any = (), **options: Any) -> Any:
        programs.append(program)
        return proceed(program, args, **options)

    before = launches.total()
    with observed(arena.vm, launch=look):
        double(x)
    assert len(programs) == 1
    assert launches.total() == before + 1
    double(x)
    assert launches.total() == before + 1


def test_a_changed_function_table_is_seen(arena: Any, launches: Counter[str]) -> None:
    x = ml.ones(2)
    double = warmed(lambda x: x + x, x)
    before = launches.total()
    arena.vm.register("another", lambda frame: None, nparams=0, nresults=0)
    assert double(x).tolist() == [2.0, 2.0]
    assert launches.total() == before + 1


def test_a_closed_vm_is_told(arena: Any) -> None:
    x = ml.ones(2)
    double = warmed(lambda x: x + x, x)
    arena.vm.close()
    refuses(ml.errors.MlvmError, "closed", double, x)


def test_threads_share_a_function() -> None:
    w = ml.asarray(np.arange(8.0, dtype=np.float32))
    captured = warmed(lambda x: ml.sum(ml.tanh(x * w) * x), ml.ones(8))
    vm = w.device

    def work(seed: int) -> None:
        with ml.Arena(vm, f"of {seed}").allocating():
            x = ml.full(8, float(seed))
            expected = np.tanh(np.float32(seed) * np.arange(8, dtype=np.float32)).sum() * seed
            for i in range(300):
                assert abs(float(captured(x)) - expected) < 1e-3
                if i % 50 == 7:
                    ml.Arena(vm, "brief").close()  # handles end: known launches are forgotten

    in_threads(work, range(1, 5))


def test_arrays_that_change_while_a_launch_is_learned(arena: Any, monkeypatch: Patch) -> None:
    from mlvm.machines.native import loop

    bound_code = loop.bound_code
    x, y = ml.asarray([1.0, 2.0]), ml.asarray([3.0, 4.0])

    def handing_over(*args: Any) -> Any:  # as to a thread that swaps, once C has called Python
        bound = bound_code(*args)
        arena.vm.swap(x.handle, y.handle)
        return bound

    monkeypatch.setattr(loop, "bound_code", handing_over)
    double = ml.capture(lambda x: x + x)
    for _ in range(6):
        expected = (x.numpy() * 2.0).tolist()
        assert double(x).tolist() == expected


def test_a_weight_that_moves_while_a_launch_is_learned(arena: Any, monkeypatch: Patch) -> None:
    w, x, y = ml.asarray([1.0, 2.0]), ml.ones(2), ml.asarray([10.0, 20.0])
    views: list[Any] = []
    launch = type(arena.vm).launch
    add = ml.capture(lambda x: x + w)
    add(y)

    def moving(vm: Any, *args: Any) -> Any:  # as a signal's handler, once the launch has returned
        result = launch(vm, *args)
        if not views:
            views.append(ml.reshape(w, (1, 2)))
            w[...] = y  # moves, as the view needs the old bytes
        return result

    monkeypatch.setattr(type(arena.vm), "launch", moving)
    add(x)
    assert [add(x).tolist() for _ in range(3)] == [[11.0, 21.0]] * 3


def products(x: Any, number: float | None = None) -> Any:
    """A launch in which handlers of signals run."""
    y = x
    for _ in range(30):
        y = ml.tanh(y @ x)
        y = y if number is None else y * number
    return y


@cases("number", None, 3.0)
def test_a_call_inside_a_launch_of_the_same_function(
    arena: Any, monkeypatch: Patch, number: float | None
) -> None:
    """Each has scratch memory and numbers of its own."""
    from mlvm.machines.native import loop

    x, other = ml.full((512, 512), 1e-3), ml.full((512, 512), 2e-3)
    args = [(x,), (other,)] if number is None else [(x, number), (other, number + 1)]
    outer, inner = [products(*each).numpy() for each in args]
    captured = ml.capture(products)
    for each in (*args, *args, args[0]):
        captured(*each)
    handled: list[bool] = []

    def handle(_: Any) -> None:  # where handlers of signals run
        if not handled:
            handled.append(False)
            handled[0] = np.array_equal(captured(*args[1]), inner)

    monkeypatch.setattr(loop.Helper, "check_signals", handle)
    for _ in range(50):
        if not handled:
            assert np.array_equal(captured(*args[0]), outer)
    assert handled == [True]
    monkeypatch.undo()
    assert np.array_equal(captured(*args[0]), outer)


def test_a_call_inside_another_call_of_the_vm_waits_for_no_thread() -> None:
    """A thread that has the scratch memory may wait for the VM."""
    captured = ml.capture(lambda x, k: ml.sum(ml.tanh(x @ x) @ x) * k)
    vm, both = ml.VM("busy", native=True), threading.Barrier(2)

    def call(number: float, lock: Any) -> float:
        with lock, ml.use(vm):
            both.wait(10)
            return float(captured(ml.ones((4, 4)), number))

    with ml.use(vm):
        captured(ml.ones((4, 4)), 1.0)
    work = [(2.0, captured._scratch.of(vm).lock), (3.0, vm.lock)]
    one, other = in_threads(lambda each: call(*each), work)
    assert one * 1.5 == other


class Stopped(BaseException):
    """An interrupt."""


def test_signals_in_a_launch(arena: Any, launches: Counter[str], monkeypatch: Patch) -> None:
    from mlvm.machines.native import loop

    x = ml.full((512, 512), 1e-3)
    expected, errors = products(x).numpy(), []
    captured = warmed(products, x)

    def close(_: Any) -> None:  # where handlers of signals run
        try:
            arena.vm.close()
        except ml.errors.MachineError as error:
            errors.append(str(error))

    def stop(_: Any) -> None:
        raise Stopped

    monkeypatch.setattr(loop.Helper, "check_signals", close)
    before, stopped = launches.total(), None
    for _ in range(50):
        if not errors:
            assert np.array_equal(captured(x), expected)
    assert "closed during a launch" in errors[0]
    gc.disable()
    monkeypatch.setattr(loop.Helper, "check_signals", stop)
    for _ in range(50):
        try:
            assert stopped is not None or captured(x) is not None
        except Stopped as error:
            stopped = weakref.ref(error)
    alive = stopped is not None and stopped()
    gc.enable()
    assert alive is None, "the error keeps itself alive"
    assert launches.total() == before
