"""Ctrl-C before any line of a run: the group runs again, or is closed."""

from __future__ import annotations

import itertools
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlvm.core.vm import VM
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.outcome import Outcome
from mlvm.parallel.processes import ProcessGroup
from mlvm.parallel.ray import RayGroup
from mlvm.parallel.tcp import TcpGroup
from tests.brief import cases, with_long
from tests.interrupting import interrupted_at_line
from tests.parallel.joined import SECRET, free_address
from tests.parallel.test_group import blas_threads

pytest.importorskip("threadpoolctl")


def twice(rank: int, vm: VM) -> int:
    return 2 * rank


def tcp() -> AnyGroup:
    return TcpGroup(0, 1, free_address(), secret=SECRET)


class Actor:
    """Actor of a Ray that does each call at once."""

    def __init__(self, rank: int) -> None:
        self.do = SimpleNamespace(remote=lambda task: self.answer(task))
        self.rank = rank

    def answer(self, task: Any) -> tuple[Any, bool]:
        return Outcome(task(self.rank, VM())), False


def ray() -> AnyGroup:
    group = RayGroup.__new__(RayGroup)
    AnyGroup.__init__(group, ["rank 0"])
    group._ray = SimpleNamespace(
        is_initialized=lambda: False,
        put=lambda task: task,
        wait=lambda calls, timeout: (calls, []),
        get=lambda call: call,
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    group._actors = [Actor(0)]
    group.timeout = group._place = None
    group._attempt = group._restarts = 0
    group._folder, group._is_own = "", False
    return group


@pytest.mark.skipif(os.name != "posix", reason="starts processes as POSIX has them")
@cases("make, file, least",
    (partial(ProcessGroup, 1), "/parallel/processes.py", 5), (tcp, "/parallel/messages.py", 5),
    (ray, "/parallel/ray.py", 5), (partial(ProcessGroup, 1), "/parallel/group.py", 5),
    (partial(Group, 1), "/mlvm/parallel/", 21), (partial(Group, 2), "/mlvm/parallel/", 21),
)  # fmt: skip
def test_a_group_is_never_busy_for_ever(make: Any, file: str, least: int) -> None:
    """One of threads stays open."""
    before, group = blas_threads(), make()
    for n in itertools.count(1, with_long(3, 1)):
        reached = interrupted_at_line(partial(group.run, twice), n, file)
        if group.closed and type(group) is not Group:
            group.close()
            group = make()
        assert group.run(twice) == [2 * rank for rank in range(group.size)], n
        assert blas_threads() == before, n
        if not reached:
            break
    assert n >= least
    group.close()
