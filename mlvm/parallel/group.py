"""Interface of all groups of VMs, and the group of threads of this process.

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
from mlvm.core.errors import GroupError, GroupTimeoutError, brief, takes
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
"""Function that a member runs, given the rank and the VM."""

_GRACE: Final = 1.0
"""Seconds that an interrupt waits for members that compute and call no collective."""

_LOOK: Final = 1.0
"""Seconds between two checks of whether a member was late."""

_Mailbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Seat:
    """VM as a member of a group, with the collectives in the function table until `close`.

    Raises `GroupError` if the VM is in a group already, or has a function with such a name.
    """

    def __init__(self, vm: LocalVM, rank: int, size: int, timeout: float | None = None) -> None:
        self.vm = vm
        self.member = Member(name_of(rank, vm.name), rank, size, vm.memory, timeout)
        if member_of(vm) is not None:
            raise GroupError(f"{vm.name} is already in a group; close that group first")
        names = self.member.functions()
        conflicts = [name for name in vm.functions if name in names]
        if conflicts:
            raise GroupError(
                f"{vm.name} already has a function {conflicts[0]!r}; rename it, or use a new VM"
            )
        self._arena = Arena(vm, "default", trims=True)
        vm.attached(Membership).member = self.member
        vm.register_callees(names)

    def do(self, task: Task[R], communicator: Communicator) -> R:
        """Run a task on this thread, and report the end to the other members."""
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
        """Remove the collectives from the VM.

        Idempotent. If an interrupt stopped a `close`, the next call does the rest.
        """
        if member_of(self.vm) is not self.member:
            return
        self.member.close()
        self._arena.close()
        for name in self.member.functions():
            if name in self.vm.functions:
                self.vm.remove(name)
        self.vm.attached(Membership).member = None


def name_of(rank: int, vm: str) -> str:
    """Return the name of a member in errors, given the rank and the name of the VM."""
    return f"member {rank} ({vm})"


class AnyGroup(Closing, ABC):
    """VMs that run the same task and exchange tensors by collectives.

    Until `close`, the function table of each VM has `all_reduce`, `all_gather`, `reduce_scatter`,
    `broadcast`, `send`, `recv` and `barrier`. The first three also have asynchronous forms, such as
    `all_reduce.start` and `all_reduce.wait`. The bits of the results depend only on the number of
    members, not on the kind of group.

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
        """Number of members, which have the ranks 0 .. size - 1."""
        return len(self._names)

    @property
    def closed(self) -> bool:
        """True after `close`, or after a member has died or was late."""
        return self._closed

    def run(self, fn: Task[R]) -> list[R]:
        """Call `fn(rank, vm)` on each member, and return the results in order of rank.

        Eager code in `fn` runs on the member's VM, also outside any arena. A member must not use
        the VM of another member. The first error of a member is raised here. The other members
        raise an error at the next collective, and the group can run again. Ctrl-C has the same
        effect.

        Raises `GroupError` if `fn` does not accept (rank, vm), or the group is closed or running.
        Also raises it if the members call different collectives, if a member finishes while another
        member waits for it, or if all members wait.

        Invalid calls:
            members(lambda rank, vm: rank or ml.parallel.barrier())  # GroupError
            members(lambda rank: rank)  # GroupError
        """
        _require_task(fn, "run")
        return self._each([self.carried(fn)] * self.size)

    def keep(self, fn: Task[Callable[..., R]]) -> Kept[R]:
        """Call `fn(rank, vm)` on each member, which returns a function that the member keeps.

        The functions stay with the members until the group is closed. Calling the result of `keep`
        calls them. Raises what `run` raises.
        """
        _require_task(fn, "keep")
        key = next(self._keys)
        self._each([self.carried(partial(_keep, key, fn))] * self.size)
        return Kept(self, key)

    @abstractmethod
    def _each(self, tasks: Sequence[Task[R]]) -> list[R]:
        """Run the task of each rank on the member, and return the results by rank."""

    def _begin(self, busy: set[int]) -> None:
        """Mark these members as busy until the run empties the set.

        Raises `GroupError` if the group is closed, or another run is active.
        """
        with self._lock:
            if self._closed:
                kind, text = self._why_closed
                raise kind(text)
            if self._busy:
                names = ", ".join(self._names[rank] for rank in sorted(self._busy))
                raise GroupError(f"a group can only run one task at a time; still running: {names}")
            self._busy = busy

    @abstractmethod
    def close(self) -> None:
        """Stop the members, and remove the collectives from the VMs. Idempotent."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.size}>"


class Kept(Generic[R]):
    """Functions that the members of a group keep, one per member."""

    def __init__(self, group: AnyGroup, key: int) -> None:
        self.group = group
        self._key = key

    def __call__(self, *args: Sequence[Any], **common: Any) -> list[R]:
        """Call each member's function, and return the results in order of rank.

        Each of `args` has one item for each member, in order of rank: `kept([a0, a1], x=x)` calls
        f0(a0, x=x) and f1(a1, x=x). Raises `GroupError` if the number of items is different, and
        what `AnyGroup.run` raises.
        """
        size = self.group.size
        for each in args:
            if len(each) != size:
                raise GroupError(
                    f"an argument must have one item for each of {size} members, got {brief(each)}"
                )
        rows = [tuple([each[rank] for each in args]) for rank in range(size)]
        tasks = [partial(_call, self._key, row, common) for row in rows]
        return self.group._each([self.group.carried(task) for task in tasks])


def _require_task(fn: object, what: str) -> None:
    if not takes(fn, 2):
        raise GroupError(f"{what}: expected a function (rank, vm), got {brief(fn)}")


def _keep(key: int, fn: Task[Any], rank: int, vm: LocalVM) -> None:
    """Keep the result of `fn` in this member."""
    function = fn(rank, vm)
    if not callable(function):
        raise GroupError(f"keep: expected {brief(fn)} to return a function, got {brief(function)}")
    _member(vm).kept_functions[key] = function


def _call(key: int, args: tuple[Any, ...], common: dict[str, Any], rank: int, vm: LocalVM) -> Any:
    """Call the kept function of this member."""
    function = _member(vm).kept_functions.get(key)
    if function is None:
        raise GroupError("the members were started again since this was kept; call keep again")
    return function(*args, **common)


def _member(vm: LocalVM) -> Member:
    member = member_of(vm)
    assert member is not None  # a task runs on a member
    return member


def one_at_a_time(
    each: Callable[[G, Sequence[Task[R]]], list[R]],
) -> Callable[[G, Sequence[Task[R]]], list[R]]:
    """Mark all members of a group as busy while `_each` runs.

    The members are idle afterwards, even if Ctrl-C stops the method between any two lines.
    """

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
    """Group whose members are VMs of this process, with one thread for each.

    While a group runs, BLAS uses one thread for each VM.

    Arguments:
        vms: VMs of this process, or the number of VMs to create. A VM can be in one group at a
            time.
        cores: the core for the thread of each VM (Linux only). By default, threads are not pinned.
        timeout: the longest time in seconds that a member waits for another member without
            progress, and that `run` waits for the other members after the first has finished. By
            default, there is no limit.

    Raises `GroupError` if `vms` or `cores` are invalid; `MissingExtraError` without threadpoolctl.

        >>> with ml.parallel.Group(2) as group: group.run(lambda rank, vm: float(ml.ones(4).sum()))
        [4.0, 4.0]

    Invalid calls:
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
            """Run the task of a member on the member's thread. Do nothing the second time."""
            if rank not in busy:
                return
            try:
                if not interrupted.is_set():  # else the run was aborted before this member started
                    results[rank] = self._seats[rank].do(tasks[rank], rendezvous)
            except BaseException:  # the rendezvous stores it, and the caller's thread raises it
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
                for rank in busy.copy():  # the interrupt may have come before all tasks were sent
                    self._mailboxes[rank].put(partial(take_part, rank))
                _drain(ended, busy)
            raise
        first, rendezvous.error = rendezvous.error, None
        if first is not None:
            try:
                raise first
            finally:
                del first  # the traceback holds this frame
        return [results[rank] for rank in range(self.size)]

    def _await(self, ended: SimpleQueue[int], there: int, rendezvous: Rendezvous) -> None:
        """Wait until one more member has finished.

        Raises `GroupTimeoutError` if no member does. A thread cannot stop another thread.
        """
        while True:
            is_late = isinstance(rendezvous.error, GroupTimeoutError)
            limit = _GRACE if is_late else self.timeout if there else None
            try:
                ended.get(timeout=_LOOK if limit is None else limit)
                return
            except Empty:
                if is_late:
                    raise GroupTimeoutError(str(rendezvous.error)) from None
                if limit is not None:
                    late = ", ".join(self._names[rank] for rank in sorted(self._busy))
                    raise GroupTimeoutError(
                        f"{late} did not finish within {limit:g} s; raise timeout="
                    ) from None

    def close(self) -> None:
        """Stop the threads, and remove the collectives from the VMs.

        Idempotent. If an interrupt stopped a `close`, the next call does the rest. If a member
        still computes after an interrupt, the collectives stay, and the thread stops when the task
        returns.
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
    """Run the tasks of a member's mailbox on this thread, until the mailbox receives None."""
    if core is not None:
        os.sched_setaffinity(0, {core})  # 0 means the calling thread
    while (task := mailbox.get()) is not None:
        task()
        del task  # else it would keep the group alive


def _dismiss(mailboxes: Sequence[_Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.put(None)


def _drain(ended: SimpleQueue[int], busy: set[int]) -> None:
    """Wait a moment for members that are computing."""
    while busy:
        try:
            ended.get(timeout=_GRACE)
        except Empty:
            return


def _checked_vms(vms: Any) -> tuple[LocalVM, ...]:
    if isinstance(vms, int) and not isinstance(vms, bool):
        if vms < 1:
            raise GroupError(f"a group must have 1 or more VMs, got {vms}")
        return tuple([LocalVM(f"vm{rank}") for rank in range(vms)])
    if not isinstance(vms, Sequence) or not vms or not all(isinstance(vm, LocalVM) for vm in vms):
        raise GroupError(f"expected VMs of this process or the number of VMs, got {vms!r}")
    if len(set(map(id, vms))) < len(vms):
        raise GroupError(f"expected distinct VMs, got {[vm.name for vm in vms]}")
    return tuple(vms)


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Return a timeout in seconds; None means no limit. Raises `GroupError` if it is invalid."""
    is_number = is_real(timeout) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise GroupError(f"a group's {name} must be a number of seconds > 0, got {brief(timeout)}")
    return timeout


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_cores(cores: Sequence[int] | None, members: int) -> Sequence[int | None]:
    """Return a core or None for each member. Raises `GroupError` if a core does not exist."""
    if cores is None:
        return [None] * members
    if not hasattr(os, "sched_setaffinity"):
        raise GroupError("cores=: this operating system cannot pin a thread to a core; omit cores=")
    available = sorted(os.sched_getaffinity(0))
    is_list = isinstance(cores, Sequence) and len(cores) == members
    if not is_list or not all(core in available for core in cores):
        raise GroupError(
            f"cores=: expected one core of {available} for each of {members} members, got "
            f"{brief(cores)}"
        )
    return cores
