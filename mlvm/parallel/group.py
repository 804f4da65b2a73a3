"""A group of VMs: what all groups can do, and the group whose members are threads of this process.

The members of other groups are processes; see `mlvm.parallel.processes` and `mlvm.parallel.mpi`.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeAlias, TypeVar

from mlvm.arena.arena import Arena
from mlvm.core.errors import GroupError, GroupTimeout, brief, takes
from mlvm.core.rules import is_real
from mlvm.machines.closing import Closing
from mlvm.machines.local import LocalVM
from mlvm.parallel.blas import one_blas_thread
from mlvm.parallel.collectives import Member
from mlvm.parallel.communicator import Communicator
from mlvm.parallel.membership import Membership, member_of
from mlvm.parallel.rendezvous import Rendezvous

R = TypeVar("R")
G = TypeVar("G", bound="AnyGroup")

Task: TypeAlias = Callable[[int, LocalVM], R]
"""Function that a member runs, of its rank and its VM."""

_GRACE: Final = 1.0
"""Seconds that an interrupt waits for members which are computing and call no collective."""

_LOOK: Final = 1.0
"""Seconds of waiting until the next look at whether a member was late."""

_Mailbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Seat:
    """A VM as a member of a group: between this and `close` it has the collectives.

    Raises `GroupError` for a VM that is in a group already, or has functions of such names.
    """

    def __init__(self, vm: LocalVM, rank: int, size: int, timeout: float | None = None) -> None:
        self.vm = vm
        self.member = Member(name_of(rank, vm.name), rank, size, vm.memory, timeout)
        if member_of(vm) is not None:
            raise GroupError(f"{vm.name} is in a group already; close that one first")
        names = self.member.functions()
        conflicts = [name for name in vm.functions if name in names]
        if conflicts:
            raise GroupError(f"{vm.name} has a function {conflicts[0]!r} of its own")
        self._arena = Arena(vm, "default", trims=True)
        vm.attached(Membership).member = self.member
        vm.register_callees(names)

    def do(self, task: Task[R], communicator: Communicator) -> R:
        """Do a task, on the member's thread or in its process, and tell the others how it ended."""
        self.member.begin(communicator)
        try:
            with self._arena.allocating():
                result = task(self.member.rank, self.vm)
            self.member.finish()
        except BaseException as error:
            communicator.fail(self.member.rank, error)
            raise
        else:
            communicator.end(self.member.rank)
        finally:
            self.member.leave()
        return result

    def close(self) -> None:
        """Take the collectives out of the VM. Idempotent: where an interrupt ended a `close`,
        another one does the rest."""
        if member_of(self.vm) is not self.member:
            return
        self.member.close()
        self._arena.close()
        for name in self.member.functions():
            if name in self.vm.functions:
                self.vm.remove(name)
        self.vm.attached(Membership).member = None


def name_of(rank: int, vm: str) -> str:
    """Return the name of a member in errors, from its rank and its VM's name."""
    return f"member {rank} ({vm})"


class AnyGroup(Closing, ABC):
    """VMs that run together and exchange tensors by collectives, wherever they are.

    Until `close`, the function table of each VM has `all_reduce`, `all_gather`, `reduce_scatter`,
    `broadcast`, `send`, `recv` and `barrier`, and of the first three `all_reduce.start` and
    `all_reduce.wait`. With the same number of members they leave the same bits in every group.

        >>> with ml.parallel.group("threads:2") as group:
        ...     isinstance(group, ml.parallel.AnyGroup), group.size
        (True, 2)
    """

    @staticmethod
    def carried(task: Task[R]) -> Task[R]:
        """Wrap the task in the caller's context; `ml.parallel` replaces this function."""
        return task

    def __init__(self, names: Sequence[str]) -> None:
        self._keys = count()
        self._names = names
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._closed = False
        self._why_closed: tuple[type[GroupError], str] = GroupError, "the group is closed"

    @property
    def size(self) -> int:
        """Number of members; their ranks are 0 .. size - 1."""
        return len(self._names)

    @property
    def closed(self) -> bool:
        """True if the members have ended, by `close` or because one of them died or was late."""
        return self._closed

    def run(self, fn: Task[R]) -> list[R]:
        """Call `fn(rank, vm)` for each member where it lives, and return the results by rank.

        Eager code in `fn` runs on the member's VM, also outside of any arena. A member must not use
        the VM of another. The first error of a member is raised here. The other members end at
        their next collective, and the group can run again. The same holds for Ctrl-C. Raises
        `GroupError` if `fn` does not take (rank, vm), members call different collectives, one ends
        while others wait for it, all wait, or the group is closed or running.

        Refuses:
            members(lambda rank, vm: rank or ml.parallel.barrier())  # GroupError
            members(lambda rank: rank)  # GroupError
        """
        _require_task(fn, "run")
        return self._each([self.carried(fn)] * self.size)

    def keep(self, fn: Task[Callable[..., R]]) -> Kept[R]:
        """Call `fn(rank, vm)` for each member, and have each keep what that returns: a function
        which only the member itself can call. It stays until the group is closed.

        Raises what `run` raises.
        """
        _require_task(fn, "keep")
        key = next(self._keys)
        self._each([self.carried(partial(_keep, key, fn))] * self.size)
        return Kept(self, key)

    @abstractmethod
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        """Run the task of each rank on its member, and return the results by rank."""

    def _begin(self, busy: set[int]) -> None:
        """Mark the members of `busy` as busy, until the run empties that set. Raises `GroupError`
        if the group is closed, or another run is active."""
        with self._lock:
            if self._closed:
                kind, text = self._why_closed
                raise kind(text)
            if self._busy:
                names = ", ".join(self._names[rank] for rank in sorted(self._busy))
                raise GroupError(f"a group has one run at a time; at work: {names}")
            self._busy = busy

    @abstractmethod
    def close(self) -> None:
        """End the members, and take the collectives out of their VMs. Idempotent."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.size}>"


class Kept(Generic[R]):
    """Functions that stay with the members of a group, one with each."""

    def __init__(self, group: AnyGroup, key: int) -> None:
        self.group = group
        self._key = key

    def __call__(self, *args: Sequence[Any], **common: Any) -> list[R]:
        """Call each member's function, and return the results by rank.

        Each of `args` has one item for each member, in order of rank: `kept([a0, a1], x=x)` calls
        f0(a0, x=x) and f1(a1, x=x). Raises `GroupError` for another number of items, and what
        `AnyGroup.run` raises.
        """
        size = self.group.size
        for each in args:
            if len(each) != size:
                raise GroupError(
                    f"an argument has one item for each of {size} members, not {brief(each)}"
                )
        rows = [tuple([each[rank] for each in args]) for rank in range(size)]
        tasks = [partial(_call, self._key, row, common) for row in rows]
        return self.group._each([self.group.carried(task) for task in tasks])


def _require_task(fn: object, what: str) -> None:
    if not takes(fn, 2):
        raise GroupError(f"{what}: expected a function (rank, vm), got {brief(fn)}")


def _keep(key: int, fn: Task[Any], rank: int, vm: LocalVM) -> None:
    """Run as a task: keep the result of `fn`."""
    kept = fn(rank, vm)
    if not callable(kept):
        raise GroupError(f"keep: expected {brief(fn)} to return a function, got {brief(kept)}")
    _member(vm).kept_functions[key] = kept


def _call(key: int, args: tuple[Any, ...], common: dict[str, Any], rank: int, vm: LocalVM) -> Any:
    """Run as a task: call the kept function."""
    kept = _member(vm).kept_functions.get(key)
    if kept is None:
        raise GroupError("the members were started again since this was kept; call keep again")
    return kept(*args, **common)


def _member(vm: LocalVM) -> Member:
    member = member_of(vm)
    assert member is not None  # a task is done by a member
    return member


def one_at_a_time(
    each: Callable[[G, Sequence[Task[R]]], list[R]],
) -> Callable[[G, Sequence[Task[R]]], list[R]]:
    """Wrap `_each` of a group whose members are busy while it runs, also if Ctrl-C ends it between
    any two lines."""

    @wraps(each)
    def run(self: G, tasks: Sequence[Task[R]]) -> list[R]:
        busy = set(range(self.size))
        try:
            try:
                self._begin(busy)
                return each(self, tasks)
            finally:
                busy.clear()
        finally:
            busy.clear()  # Ctrl-C may have come before the line above

    return run


class Group(AnyGroup):
    """A group whose members are VMs of this process, with a thread for each.

    `vms` are VMs of this process, or how many to make. A VM is in one group at a time. `cores`
    has, for each VM, the core on which its thread stays (Linux only). While a group runs, BLAS has
    one thread for each VM. No member waits for another longer than `timeout` seconds at a stretch;
    nor does `run`, once the first one has ended.

    Raises `GroupError` for impossible VMs or cores, `MissingExtra` without threadpoolctl.

        >>> with ml.parallel.Group(2) as group: group.run(lambda rank, vm: float(ml.ones(4).sum()))
        [4.0, 4.0]

    Refuses:
        ml.parallel.Group(0)  # GroupError
    """

    def __init__(
        self,
        vms: int | Sequence[LocalVM],
        *,
        cores: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.timeout = checked_timeout(timeout)
        self.vms: tuple[LocalVM, ...] = _checked_vms(vms)
        super().__init__([name_of(rank, vm.name) for rank, vm in enumerate(self.vms)])
        pins = checked_cores(cores, len(self.vms))
        one_blas_thread.prepare()
        mailboxes: list[_Mailbox] = [SimpleQueue() for _ in self.vms]
        self._mailboxes = mailboxes
        self._seats: list[Seat] = []
        try:
            for rank, vm in enumerate(self.vms):
                self._seats.append(Seat(vm, rank, len(self.vms), timeout))
        except BaseException:
            for seat in self._seats:
                seat.close()
            raise
        self._threads = [
            threading.Thread(target=_serve, args=(mailbox, core), name=vm.name, daemon=True)
            for vm, mailbox, core in zip(self.vms, mailboxes, pins, strict=True)
        ]
        weakref.finalize(self, _dismiss, mailboxes)
        for thread in self._threads:
            thread.start()

    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        rendezvous = Rendezvous(self._names)
        results: dict[int, R] = {}
        ended: SimpleQueue[int] = SimpleQueue()
        busy = set(range(self.size))
        interrupted = threading.Event()

        def take_part(rank: int) -> None:
            """Do a member's part of the run, on the member's thread; the second time, nothing."""
            if rank not in busy:
                return
            try:
                if not interrupted.is_set():  # else the run was over before the part began
                    results[rank] = self._seats[rank].do(tasks[rank], rendezvous)
            except BaseException:  # which the rendezvous has; it is raised on the caller's thread
                pass
            finally:
                busy.discard(rank)
                ended.put(rank)

        try:
            self._begin(busy)
            with one_blas_thread.limited():
                for rank, mailbox in enumerate(self._mailboxes):
                    mailbox.put(partial(take_part, rank))
                for there in range(self.size):
                    self._await(ended, there, rendezvous)
        except BaseException as error:  # Ctrl-C
            if self._busy is busy:
                interrupted.set()
                rendezvous.abort(error)
                for rank in busy.copy():  # an interrupt may have come before some were sent
                    self._mailboxes[rank].put(partial(take_part, rank))
                _drain(ended, busy)
            raise
        first, rendezvous.error = rendezvous.error, None
        if first is not None:
            try:
                raise first
            finally:
                del first  # its traceback holds this frame
        return [results[rank] for rank in range(self.size)]

    def _await(self, ended: SimpleQueue[int], there: int, rendezvous: Rendezvous) -> None:
        """Wait for one more member to end. Raises `GroupTimeout` for those that do not: a thread
        cannot be ended by another one."""
        while True:
            is_late = isinstance(rendezvous.error, GroupTimeout)
            limit = _GRACE if is_late else self.timeout if there else None
            try:
                ended.get(timeout=_LOOK if limit is None else limit)
                return
            except Empty:
                if is_late:
                    raise GroupTimeout(str(rendezvous.error)) from None
                if limit is not None:
                    late = ", ".join(self._names[rank] for rank in sorted(self._busy))
                    raise GroupTimeout(
                        f"{limit:g} s have been waited for the end of {late}"
                    ) from None

    def close(self) -> None:
        """End the threads, and take the collectives out of the VMs. Idempotent: where an interrupt
        ended a `close`, another one does the rest.

        A member that is still computing after an interrupt keeps them. Its thread ends when it is
        done.
        """
        with self._lock:
            self._closed = True
            idle = set(range(self.size)) - self._busy
        _dismiss(self._mailboxes)
        for rank in idle:
            self._threads[rank].join()
            self._seats[rank].close()

    def __repr__(self) -> str:
        return f"<Group of {', '.join(vm.name for vm in self.vms)}>"


def _serve(mailbox: _Mailbox, core: int | None) -> None:
    """Run the tasks of a member's mailbox on its thread, until None comes."""
    if core is not None:
        os.sched_setaffinity(0, {core})  # 0 is the calling thread
    while (task := mailbox.get()) is not None:
        task()
        del task  # else it would keep the group alive


def _dismiss(mailboxes: Sequence[_Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.put(None)


def _drain(ended: SimpleQueue[int], busy: set[int]) -> None:
    """Give members that are computing a moment to end."""
    while busy:
        try:
            ended.get(timeout=_GRACE)
        except Empty:
            return


def _checked_vms(vms: Any) -> tuple[LocalVM, ...]:
    if isinstance(vms, int) and not isinstance(vms, bool):
        if vms < 1:
            raise GroupError(f"a group has 1 or more VMs, not {vms}")
        return tuple([LocalVM(f"vm{rank}") for rank in range(vms)])
    if not isinstance(vms, Sequence) or not vms or not all(isinstance(vm, LocalVM) for vm in vms):
        raise GroupError(f"a group is of VMs of this process, or of a number, not of {vms!r}")
    if len(set(map(id, vms))) < len(vms):
        raise GroupError(f"a VM occurs twice in the group {[vm.name for vm in vms]}")
    return tuple(vms)


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Check a timeout in seconds; None is no limit. Raises `GroupError` if it is invalid."""
    is_number = is_real(timeout) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise GroupError(f"a group's {name} is a number of seconds > 0, not {brief(timeout)}")
    return timeout


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_cores(cores: Sequence[int] | None, members: int) -> Sequence[int | None]:
    """Return a core for each member, or None. Raises `GroupError` if a core does not exist."""
    if cores is None:
        return [None] * members
    if not hasattr(os, "sched_setaffinity"):
        raise GroupError("this operating system does not let a thread choose its core")
    available = sorted(os.sched_getaffinity(0))
    is_list = isinstance(cores, Sequence) and len(cores) == members
    if not is_list or not all(core in available for core in cores):
        raise GroupError(
            f"cores are one for each of {members} members, of {available}, not {brief(cores)}"
        )
    return cores
