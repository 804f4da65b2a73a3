"""Groups in a simulated world: members that meet by TCP, share a board, or are threads.

Each member runs the same collectives, on data that the seed chooses. One fault may strike one
member: it raises, calls something else, is killed, stops, is cut off, or has another secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from mlvm.core.errors import GroupError, GroupTimeoutError, MlvmError
from mlvm.core.types import Array
from mlvm.machines.local import LocalVM as VM
from mlvm.parallel import communicator, messages, tcp
from mlvm.parallel.board import Board, BoardCommunicator
from mlvm.parallel.group import Seat, name_of
from mlvm.parallel.rendezvous import Rendezvous
from mlvm.parallel.tcp import TcpGroup
from tests.parallel.members import call
from tests.parallel.places import digest, reduced
from tests.simulation.world import Bells, Process, World

START: Final = 20.0
"""Seconds for all members to join."""

TIMEOUT: Final = 4.0
"""Seconds that members wait for each other."""

_SECRET: Final = "between the members alone"

FAULTS: Final = (
    "none", "none", "raises", "differs", "ends", "killed", "killed", "killed", "stopped",
    "stopped", "paused", "cut", "healed", "secret", "full",
    "late", "late", "parts", "parts",
)  # fmt: skip

_BY_TCP: Final = ("killed", "cut", "healed", "secret", "full", "late", "parts")
_SMALL: Final = {
    "mlvm.parallel.communicator.SMALL": 1 << 9,
    "mlvm.parallel.communicator.BLOCK_NBYTES": 1 << 9,
    "mlvm.parallel.messages.BLOCK_NBYTES": 1 << 9,
    "mlvm.parallel.messages.RING": 1 << 9,
    "mlvm.parallel.tcp._ROOM": 1 << 12,
}
"""Limits that decide how data travels, so that little data travels in all ways."""


@contextmanager
def little_data() -> Iterator[None]:
    assert communicator.SMALL > messages.RING >> 4 > 0 < tcp._ROOM  # the names exist
    patches = [patch(name, value) for name, value in _SMALL.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


Step = tuple[str, dict[str, Any], list[Array]]


def steps_of(world: World, size: int) -> list[Step]:
    """Choose collectives, and each member's operand."""
    steps: list[Step] = []
    draw = world.random
    for _ in range(draw.randint(1, 4)):
        name = draw.choice(("all_reduce", "all_reduce", "all_gather", "broadcast", "barrier"))
        name = draw.choice((name, name, name, "reduce_scatter"))
        n = size * draw.choice((0, 1, 3, 40, 300, 1000))
        seed = draw.randrange(1 << 30)
        xs = [np.random.default_rng((seed, rank)).random(n, np.float32) for rank in range(size)]
        attributes: dict[str, Any] = {}
        if name in ("all_reduce", "reduce_scatter"):
            attributes["op"] = draw.choice(("sum", "mean", "max"))
        elif name == "broadcast":
            attributes["root"] = draw.randrange(size)
        steps.append((name, attributes, xs))
    return steps


def expected(step: Step, rank: int) -> str:
    """Return the digest of a member's results, by numpy alone."""
    name, attributes, xs = step
    if name == "barrier":
        return digest([])
    if name == "broadcast":
        return digest([xs[attributes["root"]]])
    if name == "all_gather":
        return digest([np.concatenate(xs)])
    total = reduced(xs, attributes["op"])
    return digest([total if name == "all_reduce" else np.split(total, len(xs))[rank]])


class Members:
    """A group in a world, and what becomes of each member."""

    longest: Final = 4 * (START + TIMEOUT)
    """Virtual seconds after which a member that still runs hangs."""

    def __init__(self, world: World) -> None:
        draw = world.random
        self.world = world
        self.kind = draw.choice(("tcp", "tcp", "tcp", "tcp", "tcp", "board", "threads"))
        self.size = draw.randint(2, 5)
        self.victim = draw.randrange(self.size)
        self.fault = draw.choice(FAULTS)
        if self.kind != "tcp" and self.fault in _BY_TCP:
            self.fault = "stopped"
        if self.fault == "full":
            world.buffer, world.bandwidth, world.latency = 500, 1e5, 1e-5
        self.runs = [steps_of(world, self.size) for _ in range(draw.randint(1, 3))]
        self.fault_at = draw.randrange(len(self.runs)), draw.randrange(4)
        self.pause = draw.choice((0.0, 0.0, 0.01, 1.0))
        self.result = draw.choice((0, 0, 0, 20_000))  # more bytes
        if self.fault == "late":
            self.result, world.buffer, world.latency = 20_000, 1_500, 1e-3
        self.completed = [0] * self.size  # runs, each with the right bits
        self.errors: list[BaseException | None] = [None] * self.size
        self.ended = [False] * self.size
        self.vms: list[VM] = []
        self.groups: list[TcpGroup] = []
        hosts = [f"10.0.0.{rank + 1}" for rank in range(self.size)]
        self.processes = [world.process(f"m{rank}", host) for rank, host in enumerate(hosts)]
        at = int(10 ** draw.uniform(0.5, 3.3))  # also early events
        world.strike(self.struck, self.fault, at, TIMEOUT / 2)
        self._main: Callable[[int], None] = {
            "tcp": self._tcp, "board": self._board, "threads": self._threads,
        }[self.kind]  # fmt: skip
        self.shared: Any = None
        if self.kind == "board":
            self.shared = Board(self.size, False), Bells(world, self.size)
        if self.kind == "threads":
            self.shared = Rendezvous(self._names(), self.processes[0].system)
        for rank, process in enumerate(self.processes):
            world.start(process, lambda rank=rank: self._member(rank))  # type: ignore[misc]

    def _names(self) -> list[str]:
        return [name_of(rank, f"vm{rank}") for rank in range(self.size)]

    @property
    def struck(self) -> Process:
        return self.processes[self.victim]

    # --- the program of a member ---

    def _member(self, rank: int) -> None:
        try:
            self._main(rank)
        except MlvmError as error:
            self.errors[rank] = error
        except ZeroDivisionError as error:  # a member's own
            self.errors[rank] = error
        self.ended[rank] = not self.processes[rank].is_dead

    def _task(self, run: int) -> Callable[[int, VM], Any]:
        steps, system = self.runs[run], [each.system for each in self.processes]

        def task(rank: int, vm: VM) -> list[Any]:
            got: list[Any] = []
            for number, step in enumerate(steps):
                system[rank].sleep(system[rank].uniform(0, self.pause))
                name, attributes, xs = step
                if rank == self.victim and self.fault_at == (run, number):
                    if self.fault == "raises":
                        raise ZeroDivisionError("of this member")
                    if self.fault == "differs":
                        name, attributes, xs = "all_gather", {}, [np.zeros(7)] * self.size
                    if self.fault == "ends":
                        return got
                operands = [] if name == "barrier" else [xs[rank]]
                results = call(vm, name, *operands, **attributes)
                got.append(digest(results))
            if self.fault == "parts" and rank == self.victim and run == self.fault_at[0]:
                # cut off soon after it has ended, so that some hear of its end, and some do not
                world, seconds = self.world, 5 * self.world.latency
                world.at(world.now + world.random.uniform(0, seconds), self._cut)
            if self.fault == "late":  # it stops soon after it has ended, or just before
                world, last = self.world, run == len(self.runs) - 1
                if rank == self.victim and last:
                    world.at(world.now + world.random.uniform(0, 0.02), self._stop)
                elif rank != self.victim:
                    system[rank].sleep(0.01)
            return [*got, self._padding(rank)]

        return task

    def _padding(self, rank: int) -> bytes:
        """Return what a result has in addition, for it to take long to send."""
        return bytes(0 if self.fault == "late" and rank == self.victim else self.result)

    def _stop(self) -> None:
        self.struck.stopped_until = float("inf")

    def _cut(self) -> None:
        self.struck.cut_until = float("inf")

    def _check(self, run: int, rank: int, results: list[list[Any]]) -> None:
        for other, got in enumerate(results):
            wanted = [*(expected(step, other) for step in self.runs[run]), self._padding(other)]
            if got != wanted:
                raise AssertionError(f"member {rank} has wrong bits of member {other}, run {run}")

    def _tcp(self, rank: int) -> None:
        secret = _SECRET + "!" * (self.fault == "secret" and rank == self.victim)
        system = self.processes[rank].system
        system.sleep(system.uniform(0, self.pause))
        with TcpGroup(
            rank,
            self.size,
            "10.0.0.1:29500",
            secret=secret,
            timeout=TIMEOUT,
            start=START,
            system=system,
        ) as group:
            self.vms.append(group.vm)
            self.groups.append(group)
            for run in range(len(self.runs)):
                try:
                    self._check(run, rank, group.run(self._task(run)))
                except (GroupError, ZeroDivisionError) as error:
                    self.errors[rank] = error
                    if group.closed:
                        return
                else:
                    self.completed[rank] += 1

    def _board(self, rank: int) -> None:
        board, bells = self.shared
        system = self.processes[rank].system
        place = BoardCommunicator(board, self._names(), rank, bells, system)
        self._alone(rank, place)

    def _threads(self, rank: int) -> None:
        self._alone(rank, self.shared)

    def _alone(self, rank: int, place: Any) -> None:
        """Do the first run as a member whose results nobody collects."""
        self.runs[1:] = []
        vm = VM(f"vm{rank}")
        self.vms.append(vm)
        seat = Seat(vm, rank, self.size, TIMEOUT)
        try:
            got = seat.do(self._task(0), place)
        finally:
            seat.close()
        wanted = [*(expected(step, rank) for step in self.runs[0]), self._padding(rank)]
        if got != wanted[: len(got)]:
            raise AssertionError(f"member {rank} has wrong bits")
        self.completed[rank] += 1

    def close(self) -> None:
        """Free what killed members have left, in a world that has ended."""
        for group in self.groups:
            group.close()
        for vm in self.vms:
            vm.close()

    # --- what must be ---

    def __str__(self) -> str:
        return f"{self.size} members by {self.kind}, {self.fault} member {self.victim}"

    def wrong(self) -> Iterator[str]:
        """Yield what should not be."""
        for rank, process in enumerate(self.processes):
            if rank == self.victim and (process.is_dead or self.fault in ("stopped", "late")):
                continue
            for thread in process.threads:
                if thread.error is not None:
                    yield f"member {rank}: {thread.error!r}"
            if not self.ended[rank]:
                yield f"member {rank} hangs"
                continue
            if process.sockets:
                yield f"member {rank} leaves {len(process.sockets)} sockets"
            if any(each.is_alive() for each in process.threads):
                yield f"member {rank} leaves a thread"
            yield from self._wrong_of(rank, self.errors[rank])
        for vm in self.vms if not self.struck.is_dead else ():
            if vm.consumed_size_in_mib() and self.fault not in ("stopped", "late"):
                yield f"{vm.name} has memory"

    def _wrong_of(self, rank: int, error: BaseException | None) -> Iterator[str]:
        all_well = self.completed[rank] == len(self.runs)
        text = f"{type(error).__name__}: {error}"
        if self.fault in ("none", "paused", "healed", "full"):
            if not all_well or error is not None:
                yield f"member {rank} without a fault: {text}"
            return
        if all_well:
            return
        if error is None:
            yield f"member {rank} has neither results nor an error"
        elif rank != self.victim and not self._is_named(text):
            yield f"member {rank} blames another one: {text}"
        elif self.fault in ("stopped", "late") and _late_members(text) > 1:
            yield f"member {rank} blames others, too: {text}"
        elif (
            self.fault in ("stopped", "late")
            and rank != self.victim
            and GroupTimeoutError.__name__ not in text  # its own, or that of one that has left
        ):
            yield f"member {rank} has no timeout: {text}"

    def _is_named(self, text: str) -> bool:
        """Return whether an error of another member names the one that was struck."""
        if self.fault == "secret":  # one without a secret has no proved name
            return "was refused: the secret is wrong" in text or "AccessDeniedError" in text
        if self.fault in ("differs", "ends") and (
            "different collectives" in text or "no member" in text
        ):
            return True
        if self.fault == "killed" and "has not found member 0" in text:  # who has ended since
            return True
        is_own = self.fault == "raises" and text.startswith("ZeroDivisionError")
        return is_own or f"member {self.victim} (vm{self.victim})" in text


def _late_members(text: str) -> int:
    """Return how many members an error says another one has waited for."""
    return text.partition(" has waited ")[2].rpartition(" for ")[2].count("(vm")
