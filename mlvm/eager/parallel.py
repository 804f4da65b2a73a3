"""Several VMs from eager code: `ml.parallel`.

Each member of a group runs the same code on its own VM, and meets the other members in the
collectives. `data_parallel` has them share the batches of a training:

    with ml.parallel.Group(2) as group:
        step = ml.parallel.data_parallel(make_step, group)
        loss = step(images, labels)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mlvm.core.errors import AttributeRefused, ShapeError, brief
from mlvm.core.types import Array
from mlvm.eager import primitives as op
from mlvm.eager import shards
from mlvm.eager.autodiff import collecting
from mlvm.eager.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    rank,
    recv,
    reduce_scatter,
    send,
    size,
)
from mlvm.eager.shards import Parts, Shard
from mlvm.eager.tensor import Tensor
from mlvm.eager.tree import Node, Tree
from mlvm.machines.local import LocalVM
from mlvm.parallel.group import Group

__all__ = [
    "Group",
    "Parts",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "data_parallel",
    "rank",
    "recv",
    "reduce_scatter",
    "send",
    "size",
    "value_and_grad",
]

R = TypeVar("R")


# --- gradients -----------------------------------------------------------------------


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """`ml.value_and_grad`, of which the value and the gradients are the mean over all members.

    Members meet while the way back goes on: as soon as the gradients of a few megabytes of
    parameters are there, they are averaged (Li et al., PyTorch Distributed, arXiv 2006.15704). The
    parameters' order says which ones these are, from the last to the first, so that all members do
    the same. The bits are those of `all_reduce(ml.value_and_grad(fn)(...), "mean")`. `aux` is each
    member's own.

    In a step of `data_parallel(..., shard=...)` the gradient of a Module or dict is a `Parts`: each
    member has its piece of every gradient, which is all that its optimizer needs.

    Raises what `ml.value_and_grad` raises, and `GradientError` inside a differentiated function.
    """
    differentiated = collecting(fn, argnums, has_aux=has_aux, collect=_Buckets)
    several = isinstance(argnums, tuple)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        primal, gradients = differentiated(*args, **kwargs)
        value = primal[0] if has_aux else primal
        value = value if value.base is None else op.copy(value)
        all_reduce(value, "mean")
        if shards.wanted() is not None:
            given = gradients if several else [gradients]
            given = [Parts(each) if isinstance(each, dict) else each for each in given]
            gradients = tuple(given) if several else given[0]
        return ((value, primal[1]) if has_aux else value), gradients

    return averaged


class _Buckets:
    """The gradients of a differentiation, averaged a bucket at a time.

    A gradient with respect to a piece was averaged when it went back to the piece. Under
    `shard="optimizer"` of the others a piece is left, but of those in a list or tuple.
    """

    def __init__(self, arguments: Sequence[Tree], variables: Sequence[Tensor]) -> None:
        self._gradients: dict[int, Tensor] = {}
        self._buckets: list[tuple[bool, list[int]]] = []  # from the last parameter to the first
        self._next = 0
        numbers = {id(x): i for i, x in enumerate(variables)}
        scatters = shards.wanted() == "optimizer"
        for argument in reversed(arguments):
            whole = [numbers[id(x)] for x in shards.parted(argument)[0]][::-1]
            into_pieces = scatters and isinstance(argument, (dict, Node))
            for bucket in shards.buckets([variables[i].type for i in whole]):
                self._buckets.append((into_pieces, [whole[i] for i in bucket]))

    def add(self, i: int, g: Tensor) -> None:
        self._gradients[i] = g
        while self._next < len(self._buckets):
            into_pieces, bucket = self._buckets[self._next]
            if not all(j in self._gradients for j in bucket):
                return
            self._next += 1
            gradients = [self._gradients[j] for j in bucket]
            if into_pieces:
                self._gradients.update(zip(bucket, shards.scattered(gradients), strict=True))
            else:
                all_reduce(gradients, "mean")

    def gradients(self) -> Mapping[int, Tensor]:
        return self._gradients


# --- data parallelism ----------------------------------------------------------------


def data_parallel(
    make_step: Callable[[LocalVM], Callable[..., R]], group: Group, *, shard: Shard | None = None
) -> Callable[..., R]:
    """A training step that the members of the group share: each takes its part of the batch.

    `make_step(vm)` is called once on each member. It builds the model and optimizer there, and
    returns the member's step. Each member must build the same ones, for instance from one random
    key. The result is called with arrays or tensors of N rows. It calls each member's step with the
    N / size rows of its rank, as numpy arrays, and returns what the step of rank 0 returns; keyword
    arguments go to all steps as they are. The step brings the gradients together:

        loss_and_grads = ml.parallel.value_and_grad(loss_of)

        def make_step(vm):
            weights, batch = ml.Arena(vm, "weights"), ml.Arena(vm, "batch")
            with weights.allocating():
                model = Mlp((28, 28, 1), 10, key=ml.random.key(0))
                optimizer = ml.optim.SGD(model, 0.1)

            def step(images, labels):
                with batch:
                    loss, grads = loss_and_grads(model, ml.asarray(images), ml.asarray(labels))
                    optimizer.update(grads)
                    return float(loss)

            return step

    All parts have equal length, so the mean of their means is that of the batch. But for rounding,
    one step is the step of one VM on the whole batch; the replicas stay equal bit for bit. Each
    member's step may be captured, on its own VM.

    With `shard="optimizer"` an optimizer that `make_step` makes keeps the state of this member's
    part of the parameters, a 1 / size of it. With `shard="all"` it also leaves a Module no more
    than that part of its parameters, which are gathered whenever a field is read. Neither changes
    how a step is written, and both give the bits of a step that is not sharded, but where a norm of
    all gradients adds in another order (Rajbhandari et al., ZeRO, arXiv 1910.02054).

    Raises `AttributeRefused` for another `shard`, `ShapeError` unless all arguments are
    arrays of one number of rows, a multiple of the group's size, and what `Group.run` raises.
    """
    if shard not in (None, "optimizer", "all"):
        raise AttributeRefused(
            f"data_parallel: shard is None, 'optimizer' or 'all', not {brief(shard)}"
        )

    def make(rank: int, vm: LocalVM) -> Callable[..., R]:
        with shards.sharding(shard):
            return make_step(vm)

    steps = group.run(make)

    def step(*batch: Any, **common: Any) -> R:
        rows = _rows(batch, group.size)

        def take_part(rank: int, vm: LocalVM) -> R:
            with shards.sharding(shard):
                return steps[rank](*rows[rank], **common)

        return group.run(take_part)[0]

    return step


def _rows(batch: Sequence[Any], members: int) -> list[list[Array]]:
    """For each member its rows of every array; views, not copies."""
    arrays = [np.asarray(each) for each in batch]
    lengths = {array.shape[0] if array.ndim else None for array in arrays}
    if len(lengths) > 1 or None in lengths or any(n % members for n in lengths if n is not None):
        types = ", ".join(brief(array.shape) for array in arrays)
        raise ShapeError(
            f"a batch for {members} members is of arrays with one number of rows, a multiple "
            f"of {members}, not of shapes {types}"
        )
    return [
        [
            array[rank * len(array) // members : (rank + 1) * len(array) // members]
            for array in arrays
        ]
        for rank in range(members)
    ]
