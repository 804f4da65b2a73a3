"""Groups of Ray actors, on the hosts of its cluster.

Each actor is a process with a VM. The actors communicate by TCP, as in `mlvm.parallel.tcp`; the
program that created the group sends tasks and receives results.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from mlvm.core.errors import GroupError, GroupTimeout, MlvmError, brief
from mlvm.core.extras import extra
from mlvm.machines.failure import Failure
from mlvm.machines.local import LocalVM
from mlvm.parallel.group import (
    AnyGroup,
    Task,
    checked_timeout,
    cores_here,
    name_of,
    one_at_a_time,
)
from mlvm.parallel.outcome import Outcome, results_of
from mlvm.parallel.tcp import TcpGroup

R = TypeVar("R")

_MOST_STARTS: Final = 6  # of new actors, each a second later than the one before
_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_MOST_CAUSE: Final = 500  # characters of Ray's cause of a death

_GRACE: Final = 3.0
"""Seconds that the others have to end when a member has died or was late."""


class RayGroup(AnyGroup):
    """Group of `size` Ray actors, each with a VM. If the program has not connected to a cluster by
    `ray.init`, the group starts Ray, and stops it in `close`.

    `options` are those of `ray.remote`: `num_cpus` (1 by default; less on a host with fewer
    processors than actors), `num_gpus`, `resources`, `runtime_env`, ... A placement group with this
    `strategy` reserves them for all actors: "PACK" on few hosts, "SPREAD" on many, "STRICT_PACK" on
    one host, "STRICT_SPREAD" on `size` hosts.

    Tasks and results are pickled by Ray's cloudpickle; all actors share one copy of a task. The
    actors communicate by TCP, with a generated secret. No member waits for another longer than
    `timeout` seconds at a stretch, and `run` waits no longer for the others once one has ended. The
    group waits `timeout` seconds for its resources, and `start` seconds for its actors.

    An actor that dies or is late ends the others and the group, with an error that has Ray's cause.
    With `restarts`, all actors are started again, up to so many times, and `run` repeats its
    function, which resumes from its last checkpoint. Functions that were kept end with the actors:
    their calls raise the error, and `keep` makes new ones. MLVM_RESTARTS is the number of earlier
    starts in the environment of an actor.

    All actors have the same versions of mlvm, its kernels and numpy, unless `mixed=True`.

    Raises `MissingExtra` without ray; `GroupError` if the size or an option is invalid, or the
    cluster has not the resources; `GroupTimeout` if they are in use, or the actors do not start.

    Refuses:
        ml.parallel.RayGroup(0)  # GroupError
        ml.parallel.RayGroup(1, strategy="pack")  # GroupError
        ml.parallel.RayGroup(1, restarts=-1)  # GroupError
    """

    def __init__(
        self,
        size: int,
        *,
        timeout: float | None = None,
        start: float = 300.0,
        strategy: str = "PACK",
        restarts: int = 0,
        mixed: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise GroupError(f"a group has 1 or more actors, not {brief(size)}")
        if strategy not in _STRATEGIES:
            raise GroupError(f"strategy=: expected one of {_STRATEGIES}, got {brief(strategy)}")
        if not isinstance(restarts, int) or restarts < 0:
            raise GroupError(f"restarts=: expected a number >= 0, got {brief(restarts)}")
        if not isinstance(mixed, bool):
            raise GroupError(f"mixed=: expected True or False, got {brief(mixed)}")
        self.timeout = checked_timeout(timeout)
        self._start = checked_timeout(start, "start") or math.inf
        self._restarts = restarts
        self._mixed = mixed
        self._attempt = 0
        self._actors: list[Any] = []
        self._place: Any = None
        self._folder = ""  # of Ray's logs and sockets, if it is started here
        self._ray = ray = extra("ray", "ray")
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(size)])
        self._is_own = not ray.is_initialized()
        self._is_alone = self._is_own and not os.environ.get("RAY_ADDRESS")
        share = math.floor(1e4 * cores_here() / size) / 1e4  # Ray counts in these parts
        self._options = {"num_cpus": min(share, 1) if self._is_alone else 1, **options}
        self._member = self._checked_actor()
        try:
            if self._is_own:
                self._start_ray()
            self._reserve(strategy)
            self._start_actors()
        except BaseException:
            self.close()
            raise

    # --- the cluster ---

    def _checked_actor(self) -> Any:
        """Return the class of the actors.

        Raises `GroupError` for options that Ray does not take, and for more processors than this
        host has, if Ray is to be started here.
        """
        try:
            actor = self._ray.remote(**self._options)(_Actor)
            needs = self._needs(self.size)
        except (TypeError, ValueError, ArithmeticError) as error:
            first = str(error).partition("\n")[0]
            raise GroupError(f"RayGroup: these are no options of an actor: {first}") from None
        there = {**needs, "CPU": float(cores_here())}
        if self._is_alone and needs.get("CPU", 0) > there["CPU"]:
            raise GroupError(self._lack("this host has", there))
        return actor

    def _needs(self, actors: int) -> dict[str, float]:
        """Return the resources that so many actors need, by Ray's names."""
        options = self._options
        named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus")}
        named |= {"memory": options.get("memory"), **(options.get("resources") or {})}
        return {name: float(amount) * actors for name, amount in named.items() if amount}

    def _start_ray(self) -> None:
        """Connect to the cluster that RAY_ADDRESS names, or start one on this host's processors."""
        if not self._is_alone:
            self._ray.init()
            return
        processors = cores_here()
        self._folder = tempfile.mkdtemp(prefix="ray-")  # short, as the names of sockets are
        self._ray.init(num_cpus=processors, include_dashboard=False, _temp_dir=self._folder)

    def _reserve(self, strategy: str) -> None:
        """Reserve the resources of all actors. Raises `GroupError` if the cluster does not have
        them, and `GroupTimeout` if they do not become free."""
        needs, there = self._needs(self.size), self._ray.cluster_resources()
        if any(there.get(name, 0) < amount for name, amount in needs.items()):
            raise GroupError(self._lack("the cluster has", there))
        if not needs:
            return
        placing = extra("ray.util.placement_group", "ray")
        self._place = placing.placement_group([self._needs(1)] * self.size, strategy=strategy)
        seconds = self._start if self.timeout is None else self.timeout
        if not self._place.wait(seconds):
            free = self._ray.available_resources()
            text = self._lack(f"after {seconds:g} s the cluster has free", free)
            raise GroupTimeout(f"{text}, and the strategy is {strategy}")

    def _lack(self, who: str, there: Mapping[str, float]) -> str:
        needs = self._needs(self.size)
        asked = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        shown = ", ".join(f"{there.get(name, 0):g} {name}" for name in needs)
        return f"{self.size} actors need {asked}; {who} {shown}"

    # --- the actors ---

    def _start_actors(self) -> None:
        """Start the actors, and have them join."""
        until = time.monotonic() + self._start
        for rank in range(self.size):
            bundle = {}
            if self._place is not None:
                scheduling = extra("ray.util.scheduling_strategies", "ray")
                bundle["scheduling_strategy"] = scheduling.PlacementGroupSchedulingStrategy(
                    self._place, placement_group_bundle_index=rank
                )
            self._actors.append(self._member.options(**bundle).remote())
        [address] = self._started([self._actors[0].address.remote()], until)
        secret = secrets.token_urlsafe(32)
        rest = self.size, address, secret, self.timeout, self._start, self._attempt, self._mixed
        joined = [each.join.remote(rank, *rest) for rank, each in enumerate(self._actors)]
        self._started(joined, until)

    def _started(self, calls: Sequence[Any], until: float) -> list[Any]:
        """Return the results of the actors' first calls. Raises `GroupError` if one dies, and
        `GroupTimeout`."""
        errors = self._ray.exceptions
        try:
            results: list[Any] = self._ray.get(
                list(calls), timeout=max(until - time.monotonic(), 0.01)
            )
        except errors.GetTimeoutError:
            missing = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[1]
            names = ", ".join(self._names[calls.index(each)] for each in missing)
            raise GroupTimeout(f"{names} did not start within {self._start:g} s") from None
        except errors.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, MlvmError) else GroupError(str(error)) from None
        except errors.RayError as error:
            raise GroupError(f"an actor has died as it started: {_cause(error)}") from None
        return results

    def run(self, fn: Task[R]) -> list[R]:
        """See `AnyGroup.run`. If the actors were started again, the function is repeated."""
        while True:
            attempt = self._attempt
            try:
                return super().run(fn)
            except GroupError as error:
                if self._attempt == attempt or self._closed:
                    raise
                print(f"RayGroup: {error}; all actors were started again", file=sys.stderr)

    @one_at_a_time
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        ray = self._ray
        outcomes: dict[int, Outcome] = {}
        dead: GroupError | None = None
        is_over = True  # if Ctrl-C ends the run, too
        try:
            same = all(task is tasks[0] for task in tasks)
            passed = [ray.put(tasks[0])] * self.size if same else tasks
            calls = {
                actor.do.remote(task): rank
                for rank, (actor, task) in enumerate(zip(self._actors, passed, strict=True))
            }
            missing, any_over = list(calls), False
            while missing:
                seconds = self.timeout if outcomes else None
                if dead is not None or any_over:
                    seconds = _GRACE
                elif seconds is not None:
                    seconds += _GRACE  # the actors notice it first
                ready, missing = ray.wait(missing, timeout=seconds)
                if not ready:
                    names = ", ".join(self._names[calls[each]] for each in missing)
                    late = GroupTimeout(f"{seconds:g} s have been waited for the end of {names}")
                    dead = dead or (None if any_over else late)
                    break
                for call in ready:
                    rank = calls[call]
                    try:
                        outcomes[rank], closed = ray.get(call)
                        any_over |= closed
                    except ray.exceptions.RayError as error:
                        text = f"{self._names[rank]} has died: {_cause(error)}"
                        dead = dead or GroupError(text)
            is_over = dead is not None or any_over
        finally:
            if is_over:
                self._go_on_or_close()
        if dead is not None:
            raise dead
        return results_of(outcomes, self._names)

    def _go_on_or_close(self) -> None:
        """Start all actors again, if they may be, and else close the group."""
        if self._attempt == self._restarts or isinstance(sys.exc_info()[1], BaseException):
            self.close()
            return
        self._attempt += 1
        for pause in range(_MOST_STARTS):
            try:
                self._stop_actors()
                time.sleep(pause)
                self._start_actors()
                return
            except GroupError:  # Ray may not know yet that a node is dead, and use it
                if pause == _MOST_STARTS - 1:
                    self.close()
                    raise
            except BaseException:
                self.close()
                raise

    def _stop_actors(self) -> None:
        actors, self._actors = self._actors, []
        for each in actors:
            self._ray.kill(each)

    def close(self) -> None:
        """Stop what the group has started: its actors, their placement group, and Ray itself if the
        program has not connected to a cluster. Idempotent."""
        self._closed = True
        if not self._ray.is_initialized():
            return
        self._stop_actors()
        place, self._place = self._place, None
        if place is not None:
            extra("ray.util.placement_group", "ray").remove_placement_group(place)
        if self._is_own:
            self._is_own = False
            self._ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _cause(error: Exception) -> str:
    """Return Ray's cause of a death: its sentences, without the table of the actor's numbers."""
    lines = str(error).splitlines()
    text = " ".join(line.strip() for line in lines if line.strip() and not line.startswith("\t"))
    return text if len(text) <= _MOST_CAUSE else f"{text[:_MOST_CAUSE]}..."


class _Actor:
    """A member, in its own process."""

    def __init__(self) -> None:
        self._group: TcpGroup | None = None

    def address(self) -> str:
        """Return a free address of this host."""
        host = extra("ray", "ray").util.get_node_ip_address()
        with socket.create_server(("", 0)) as server:
            return f"{host}:{server.getsockname()[1]}"

    def join(
        self,
        rank: int,
        size: int,
        address: str,
        secret: str,
        timeout: float | None,
        start: float,
        attempt: int,
        mixed: bool,
    ) -> None:
        os.environ["MLVM_RESTARTS"] = str(attempt)
        self._group = TcpGroup(
            rank, size, address, secret=secret, timeout=timeout, start=start, mixed=mixed
        )

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
