"""Groups by name, for the command line."""

from __future__ import annotations

import os

from mlvm.core.errors import GroupError, brief
from mlvm.core.sizes import parse_count
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.launched import launched
from mlvm.parallel.mpi import MpiGroup
from mlvm.parallel.processes import ProcessGroup
from mlvm.parallel.ray import RayGroup
from mlvm.parallel.tcp import TcpGroup


def group(name: str, *, timeout: float | None = None) -> AnyGroup:
    """Create a group by name.

    - `threads:N`: a `Group` of N threads of this process.
    - `processes:N`: a `ProcessGroup` of N processes on this host.
    - `ray:N`: a `RayGroup` of N actors.
    - `mpi`: the `MpiGroup` of this MPI job.
    - `auto`: a `TcpGroup` of the processes that a scheduler has started. The rank and the address
      are read from the environment variables of `python -m mlvm launch`, torchrun, Slurm's srun,
      Open MPI's mpirun or Kubernetes.

    `timeout` is the longest time in seconds that a member waits for another member without
    progress. By default, there is no limit.

    Raises `GroupError` if the name is unknown, or no scheduler has set variables; and what these
    classes raise.

        >>> with ml.parallel.group("threads:3") as group: group.run(lambda rank, vm: rank * rank)
        [0, 1, 4]

    Invalid calls:
        ml.parallel.group("friends")  # GroupError
        ml.parallel.group(2)  # GroupError
    """
    kind, colon, count = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind == "mpi" and not colon:
        return MpiGroup(timeout=timeout)
    if kind == "auto" and not colon:
        rank, size, address = launched(os.environ)
        return TcpGroup(rank, size, str(address), timeout=timeout)
    if kind in ("threads", "processes", "ray") and (members := parse_count(count)) is not None:
        makes = {"threads": Group, "processes": ProcessGroup, "ray": RayGroup}
        created: AnyGroup = makes[kind](members, timeout=timeout)
        return created
    raise GroupError(
        f"group: expected threads:N, processes:N, ray:N, mpi or auto, got {brief(name)}"
    )
