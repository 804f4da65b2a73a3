"""Norms and clipping of gradients, and loss scaling.

The norm of a sharded tree is the norm of the unsharded tree: see `Parts`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar, Final

from mlvm.core.errors import ArgumentError, DTypeError, brief
from mlvm.core.types import f32
from mlvm.eager.control.branches import cond
from mlvm.eager.functions import creation, elements
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.nn.module import Name
from mlvm.eager.optim.optimizer import Optimizer
from mlvm.eager.optim.ranges import AtLeastOne, CheckedFields, Count, Fraction, number_in
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY
from mlvm.eager.tensor.tensor import Tensor, described
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Node, Tree, containers, leaves, named_tensors, substitute

_MOST_SCALE: Final = 2.0**126


class Parts(dict[str, Any]):
    """Tree of shards: for each tensor the shard of this member, f[ceil(size / n)].

    >>> loss_and_grads = ml.parallel.value_and_grad(lambda params: ml.sum(params["w"] ** 2))
    >>> def make_step(vm):
    ...     params = {"w": ml.ones(3)}
    ...     optimizer = ml.optim.SGD(params, 0.5)
    ...     def step(x):
    ...         grads = loss_and_grads(params)[1]
    ...         optimizer.update(grads)
    ...         return type(grads).__name__, grads["w"].type, params["w"].tolist()
    ...     return step
    >>> with ml.parallel.Group(2) as group:
    ...     ml.parallel.data_parallel(make_step, group, shard="optimizer")(ml.ones(2))
    ('Parts', f32[2], [0.0, 0.0, 0.0])
    """

    @staticmethod
    def _all_reduce(tree: Tree, op: Any = "sum") -> None:
        """Combine shards over all members: `ml.parallel` assigns a function."""
        raise NotImplementedError


def parted(tree: Tree) -> tuple[list[Tensor], list[Tensor]]:
    """Return the unsharded and the sharded tensors of a tree, each once."""
    holders = [each for each in containers(tree) if isinstance(each, Parts) or is_in_parts(each)]
    pieces = {id(x) for each in holders for x in named_tensors(each).values()}
    tensors = named_tensors(tree).values()
    return [x for x in tensors if id(x) not in pieces], [x for x in tensors if id(x) in pieces]


def is_in_parts(tree: Tree) -> bool:
    """Return whether it is a Module with sharded parameters."""
    return isinstance(tree, Node) and tree._as_dict is Parts


@hinted
def global_norm(tree: Tree) -> Tensor:
    """Return the square root of the sum of all squares in a tree of float tensors: f[].

    The result is f32 for half precision. For complex numbers it uses the squared magnitudes.

    A tensor that occurs twice, such as the gradient of a shared parameter, is counted once. For
    sharded gradients (`ml.parallel.Parts`) it is the norm of the unsharded gradients, and all
    members must call this function.

    Raises `DTypeError` if a leaf is not a tensor of floats or complex numbers.

        >>> ml.optim.global_norm({"w": ml.asarray([3.0, 4.0])})
        Tensor(5., f32[])

    Invalid calls:
        ml.optim.global_norm({"w": 5})  # DTypeError
        ml.optim.global_norm({"w": ints})  # DTypeError
    """
    whole, pieces = parted(tree)
    parts = [_sum_of_squares(x) for x in whole]
    if pieces:
        of_pieces = reduce(op.add, map(_sum_of_squares, pieces))
        Parts._all_reduce(of_pieces)
        parts.append(of_pieces)
    return op.sqrt(reduce(op.add, parts)) if parts else creation.zeros((), dtype=f32)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of the squares of the magnitudes; f32 for half precision."""
    if not x.dtype.is_inexact:
        raise DTypeError(f"global_norm: expected gradients of floats, got {x.type}")
    return op.sum(op.square(op.abs(x) if x.dtype.kind == "complex" else widened(x)))


@hinted
def clip_by_global_norm(grads: Tree, max_norm: float) -> Tree:
    """Scale a tree by max_norm / global_norm(grads) if that is below 1.

    Pascanu et al., arXiv 1211.5063.

    The gradients: float tensors of any shapes, and so is the result. Raises `ArgumentError` unless
    max_norm > 0, or if `model.parameters()` is passed instead of gradients; `DTypeError` if a
    gradient is of integers.

        >>> ml.optim.clip_by_global_norm({"w": ml.asarray([3.0, 4.0])}, 1.0)["w"]
        Tensor([0.6, 0.8], f32[2])

    Invalid calls:
        ml.optim.clip_by_global_norm({"w": v}, 0.0)  # ArgumentError
        ml.optim.clip_by_global_norm({"w": ints}, 1.0)  # DTypeError
    """
    if not number_in("clip_by_global_norm", "max_norm", max_norm, 0):
        raise ArgumentError("clip_by_global_norm: expected a positive max_norm, got 0")
    if isinstance(grads, dict) and any(isinstance(name, Name) for name in grads):
        raise ArgumentError(
            "clip_by_global_norm: expected gradients, got parameters; write grads = "
            "clip_by_global_norm(grads, 1.0) with the result of ml.grad, which is not changed"
        )
    factor = max_norm / op.maximum(global_norm(grads), max_norm)

    def clipped(g: Tensor) -> Tensor:
        wide = widened(g)
        return rounded(wide * elements.astype(factor, wide.dtype), g.dtype)

    return substitute(clipped, grads)


# --- loss scaling --------------------------------------------------------------------


class LossScale(CheckedFields):
    """Factor for the loss, so that gradients in f16 neither underflow nor overflow.

    If a gradient is not finite, the factor is halved and that update is skipped. After
    `growth_interval` updates it is doubled. Names and defaults follow PyTorch's `GradScaler`
    (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740). bf16 has the range of f32
    and needs no scaling.

        scale = ml.optim.LossScale()
        loss, grads = ml.value_and_grad(lambda model: scale.scale(loss_of(model)))(model)
        scale.update(optimizer, scale.unscale(grads))

    `value` is the factor, and `good_steps` the number of updates since it last changed. Both are
    f32[] in the current arena, so a captured step can update them. The factor stays within 1 and
    2**126. If the initial value and the factors are powers of two, scaling does not round.

    Raises `ArgumentError` unless init_scale >= 1, growth_factor > 1, 0 < backoff_factor < 1 and
    growth_interval is an int from 1 to 2**24.

        >>> scale, w = ml.optim.LossScale(8.0), ml.asarray([3.0])
        >>> optimizer = ml.optim.SGD({"w": w}, 0.5)
        >>> scale.update(optimizer, scale.unscale({"w": ml.asarray([16.0])})), w, scale.value
        (Tensor(True, bool[]), Tensor([2.], f32[1]), Tensor(8., f32[]))
        >>> scale.update(optimizer, {"w": ml.asarray([ml.inf])}), w, scale.value
        (Tensor(False, bool[]), Tensor([2.], f32[1]), Tensor(4., f32[]))

    Invalid calls:
        ml.optim.LossScale(0.5)  # ArgumentError
    """

    _kinds: ClassVar = {
        "growth_factor": AtLeastOne,
        "backoff_factor": Fraction,
        "growth_interval": Count,
    }

    @hinted
    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor = number_in("LossScale", "growth_factor", growth_factor, 1)
        self.backoff_factor = number_in("LossScale", "backoff_factor", backoff_factor, 0, 1)
        self.growth_interval = growth_interval
        first = number_in("LossScale", "init_scale", init_scale, 1, _MOST_SCALE)
        self.value = creation.full((), first, dtype=f32)
        self.good_steps = creation.zeros((), dtype=f32)

    def _checked_field(self, name: str, value: Any) -> Any:
        value = super()._checked_field(name, value)
        low = {"backoff_factor": 0, "growth_factor": 1}.get(name)
        if value == low:
            raise ArgumentError(f"LossScale: expected {name} above {low}, got {value}")
        return value

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the factor; a half-precision loss is first converted to f32.

        f16 would overflow. Raises `DTypeError` if the loss is not a tensor of floats.

        Invalid calls:
            ml.optim.LossScale().scale(1.0)  # DTypeError
        """
        if not isinstance(loss, Tensor) or not loss.dtype.is_float:
            raise DTypeError(f"LossScale.scale: expected a loss of floats, got {described(loss)}")
        loss = widened(loss)
        return loss * elements.astype(self.value, loss.dtype)

    def unscale(self, grads: Tree) -> Tree:
        """Divide each gradient of a tree by the factor.

        Half-precision gradients become f32, because they would underflow. Raises `DTypeError` if a
        leaf is not a tensor.

        Invalid calls:
            ml.optim.LossScale().unscale({"w": 1.0})  # DTypeError
        """
        for leaf in leaves(grads):
            if not isinstance(leaf, Tensor):
                raise DTypeError(f"LossScale.unscale: expected tensors, got {brief(leaf)}")

        def divided(g: Tensor) -> Tensor:
            g = widened(g)
            return g / elements.astype(self.value, g.dtype)

        return substitute(divided, grads)

    def update(self, optimizer: Optimizer, grads: Tree) -> Tensor:
        """Update the parameters if all unscaled gradients are finite, and adapt the factor.

        Return whether they were finite: bool[]. Otherwise the parameters, the optimizer's state and
        its `count` do not change. Raises `DTypeError` if the first argument is not an optimizer.

        Invalid calls:
            ml.optim.LossScale().update(None, {})  # DTypeError
        """
        if not callable(getattr(optimizer, "update", None)):
            raise DTypeError(
                f"LossScale.update: expected an optimizer, then gradients, got {brief(optimizer)}"
            )
        finite = all_finite(grads)

        def improve() -> None:
            optimizer.update(grads)

        cond(finite, improve, lambda: None)
        good = op.where(finite, self.good_steps + 1.0, 0.0)
        grows = good >= self.growth_interval
        larger = op.where(grows, self.value * self.growth_factor, self.value)
        value = op.where(finite, larger, self.value * self.backoff_factor)
        apply_into(self.value, COPY, op.clip(value, 1.0, _MOST_SCALE))
        apply_into(self.good_steps, COPY, op.where(grows, 0.0, good))
        return finite

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of state by name: `value` and `good_steps`."""
        return {"value": self.value, "good_steps": self.good_steps}

    def __repr__(self) -> str:
        return f"<LossScale: {self.value}>"


@hinted
def all_finite(tree: Tree) -> Tensor:
    """Test whether all elements of a tree of float tensors are finite: bool[].

    Sharded gradients (`ml.parallel.Parts`) are tested as a whole: all members must call this
    function.

    Raises `DTypeError` if a leaf is not a tensor.

        >>> ml.optim.all_finite({"w": ml.ones(2), "b": ml.asarray([ml.nan])})
        Tensor(False, bool[])

    Invalid calls:
        ml.optim.all_finite({"w": 5})  # DTypeError
    """
    whole, pieces = parted(tree)
    parts = [op.all(op.isfinite(x)) for x in whole]
    if pieces:
        of_pieces = reduce(op.logical_and, [op.all(op.isfinite(x)) for x in pieces])
        here = elements.astype(of_pieces, f32)
        Parts._all_reduce(here, "min")
        parts.append(here > 0.0)
    return reduce(op.logical_and, parts) if parts else creation.full((), True)
