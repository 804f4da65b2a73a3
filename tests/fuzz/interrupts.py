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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.arena.arena import Arena
from mlvm.core.errors import (
    ConnectionLostError,
    GroupError,
    MlvmError,
    QueueClosedError,
    QueueEmptyError,
    QueueFullError,
    UnknownFunctionError,
)
from mlvm.core.program.program import Program
from mlvm.input.pipeline import Pipeline
from mlvm.input.queue import QueueTensor
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.remote.client import RemoteVM
from mlvm.machines.remote.connect import connect
from mlvm.machines.remote.server import Server
from mlvm.machines.wire import WireVM
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.membership import member_of
from mlvm.parallel.processes import ProcessGroup
from tests.core.programs import put
from tests.fuzz.command import Outcomes, Wrong, outcomes_of
from tests.fuzz.trying import time_limit
from tests.input.datasets import Numbers
from tests.interrupting import lines_run
from tests.parallel.members import call

INPUT: Final = "/mlvm/input/"
PARALLEL: Final = "/mlvm/parallel/"
REMOTE: Final = "/mlvm/machines/remote/"
SECONDS: Final = 60
"""For one program; more counts as a hang."""

_SECRET: Final = "between interrupts"
_ADD: Final = Program.of_op("add", 2, {}, 1)
_ADD_INTO: Final = Program.of_op("add.out", 3, {}, 0)
_REMOTE_CALLS: Final = ("alloc", "read", "launch", "outputs", "dealloc", "size")

PROCESSES: Final = 50
"""One program in so many runs in a process."""


def require(condition: object, text: str) -> None:
    """Raise `Wrong` unless the condition is true."""
    if not condition:
        raise Wrong(text)


Trial: TypeAlias = Callable[[], AbstractContextManager[Callable[[], Any]]]
"""A block with calls to interrupt in it, at whose end `Wrong` is raised for what they have left."""


def lines_interrupted(trial: Trial, folder: str, places: Sequence[int]) -> list[int]:
    """Run the trial's calls for each place, with Ctrl-C before that line; return how many lines ran
    each time."""
    try:
        with trial() as calls:
            return [lines_run(calls, folder, n) for n in places]
    except (MlvmError, Wrong) as error:
        raise Wrong(f"{trial}, lines {places}: {error}") from error


def interrupt(rng: random.Random, trial: Trial, folder: str, again: float = 0.0) -> None:
    """Run the trial's calls, with Ctrl-C before one of their lines; at times twice."""
    [total] = lines_interrupted(trial, folder, [0])
    places = [rng.randint(1, max(total, 1)) for _ in range(1 + (rng.random() < again))]
    lines_interrupted(trial, folder, places)


def interrupt_each(trial: Trial, folder: str, step: int = 1) -> int:
    """Run the trial's calls with Ctrl-C before each of their lines, or one of `step`; return the
    number of the last."""
    n = 1
    while lines_interrupted(trial, folder, [n])[0] >= n:
        n += step
    return n


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
        self.queue.cancel(QueueClosedError("cancelled"))


_CALLS: Final = (
    *("put", "put", "put", "reserve", "reserve", "cancels", "drops", "fails", "get", "get"),
    *("keep", "keep", "forget", "inside"),
)


@contextmanager
def queue(
    names: Sequence[str], maxsize: int = 2, *, is_far: bool = False, **options: Any
) -> Iterator[Callable[[], None]]:
    """Calls on a queue: no slot is lost, and elements come in order."""
    vm: Any = WireVM(VM()) if is_far else VM()
    calls = QueueCalls(QueueTensor(vm, ["f32[3]", "i64[]"], maxsize, **options))

    def run() -> None:
        for name in names:
            with suppress(QueueEmptyError, QueueFullError, QueueClosedError):
                getattr(calls, name)()

    yield run
    calls.lent.clear()
    queue = calls.queue
    was_closed = queue.closed
    for _ in range(maxsize + 1):  # elements of a cancelled queue go one by one
        with suppress(QueueEmptyError, QueueClosedError):
            calls.get()
    order = calls.elements
    require(order == sorted(set(order)), f"elements {order}")
    state = queue.arena.free_slots(), queue.arena.used, queue.arena.live()
    require(state == (maxsize, 0, []), f"free slots, bytes and tensors are {state}")
    require(queue.closed == was_closed, "closed by get")
    if not was_closed:
        for _ in range(maxsize):
            queue.put(calls.value(), 0)
        require(queue.full(), "a slot is there twice")
        for _ in range(maxsize):
            calls.get()
    queue.close()
    with suppress(QueueClosedError):
        queue.get()
        raise Wrong("a closed queue has an element")


def drawn_queue(rng: random.Random) -> Trial:
    """Draw a queue and the names of its calls."""
    maxsize, is_far = rng.randint(1, 3), rng.random() < 0.2
    options: Any = {"single_threaded": rng.random() < 0.4, "shared": rng.random() < 0.1}
    names = [rng.choice(_CALLS) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.15:
        names.insert(rng.randrange(len(names) + 1), rng.choice(["end", "cancel"]))
    return partial(queue, names, maxsize, is_far=is_far, **options)


# --- pipelines ------------------------------------------------------------------------


def first_values(batches: Pipeline[Any], count: int) -> list[int]:
    """Return the first sample of each of the next batches."""
    numbers = []
    for _ in range(count):
        tensors = batches.get()  # a worker fills their slot as soon as they are gone
        numbers.append(int(batches._vm.read(tensors[1].handle)[0]))
    return numbers


def new_pipeline(workers: int) -> Pipeline[Any]:
    options: Any = {"shuffle": True, "seed": 7, "epochs": None, "workers": workers}
    return Pipeline(Numbers(), 5, vm=VM(), **options)


@cache
def all_values() -> list[int]:
    with new_pipeline(0) as batches:
        return first_values(batches, 16)


@contextmanager
def pipeline(names: Sequence[str], workers: int, count: int) -> Iterator[Callable[[], None]]:
    """Calls on a pipeline after `count` batches: no batch is skipped or comes twice, and no thread
    stays."""
    whole, threads = all_values(), {*threading.enumerate()}
    with new_pipeline(workers) as batches:
        first_values(batches, count)

        def run() -> None:
            for name in names:
                if name == "for":
                    for _ in batches:
                        break
                else:
                    getattr(batches, name)()

        yield run
        if not batches._closed:
            state = batches.state()
            at = state["epoch"] * 5 + state["next_index"] // 5
            numbers = first_values(batches, 3)
            require(numbers == whole[at : at + 3], f"{numbers} at {at}")
            now = len({*threading.enumerate()} - threads)
            require(now == workers, f"{now} threads")
    require({*threading.enumerate()} <= threads, "threads after close")


def drawn_pipeline(rng: random.Random) -> Trial:
    """Draw a pipeline that begins, goes on or ends."""
    workers, count = rng.randint(0, 3), rng.randrange(3)
    names = [rng.choice(["get", "get", "peek", "state", "for"]) for _ in range(rng.randint(1, 3))]
    return partial(pipeline, [*names, *rng.choice([[], ["close"]])], workers, count)


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


@contextmanager
def run_of(groups: Groups, kind: str) -> Iterator[Callable[[], Any]]:
    """A run of a group: it runs again, or is closed."""
    group = groups.group(kind)
    yield partial(group.run, twice)
    if group.closed:
        group.close()
        group = groups.group(kind)
    results = group.run(twice)
    require(results == [2 * rank for rank in range(group.size)], f"{results}")


@contextmanager
def end_of_group() -> Iterator[Callable[[], None]]:
    """The end of a group: another `close` leaves no thread, and gives the VMs back."""
    vms, threads = [VM("a"), VM("b")], {*threading.enumerate()}
    group = Group(vms)
    group.run(twice)
    yield group.close
    group.close()
    require({*threading.enumerate()} <= threads, "threads after close")
    require(member_of(vms[0]) is None, "a VM is a member after close")
    with suppress(GroupError):
        group.run(twice)
        raise Wrong("a closed group runs")
    with suppress(UnknownFunctionError):
        call(vms[0], "barrier")
        raise Wrong("a VM has the functions of a group that was closed")


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


@contextmanager
def remote(server: Server, names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Calls on a remote VM: it computes, or says that its connection is lost."""
    with connect(str(server.address), secret=_SECRET) as vm:
        calls = RemoteCalls(vm)

        def run(names: Sequence[str] = names) -> None:
            for name in names:
                getattr(calls, name)()

        yield run
        with suppress(ConnectionLostError):
            run(["read", "alloc", "launch", "outputs", "read", "size", "dealloc"])


# --- all ------------------------------------------------------------------------------


def try_program(seed: int, number: int, groups: Groups, server: Server) -> str:
    """Try the program of that number; return its kind. Raises `Wrong`."""
    rng = random.Random(f"interrupts:{seed}:{number}")
    kind = rng.random()
    if number % PROCESSES == 0 and os.name == "posix":
        interrupt(rng, partial(run_of, groups, "processes"), PARALLEL)
        return "group of processes"
    if kind < 0.6:
        interrupt(rng, drawn_queue(rng), INPUT, again=0.3)
        return "queue"
    if kind < 0.85:
        interrupt(rng, drawn_pipeline(rng), INPUT)
        return "pipeline"
    if kind < 0.9:
        names = ["alloc", *[rng.choice(_REMOTE_CALLS) for _ in range(rng.randint(1, 8))]]
        interrupt(rng, partial(remote, server, names), REMOTE)
        return "remote VM"
    if kind < 0.92:
        interrupt(rng, end_of_group, PARALLEL)
        return "end of a group"
    size = rng.choice("12")
    interrupt(rng, partial(run_of, groups, size), PARALLEL)
    return f"group of {size}"


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
