"""Several VMs from eager code: `ml.parallel`.

Each member of a group runs the same code on a separate VM; collectives exchange data between the
members. `data_parallel` splits the batches of a training loop between them:

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        loss = step(images, labels)
"""

from mlvm.eager.optim.gradients import Parts as Parts
from mlvm.eager.parallel.collectives import all_gather as all_gather
from mlvm.eager.parallel.collectives import all_gather_start as all_gather_start
from mlvm.eager.parallel.collectives import all_gather_wait as all_gather_wait
from mlvm.eager.parallel.collectives import all_reduce as all_reduce
from mlvm.eager.parallel.collectives import all_reduce_start as all_reduce_start
from mlvm.eager.parallel.collectives import all_reduce_wait as all_reduce_wait
from mlvm.eager.parallel.collectives import barrier as barrier
from mlvm.eager.parallel.collectives import broadcast as broadcast
from mlvm.eager.parallel.collectives import rank as rank
from mlvm.eager.parallel.collectives import recv as recv
from mlvm.eager.parallel.collectives import reduce_scatter as reduce_scatter
from mlvm.eager.parallel.collectives import reduce_scatter_start as reduce_scatter_start
from mlvm.eager.parallel.collectives import reduce_scatter_wait as reduce_scatter_wait
from mlvm.eager.parallel.collectives import send as send
from mlvm.eager.parallel.collectives import size as size
from mlvm.eager.parallel.data_parallel import data_parallel as data_parallel
from mlvm.eager.parallel.data_parallel import value_and_grad as value_and_grad
from mlvm.eager.tensor.wrapper import names_shown as _names_shown
from mlvm.parallel.group import AnyGroup as AnyGroup
from mlvm.parallel.group import Group as Group
from mlvm.parallel.membership import Shard as Shard
from mlvm.parallel.mpi import MpiGroup as MpiGroup
from mlvm.parallel.named import group as group
from mlvm.parallel.processes import ProcessGroup as ProcessGroup
from mlvm.parallel.ray import RayGroup as RayGroup
from mlvm.parallel.tcp import TcpGroup as TcpGroup

__all__ = _names_shown(globals())
