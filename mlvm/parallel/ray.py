"""Groups of Ray actors, on the hosts of its cluster.

Each actor is a process with a VM. The actors communicate by TCP, as in `mlvm.parallel.tcp`; the
program that created the group sends tasks and receives results.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from mlvm.core.errors import GroupError, brief
from mlvm.core.extras import extra
from mlvm.machines.failure import Failure
from mlvm.machines.local import LocalVM
from mlvm.parallel.group import AnyGroup, Task, checked_timeout, name_of, one_at_a_time
from mlvm.parallel.outcome import Outcome, results_of
from mlvm.parallel.tcp import TcpGroup

R = TypeVar("R")

_GRACE: Final = 3.0
"""Seconds that the others have to end when a member has died or was late."""


class RayGroup(AnyGroup):
    """Group of `size` Ray actors, each with a VM. Each has one processor; `options` are those of
    `ray.remote`. Ray is started here, unless the program has connected to a cluster with
    `ray.init`.

    Tasks and results are pickled by Ray's cloudpickle. The actors share a generated secret, and
    communicate by TCP. An actor that dies or is late ends the others and the group. No member waits
    for another longer than `timeout` seconds at a stretch.

    Raises `MissingExtra` without ray; `GroupError` if the size is invalid.

    Refuses:
        ml.parallel.RayGroup(0)  # GroupError
    """

    def __init__(self, size: int, *, timeout: float | None = None, **options: Any) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise GroupError(f"a group has 1 or more actors, not {brief(size)}")
        self.timeout = checked_timeout(timeout)
        self._ray = ray = extra("ray", "ray")
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(size)])
        if not ray.is_initialized():
            ray.init()
        actor = ray.remote(**{"num_cpus": 1, **options})(_Actor)
        self._actors: list[Any] = [actor.remote() for _ in range(size)]
        try:
            address = ray.get(self._actors[0].address.remote())
            secret = secrets.token_urlsafe(32)
            joined = [
                each.join.remote(rank, size, address, secret, timeout)
                for rank, each in enumerate(self._actors)
            ]
            ray.get(joined)
        except BaseException:
            self.close()
            raise

    @one_at_a_time
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        ray = self._ray
        outcomes: dict[int, Outcome] = {}
        dead: GroupError | None = None
        is_over = True  # if Ctrl-C ends the run, too
        try:
            calls = {
                actor.do.remote(task): rank
                for rank, (actor, task) in enumerate(zip(self._actors, tasks, strict=True))
            }
            missing, seconds, any_over = list(calls), None, False
            while missing:
                ready, missing = ray.wait(missing, timeout=seconds)
                if not ready:
                    break
                for call in ready:
                    rank = calls[call]
                    try:
                        outcomes[rank], closed = ray.get(call)
                        any_over |= closed
                    except ray.exceptions.RayError as error:
                        text = str(error).strip().partition("\n")[0]
                        dead = dead or GroupError(f"{self._names[rank]} has died: {text}")
                if dead is not None or any_over:
                    seconds = _GRACE
            is_over = dead is not None or any_over
        finally:
            if is_over:
                self.close()
        if dead is not None:
            raise dead
        return results_of(outcomes, self._names)

    def close(self) -> None:
        """End the actors. Idempotent."""
        self._closed = True
        actors, self._actors = self._actors, []
        for each in actors:
            self._ray.kill(each)


class _Actor:
    """A member, in its own process."""

    def __init__(self) -> None:
        self._group: TcpGroup | None = None

    def address(self) -> str:
        """Return a free address of this host."""
        host = extra("ray", "ray").util.get_node_ip_address()
        with socket.create_server(("", 0)) as server:
            return f"{host}:{server.getsockname()[1]}"

    def join(self, rank: int, size: int, address: str, secret: str, timeout: float | None) -> None:
        self._group = TcpGroup(rank, size, address, secret=secret, timeout=timeout)

    def do(self, task: Task[Any]) -> tuple[Outcome, bool]:
        """Run a task; return its outcome, and whether the group has ended."""
        assert self._group is not None  # the first call is `join`
        done: list[Any] = []
        failed: list[BaseException] = []

        def alone(rank: int, vm: LocalVM) -> None:  # the others need not know what it returns
            try:
                done.append(task(rank, vm))
            except BaseException as error:
                failed.append(error)
                raise

        try:
            self._group.run(alone)
        except Exception as error:
            return Outcome(None, Failure.of(error), error in failed), self._group.closed
        return Outcome(done[0]), False
