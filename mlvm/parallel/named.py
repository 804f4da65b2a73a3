"""Groups by what the command line calls them."""

from __future__ import annotations

from mlvm.core.errors import GroupError, brief
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.mpi import MpiGroup
from mlvm.parallel.processes import ProcessGroup


def group(name: str) -> AnyGroup:
    """A group of `threads:N` of this process, of `processes:N` of this host, or of the processes
    that were started together by `mpi`.

    Raises `GroupError` for another name, and what `Group`, `ProcessGroup` and `MpiGroup` raise.

        >>> with ml.parallel.group("threads:3") as group: group.run(lambda rank, vm: rank * rank)
        [0, 1, 4]
    """
    kind, colon, count = name.partition(":")
    if kind == "mpi" and not colon:
        return MpiGroup()
    if kind in ("threads", "processes") and count.isdecimal():
        return Group(int(count)) if kind == "threads" else ProcessGroup(int(count))
    raise GroupError(f"a group is threads:N, processes:N or mpi, not {brief(name)}")
