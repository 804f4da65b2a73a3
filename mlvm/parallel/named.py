"""Groups by what the command line calls them."""

from __future__ import annotations

import os

from mlvm.core.errors import GroupError, brief
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.launched import launched
from mlvm.parallel.mpi import MpiGroup
from mlvm.parallel.processes import ProcessGroup
from mlvm.parallel.ray import RayGroup
from mlvm.parallel.tcp import TcpGroup


def group(name: str, *, timeout: float | None = None) -> AnyGroup:
    """A group of `threads:N` of this process, of `processes:N` of this host, of `ray:N` actors, of
    the processes that were started together by `mpi`, or of those that a scheduler has started:
    `auto` reads the variables that `python -m mlvm launch`, torchrun, Slurm's srun or Open MPI's
    mpirun has set, and makes a `TcpGroup`.

    Raises `GroupError` for another name and where no scheduler has set any, and what `Group`,
    `ProcessGroup`, `RayGroup`, `MpiGroup` and `TcpGroup` raise.

        >>> with ml.parallel.group("threads:3") as group: group.run(lambda rank, vm: rank * rank)
        [0, 1, 4]
    """
    kind, colon, count = name.partition(":")
    if kind == "mpi" and not colon:
        return MpiGroup(timeout=timeout)
    if kind == "auto" and not colon:
        rank, size, address = launched(os.environ)
        return TcpGroup(rank, size, str(address), timeout=timeout)
    if kind in ("threads", "processes", "ray") and count.isdecimal():
        makes = {"threads": Group, "processes": ProcessGroup, "ray": RayGroup}
        made: AnyGroup = makes[kind](int(count), timeout=timeout)
        return made
    raise GroupError(f"a group is threads:N, processes:N, ray:N, mpi or auto, not {brief(name)}")
