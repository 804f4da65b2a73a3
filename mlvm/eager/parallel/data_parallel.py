"""Data-parallel training on the members of a group: averaged gradients, and split batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import numpy as np

from mlvm.arena.arena import STALE
from mlvm.core.errors import ArgumentError, ShapeError, brief, takes
from mlvm.core.types import Array
from mlvm.eager.autodiff.grad import collecting
from mlvm.eager.optim.gradients import Parts, parted
from mlvm.eager.parallel import shards
from mlvm.eager.parallel.collectives import all_reduce_start, all_reduce_wait, size
from mlvm.eager.tensor.reading import values_of
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Node, Tree, Where
from mlvm.machines.local import LocalVM
from mlvm.parallel.group import AnyGroup
from mlvm.parallel.membership import Shard, sharding

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


# --- gradients -----------------------------------------------------------------------


@overload
def value_and_grad(
    fn: Callable[P, Tensor],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[False] = False,
    where: Where | None = None,
) -> Callable[P, tuple[Tensor, Any]]: ...
@overload
def value_and_grad(
    fn: Callable[P, tuple[Tensor, A]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    where: Where | None = None,
) -> Callable[P, tuple[tuple[Tensor, A], Any]]: ...
@hinted
def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    where: Where | None = None,
) -> Callable[..., Any]:
    """Transform like `ml.value_and_grad`, with value and gradients averaged over all members.

    Communication overlaps the backward pass: buckets of a few megabytes of gradients are averaged
    as soon as they are complete (Li et al., PyTorch Distributed, arXiv 2006.15704). Buckets follow
    the parameters in reverse order, so that all members agree. The bits equal the bits of
    `all_reduce(ml.value_and_grad(fn)(...), "mean")`. `aux` is not averaged.

    In a step of `data_parallel(..., shard=...)`, the gradient of a Module or dict is a `Parts`:
    each member gets one shard of every gradient, as the member's optimizer needs.

    Raises the errors of `ml.value_and_grad`, and `GradientError` inside a differentiated function.

        >>> loss_and_grad = ml.parallel.value_and_grad(lambda x: ml.sum(x * x))
        >>> def member(rank, vm):
        ...     return loss_and_grad(ml.ones(2) * rank)[1].tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[1.0, 1.0], [1.0, 1.0]]

    Invalid calls:
        ml.parallel.value_and_grad(lambda x: x)(v)  # GradientError
    """
    alone = collecting(fn, argnums, has_aux=has_aux, where=where)
    differentiated = collecting(fn, argnums, has_aux=has_aux, where=where, collect=_Buckets)
    several = not isinstance(argnums, int)

    @wraps(fn, updated=())
    def averaged(*args: Any, **kwargs: Any) -> Any:
        if size() == 1:
            return alone(*args, **kwargs)
        primal, gradients = differentiated(*args, **kwargs)
        if shards.current_sharding() is not None:
            trees = gradients if several else [gradients]
            trees = [Parts(each) if isinstance(each, dict) else each for each in trees]
            gradients = tuple(trees) if several else trees[0]
        return primal, gradients

    return averaged


class _Buckets:
    """The value and the gradients of a differentiation, averaged in buckets.

    Gradients with respect to sharded tensors are averaged during the backward pass, and are
    returned unchanged. Under `shard="optimizer"` each member keeps only one shard of all other
    gradients, except those in a list or tuple.
    """

    def __init__(
        self, value: Tensor, arguments: Sequence[Tree], variables: Sequence[Tensor]
    ) -> None:
        self._value = value
        self._gradients: dict[int, Tensor] = {}
        self._buckets: list[tuple[bool, list[int]]] = []  # from the last parameter to the first
        self._next = 0
        self._started: list[Tree] = []
        self._scattering: deque[tuple[list[int], Callable[[], list[Tensor]]]] = deque()
        numbers = {id(x): i for i, x in enumerate(variables)}
        for argument in reversed(arguments):
            scatters = shards.current_sharding() == "optimizer" and isinstance(
                argument, (dict, Node)
            )
            whole = [numbers[id(x)] for x in parted(argument)[0] if id(x) in numbers][::-1]
            for bucket in shards.buckets([variables[i].type for i in whole]):
                self._buckets.append((scatters, [whole[i] for i in bucket]))
        self._start(value)

    def add(self, i: int, g: Tensor) -> None:
        self._gradients[i] = g
        while self._next < len(self._buckets):
            scatters, bucket = self._buckets[self._next]
            if not all(j in self._gradients for j in bucket):
                return
            self._next += 1
            gradients = [self._gradients[j] for j in bucket]
            if scatters:
                self._scattering.append((bucket, shards.begin_scattered(gradients)))
                self._end_scattering(1)  # wait for all, since each member keeps whole gradients
            else:
                self._start(gradients)

    def finish(self) -> tuple[Tensor, Mapping[int, Tensor]]:
        self._end_scattering(0)
        for tree in self._started:
            all_reduce_wait(tree)
        return self._value, self._gradients

    def _end_scattering(self, count: int) -> None:
        """Wait for the shards of all buckets except the last `count`."""
        while len(self._scattering) > count:
            bucket, end = self._scattering.popleft()
            self._gradients.update(zip(bucket, end(), strict=True))

    def _start(self, tree: Tree) -> None:
        self._started.append(tree)
        all_reduce_start(tree, "mean")


# --- data parallelism ----------------------------------------------------------------


@hinted
def data_parallel(
    make_step: Callable[[LocalVM], Callable[..., R]], group: AnyGroup, *, shard: Shard | None = None
) -> Callable[..., R]:
    """Return a training step that all members of a group run, each on a slice of the batch.

    `make_step(vm)` is called once on each member. It creates the model and the optimizer there, and
    returns the member's step. Each member must create the same model, for instance from the same
    random key. The returned function accepts arrays or tensors of N rows. It calls each member's
    step with the N / size rows of that rank, as numpy arrays, and returns the result of rank 0.
    Keyword arguments are passed to all steps unchanged. The step averages the gradients:

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

    All slices have equal length, so the mean of the means is the mean of the batch. Except for
    rounding, a step equals a step of a single VM on the full batch; the replicas stay equal bit for
    bit. Each member may capture the step, on the member's VM.

    With `shard="optimizer"`, an optimizer of `make_step` stores only the state for this member's
    shard of the parameters, 1 / size of it. With `shard="all"` a Module also stores only this shard
    of the parameters, which are gathered whenever a field is read (Rajbhandari et al., ZeRO, arXiv
    1910.02054). The code of a step does not change. The results equal the results of an unsharded
    step bit for bit, except for norms of all gradients, which are summed in a different order.

    Raises `ArgumentError` if `shard` is unknown, `group` is not a group, or `make_step` does not
    accept exactly the VM and return a function; `ShapeError` unless all arguments are arrays with
    the same number of rows, a multiple of the group's size; and the errors of `Group.run`.

        >>> def make_step(vm): return lambda x: float(ml.sum(ml.asarray(x)))
        >>> with ml.parallel.Group(2) as group:
        ...     ml.parallel.data_parallel(make_step, group)(ml.ones(6))
        3.0

    Invalid calls:
        ml.parallel.data_parallel(lambda vm: None, None, shard="most")  # ArgumentError
        ml.parallel.data_parallel(lambda rank, vm: None, group)  # ArgumentError
        ml.parallel.data_parallel(lambda vm: None, group)  # ArgumentError
        ml.parallel.data_parallel(lambda vm: lambda x: x, group)(ml.ones(3))  # ShapeError
    """
    if shard not in (None, "optimizer", "all"):
        raise ArgumentError(
            f"data_parallel: expected shard as None, 'optimizer' or 'all', got {brief(shard)}"
        )

    if not isinstance(group, AnyGroup):
        raise ArgumentError(
            f"data_parallel: expected a Group, such as ml.parallel.Group(2), got {brief(group)}"
        )
    if not takes(make_step, 1):
        raise ArgumentError(
            f"data_parallel: expected make_step as a function (vm), got {brief(make_step)}"
        )
    steps = group.keep(_Maker(make_step, shard))

    def step(*batch: Any, **common: Any) -> R:
        return steps(*_rows(batch, group.size), **common)[0]

    return step


@dataclass(frozen=True)
class _Maker(Generic[R]):
    """Callable that makes a member's step; it can be pickled if `make_step` can."""

    make_step: Callable[[LocalVM], Callable[..., R]]
    shard: Shard | None

    def __call__(self, rank: int, vm: LocalVM) -> Callable[..., R]:
        with sharding(self.shard):
            step = self.make_step(vm)
        if not callable(step):
            reason = f"{brief(self.make_step)} returned {brief(step)}"
            raise ArgumentError(f"data_parallel: expected make_step to return a function; {reason}")

        def take_part(*rows: Array, **common: Any) -> R:
            with sharding(self.shard):
                return step(*rows, **common)

        return take_part


def _rows(batch: Sequence[Any], members: int) -> list[list[Array]]:
    """Split every array into the rows of each member, as views without a copy.

    Tensors must belong to this process."""
    arrays = [_array(each) for each in batch]
    lengths = {array.shape[0] if array.ndim else None for array in arrays}
    if len(lengths) > 1 or None in lengths or any(n % members for n in lengths if n is not None):
        types = ", ".join(brief(array.shape) for array in arrays)
        raise ShapeError(
            f"expected arrays with equal numbers of rows, a multiple of {members} for the "
            f"{members} members, got shapes {types}"
        )
    return [np.split(array, members) for array in arrays]


def _array(x: Any) -> Array:
    if not isinstance(x, Tensor):
        return np.asarray(x)
    vm = x.arena.vm
    if x.handle == STALE or not isinstance(vm, LocalVM) or not vm.on_host:
        return values_of(x)
    view = vm.borrow(x.handle)
    view.flags.writeable = False
    return view
