"""Averages of weights, and updates from the gradients of several batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from mlvm.arena.context import current
from mlvm.core.errors import ArgumentError, GradientError
from mlvm.core.types import TensorType, f32
from mlvm.eager.control.branches import cond
from mlvm.eager.functions import creation, elements
from mlvm.eager.functions.halves import rounded, widened
from mlvm.eager.optim.gradients import is_in_parts
from mlvm.eager.optim.optimizer import Optimizer, zeros_beside
from mlvm.eager.optim.ranges import CheckedFields, Count, Fraction, checked, number_in
from mlvm.eager.optim.schedules import Schedule
from mlvm.eager.tensor import primitives as op
from mlvm.eager.tensor.apply import COPY
from mlvm.eager.tensor.tensor import Tensor
from mlvm.eager.tensor.update import apply_into
from mlvm.eager.tensor.values import kind_of
from mlvm.eager.tensor.wrapper import hinted
from mlvm.eager.tree import Tree, flatten, named_leaves, named_tensors, require_types, unflatten
from mlvm.renamed import OldAttribute


class EMA(CheckedFields):
    """Exponential moving averages of the parameters of a model or other tree.

    Each update sets average = decay * average + (1 - decay) * parameter (Polyak and Juditsky,
    1992). The averages are initialised with the parameters.

        average = ml.optim.EMA(model, 0.999)
        optimizer.update(grads)                 # in a step, captured or not
        average.update()
        with average.swapped():                 # the model has the averages
            evaluate(model)

    With `warmup` the decay is min(decay, (1 + t) / (10 + t)) after t updates, as in TensorFlow, so
    that the influence of the initial weights decreases fast. Averages of half-precision parameters
    are f32. Buffers are not averaged. `count`, f32[], is the number of updates; it is allocated in
    the arena of the first parameter.

    Raises `ArgumentError` unless 0 <= decay < 1 and `warmup` is a bool, or if the model is sharded
    over a group.

        >>> w = ml.zeros(2)
        >>> average = ml.optim.EMA({"w": w}, 0.75)
        >>> w += 4.0
        >>> average.update()
        >>> with average.swapped(): w
        Tensor([1., 1.], f32[2])
        >>> w
        Tensor([4., 4.], f32[2])

    Invalid calls:
        ml.optim.EMA({})  # ArgumentError
    """

    _kinds: ClassVar = {"decay": Fraction, "warmup": bool}

    @hinted
    def __init__(self, params: Tree, decay: float = 0.999, *, warmup: bool = False) -> None:
        self.decay = number_in("EMA", "decay", decay, 0, 1)
        self.warmup = checked("EMA", "warmup", warmup, bool)
        self._tree = params
        self._is_swapped = False
        parameters = self._params()
        if not parameters:
            raise ArgumentError(
                "EMA: expected parameters to average, got none; pass a model or its parameters"
            )
        if is_in_parts(params):
            raise ArgumentError("EMA: cannot average sharded weights; use shard='optimizer'")
        self._types = {path: x.type for path, x in parameters.items()}
        self._averages = {path: zeros_beside(x, _wide(x.type)) for path, x in parameters.items()}
        self.count = zeros_beside(next(iter(parameters.values())), TensorType(f32))
        for path, average in self._averages.items():
            apply_into(average, COPY, widened(parameters[path]))

    def update(self) -> None:
        """Update the averages with the current parameters.

        Raises as `Optimizer.update` does for parameters with other paths or types, `ArgumentError`
        inside `swapped()`, and `GradientError` inside a differentiated function.

        Invalid calls:
            within(swapped.swapped(), swapped.update)  # ArgumentError
            ml.grad(lambda x: (swapped.update(), x)[1])(ml.ones(()))  # GradientError
        """
        params = self._checked("update")
        part: float | Tensor = 1 - self.decay
        if self.warmup:
            part = op.maximum(9 / (self.count + 10), part)
        for path, average in self._averages.items():
            here = elements.astype(part, average.dtype) if isinstance(part, Tensor) else part
            average += here * (widened(params[path]) - average)
        self.count += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the averages into the parameters inside the block, and restore them afterwards.

        Raises the errors of `update`."""
        params = self._checked("swapped")
        own = {path: zeros_beside(x, x.type) for path, x in params.items()}
        for path, x in params.items():
            apply_into(own[path], COPY, x)
        self._is_swapped = True
        try:
            for path, x in params.items():
                apply_into(x, COPY, rounded(op.copy(self._averages[path]), x.dtype))
            yield
        finally:
            self._is_swapped = False
            for path, x in params.items():
                apply_into(x, COPY, own[path])

    def state(self) -> dict[str, Tensor]:
        """Return the averages by path, as `average/Dense_0/kernel`, and `count`."""
        return dict(named_leaves({"count": self.count, "average": self._averages}))

    def _params(self) -> dict[str, Tensor]:
        return {path: x for path, x in named_tensors(self._tree).items() if x.dtype.is_float}

    def _checked(self, where: str) -> dict[str, Tensor]:
        params = self._params()
        require_types(self._types, {path: x.type for path, x in params.items()}, "parameter")
        if self._is_swapped:
            raise ArgumentError(
                f"EMA.{where}: inside swapped() the parameters are the averages; call it "
                "outside of the block"
            )
        if current().tape is not None:
            raise GradientError(f"EMA.{where}: call it outside of the differentiated function")
        return params

    def __repr__(self) -> str:
        return f"<EMA of {len(self._averages)} tensors: decay={self.decay}>"


def _wide(type: TensorType) -> TensorType:
    return type.with_dtype(f32) if type.dtype.is_half else type


class MultiSteps:
    """Optimizer that updates with the mean gradient of `every` batches, like MultiSteps of optax.

    Use it for batches that are too large for the memory.

        optimizer = ml.optim.MultiSteps(ml.optim.AdamW(model, 1e-3), 4)
        for x, y in batches:                    # of a quarter of the size
            loss, grads = ml.value_and_grad(loss_of)(model, x, y)
            optimizer.update(grads)

    The sums of gradients are allocated in the arenas of the parameters. `count`, f32[], is the
    number of gradients in them. A step with this optimizer may be captured: the program decides
    when to update.

    Raises `ArgumentError` unless `every` is an int from 1 to 2**24.

        >>> w = ml.zeros(2)
        >>> optimizer = ml.optim.MultiSteps(ml.optim.SGD({"w": w}, 1.0), 2)
        >>> optimizer.update({"w": ml.ones(2)}), optimizer.update({"w": 2 * ml.ones(2)})
        (Tensor(False, bool[]), Tensor(True, bool[]))
        >>> w
        Tensor([-1.5, -1.5], f32[2])

    Invalid calls:
        ml.optim.MultiSteps(None, 2)  # ArgumentError
    """

    if not TYPE_CHECKING:
        rate = OldAttribute("MultiSteps", "rate")

    @hinted
    def __init__(self, optimizer: Optimizer, every: int) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"MultiSteps: expected an optimizer, got {kind_of(optimizer)}")
        self.optimizer = optimizer
        self.every = checked("MultiSteps", "every", every, Count)
        params, layout = optimizer._params, optimizer._layout
        self._sums = {
            path: zeros_beside(x, layout.state_type(x.type)) for path, x in params.items()
        }
        self.count = zeros_beside(optimizer.count, optimizer.count.type)

    def update(self, grads: Tree) -> Tensor:
        """Add gradients to the sums; after every `every` calls, update the parameters.

        Return whether they were updated: bool[]. Raises the errors of `Optimizer.update`."""
        sums = self._sums_of(grads)
        for total, g in {id(total): (total, g) for total, g in sums.values()}.values():
            total += g * (1.0 / self.every)
        self.count += 1
        is_full: Tensor = self.count >= self.every
        leaves, structure = flatten(grads)
        means = unflatten(structure, [sums[path][0] if path in sums else g for path, g in leaves])

        def improve() -> None:
            self.optimizer.update(means)
            for total in (*self._sums.values(), self.count):
                apply_into(total, COPY, creation.zeros_like(total))

        cond(is_full, improve, lambda: None)
        return is_full

    def _sums_of(self, grads: Tree) -> dict[str, tuple[Tensor, Tensor]]:
        """Return pairs of a sum and the gradient to add; shared parameters occur twice."""
        gradients = self.optimizer._own(named_leaves(grads))
        leaves = self.optimizer._leaves
        first = {id(x): path for path, x in self.optimizer._params.items()}
        types = {path: self._sums[first[id(x)]].type for path, x in leaves.items()}
        require_types(types, {path: g.type for path, g in gradients.items()}, "gradient")
        if current().tape is not None:
            raise GradientError("MultiSteps: call update outside of the differentiated function")
        return {path: (self._sums[first[id(leaves[path])]], g) for path, g in gradients.items()}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer. It may be assigned a number or a schedule."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | Schedule) -> None:
        self.optimizer.learning_rate = value

    def state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, and the sums by path, as `gradients/Dense_0/kernel`.

        `num_gradients` is the number of gradients in the sums."""
        return self.optimizer._layout.state(self._own_state())

    def _own_state(self) -> dict[str, Tensor]:
        own = dict(named_leaves({"num_gradients": self.count, "gradients": self._sums}))
        return {**self.optimizer._own_state(), **own}

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays to the state, in place, by the paths of `state`.

        Raises as `Optimizer.load_state` does."""
        self.optimizer._layout.load_state(self._own_state(), arrays)

    def __repr__(self) -> str:
        return f"<MultiSteps: {self.every} of {self.optimizer!r}>"
