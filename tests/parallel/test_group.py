"""A group's runs: what they return, and that whatever goes wrong ends them with a clear error."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlvm.arena.arena import scope
from mlvm.core.collecting import uncollected
from mlvm.core.errors import GroupError, MissingExtraError, ShapeError, UnknownFunctionError
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel import blas
from mlvm.parallel.communicator import SMALL
from mlvm.parallel.group import Group
from mlvm.parallel.membership import member_of
from tests.brief import Patch, cases, output_of, refuses
from tests.parallel.members import Step, call, run, run_in
from tests.threads import wait_for

threadpoolctl = pytest.importorskip("threadpoolctl")

ONES = np.ones(4, np.float32)


def reduce(rank: int, vm: VM) -> Any:
    return call(vm, "all_reduce", ONES)[0].tolist()


def end(rank: int, vm: VM) -> None:
    pass


def boom(rank: int, vm: VM) -> None:
    raise ValueError("boom")


# --- runs ----------------------------------------------------------------------------


def test_results_come_by_rank_from_a_thread_each() -> None:
    def step(rank: int, vm: VM) -> tuple[int, str, int]:
        return rank, vm.name, threading.get_ident()

    with Group([VM("a"), VM("b"), VM("c")]) as group:
        first, second = group.run(step), group.run(step)
        assert group.size == 3
    assert [each[:2] for each in first] == [(0, "a"), (1, "b"), (2, "c")]
    assert first == second
    assert len({each[2] for each in first} | {threading.get_ident()}) == 4


def test_results_are_allocated_on_the_members_vm() -> None:
    def vm_of_scope(rank: int, vm: VM) -> bool:
        arena = scope()
        return arena is not None and arena.vm is vm

    assert run(2, vm_of_scope) == [True, True]


def test_groups_run_within_each_other() -> None:
    assert run(2, lambda rank, vm: run(2, reduce)) == [[[2.0] * 4] * 2] * 2


def test_a_group_has_one_run_at_a_time() -> None:
    with Group(2) as group:
        with pytest.raises(GroupError, match="one task at a time; still running: member 0"):
            group.run(lambda rank, vm: group.run(end) if rank == 0 else None)
        assert run_in(group, reduce) == [[2.0] * 4] * 2


# --- what goes wrong -----------------------------------------------------------------


@cases("length", 4, SMALL)
@cases("failing", 0, 1, 2)
def test_an_error_of_one_member_ends_the_others(failing: int, length: int) -> None:
    errors: dict[int, GroupError] = {}

    def step(rank: int, vm: VM) -> None:
        call(vm, "all_reduce", np.ones(length, np.float32))
        if rank == failing:
            raise ValueError("boom")
        try:
            call(vm, "all_reduce", np.ones(length, np.float32))
        except GroupError as error:
            errors[rank] = error
            raise

    with Group(3) as group:
        caught = refuses(ValueError, "boom", group.run, step)
        assert caught.__notes__ == [f"raised by member {failing} (vm{failing}) of a group of 3"]
        assert errors.keys() == {0, 1, 2} - {failing}
        for rank, error in errors.items():
            assert str(error).startswith(
                f"member {rank} (vm{rank}) gives up all_reduce(f32[{length}]"
            )
            assert f"member {failing} (vm{failing}) failed: ValueError: boom" in str(error)
        assert run_in(group, reduce) == [[3.0] * 4] * 3


@cases("step, error, text",
    (lambda rank, vm: sys.exit(3), SystemExit, ""),
    (lambda rank, vm: call(vm, "matmul", *[np.ones((2, 3))] * 2), ShapeError, "matmul"),
)  # fmt: skip
def test_any_error_of_a_member_ends_the_others(step: Step, error: Any, text: str) -> None:
    refuses(error, text, run, 2, reduce, step)


def calling(name: str, *arrays: Array, **attributes: Any) -> Step:
    """A step of one collective."""
    return lambda rank, vm: call(vm, name, *arrays, **attributes)


gather, barrier = calling("all_gather", ONES), calling("barrier")
STEPS: dict[str, Step] = {
    "reduce": reduce, "end": end, "gather": gather, "barrier": barrier,
    "other_op": calling("all_reduce", ONES, op="max"),
    "other_type": calling("all_reduce", np.ones(5, np.float32)),
    "other_dtype": calling("all_reduce", np.ones(4)),
    "several": calling("all_reduce", *[np.ones(n, np.float32) for n in range(9)]),
    "other_several": calling(
        "all_reduce", *[np.ones(n + (n == 7), np.float32) for n in range(9)]
    ),
    **{f"send_to_{rank}": calling("send", ONES, to=rank) for rank in range(2)},
    **{f"recv_from_{n}": calling("recv", source=n, shape=(4,), dtype="f32") for n in range(2)},
    "recv_5_from_1": calling("recv", source=1, shape=(5,), dtype="f32"),
}  # fmt: skip


def meetings() -> Iterator[tuple[tuple[Step, ...], list[str] | None]]:
    """The steps of members that cannot meet, and parts of the error; None where they can."""
    for line in Path(__file__).with_name("meetings.txt").read_text("utf-8").splitlines():
        if line and line[0] != "#":
            names, *texts = line.split(" | ")
            steps = tuple(STEPS[name] for name in names.split())
            yield steps, None if texts == ["they meet"] else texts


CANNOT_MEET = [*meetings()]


@pytest.mark.parametrize(("steps", "texts"), CANNOT_MEET)
def test_members_that_cannot_meet_raise(steps: tuple[Step, ...], texts: list[str] | None) -> None:
    with Group(len(steps)) as group:
        for _ in range(3):  # timing differs
            if texts is None:
                run_in(group, *steps)
                continue
            caught = refuses(GroupError, "", run_in, group, *steps)
            for text in texts:
                assert text in str(caught)
        assert run_in(group, reduce) == [[float(len(steps))] * 4] * len(steps)


def test_who_goes_on_after_an_error_meets_nobody() -> None:
    def step(rank: int, vm: VM) -> None:
        for _ in range(3):
            refuses(GroupError, "different collectives", reduce if rank else gather, rank, vm)

    refuses(GroupError, "different collectives", run, 2, step)


@cases("length", 4, SMALL)
def test_an_error_within_a_collective_ends_the_run(length: int, monkeypatch: Patch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no scratch")

    monkeypatch.setattr("mlvm.parallel.sharing.combine", fail)
    with pytest.raises(MemoryError, match="no scratch"):
        run(2, lambda rank, vm: call(vm, "all_reduce", np.ones(length, np.float32)))


def test_the_vm_of_another_member_is_refused() -> None:
    def step(rank: int, vm: VM) -> None:
        barrier(rank, vm)
        if rank == 0:
            reduce(rank, group.vms[1])
        else:
            time.sleep(0.2)

    with Group(2) as group, pytest.raises(GroupError, match="the thread of a different member"):
        group.run(step)


def test_an_error_keeps_no_tensor_alive() -> None:
    class Big:
        pass

    references: list[weakref.ref[Big]] = []

    def step(rank: int, vm: VM) -> None:
        big = Big()
        references.append(weakref.ref(big))
        raise ValueError("boom")

    with uncollected(), Group(1) as group:
        caught = refuses(ValueError, "boom", group.run, step)
        caught.__traceback__ = None
        del caught
        assert references[0]() is None


CTRL_C = """
import os, signal, sys, threading, time
import numpy as np
from mlvm.parallel.group import Group
from tests.parallel.members import call

def waits(rank, vm):
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return call(vm, "all_reduce", np.ones(3))
    while True:
        {other}

try:
    with Group(2) as group:
        group.run(waits)
except KeyboardInterrupt:
    print("interrupted")
    try:
        group.run(waits)
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@cases("other", "time.sleep(0.01)", "call(vm, 'square', np.ones(3))")
def test_ctrl_c_ends_a_run(other: str) -> None:
    output = output_of("-c", CTRL_C.replace("{other}", other))
    assert output.split() == ["interrupted", "GroupError"]


# --- groups --------------------------------------------------------------------------


def test_a_group_that_is_closed_gives_its_vms_back() -> None:
    vms = [VM("a"), VM("b")]
    threads = {*threading.enumerate()}
    for _ in range(2):
        group = Group(vms)
        refuses(GroupError, "a is already in a group", Group, [vms[0]])
        assert run_in(group, reduce) == [[2.0] * 4] * 2
        group.close()
        group.close()
        refuses(GroupError, "closed", group.run, end)
    assert {*threading.enumerate()} <= threads  # those of other tests may end
    assert member_of(vms[0]) is None
    refuses(UnknownFunctionError, "", reduce, 0, vms[0])
    assert [vm.consumed_size_in_mib() for vm in vms] == [0, 0]


def test_a_group_that_is_forgotten_ends_its_threads() -> None:
    threads = {*threading.enumerate()}
    group = Group(2)
    run_in(group, reduce)
    refuses(ValueError, "boom", group.run, boom)
    del group
    gc.collect()
    wait_for(lambda: {*threading.enumerate()} <= threads)


@cases("vms", 0, -1, True, None, "ab", [], [object()], ["a"])
def test_what_is_no_group_is_refused(vms: Any) -> None:
    refuses(GroupError, "", Group, vms)


def test_a_vm_twice_or_with_such_a_function_is_refused() -> None:
    vm = VM("own")
    refuses(GroupError, "expected distinct VMs", Group, [vm, vm])
    vm.register("send", lambda frame: None)
    refuses(GroupError, "own already has a function 'send'", Group, [vm])


def blas_threads() -> set[int]:
    pools = threadpoolctl.threadpool_info()
    return {each["num_threads"] for each in pools if each["user_api"] == "blas"}


def test_blas_has_one_thread_while_any_group_runs() -> None:
    before = blas_threads()

    def step(rank: int, vm: VM) -> set[int]:
        run(1, end)
        return blas_threads()

    with threadpoolctl.threadpool_limits(2):
        assert run(2, step) == [{1}, {1}]
        assert blas_threads() == {2}
        refuses(ValueError, "boom", run, 2, boom)
        assert blas_threads() == {2}
    assert blas_threads() == before


def test_without_threadpoolctl_the_error_names_the_extra(monkeypatch: Patch) -> None:
    def missing(module: str, name: str) -> Any:
        raise MissingExtraError(f'{module} is not installed: pip install "mlvm[{name}]"')

    monkeypatch.setattr(blas, "extra", missing)
    vm = VM("a")
    refuses(MissingExtraError, r'threadpoolctl is not .* "mlvm\[parallel\]"', Group, [vm])
    assert member_of(vm) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_threads_stay_on_their_cores() -> None:
    there = os.sched_getaffinity(0)
    core = min(there)
    with Group(2, cores=[core, core]) as group:
        assert group.run(lambda rank, vm: os.sched_getaffinity(0)) == [{core}, {core}]
    assert os.sched_getaffinity(0) == there
    for cores in ([core], [core, max(there) + 1], [core, "x"]):
        refuses(GroupError, "expected one core of .* for each of 2 members", Group, 2, cores=cores)  # type: ignore[arg-type]


def test_elsewhere_threads_cannot_be_pinned(monkeypatch: Patch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    refuses(GroupError, "cannot pin a thread to a core", Group, 1, cores=[0])
