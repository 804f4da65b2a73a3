"""Pools and the processes and VMs that have them: forks, ends, and threads that sleep."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

import mlvm.eager as ml
from mlvm.core.program.program import Program
from mlvm.machines.local import LocalVM as VM
from mlvm.machines.native import extension
from tests.brief import cases, run_python
from tests.core.programs import put
from tests.threads import PATIENCE, in_child, start

pytestmark = [
    pytest.mark.skipif(extension.EXTENSION is None, reason=extension.REASON),
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="says nothing of threads"),
    pytest.mark.skipif("TSAN_OPTIONS" in os.environ, reason="it has threads, and forbids forks"),
]

MATMUL = Program.of_op("matmul.out", 3, {}, 0)
ASLEEP = 0.05
"""Seconds after which idle threads sleep, at the latest."""


def threads_of_process() -> set[str]:
    return {*os.listdir("/proc/self/task")}


@pytest.fixture(autouse=True)
def no_vms_of_other_tests() -> None:
    gc.collect()


def vm_at_work(threads: int = 3, *, pinned: bool = False) -> tuple[VM, list[int]]:
    """A VM whose threads have had something to do."""
    vm = VM(native=True, threads=threads, pinned=pinned)
    handles = [put(vm, np.ones((200, 200), np.float32)) for _ in range(3)]
    vm.launch(MATMUL, handles)
    return vm, handles


@cases("asleep", False, True)
def test_the_threads_end_with_their_vm(asleep: bool) -> None:
    before = threads_of_process()
    vm, _ = vm_at_work()
    assert len(threads_of_process() - before) == 2
    time.sleep(ASLEEP if asleep else 0)
    del vm
    gc.collect()
    assert threads_of_process() <= before  # those of other tests may have ended


def test_each_pinned_thread_has_a_processor() -> None:
    before = threads_of_process()
    pinned = vm_at_work(pinned=True)
    threads = threads_of_process() - before
    late = time.monotonic() + 20
    while (counts := [len(os.sched_getaffinity(int(each))) for each in threads]) != [1, 1]:
        assert time.monotonic() < late, counts  # a thread pins itself once it runs
    del pinned
    gc.collect()


def test_eager_calls_keep_no_threads() -> None:
    gc.collect()  # the VMs of other tests
    before = threads_of_process()
    for _ in range(3):
        vm = ml.VM(native=True, threads=3)
        arena = ml.Arena(vm, "arena")
        with arena.allocating():
            x = ml.ones((200, 200))
            for _ in range(3):
                x = (x + x) @ x
        arena.close()
        del x, arena, vm
    gc.collect()
    assert threads_of_process() <= before  # those of other tests may have ended


@cases("asleep", False, True)
def test_a_forked_process_has_threads_of_its_own(asleep: bool) -> None:
    vm, handles = vm_at_work()
    time.sleep(ASLEEP if asleep else 0)
    vms = [vm]

    def works() -> bool:
        for _ in range(2):
            vm.write(handles[0], np.zeros((200, 200), np.float32))
            vm.launch(MATMUL, handles)
        return len(threads_of_process()) == 3 and bool((vm.read(handles[0]) == 200).all())

    def works_in_its_child() -> bool:
        return works() and in_child(works) == 0 and works()

    def drops() -> bool:
        nonlocal vm
        vms.clear()
        del vm
        gc.collect()
        return True

    assert in_child(works_in_its_child) == 0
    assert in_child(drops) == 0
    vm.launch(MATMUL, handles)


def run_apart(text: str) -> None:
    """Run the text, with what is here, in a separate process, which must end well."""
    text = f"from {__name__} import *\n{text}"
    warnings = ["-W", "ignore::DeprecationWarning"]
    done = run_python(*warnings, "-c", text, OPENBLAS_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_process_works_on_while_other_threads_launch() -> None:
    run_apart("""
vm, handles = vm_at_work()
big = [put(vm, np.ones((700, 700), np.float32)) for _ in range(3)]
x = ml.ones((500, 500))
step = ml.capture(lambda x: ml.sum(x @ x @ x))
work = [lambda: vm.launch(MATMUL, big), lambda: x @ x, lambda: step(x)]
def forever(work):
    while True:
        work()
for each in work:
    each()
    threading.Thread(target=forever, args=(each,), daemon=True).start()
def works():
    for _ in range(2):
        vm.launch(MATMUL, handles)
        assert (vm.read(handles[0]) == 200).all()
        assert (ml.ones((500, 500)) @ x).numpy().max() == 500
        assert abs(float(step(x)) - 500.0**4) < 1e5
    return vm.depth == 0
for i in range(6):
    time.sleep(0.005 * i)
    assert in_child(works) == 0
""")


def test_no_signal_goes_to_the_threads_of_a_pool() -> None:
    run_apart("""
import signal
kept = vm_at_work()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for _ in range(10):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
""")


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="what is freed stays for a while")
def test_threads_that_the_system_does_not_grant_lose_no_memory() -> None:
    run_apart("""
import resource
def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
def started():
    vm, handles = vm_at_work(60)
    assert (vm.read(handles[0]) == 200).all()
    return len(threads_of_process())
assert started() == 60
gc.collect()
before = size()
resource.setrlimit(resource.RLIMIT_AS, (before + (200 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    assert 1 < started() < 60
    gc.collect()
    begun = time.monotonic()
    while size() - before >= 48 << 20:  # threads end in their own time; 40 MiB of stacks are kept
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
""")


def test_a_process_ends_whatever_its_pools_do() -> None:
    run_apart("""
kept = [vm_at_work() for _ in range(3)]
def forever(vm, handles):
    while True:
        vm.launch(MATMUL, handles)
for vm, handles in kept[:2]:
    threading.Thread(target=forever, args=(vm, handles), daemon=True).start()
time.sleep(0.1)
""")


def test_an_arena_that_only_another_thread_is_in_ends_in_a_forked_process() -> None:
    """The context of that thread ends before the locks that threads had are free."""
    vm, ready, end = VM(), threading.Barrier(2), threading.Event()

    def enter() -> None:
        ml.Arena(vm, "of a thread").hosting().__enter__()
        ml.ones(3)
        ready.wait()
        end.wait()

    def hold() -> None:
        with vm._lock:
            ready.wait()
            end.wait()

    for work in (enter, hold):
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    assert in_child(lambda: True) == 0
    end.set()


def test_no_thread_that_has_ended_is_inside_an_arena() -> None:
    arena, ready, end = ml.Arena(VM(), "a"), threading.Event(), threading.Event()

    def is_free() -> bool:
        with arena:
            return arena.used == 0

    def stay() -> None:
        with arena:
            ready.set()
            end.wait()

    start(arena.__enter__).result(PATIENCE)
    assert start(is_free).result(PATIENCE)
    assert is_free()
    staying = start(stay)
    ready.wait()
    assert in_child(is_free) == 0
    end.set()
    staying.result(PATIENCE)
