"""Group of Ray actors, on the hosts of a cluster.

Each actor is a process with a VM. The actors communicate by TCP (`mlvm.parallel.tcp`). The program
that created the group sends tasks and receives results.
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

from mlvm.core.errors import GroupError, GroupTimeoutError, MlvmError, brief, shortened
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

_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_GRACE: Final = 3.0
"""Seconds that the members have to finish after a member has died or was late."""


class RayGroup(AnyGroup):
    """Group of `size` Ray actors, each with a VM.

    If the program has not connected to a cluster by `ray.init`, the group starts Ray, and `close`
    stops it. Tasks and results are pickled by Ray's cloudpickle, and all actors share one copy of a
    task. The actors communicate by TCP, with a generated secret.

    If an actor dies or is late, all actors are stopped and the group is closed. The error contains
    Ray's cause of death. With `restarts`, all actors are restarted instead, and `run` repeats the
    function, which resumes from the last checkpoint. Kept functions are lost with the actors: calls
    of these functions raise the error, and `keep` creates new functions. In the environment of an
    actor, MLVM_RESTARTS is the number of earlier starts.

    Arguments:
        size: the number of actors.
        timeout: the longest time in seconds that a member waits for another member without
            progress, that `run` waits for the other members after the first has finished, and that
            the group waits for resources. By default, members wait without a limit, and the group
            waits `start` seconds for resources.
        start: the longest time in seconds that the group waits for actors.
        strategy: the placement group that reserves the resources: "PACK" on few hosts, "SPREAD" on
            many, "STRICT_PACK" on one host, "STRICT_SPREAD" on `size` hosts.
        restarts: the largest number of restarts.
        mixed: whether the actors may have different versions of mlvm, the kernels or numpy, which
            may compute different bits.
        options: the options of `ray.remote` for each actor: `num_cpus` (by default 1, or less on a
            host with fewer processors than actors), `num_gpus`, `resources`, `runtime_env`, ...

    Raises `MissingExtraError` without ray; `GroupError` if the size or an option is invalid, or the
    cluster lacks the resources; `GroupTimeoutError` if they are in use, or the actors do not start.

    Invalid calls:
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
            raise GroupError(f"a group must have 1 or more actors, got {brief(size)}")
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
        self._folder = ""  # folder of Ray's logs and sockets, if the group starts Ray
        self._ray = ray = extra("ray", "ray")
        super().__init__([name_of(rank, f"vm{rank}") for rank in range(size)])
        self._is_own = not ray.is_initialized()
        self._is_alone = self._is_own and not os.environ.get("RAY_ADDRESS")
        share = math.floor(1e4 * cores_here() / size) / 1e4  # Ray counts in multiples of 1e-4
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

        Raises `GroupError` if Ray does not accept an option. If the group will start Ray, also
        raises it if the actors need more processors than this host has.
        """
        try:
            actor = self._ray.remote(**self._options)(_Actor)
            needs = self._needs(self.size)
        except (TypeError, ValueError, ArithmeticError) as error:
            first = str(error).partition("\n")[0]
            raise GroupError(f"RayGroup: invalid options of an actor: {first}") from None
        there = {**needs, "CPU": float(cores_here())}
        if self._is_alone and needs.get("CPU", 0) > there["CPU"]:
            raise GroupError(self._lack("this host has", there))
        return actor

    def _needs(self, actors: int) -> dict[str, float]:
        """Return the resources that this number of actors needs, by Ray's names."""
        options = self._options
        named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus")}
        named |= {"memory": options.get("memory"), **(options.get("resources") or {})}
        return {name: float(amount) * actors for name, amount in named.items() if amount}

    def _start_ray(self) -> None:
        """Connect to the cluster in RAY_ADDRESS, or start Ray with this host's processors.

        Raises `GroupError` if that fails. Ray itself gives up after 30 seconds.
        """
        options: dict[str, Any] = {}
        if self._is_alone:
            self._folder = tempfile.mkdtemp(prefix="ray-")  # sockets need short names
            options = {"num_cpus": cores_here(), "include_dashboard": False}
            options["_temp_dir"] = self._folder
        try:
            self._ray.init(**options)
        except Exception as error:  # Ray raises errors of many classes
            first = str(error).partition("\n")[0]
            raise GroupError(
                f"RayGroup: Ray has not started: {first}; call ray.init before it"
            ) from error

    def _reserve(self, strategy: str) -> None:
        """Reserve the resources of all actors.

        Raises `GroupError` if the cluster does not have them; `GroupTimeoutError` if they stay in
        use.
        """
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
            raise GroupTimeoutError(f"{text} (strategy {strategy})")

    def _lack(self, who: str, there: Mapping[str, float]) -> str:
        needs = self._needs(self.size)
        needed = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        shown = ", ".join(f"{there.get(name, 0):g} {name}" for name in needs)
        return f"{self.size} actors need {needed}; {who} {shown}"

    # --- the actors ---

    def _start_actors(self) -> None:
        """Start the actors, and connect them to each other."""
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
        """Return the results of the actors' first calls.

        Raises `GroupError` if an actor dies; `GroupTimeoutError` if an actor does not start.
        """
        errors = self._ray.exceptions
        try:
            results: list[Any] = self._ray.get(
                list(calls), timeout=max(until - time.monotonic(), 0.01)
            )
        except errors.GetTimeoutError:
            missing = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[1]
            names = ", ".join(self._names[calls.index(each)] for each in missing)
            raise GroupTimeoutError(
                f"{names} did not start within {self._start:g} s; raise start="
            ) from None
        except errors.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, MlvmError) else GroupError(str(error)) from None
        except errors.RayError as error:
            raise GroupError(f"an actor died at startup: {_cause(error)}; see its log") from None
        return results

    def run(self, fn: Task[R]) -> list[R]:
        """Run a task, as `AnyGroup.run` does. Repeat it if the actors were restarted."""
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
        is_over = True  # also if Ctrl-C stops the run
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
                    seconds += _GRACE  # the actors should detect it first
                ready, missing = ray.wait(missing, timeout=seconds)
                if not ready:
                    names = ", ".join(self._names[calls[each]] for each in missing)
                    late = GroupTimeoutError(f"{names} did not finish within {seconds:g} s")
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
        """Restart all actors if a restart is left, and otherwise close the group."""
        if self._attempt == self._restarts or isinstance(sys.exc_info()[1], BaseException):
            self.close()
            return
        self._attempt += 1
        pauses = range(6)  # seconds
        for pause in pauses:
            try:
                self._stop_actors()
                time.sleep(pause)
                self._start_actors()
                return
            except GroupError:  # Ray may not have detected yet that a node is dead
                if pause == pauses[-1]:
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
        """Stop the actors, remove their placement group, and stop Ray if the group has started it.

        Idempotent.
        """
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
    """Return Ray's cause of death: its sentences, without the table of the actor's ids."""
    lines = str(error).splitlines()
    text = " ".join(line.strip() for line in lines if line.strip() and not line.startswith("\t"))
    return shortened(text, 500)


class _Actor:
    """Member of the group, in a separate process."""

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
        """Run a task; return the outcome, and whether the group was closed."""
        assert self._group is not None  # the first call is `join`
        done: list[Any] = []
        failed: list[BaseException] = []

        def alone(rank: int, vm: LocalVM) -> None:  # the other members do not need the result
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
