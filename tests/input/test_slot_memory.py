"""The memory of slots: its layout, and sharing it with processes that are started any way."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.core.errors import EncodingError, OutOfMemoryError
from mlvm.core.types import TensorType
from mlvm.core.vm import VM
from mlvm.input.queue import QueueTensor
from mlvm.input.slot_memory import SlotMemory
from tests.brief import cases, refuses, with_long

TYPES = [TensorType("u8", (3,)), TensorType("f64", (2, 2)), TensorType("i16")]
PATIENCE = 60


@cases("shared", False, True)
def test_the_tensors_lie_apart_and_aligned(shared: bool) -> None:
    memory = SlotMemory(TYPES, 5, shared=shared)
    assert (memory.slot_nbytes, memory.offsets) == (3 * 64, [0, 64, 128])
    assert not memory.data.any()
    for k, slot in enumerate(memory.slots):
        assert [TensorType.of(array) for array in slot] == TYPES
        for n, array in enumerate(slot):
            assert array.ctypes.data % 64 == 0
            array[...] = 10 * k + n
    for k, slot in enumerate(memory.slots):
        for n, array in enumerate(slot):
            assert (array == 10 * k + n).all()


@cases("shared, message", (False, "shared=True"), (True, "when it starts"))
def test_slots_are_not_pickled_otherwise(shared: bool, message: str) -> None:
    refuses(EncodingError, message, lambda: pickle.dumps(SlotMemory(TYPES, 1, shared=shared)))


def test_more_than_the_machine_has_is_refused_before_it_is_used() -> None:
    files = open_files()
    with pytest.raises(OutOfMemoryError, match=r"9 slots of 2,199,023,255,552 bytes"):
        SlotMemory([TensorType("u8", (1 << 41,))], 9, shared=True)
    assert open_files() == files


def open_files() -> int:
    """Count this process's file descriptors, where the system tells."""
    listing = Path("/proc/self/fd")
    return len(list(listing.iterdir())) if listing.exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm and /proc")
def test_shared_memory_has_no_name_and_ends_with_its_arrays(vm: VM) -> None:
    before, files = set(Path("/dev/shm").iterdir()), open_files()
    q = QueueTensor(vm, ["f32[1024]"], 4, shared=True)
    assert set(Path("/dev/shm").iterdir()) <= before
    assert open_files() > files
    q.put((np.ones(1024, np.float32),))
    [x] = q.get()
    del q
    assert (vm.read(x.handle) == 1).all()
    del x
    assert open_files() == files
    assert "mlvm-queue" not in Path("/proc/self/maps").read_text()


# --- with processes -------------------------------------------------------------------


def fill(memory: SlotMemory, commands: Connection, sign: int) -> None:
    """A worker: for each slot number k it receives, fill slot k and answer k."""
    while (k := commands.recv()) is not None:
        images, labels = memory.slots[k]
        images[...] = sign * (k + 1)
        labels[...] = k
        commands.send(k)


@pytest.fixture(params=with_long(["spawn"], ["spawn", "fork", "forkserver"]))
def context(request: pytest.FixtureRequest) -> Any:
    if request.param not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {request.param} here")
    if request.param != "spawn" and sys.version_info >= (3, 12):
        pytest.skip("a fork beside threads is a DeprecationWarning")
    return multiprocessing.get_context(request.param)


@pytest.fixture
def q() -> QueueTensor:
    return QueueTensor(VM(), ["f32[256,256]", "i64[3]"], 3, shared=True)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, if a test has loaded it
def test_processes_fill_slots_in_place(q: QueueTensor, context: Any) -> None:
    workers = []
    for sign in (1, -1):
        ours, theirs = context.Pipe()
        process = context.Process(target=fill, args=(q.memory, theirs, sign), daemon=True)
        process.start()
        workers.append((process, ours))
    for turn in range(4):
        reservations = []
        for _, pipe in workers:
            reservations.append(q.reserve())
            pipe.send(reservations[-1].index)
        for r, (_, pipe) in zip(reservations, workers, strict=True):
            assert pipe.poll(PATIENCE)
            assert pipe.recv() == r.index
            r.commit()
        for sign, r in zip((1, -1), reservations, strict=True):
            images, labels = q.get()
            assert (q.vm.read(images.handle) == sign * (r.index + 1)).all(), turn
            assert (q.vm.read(labels.handle) == r.index).all()
    for process, pipe in workers:
        pipe.send(None)
        process.join(PATIENCE)
        assert process.exitcode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_memory_outlives_a_worker_that_is_killed_and_no_longer(q: QueueTensor) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=fill, args=(q.memory, theirs, 1), daemon=True)
    process.start()
    with q.reserve() as (images, _):
        ours.send(q.maxsize - 1)
        assert ours.poll(PATIENCE)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        images[...] = 3
    assert (q.vm.read(q.get()[0].handle) == 3).all()
    q.close()
    del q, images
