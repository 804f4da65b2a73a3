"""Ctrl-C before random lines of queues, pipelines, groups and remote VMs, finalizers included.

    python -m tests.fuzz interrupts --programs 5000 --seed 0

A program is a few random calls. It runs once to count its lines in the package's folder, and once
more with Ctrl-C before one of them, sometimes before two. After that, each slot of a queue is free
or has its element, and elements come in order, none of them twice; a pipeline's position and its
batches agree, with as many threads as before; a group runs again, or is closed; a remote VM has
the tensors that it had, and computes, or its connection is lost. A program that leaves anything
else is printed with the number that makes it again, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.errors import ConnectionLost, MlvmError, QueueEmpty, QueueFull, ShutDown
from mlvm.core.program.program import Program
from mlvm.core.types import TensorType, f32
from mlvm.input.pipeline import Pipeline
from mlvm.input.queue import QueueTensor
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.server import Server
from mlvm.machines.wire import WireVM
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.processes import ProcessGroup
from tests.core.programs import put
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.trying import time_limit
from tests.input.datasets import Numbers
from tests.interrupting import lines_run

INPUT: Final = "/mlvm/input/"
PARALLEL: Final = "/mlvm/parallel/"
REMOTE: Final = "/mlvm/machines/remote/"
SECONDS: Final = 60
"""For one program; more counts as a hang."""

_SECRET: Final = "between interrupts"
_VECTOR: Final = TensorType(f32, (3,))
_ADD: Final = Program.of_op("add", 2, {}, 1)
_ADD_INTO: Final = Program.of_op("add.out", 3, {}, 0)
_REMOTE_CALLS: Final = ("alloc", "read", "launch", "outputs", "dealloc", "size")

PROCESSES: Final = 50
"""One program in so many runs in a process."""


def require(condition: object, text: str) -> None:
    """Raise `Wrong` unless the condition is true."""
    if not condition:
        raise Wrong(text)


def interrupt(rng: random.Random, calls: Callable[[], Any], total: int, folder: str) -> str:
    """Run calls of that total number of lines, with Ctrl-C before one; return its place."""
    n = rng.randint(1, max(total, 1))
    reached = lines_run(calls, folder, n)
    return f"line {n} of {total}, {'reached' if reached >= n else 'not reached'}"


# --- queues ---------------------------------------------------------------------------


class QueueCalls:
    """Calls on a queue, each of which ends at once."""

    def __init__(self, queue: QueueTensor) -> None:
        self.queue = queue
        self.next = 1  # the value to put next
        self.elements: list[int] = []  # the values that came
        self.lent: list[Any] = []

    def value(self) -> Any:
        self.next += 1
        return np.full(3, self.next, np.float32), np.full((), self.next)

    def saw(self, tensors: Any) -> None:
        self.elements.append(int(self.queue.vm.read(tensors[1].handle)))

    def put(self) -> None:
        self.queue.put(self.value(), 0)

    def reserve(self) -> None:
        with self.queue.reserve(0) as (x, y):
            x[...], y[...] = self.value()

    def cancels(self) -> None:
        self.queue.reserve(0).cancel()

    def drops(self) -> None:
        self.queue.reserve(0)

    def fails(self) -> None:
        with suppress(ZeroDivisionError), self.queue.reserve(0):
            raise ZeroDivisionError

    def get(self) -> None:
        self.saw(self.queue.get(0))

    def keep(self) -> None:
        tensors = self.queue.get(0)
        self.lent.append(tensors)
        self.saw(tensors)

    def forget(self) -> None:
        self.lent.clear()

    def inside(self) -> None:
        with Arena(self.queue.vm, "batch"):
            self.keep()

    def end(self) -> None:
        self.queue.close()

    def cancel(self) -> None:
        self.queue.cancel(ShutDown("cancelled"))


_CALLS: Final = (
    *("put", "put", "put", "reserve", "reserve", "cancels", "drops", "fails", "get", "get"),
    *("keep", "keep", "forget", "inside"),
)


def try_queue(rng: random.Random) -> str:
    """Interrupt calls on a queue; raise `Wrong` for a slot that is lost or an element that is not
    in order."""
    maxsize, is_far = rng.randint(1, 3), rng.random() < 0.2
    options: Any = {"single_threaded": rng.random() < 0.4, "shared": rng.random() < 0.1}
    names = [rng.choice(_CALLS) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.15:
        names.insert(rng.randrange(len(names) + 1), rng.choice(["end", "cancel"]))

    def new() -> QueueCalls:
        vm: Any = WireVM(VM()) if is_far else VM()
        return QueueCalls(QueueTensor(vm, ["f32[3]", "i64[]"], maxsize, **options))

    def run(calls: QueueCalls, names: list[str]) -> None:
        for name in names:
            with suppress(QueueEmpty, QueueFull, ShutDown):
                getattr(calls, name)()

    total = lines_run(partial(run, new(), names), INPUT)
    calls = new()
    place = f"{names} of {maxsize} slots, {options}, {'far' if is_far else 'here'}: "
    place += interrupt(rng, partial(run, calls, names), total, INPUT)
    if rng.random() < 0.3:
        place += ", then " + interrupt(rng, partial(run, calls, names), total, INPUT)
    calls.lent.clear()
    queue = calls.queue
    was_closed = queue.closed
    for _ in range(maxsize + 1):  # elements of a cancelled queue go one by one
        with suppress(QueueEmpty, ShutDown):
            calls.get()
    order = calls.elements
    require(order == sorted(set(order)), f"{place}: elements {order}")
    state = queue.arena.free_slots(), queue.arena.used, queue.arena.live()
    require(state == (maxsize, 0, []), f"{place}: free slots, bytes and tensors are {state}")
    require(queue.closed == was_closed, f"{place}: closed by get")
    if not was_closed:
        for _ in range(maxsize):
            queue.put(calls.value(), 0)
        require(queue.full(), f"{place}: a slot is there twice")
        for _ in range(maxsize):
            calls.get()
    queue.close()
    with suppress(ShutDown):
        queue.get()
        raise Wrong(f"{place}: a closed queue has an element")
    return "queue"


# --- pipelines ------------------------------------------------------------------------


def first_values(batches: Pipeline[Any], count: int) -> list[int]:
    """Return the first sample of each of the next batches."""
    numbers = []
    for _ in range(count):
        tensors = batches.get()  # a worker fills their slot as soon as they are gone
        numbers.append(int(batches._vm.read(tensors[1].handle)[0]))
    return numbers


def try_pipeline(rng: random.Random) -> str:
    """Interrupt a pipeline that begins, goes on or ends; raise `Wrong` for a batch that is skipped
    or comes twice, and for threads that stay."""
    workers, count = rng.randint(0, 3), rng.randrange(3)
    names = [rng.choice(["get", "get", "peek", "state", "for"]) for _ in range(rng.randint(1, 3))]
    names += rng.choice([[], ["close"]])

    def new() -> Pipeline[Any]:
        options: Any = {"shuffle": True, "seed": 7, "epochs": None, "workers": workers}
        return Pipeline(Numbers(), 5, vm=VM(), **options)

    def run(batches: Pipeline[Any]) -> None:
        for name in names:
            if name == "for":
                for _ in batches:
                    break
            else:
                getattr(batches, name)()

    with new() as batches:
        whole = first_values(batches, 16)
    threads = {*threading.enumerate()}
    with new() as batches:
        first_values(batches, count)
        total = lines_run(partial(run, batches), INPUT)
    with new() as batches:
        first_values(batches, count)
        place = f"{names} after {count} with {workers} workers: "
        place += interrupt(rng, partial(run, batches), total, INPUT)
        if not batches._closed:
            state = batches.state()
            at = state["epoch"] * 5 + state["next_index"] // 5
            numbers = first_values(batches, 3)
            require(numbers == whole[at : at + 3], f"{place}: {numbers} at {at}")
            now = len({*threading.enumerate()} - threads)
            require(now == workers, f"{place}: {now} threads")
    require({*threading.enumerate()} <= threads, f"{place}: threads after close")
    return "pipeline"


# --- groups ---------------------------------------------------------------------------


def twice(rank: int, vm: VM) -> int:
    return 2 * rank


class Groups:
    """Groups that programs use one after the other, until one is closed."""

    def __init__(self) -> None:
        self._groups: dict[str, AnyGroup] = {}

    def group(self, kind: str) -> AnyGroup:
        """Return an open group of that kind."""
        group = self._groups.get(kind)
        if group is None or group.closed:
            group = ProcessGroup(1) if kind == "processes" else Group(int(kind))
            self._groups[kind] = group
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def try_group(rng: random.Random, groups: Groups, kind: str) -> str:
    """Interrupt a run of a group; raise `Wrong` if it neither runs again nor is closed."""
    group = groups.group(kind)
    total = lines_run(partial(group.run, twice), PARALLEL)
    place = f"a group of {kind}: {interrupt(rng, partial(group.run, twice), total, PARALLEL)}"
    if group.closed:
        group.close()
        group = groups.group(kind)
    try:
        results = group.run(twice)
    except MlvmError as error:
        raise Wrong(f"{place}: {error}") from error
    require(results == [2 * rank for rank in range(group.size)], f"{place}: {results}")
    return f"group of {kind}"


def try_close(rng: random.Random) -> str:
    """Interrupt the end of a group; raise `Wrong` if another `close` leaves threads."""
    threads = {*threading.enumerate()}
    with Group(2) as group:
        group.run(twice)
        total = lines_run(group.close, PARALLEL)
    group = Group(2)
    place = f"close: {interrupt(rng, group.close, total, PARALLEL)}"
    group.close()
    require({*threading.enumerate()} <= threads, f"{place}: threads after close")
    return "close of a group"


# --- remote VMs -----------------------------------------------------------------------


class RemoteCalls:
    """Calls on a VM of a server."""

    def __init__(self, vm: RemoteVM) -> None:
        self.vm = vm
        self.written: dict[int, float] = {}  # the values of tensors, by their handles

    def alloc(self) -> None:
        handle = put(self.vm, np.full(3, 2.0, np.float32))
        self.written[handle] = 2.0

    def read(self) -> None:
        for handle, value in self.written.items():
            result = self.vm.read(handle).tolist()
            require(result == [value] * 3, f"read {result}, not {value}")

    def launch(self) -> None:
        for handle in self.written:
            value = self.written.pop(handle)  # neither the old one nor the new one is known
            self.vm.launch(_ADD_INTO, [handle, handle, handle])
            self.written[handle] = 2 * value
            break

    def outputs(self) -> None:
        for handle, value in self.written.items():
            [result] = self.vm.launch(_ADD, [handle, handle])
            require(result.tolist() == [2 * value] * 3, f"launch returned {result}")

    def dealloc(self) -> None:
        if self.written:
            self.vm.dealloc_tensor(self.written.popitem()[0])

    def size(self) -> None:
        self.vm.consumed_size_in_mib()


def try_remote(rng: random.Random, server: Server) -> str:
    """Interrupt calls on a remote VM; raise `Wrong` if it neither computes nor says that its
    connection is lost."""
    names = ["alloc", *[rng.choice(_REMOTE_CALLS) for _ in range(rng.randint(1, 8))]]

    def run(calls: RemoteCalls) -> None:
        for name in names:
            getattr(calls, name)()

    threads = threading.active_count()
    with connect(str(server.address), secret=_SECRET) as vm:
        total = lines_run(partial(run, RemoteCalls(vm)), REMOTE)
    with connect(str(server.address), secret=_SECRET) as vm:
        calls = RemoteCalls(vm)
        place = f"{names}: {interrupt(rng, partial(run, calls), total, REMOTE)}"
        try:
            for name in ("read", "alloc", "launch", "outputs", "read", "size", "dealloc"):
                getattr(calls, name)()
        except ConnectionLost:
            place = ""
        except (MlvmError, Wrong) as error:
            raise Wrong(f"{place}: {error}") from error
    until = time.monotonic() + SECONDS / 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(1e-3)  # the server's threads for the two connections end
    return "remote VM" if place else "remote VM, lost"


# --- all ------------------------------------------------------------------------------


def try_program(seed: int, number: int, groups: Groups, server: Server) -> str:
    """Try the program of that number; return its kind. Raises `Wrong`."""
    rng = random.Random(f"interrupts:{seed}:{number}")
    if number % PROCESSES == 0 and os.name == "posix":
        return try_group(rng, groups, "processes")
    kind = rng.random()
    if kind < 0.6:
        return try_queue(rng)
    if kind < 0.85:
        return try_pipeline(rng)
    if kind < 0.9:
        return try_remote(rng, server)
    return try_close(rng) if kind < 0.92 else try_group(rng, groups, rng.choice("12"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(memory=0)


def fuzz(
    programs: int, seed: int, first: int = 0, until: str | None = None
) -> tuple[Outcomes, str | None]:
    """Try the given number of programs; return how many of each kind, and what was wrong. With
    `until` the first failure with this text is the last."""
    groups = Groups()

    def attempt(number: int) -> str:
        with time_limit(SECONDS):
            return try_program(seed, number, groups, server)

    with Server("127.0.0.1:0", secret=_SECRET) as server:
        try:
            return outcomes_of(range(first, first + programs), attempt, until)
        finally:
            groups.close()
