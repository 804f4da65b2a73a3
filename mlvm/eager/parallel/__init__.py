"""Several VMs from eager code: `ml.parallel`.

Each member of a group runs the same code on its own VM, and meets the other members in the
collectives. `data_parallel` has them share the batches of a training:

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        loss = step(images, labels)
"""

from mlvm.eager.optim.gradients import Parts
from mlvm.eager.parallel.collectives import (
    all_gather,
    all_gather_start,
    all_gather_wait,
    all_reduce,
    all_reduce_start,
    all_reduce_wait,
    barrier,
    broadcast,
    rank,
    recv,
    reduce_scatter,
    reduce_scatter_start,
    reduce_scatter_wait,
    send,
    size,
)
from mlvm.eager.parallel.data_parallel import data_parallel, value_and_grad
from mlvm.eager.parallel.shards import Shard
from mlvm.parallel.group import AnyGroup, Group
from mlvm.parallel.mpi import MpiGroup
from mlvm.parallel.named import group
from mlvm.parallel.processes import ProcessGroup
from mlvm.parallel.ray import RayGroup
from mlvm.parallel.tcp import TcpGroup

__all__ = [
    "AnyGroup",
    "Group",
    "MpiGroup",
    "Parts",
    "ProcessGroup",
    "RayGroup",
    "Shard",
    "TcpGroup",
    "all_gather",
    "all_gather_start",
    "all_gather_wait",
    "all_reduce",
    "all_reduce_start",
    "all_reduce_wait",
    "barrier",
    "broadcast",
    "data_parallel",
    "group",
    "rank",
    "recv",
    "reduce_scatter",
    "reduce_scatter_start",
    "reduce_scatter_wait",
    "send",
    "size",
    "value_and_grad",
]
