"""Ctrl-C before any line of a run: the group runs again, or is closed."""

from __future__ import annotations

import itertools
import os
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlvm.core.vm import VM
from mlvm.parallel.group import AnyGroup
from tests.brief import cases, with_long
from tests.interrupting import interrupted_at_line

pytest.importorskip("threadpoolctl")


def twice(rank: int, vm: VM) -> int:
    return 2 * rank


def processes() -> AnyGroup:
    from mlvm.parallel.processes import ProcessGroup

    return ProcessGroup(1)


def tcp() -> AnyGroup:
    from mlvm.parallel.tcp import TcpGroup

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return TcpGroup(0, 1, f"127.0.0.1:{port}", secret="a secret of a test")


class Actor:
    """Actor of a Ray that does each call at once."""

    def __init__(self, rank: int) -> None:
        self.do = SimpleNamespace(remote=lambda task: self.answer(task))
        self.rank = rank

    def answer(self, task: Any) -> tuple[Any, bool]:
        from mlvm.parallel.outcome import Outcome

        return Outcome(task(self.rank, VM())), False


def ray() -> AnyGroup:
    from mlvm.parallel.ray import RayGroup

    group = RayGroup.__new__(RayGroup)
    AnyGroup.__init__(group, ["rank 0"])
    group._ray = SimpleNamespace(
        wait=lambda calls, timeout: (calls, []),
        get=lambda call: call,
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    group._actors = [Actor(0)]
    return group


@pytest.mark.skipif(os.name != "posix", reason="starts processes as POSIX has them")
@cases("make, file",
    (processes, "/parallel/processes.py"), (tcp, "/parallel/messages.py"),
    (ray, "/parallel/ray.py"), (processes, "/parallel/group.py"),
)  # fmt: skip
def test_a_group_is_never_busy_for_ever(make: Any, file: str) -> None:
    group = make()
    for n in itertools.count(1, with_long(3, 1)):
        reached = interrupted_at_line(partial(group.run, twice), n, file)
        if group.closed:
            group.close()
            group = make()
        assert group.run(twice) == [0], n
        if not reached:
            break
    assert n > 4
    group.close()
