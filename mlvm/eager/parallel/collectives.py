"""Collectives in eager code: operations in which all members of a group exchange data.

Each function is one launch, so a captured step may contain it. On a VM without a group it behaves
as in a group of size 1. The functions have no gradients: apply `all_reduce` to the result of
`value_and_grad`.

With an `axis_name`, the collective runs over the lanes of the `vmap` with that name instead of
members. This is an ordinary op with gradients.

No member waits for other members for more than `timeout` seconds; None means the timeout of the
group. After that all members raise `GroupTimeoutError`, which names the missing members. A group of
processes is then closed, unless the missing member exits within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, overload

from mlvm.arena.context import current
from mlvm.core.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    ShapeError,
    brief,
    with_article,
)
from mlvm.core.memo import memoized
from mlvm.core.program.program import Program
from mlvm.core.types import DType
from mlvm.eager.functions import creation, random, shapes
from mlvm.eager.functions.arguments import Ints, integers
from mlvm.eager.functions.elements import take
from mlvm.eager.functions.indexing import getitem
from mlvm.eager.tensor import primitives
from mlvm.eager.tensor.apply import COPY, OneOp, apply, one_op
from mlvm.eager.tensor.autocast import carried
from mlvm.eager.tensor.context import current_arena
from mlvm.eager.tensor.reading import launch_for_values
from mlvm.eager.tensor.tensor import Tensor, is_tracked
from mlvm.eager.tensor.update import apply_into, make_exclusive
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.transform.batching import axis_of
from mlvm.eager.tree import Tree, named_tensors, require_live
from mlvm.parallel.collectives import Member
from mlvm.parallel.communicator import Reduction
from mlvm.parallel.group import AnyGroup
from mlvm.parallel.membership import place_of

# --- who and with whom ---------------------------------------------------------------


@overload
def rank() -> int: ...
@overload
def rank(axis_name: str) -> Tensor: ...
@hinted
def rank(axis_name: str | None = None) -> int | Tensor:
    """Return the current VM's rank in the group, from 0; 0 outside of a group.

    With an `axis_name`, return the index along the `vmap` with that name, i64[].

    Raises `ArgumentError` if no enclosing `vmap` has that name.

    >>> with ml.parallel.Group(2) as group: group.run(lambda rank, vm: ml.parallel.rank())
    [0, 1]

    Invalid calls:
        ml.parallel.rank("nobody")  # ArgumentError
    """
    return place_of(current_arena().vm)[0] if axis_name is None else axis_of(axis_name)[1]


@hinted
def size(axis_name: str | None = None) -> int:
    """Return the size of the current VM's group; 1 outside of a group.

    With an `axis_name`, return the size of the `vmap` with that name.

    Raises `ArgumentError` if no enclosing `vmap` has that name.

    >>> with ml.parallel.Group(2) as group: group.run(lambda rank, vm: ml.parallel.size())
    [2, 2]

    Invalid calls:
        ml.parallel.size("nobody")  # ArgumentError
    """
    return place_of(current_arena().vm)[1] if axis_name is None else axis_of(axis_name)[0]


# --- collectives ---------------------------------------------------------------------


@hinted
def all_reduce(
    tree: Tree, op: Reduction = "sum", *, axis_name: str | None = None, timeout: float | None = None
) -> None:
    """Overwrite each tensor of the tree with the sum, mean, max or min over all members.

    With an `axis_name`, reduce over the `vmap` with that name instead. All members pass trees of
    the same types. The call is one launch with one barrier. Elements are combined in order of rank,
    so all members get the same bits in every run.

    The tensors: any shapes and dtypes. Raises `DTypeError` for a mean of integers or a sum of
    bools; `ArgumentError` if `op` is unknown; `GradientError` if a gradient flows through a tensor;
    and `StaleTensorError` if a tensor was freed.

        >>> def member(rank, vm):
        ...     x = ml.ones(2) * (rank + 1.0)
        ...     ml.parallel.all_reduce(x)
        ...     return x.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[3.0, 3.0], [3.0, 3.0]]
        >>> def centered(x):
        ...     mean = ml.copy(x)
        ...     ml.parallel.all_reduce(mean, "mean", axis_name="batch")
        ...     return x - mean
        >>> ml.vmap(centered, axis_name="batch")(ml.asarray([1.0, 2.0, 6.0]))
        Tensor([-2., -1.,  3.], f32[3])

    Invalid calls:
        ml.parallel.all_reduce(v, "most")  # ArgumentError
        ml.parallel.all_reduce(bools)  # DTypeError
        ml.grad(lambda x: [x * x, ml.parallel.all_reduce(x)])(v)  # GradientError
        ml.parallel.all_reduce(stale)  # StaleTensorError
    """
    if axis_name is None:
        _in_place("all_reduce", tree, op=op, timeout=timeout)
    else:
        _over_lanes(tree, lambda x: _reduced(x, op, axis_name))


@hinted
def all_reduce_start(tree: Tree, op: Reduction = "sum", *, timeout: float | None = None) -> None:
    """Start an asynchronous `all_reduce` and return immediately.

    No tensor of the tree may be used until `all_reduce_wait` returns for the same tree.

    The tensors: any shapes. Raises the errors of `all_reduce`.

        >>> def member(rank, vm):
        ...     x = ml.ones(2) * (rank + 1.0)
        ...     ml.parallel.all_reduce_start(x, "max")
        ...     y = ml.sum(ml.ones(4))  # meanwhile
        ...     ml.parallel.all_reduce_wait(x)
        ...     return x.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[2.0, 2.0], [2.0, 2.0]]
    """
    _in_place("all_reduce.start", tree, op=op, timeout=timeout)


@hinted
def all_reduce_wait(tree: Tree) -> None:
    """Wait for the `all_reduce_start` of this tree.

    The tensors: any shapes. Raises `GroupError` for a tree that was not passed to
    `all_reduce_start`.

        >>> def member(rank, vm):
        ...     x = ml.ones(2)
        ...     ml.parallel.all_reduce_start(x)
        ...     ml.parallel.all_reduce_wait(x)
        ...     return x.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[2.0, 2.0], [2.0, 2.0]]

    Invalid calls:
        members(lambda *_: ml.parallel.all_reduce_wait(ml.ones(2)))  # GroupError
    """
    _in_place("all_reduce.wait", tree)


@hinted
def broadcast(
    tree: Tree, root: int = 0, *, axis_name: str | None = None, timeout: float | None = None
) -> None:
    """Overwrite each tensor of the tree with the tensor of the member with rank `root`.

    With an `axis_name`, use the tensor of index `root` along the `vmap` with that name. After a
    broadcast of a model, it is the same on all members.

    The tensors: any shapes and dtypes. Raises `ArgumentError` unless 0 <= root < size().

        >>> def member(rank, vm):
        ...     x = ml.ones(2) * (rank + 1.0)
        ...     ml.parallel.broadcast(x, root=1)
        ...     return x.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[2.0, 2.0], [2.0, 2.0]]

    Invalid calls:
        ml.parallel.broadcast(v, root=5)  # ArgumentError
    """
    if axis_name is None:
        _in_place("broadcast", tree, root=root, timeout=timeout)
    else:
        lanes = size(axis_name)
        if not 0 <= root < lanes:
            raise ArgumentError(
                f"expected root from 0 to {lanes - 1}, the number of a lane, got {root}"
            )
        _over_lanes(tree, lambda x: getitem(_gathered(x, axis_name), root))


@hinted
def all_gather(x: Tensor, *, axis_name: str | None = None, timeout: float | None = None) -> Tensor:
    """Concatenate all members' x along axis 0 in order of rank: f[k, ...] -> f[size * k, ...].

    A scalar counts as one element. With an `axis_name`, concatenate x along the `vmap` with that
    name.

    x: [k, ...] -> [size * k, ...], the same dtype. Raises `GroupError` if members pass different
    types.

        >>> def member(rank, vm):
        ...     x = ml.ones(2) * (rank + 1.0)
        ...     return ml.parallel.all_gather(x).tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]

    Invalid calls:
        members(lambda rank, vm: ml.parallel.all_gather(ml.ones(2 + rank)))  # GroupError
    """
    if axis_name is not None:
        rows = _gathered(x, axis_name)
        return shapes.reshape(rows, (rows.shape[0] * (x.shape or (1,))[0], *x.shape[1:]))
    _require_untracked("all_gather", x)
    return _apply("all_gather", x, timeout=timeout)


@hinted
def reduce_scatter(
    x: Tensor, op: Reduction = "sum", *, axis_name: str | None = None, timeout: float | None = None
) -> Tensor:
    """Return this member's shard of `all_reduce(x, op)`: f[size * k, ...] -> f[k, ...].

    With an `axis_name`, return the shard of this index along the `vmap` with that name.

    Raises `ShapeError` if axis 0 is not a multiple of the group size, and the errors of
    `all_reduce`.

        >>> def member(rank, vm):
        ...     return ml.parallel.reduce_scatter(ml.arange(4.0)).tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[0.0, 2.0], [4.0, 6.0]]

    Invalid calls:
        ml.parallel.reduce_scatter(ml.ones(()))  # ShapeError
        members(lambda rank, vm: ml.parallel.reduce_scatter(ml.ones(3)))  # ShapeError
    """
    if axis_name is not None:
        lanes, number = axis_of(axis_name)
        if not x.ndim or not lanes or x.shape[0] % lanes:
            raise ShapeError(
                f"expected a multiple of {lanes} rows, one slice per lane, got {x.type}; "
                "pad x, or drop rows"
            )
        pieces = shapes.reshape(_reduced(x, op, axis_name), (lanes, -1, *x.shape[1:]))
        return take(pieces, number, axis=0)
    _require_untracked("reduce_scatter", x)
    return _apply("reduce_scatter", x, op=op, timeout=timeout)


@hinted
def all_gather_start(x: Tensor, *, timeout: float | None = None) -> Tensor:
    """Start an asynchronous `all_gather` and return immediately.

    The result and x must not be used until `all_gather_wait` returns for them.

    x: [k, ...] -> [size * k, ...], the same dtype. Raises the errors of `all_gather`.

        >>> def member(rank, vm):
        ...     x = ml.ones(1) * (rank + 1.0)
        ...     y = ml.parallel.all_gather_start(x)
        ...     z = ml.sum(ml.ones(4))  # meanwhile
        ...     ml.parallel.all_gather_wait(y, x)
        ...     return y.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[1.0, 2.0], [1.0, 2.0]]
    """
    return _begun("all_gather", x, timeout=timeout)


@hinted
def all_gather_wait(y: Tensor, x: Tensor) -> None:
    """Wait for the `all_gather_start` of x; afterwards y contains the elements.

    y: [size * k, ...]. x: [k, ...]. Raises `GroupError` for tensors that do not belong to a started
    call.

        >>> def member(rank, vm):
        ...     x = ml.ones(1) * rank
        ...     y = ml.parallel.all_gather_start(x)
        ...     ml.parallel.all_gather_wait(y, x)
        ...     return y.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[0.0, 1.0], [0.0, 1.0]]

    Invalid calls:
        members(lambda *_: ml.parallel.all_gather_wait(*two()))  # GroupError
    """
    _ended("all_gather", y, x)


@hinted
def reduce_scatter_start(
    x: Tensor, op: Reduction = "sum", *, timeout: float | None = None
) -> Tensor:
    """Start an asynchronous `reduce_scatter` and return immediately.

    The result and x must not be used until `reduce_scatter_wait` returns for them.

    x: [size * k, ...] -> [k, ...], the same dtype. Raises the errors of `reduce_scatter`.

        >>> def member(rank, vm):
        ...     x = ml.arange(4.0)
        ...     y = ml.parallel.reduce_scatter_start(x)
        ...     z = ml.sum(ml.ones(4))  # meanwhile
        ...     ml.parallel.reduce_scatter_wait(y, x)
        ...     return y.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[0.0, 2.0], [4.0, 6.0]]
    """
    return _begun("reduce_scatter", x, op=op, timeout=timeout)


@hinted
def reduce_scatter_wait(y: Tensor, x: Tensor) -> None:
    """Wait for the `reduce_scatter_start` of x; afterwards y contains the elements.

    y: [k, ...]. x: [size * k, ...]. Raises `GroupError` for tensors that do not belong to a started
    call.

        >>> def member(rank, vm):
        ...     x = ml.arange(2.0)
        ...     y = ml.parallel.reduce_scatter_start(x, "max")
        ...     ml.parallel.reduce_scatter_wait(y, x)
        ...     return y.tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[0.0], [1.0]]

    Invalid calls:
        members(lambda *_: ml.parallel.reduce_scatter_wait(*two()))  # GroupError
    """
    _ended("reduce_scatter", y, x)


@hinted
def send(x: Tensor, to: int, *, timeout: float | None = None) -> None:
    """Send x to the member with rank `to`; return when that member has received it with `recv`.

    x: any shape and dtype; the receiver must expect the same. Raises `ArgumentError` unless `to` is
    the rank of another member.

        >>> def member(rank, vm):
        ...     if rank == 1: return ml.parallel.send(ml.ones(2), to=0)
        ...     return ml.parallel.recv(2, source=1, dtype=ml.float32).tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[1.0, 1.0], None]

    Invalid calls:
        ml.parallel.send(v, to=0)  # ArgumentError
    """
    _require_untracked("send", x)
    _own(x)
    _effect("send", [x], to=to, timeout=timeout)


@hinted
def recv(shape: Ints, *, source: int, dtype: object, timeout: float | None = None) -> Tensor:
    """Receive a tensor of this shape and dtype from the member with rank `source`.

    The result: [*shape]. Raises `ArgumentError` unless `source` is the rank of another member.

        >>> def member(rank, vm):
        ...     if rank == 1: return ml.parallel.send(ml.ones(2), to=0)
        ...     return ml.parallel.recv(2, source=1, dtype=ml.float32).tolist()
        >>> with ml.parallel.Group(2) as group: group.run(member)
        [[1.0, 1.0], None]

    Invalid calls:
        ml.parallel.recv(2, source=0, dtype="f32")  # ArgumentError
    """
    lengths = integers(shape, "shape")
    of = DType.of(dtype)
    return _apply("recv", source=source, shape=lengths, dtype=of, timeout=timeout)


@hinted
def barrier(*, timeout: float | None = None) -> None:
    """Wait until all members have called `barrier`.

    >>> def member(rank, vm):
    ...     ml.parallel.barrier()  # both are here
    ...     return ml.parallel.rank()
    >>> with ml.parallel.Group(2) as group: group.run(member)
    [0, 1]
    """
    _effect("barrier", [], timeout=timeout)


# --- lanes ---------------------------------------------------------------------------


def _over_lanes(tree: Tree, fn: Callable[[Tensor], Tensor]) -> None:
    """Overwrite each tensor of the tree with `fn(tensor)`, unless that is None."""
    for x in named_tensors(tree, buffers=True).values():
        apply_into(x, COPY, fn(x))


def _gathered(x: Tensor, axis_name: str) -> Tensor:
    """Return x of all indices of the `vmap`, one row per index."""
    lanes, number = axis_of(axis_name)
    return apply(one_op("gather_lanes", axis_name=axis_name, size=lanes), x, number)


def _reduced(x: Tensor, op: Reduction, axis_name: str) -> Tensor:
    """Compute the sum, mean, max or min over all indices of the `vmap`."""
    if op in ("max", "min"):
        rows = _gathered(x, axis_name)
        return primitives.max(rows, axis=0) if op == "max" else primitives.min(rows, axis=0)
    if op not in ("sum", "mean"):
        raise ArgumentError(f"expected op as 'sum', 'mean', 'max' or 'min', got {brief(op)}")
    lanes, _ = axis_of(axis_name)
    total = apply(one_op("sum_lanes", axis_name=axis_name, size=lanes), x)
    if op == "sum":
        return total
    if not x.dtype.is_inexact:
        raise DTypeError(f"expected floats for a mean, got {x.type}")
    return total / lanes


# --- members -------------------------------------------------------------------------


def _require_untracked(name: str, x: Tensor) -> None:
    """Check the operand of a collective, which must be a tensor that needs no gradient.

    Raise `GradientError` if a gradient flows through it, and `DTypeError` if it is not a tensor."""
    if not isinstance(x, Tensor):
        raise DTypeError(
            f"expected a tensor, got {with_article(type(x).__name__)}; convert with ml.asarray"
        ).at(name, ())
    if is_tracked(x):
        raise GradientError(
            f"{name} has no gradient; call it on the result of value_and_grad, or on "
            f"stop_gradient(x)"
        )


def _in_place(name: str, tree: Tree, **attributes: Any) -> None:
    tensors = list(named_tensors(tree, buffers=True).values())
    require_live(tensors)
    for x in tensors:
        _require_untracked(name, x)
    if name != "all_reduce.wait":  # `all_reduce.wait` accepts the bytes of `all_reduce.start`
        for x in tensors:
            make_exclusive(x)
    _effect(name, tensors, **attributes)


def _begun(name: str, x: Tensor, **attributes: Any) -> Tensor:
    """Return the tensor that the second half of a collective will fill."""
    _require_untracked(name, x)
    if size() == 1:
        return _apply(name, x, **attributes)
    call = _one_op(*place_of(current_arena().vm), name, _bound(name, attributes))
    type = call.infer((x.type,))
    assert type is not None  # neither has a dynamic shape
    y = creation.empty(type.shape, dtype=type.dtype)
    make_exclusive(y)
    _own(x)
    _effect(f"{name}.start", [y, x], **attributes)
    return y


def _own(x: Tensor) -> None:
    """Copy an aliased x in a captured function, because a collective may overwrite operands."""
    if current().recorder is not None:
        make_exclusive(x)


def _ended(name: str, y: Tensor, x: Tensor) -> None:
    for each in (y, x):
        _require_untracked(name, each)
    if size() > 1:
        _effect(f"{name}.wait", [y, x])


def _apply(name: str, *operands: Tensor, **attributes: Any) -> Tensor:
    """Launch the collective, into a new tensor."""
    rank, size = place_of(current_arena().vm)
    call = _one_op(rank, size, name, _bound(name, attributes))
    if size > 1:
        return apply(call, *operands)
    result = call.infer(tuple([x.type for x in operands]))
    assert result is not None  # none of these has a dynamic shape
    [x] = operands  # a recv, which has no operand, was rejected above
    return shapes.reshape(x, result.shape)


def _effect(name: str, operands: list[Tensor], **attributes: Any) -> None:
    """Launch a collective that has no result."""
    rank, size = place_of(current_arena().vm)
    call = _one_op(rank, size, name, _bound(name, attributes))
    if size > 1:
        program = _program(name, len(operands), tuple(call.attributes.items()))
        launch_for_values(program, current_arena().vm, tuple(operands))
    else:
        call.op.infer([x.type for x in operands], call.attributes)


def _bound(name: str, attributes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the attributes in the collective's order; omit the timeout if it is None."""
    bound = _OPS[name].bind(attributes)
    return tuple([each for each in bound.items() if each != ("timeout", None)])


_OPS: Final = Member("", 0, 1).ops


@memoized(1024)
def _one_op(rank: int, size: int, name: str, attributes: tuple[tuple[str, Any], ...]) -> OneOp:
    """Return the one-op program of a collective for a member of that rank."""
    return OneOp(Member("", rank, size).ops[name], dict(attributes))


@memoized(1024)
def _program(name: str, nparams: int, attributes: tuple[tuple[str, Any], ...]) -> Program:
    return Program.of_op(name, nparams, dict(attributes), 0)


def _in_caller_context(task: Callable[..., Any]) -> Callable[..., Any]:
    """Return the task with the caller's `ml.autocast` and the process's random seed."""
    return random.carried(carried(task))


AnyGroup.carried = staticmethod(_in_caller_context)  # type: ignore[method-assign]
