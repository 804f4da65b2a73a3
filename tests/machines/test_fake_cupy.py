"""The fake CuPy: it refuses what CuPy refuses, counts what costs, and replays what it recorded."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.machines import fake_cupy
from tests.machines.fake_cupy import TABLE, Fake, functions, install, ndarray, signature

Call = Callable[[Any, Any], Any]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(monkeypatch)


@pytest.fixture
def x(fake: Fake) -> Any:
    return fake.cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))


HOST = np.ones(3, np.float32)

REFUSED: list[tuple[Call, type[Exception]]] = [
    # host arrays
    (lambda cp, x: x + HOST, TypeError),
    (lambda cp, x: HOST + x, TypeError),
    (lambda cp, x: np.add(x, HOST), TypeError),
    (lambda cp, x: np.add(HOST, HOST, out=x), TypeError),
    (lambda cp, x: np.asarray(x), TypeError),
    (lambda cp, x: np.copyto(np.ones((2, 3)), x), TypeError),
    (lambda cp, x: np.where(x > 0, x, HOST), TypeError),
    (lambda cp, x: np.concatenate([x, HOST[None]]), TypeError),
    (lambda cp, x: x.__setitem__(0, HOST), ValueError),
    (lambda cp, x: x.fill(HOST), ValueError),
    (lambda cp, x: x.set([1]), TypeError),
    (lambda cp, x: x.set(HOST), ValueError),
    (lambda cp, x: x.get(out=HOST), ValueError),
    # what there is not
    (lambda cp, x: cp.vecdot, AttributeError),
    (lambda cp, x: np.vecdot(x, x), TypeError),
    (lambda cp, x: np.linalg.svdvals(x), TypeError),
    (lambda cp, x: x.ctypes, AttributeError),
    (lambda cp, x: x.flags.writeable, AttributeError),
    (lambda cp, x: cp.cuda.Graph(), NotImplementedError),
    # methods of ufuncs, and keywords
    (lambda cp, x: np.maximum.reduce(x), NotImplementedError),
    (lambda cp, x: np.logical_and.reduce(x), NotImplementedError),
    (lambda cp, x: np.add.reduce(x, initial=1), TypeError),
    (lambda cp, x: np.maximum.accumulate(x), NotImplementedError),
    (lambda cp, x: np.multiply.at(x, x > 0, 1), NotImplementedError),
    (lambda cp, x: np.add(x, x, where=x > 0), TypeError),
    (lambda cp, x: np.take(x, x, 0, x, "clip"), TypeError),
    (lambda cp, x: np.fft.fftn(x, out=x), TypeError),
    (lambda cp, x: np.linalg.cholesky(x, upper=True), TypeError),
    (lambda cp, x: np.max(x, initial=0), TypeError),
    (lambda cp, x: np.unique(x, sorted=False), TypeError),
    (lambda cp, x: x.sort(kind="quicksort"), ValueError),
    (lambda cp, x: x.T.sort(), NotImplementedError),
    # results that do not fit
    (lambda cp, x: np.add(x, x, cp.empty((2, 3), np.int32)), TypeError),
    (lambda cp, x: np.add(x, x, cp.empty((3, 3), np.float32)), ValueError),
    (lambda cp, x: np.isnan(x, cp.empty(2, "?")), ValueError),
    (lambda cp, x: cp.take(x, 0, axis=0, out=cp.empty(3)), TypeError),
    (lambda cp, x: x.sum(axis=0, out=cp.empty(2, np.float32)), ValueError),
    (lambda cp, x: cp.copyto(cp.empty(3, np.int32), x), TypeError),
    (lambda cp, x: np.bitwise_and(x, x), TypeError),
    (lambda cp, x: np.add.at(cp.empty(2, np.int8), cp.zeros(1, np.int64), 1), TypeError),
    (lambda cp, x: cp.linalg.solve(cp.ones((2, 3, 3)), cp.ones((3, 1))), ValueError),
    (lambda cp, x: bool(x), ValueError),
    (lambda cp, x: cp.empty(2, object), ValueError),
    (lambda cp, x: x[0, 0].view(np.uint8), ValueError),
]


@pytest.mark.parametrize(("call", "error"), REFUSED)
def test_what_cupy_refuses(fake: Fake, x: Any, call: Call, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(fake.cupy, x)


def test_every_function_and_method_takes_what_the_table_says(fake: Fake) -> None:
    for name in functions:
        assert name in TABLE["functions"] or name in TABLE["ufuncs"]
    for name, found in vars(ndarray).items():
        if not name.startswith("_") and name not in TABLE["attributes"].split():
            given = inspect.signature(found).parameters
            own = [each for each in given if each != "self"]
            assert own == list(signature(TABLE["methods"][name]).parameters), name


def test_an_unknown_keyword_is_refused(fake: Fake) -> None:
    for name in set(functions) & set(TABLE["functions"]):
        known = signature(TABLE["functions"][name]).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in known):
            needed = {
                x.name: None for x in known if x.default is x.empty and x.kind != x.VAR_POSITIONAL
            }
            with pytest.raises(TypeError, match="colour"):
                functions[name](**needed, colour=1)


def test_a_function_of_cupys_that_the_fake_lacks_says_so(fake: Fake, x: Any) -> None:
    with pytest.raises(NotImplementedError, match="apply_along_axis"):
        _ = fake.cupy.apply_along_axis
    with pytest.raises(NotImplementedError, match="nanmax"):
        np.nanmax(x)


def test_the_third_parameter_of_argmax_is_no_out(fake: Fake, x: Any) -> None:
    out = fake.cupy.full(2, 7, np.int64)
    np.argmax(x, 1, out)
    assert out.get().tolist() == [7, 7]
    x.argmax(axis=1, out=out)
    assert out.get().tolist() == [2, 2]


def test_the_loops_of_ufuncs_are_cupys(fake: Fake, x: Any) -> None:
    cp = fake.cupy
    small = cp.ones(2, np.int8)
    assert (small / small).dtype == np.float64  # numpy has f16
    assert np.divide(small, small, dtype=np.float32).dtype == np.float32
    assert (x * 2.5).dtype == np.float32
    assert (x * np.float64(2.5)).dtype == np.float64
    assert (small + 1).dtype == np.int8
    assert (small < 300).get().all()


def test_bytes_of_a_structured_dtype_are_kept_and_not_computed_with(fake: Fake) -> None:
    cp, half = fake.cupy, np.dtype([("bf16", np.uint16)])
    x = cp.asarray(np.arange(3, dtype=np.uint16)).view(half)
    y = cp.empty(3, half)
    y[...] = x
    assert y.view(np.uint16).get().tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        x + y


def test_indices_wrap_and_duplicates_have_no_order(fake: Fake, x: Any) -> None:
    cp = fake.cupy
    assert x[cp.asarray([3, -3])].get().tolist() == [[3, 4, 5]] * 2
    assert cp.take(x, cp.asarray([4]), axis=1).get().tolist() == [[1], [4]]
    y = cp.zeros(3)
    y[cp.asarray([0, 0])] = cp.asarray([1.0, 2.0])
    assert y.get()[0] == 1  # numpy leaves 2


def test_views_share_memory_and_have_a_base(fake: Fake, x: Any) -> None:
    part = x.reshape(3, 2)[1:, ::-1]
    part[...] = 9
    assert x.get().ravel().tolist() == [0, 1, 9, 9, 9, 9]
    assert part.base is x
    assert part.data.ptr == x.data.ptr + 3 * 4
    assert fake.cupy.may_share_memory(part, x)
    assert not fake.cupy.may_share_memory(x.copy(), x)
    assert x.T.reshape(-1).base is None  # a copy


def test_what_costs_is_counted(fake: Fake, x: Any) -> None:
    cp, counts = fake.cupy, fake.counts
    assert (counts.to_device, counts.to_host, counts.waits, counts.launches) == (1, 0, 0, 0)
    y = x + x
    y *= 2
    assert counts.launches == 2
    assert y[1, 2].item() == 20
    assert (counts.to_host, counts.waits) == (1, 1)
    waiting: list[Callable[[], Any]] = [
        lambda: x[x > 1],
        lambda: cp.argwhere(x),
        lambda: x.nonzero(),
        lambda: float(x[0, 0]),
        lambda: bool(cp.any(x)),
        lambda: cp.unique(x),
        lambda: cp.cuda.Stream.null.synchronize(),
    ]
    for i, wait in enumerate(waiting, 2):
        wait()
        assert counts.waits == i


def test_a_copy_that_does_not_block_arrives_with_a_wait(fake: Fake, x: Any) -> None:
    expected = x.get()
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    memory = fake.cupy.cuda.alloc_pinned_memory(x.nbytes)
    out = np.frombuffer(memory, np.float32, x.size).reshape(x.shape)
    out[...] = 0
    x.get(stream, out=out, blocking=False)
    event = stream.record()
    assert not event.done
    assert not out.any()
    event.synchronize()
    assert event.done
    np.testing.assert_array_equal(out, expected)


def test_a_stream_is_late_unless_it_is_waited_for(fake: Fake, x: Any) -> None:
    """Another stream sees what it has done after an event of it, and not before."""
    cp = fake.cupy
    one, other = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    y = cp.zeros(2)
    y.get()
    with one:
        y += 1
        event = one.record()
        y += 1
    with other:
        assert y.get().tolist() == [0, 0]
        other.wait_event(event)
        assert y.get().tolist() == [1, 1]
        one.synchronize()
        assert y.get().tolist() == [2, 2]


def test_pinned_memory_is_read_when_the_copy_runs_and_handed_out_at_once(fake: Fake) -> None:
    cp = fake.cupy
    y = cp.empty((2, 3), np.float32)
    for pinned, value in ((False, 1), (True, 2)):
        memory = cp.cuda.alloc_pinned_memory(24)
        place = memory.ptr
        values = (
            np.frombuffer(memory, np.float32, 6).reshape(2, 3)
            if pinned
            else np.empty((2, 3), np.float32)
        )
        values[...] = 1
        y.set(values)
        values[...] = 2
        assert (y.get() == value).all()
    del memory, values
    assert cp.cuda.alloc_pinned_memory(24).ptr == place


def test_what_is_current_before_is_a_matter_of_the_thread(fake: Fake) -> None:
    """Threads may be in one stream at the same time."""
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    current = fake.cupy.cuda.get_current_stream
    inside, leave, found = threading.Event(), threading.Event(), []

    def other() -> None:
        with stream:
            inside.set()
            leave.wait(20)
        found.append(current() == stream)

    thread = threading.Thread(target=other)
    with stream:
        with stream:
            thread.start()
            inside.wait(20)
        assert current() == stream
        leave.set()
        thread.join()
    assert found == [False]
    assert current() != stream


def test_a_graph_replays_on_the_same_memory(fake: Fake, x: Any) -> None:
    cp, y = fake.cupy, fake.cupy.zeros((2, 3), np.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    assert not y.get().any()
    with stream:
        stream.begin_capture()
        cp.add(x * 2, 1, y)
        graph = stream.end_capture()
        assert not y.get().any()
        for value in (1, 4):
            x[...] = value
            graph.launch()
            assert (y.get() == 2 * value + 1).all()
    assert (fake.counts.captures, fake.counts.replays) == (1, 2)


def test_a_graph_does_not_keep_the_plan_of_a_transform(fake: Fake, x: Any) -> None:
    cp = fake.cupy
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        found = cp.fft.rfft(x)
        graph = stream.end_capture()
        graph.launch()
        found.get()
        for n in range(1, 17):
            cp.fft.rfft(cp.ones(n))
        graph.launch()
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            found.get()


def test_many_arrays_are_joined_by_a_table_of_them(fake: Fake, x: Any) -> None:
    cp, before = fake.cupy, fake.counts.to_device
    out = cp.empty((18, 3), np.float32)
    for parts, tables in (([x] * 8, 0), ([x] * 9, 1), ([x[:1]] * 8 + [x], 3)):
        np.concatenate(parts, 0, out[: sum(map(len, parts))])
        assert fake.counts.to_device == before + tables
        before += tables


def test_an_out_by_place_is_written_by_the_graph_only(fake: Fake, x: Any) -> None:
    cp, out = fake.cupy, fake.cupy.zeros((4, 3), np.float32)
    assert not out.get().any()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        np.concatenate((x + 1, x), 0, out)
        graph = stream.end_capture()
        assert not out.get().any()
        graph.launch()
        assert out.get()[0, 0] == 1


REFUSED_IN_A_CAPTURE: list[Call] = [
    lambda cp, x: x.get(),
    lambda cp, x: x.set(np.ones((2, 3), np.float32)),
    lambda cp, x: bool(x[0, 0]),
    lambda cp, x: x[x > 0],
    lambda cp, x: cp.asarray([1]),
    lambda cp, x: cp.concatenate([x] * 9),
]


@pytest.mark.parametrize("call", REFUSED_IN_A_CAPTURE)
def test_a_transfer_is_refused_in_a_capture_which_goes_on(fake: Fake, x: Any, call: Call) -> None:
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="stream is capturing") as caught:
            call(fake.cupy, x)
        assert not isinstance(caught.value, fake.cupy.cuda.runtime.CUDARuntimeError)
        stream.end_capture()


WAITING: list[Call] = [
    lambda cp, x: cp.cuda.get_current_stream().synchronize(),
    lambda cp, x: cp.cuda.get_current_stream().done,
]


@pytest.mark.parametrize("call", WAITING)
def test_a_wait_ends_the_capture(fake: Fake, x: Any, call: Call) -> None:
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    refused = fake.cupy.cuda.runtime.CUDARuntimeError
    with stream:
        stream.begin_capture()
        with pytest.raises(refused, match="cudaErrorStreamCaptureUnsupported"):
            call(fake.cupy, x)
        with pytest.raises(refused, match="cudaErrorStreamCaptureInvalidated"):
            stream.end_capture()
    assert not stream.is_capturing()


@pytest.mark.parametrize("call", [lambda x: x @ x.T, np.linalg.svd, lambda x: x.dot(x.T)])
def test_work_of_a_library_cannot_be_recorded(fake: Fake, x: Any, call: Any) -> None:
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(NotImplementedError, match="during stream capture"):
            call(x)
        stream.end_capture()


@pytest.mark.parametrize("relaxed", [True, False])
def test_memory_that_no_pool_has_cannot_be_recorded_but_relaxed(fake: Fake, relaxed: bool) -> None:
    cp = fake.cupy
    modes = cp.cuda.runtime
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        free = cp.empty(100)
        del free
        mode = modes.streamCaptureModeRelaxed if relaxed else modes.streamCaptureModeGlobal
        stream.begin_capture(mode)
        cp.empty(60)  # the pool has it
        if relaxed:
            cp.empty(10000)
            stream.end_capture()
        else:
            with pytest.raises(modes.CUDARuntimeError):
                cp.empty(10000)


def test_memory_is_used_again_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, nbytes=4096)
    cp = fake.cupy
    x = cp.zeros(256)
    place = x.data.ptr
    del x
    assert cp.empty(256).data.ptr == place
    assert fake.counts.allocations == 1
    pool = cp.get_default_memory_pool()
    assert (pool.total_bytes(), pool.used_bytes()) == (2048, 0)
    kept = cp.cuda.alloc(2048)
    with pytest.raises(cp.cuda.memory.OutOfMemoryError, match="Out of memory"):
        cp.empty(512)
    assert cp.ndarray((256,), np.float64, kept).data.ptr == kept.ptr
    assert cp.cuda.runtime.memGetInfo() == (2048, 4096)


def test_a_pool_for_a_while(fake: Fake) -> None:
    cp = fake.cupy
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        x = cp.zeros(10)
    y = cp.zeros(10)
    assert pool.used_bytes() == 512
    assert x.data.ptr != y.data.ptr


def test_arrays_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, devices=2)
    cp = fake.cupy
    here = cp.ones(2)
    with cp.cuda.Device(1):
        there = cp.ones(2)
        assert there.device == cp.cuda.Device(1)
        with pytest.raises(ValueError, match="different from the current device"):
            here + there
    with pytest.raises(ValueError, match="different from the current device"):
        cp.copyto(here, there)
    assert there.get().tolist() == [1, 1]
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="invalid device"):
        cp.cuda.Device(2).use()
    assert cp.cuda.runtime.getDeviceCount() == 2


def test_import_finds_it(fake: Fake) -> None:
    import importlib

    assert importlib.import_module("cupy") is fake.cupy
    assert importlib.import_module("cupyx").errstate is fake_cupy.errstate
