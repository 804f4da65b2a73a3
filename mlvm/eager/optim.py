"""Optimizers, which update parameters in place, learning-rate schedules, and clipping.

    optimizer = Adam(model, cosine(1e-3, total_steps=1000))
    loss, grads = value_and_grad(loss_of)(model, x, y)
    optimizer.update(clip_by_global_norm(grads, 1.0))

A schedule is a function from the number of updates done, f32[], to the learning rate, f32[]. It is
written with ops, so that it can be captured. A float is a rate that never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mlvm.core.errors import AttributeRefused, DTypeError, GradientError, HandleError
from mlvm.core.types import DType, TensorType, f32
from mlvm.eager import creation
from mlvm.eager import functions as fn
from mlvm.eager import primitives as op
from mlvm.eager.context import current_arena, recording
from mlvm.eager.tensor import Tensor, apply_into, one_op
from mlvm.eager.tensor import constant as scalar
from mlvm.eager.tree import (
    Tree,
    leaves,
    load,
    named_tensors,
    require_live,
    require_types,
    require_writable,
    substitute,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "Schedule",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "one_cycle",
]

Schedule: TypeAlias = Callable[[Tensor], Tensor]

_SCALAR = TensorType(f32)
_MULTIPLY_ADD = one_op("multiply_add")


class Optimizer:
    """Updates a tree of parameters in place; base of the optimizers.

    `params` is a Module or another tree of float tensors. `count`, f32[], is the number of
    updates done. All state is allocated at construction, in the arena of the parameter that it
    belongs to. An update leaves nothing behind in the current arena.

    Raises `AttributeRefused` for a hyperparameter out of range, `DTypeError` for parameters
    that are not floats, are views, or none at all, `HandleError` for parameters on
    several VMs.
    """

    count: Tensor

    def __init__(self, params: Tree, learning_rate: float | Schedule, state: Sequence[str]) -> None:
        """`state` names the tensors of state that each parameter has, which begin at zero."""
        self.learning_rate = (
            learning_rate
            if callable(learning_rate)
            else _require(self._name, "learning_rate", learning_rate, 0)
        )
        self._tree = params
        self._leaves = dict(leaves(params))
        self._params = named_tensors(params)
        self._types = {path: x.type for path, x in self._leaves.items()}
        for path, x in self._params.items():
            if not x.dtype.is_float:
                raise DTypeError(f"{self._name}: parameter {path!r} must be a float, not {x.type}")
            if x.base is not None:
                raise DTypeError(
                    f"{self._name}: parameter {path!r} is a view, whose update would be one of the "
                    f"tensor it was made from too; make it a copy(x)"
                )
        if not self._params:
            raise DTypeError(f"{self._name}: there are no parameters to update")
        arenas = [x.arena for x in self._params.values()]
        if len({id(arena.vm) for arena in arenas}) > 1:
            names = ", ".join(sorted({arena.vm.name for arena in arenas}))
            raise HandleError(f"{self._name}: all parameters must live on one VM, not on {names}")
        with arenas[0].allocating():
            self.count = creation.zeros((), dtype=f32)
        self._state = {name: dict(map(_zeros_beside, self._params.items())) for name in state}

    def update(self, grads: Tree) -> None:
        """Update every parameter from its gradient; `grads` is a tree like that of the parameters.

        Everything is checked before the first write. Raises `PathError` for gradients of another
        structure, `DTypeError` for another dtype or when a parameter was replaced in the tree,
        `ShapeError`, `StaleTensor`, `HandleError` when the current arena is on another VM,
        `GradientError` inside a differentiated function or while a tape needs a parameter's value.
        `ArenaOverflow` in the middle leaves the later parameters as they were.
        """
        gradients = self._checked(grads)
        rate = self._rate()
        dtypes = dict.fromkeys(x.dtype for x in self._params.values())
        scalars = {dtype: self._scalars(_in_dtype(rate, dtype)) for dtype in dtypes}
        self.count += 1
        for path, param in self._params.items():
            state = [tensors[path] for tensors in self._state.values()]
            self._step(param, gradients[path], state, scalars[param.dtype])

    def state(self) -> dict[str, Tensor]:
        """The tensors of state by path: `count`, `momentum/Dense_0/kernel`."""
        return dict(leaves({"count": self.count, **self._state}))

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays over the state, in place, by the paths of `state`.

        Nothing is written unless all fit: raises `PathError` for paths that are missing or
        unknown, `DTypeError` for a wrong dtype, `ShapeError` for a wrong shape.
        """
        load(self.state(), arrays, "state")

    def _rate(self) -> float | Tensor:
        """The learning rate of this update: the float, or what the schedule returns."""
        if not callable(self.learning_rate):
            return self.learning_rate
        rate: object = self.learning_rate(self.count)
        if not isinstance(rate, Tensor) or rate.type is not _SCALAR:
            given = rate.type if isinstance(rate, Tensor) else type(rate).__name__
            raise DTypeError(f"{self._name}: a schedule must return a {_SCALAR}, not {given}")
        return rate

    def _scalars(self, rate: Tensor) -> Sequence[Tensor]:
        """The scalars that this update needs for all parameters of rate's dtype, in that dtype."""
        raise NotImplementedError

    def _step(
        self, param: Tensor, g: Tensor, state: Sequence[Tensor], scalars: Sequence[Tensor]
    ) -> None:
        """Update one parameter and its state in place."""
        raise NotImplementedError

    def _checked(self, grads: Tree) -> dict[str, Tensor]:
        """The gradients by path, after every check that may refuse the update."""
        self._require_same_tensors()
        gradients = dict(leaves(grads))
        require_types(self._types, {path: g.type for path, g in gradients.items()}, "gradient")
        require_live(gradients.values())
        if recording.get() is not None:
            raise GradientError(
                f"{self._name}: an update in place has no gradient; "
                f"call update outside of the differentiated function"
            )
        written = [self.count, *self._params.values()]
        for tensors in self._state.values():
            written += tensors.values()
        require_writable(written)
        vm = self.count.arena.vm
        for arena in (current_arena(), *[g.arena for g in gradients.values()]):
            if not arena.vm.is_same(vm):
                raise HandleError(
                    f"{self._name}: arena {arena.name!r} is on {arena.vm.name}, the parameters "
                    f"are on {vm.name}; update inside `with` an arena of theirs"
                )
        return gradients

    def _require_same_tensors(self) -> None:
        """Raise `DTypeError` unless the tree holds the tensors it held at construction."""
        current = dict(leaves(self._tree))
        for path in self._leaves | current:
            if current.get(path) is not self._leaves.get(path):
                raise DTypeError(
                    f"{self._name}: parameter {path!r} is not the tensor it was when the optimizer "
                    f"was made; change it in place, as p *= 2 does, or make another optimizer"
                )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        public = {name: x for name, x in vars(self).items() if name[0] != "_" and name != "count"}
        given = ", ".join(f"{k}={getattr(x, '__name__', x)}" for k, x in public.items())
        return f"<{self._name} of {len(self._params)} tensors: {given}>"


class SGD(Optimizer):
    """Stochastic gradient descent: p -= rate * d, where

    d = g + weight_decay p                            without momentum
    v = momentum v + g + weight_decay p;  d = v       with it (Polyak, 1964)
    d = g + weight_decay p + momentum v               and with `nesterov` (Sutskever et al., 2013)
    """

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self.momentum = _require(self._name, "momentum", momentum, 0, 1)
        self.nesterov = nesterov
        self.weight_decay = _require(self._name, "weight_decay", weight_decay, 0)
        if nesterov and not momentum:
            raise AttributeRefused("SGD: nesterov needs a momentum > 0, given 0")
        super().__init__(params, learning_rate, ["momentum"] if momentum else [])

    def _scalars(self, rate: Tensor) -> Sequence[Tensor]:
        dtype = rate.dtype
        return -rate, scalar(self.momentum, dtype), scalar(self.weight_decay, dtype)

    def _step(
        self, param: Tensor, g: Tensor, state: Sequence[Tensor], scalars: Sequence[Tensor]
    ) -> None:
        minus_rate, momentum, weight_decay = scalars
        if self.weight_decay:
            g = op.multiply_add(param, weight_decay, g)
        if self.momentum:
            [v] = state
            _multiply_add_into(v, v, momentum, g)
            g = op.multiply_add(v, momentum, g) if self.nesterov else v
        _multiply_add_into(param, g, minus_rate, param)


class Adam(Optimizer):
    """p -= rate * m / (sqrt(v) + eps), with m and v the exponentially weighted means of g and
    g^2 (Kingma and Ba, arXiv 1412.6980).

    The state holds them as sums: gradient_sum = beta1 gradient_sum + g, and square_sum =
    beta2 square_sum + g^2. Divided by the sum of the weights, (1 - beta^t) / (1 - beta), these are
    the paper's bias-corrected moments. This takes two launches less than the paper's formulas.
    """

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise AttributeRefused(f"{self._name}: betas must be two numbers, given {betas!r}")
        beta1, beta2 = betas
        self.betas = (
            _require(self._name, "betas[0]", beta1, 0, 1),
            _require(self._name, "betas[1]", beta2, 0, 1),
        )
        self.eps = _require(self._name, "eps", eps, 0)
        super().__init__(params, learning_rate, ["gradient_sum", "square_sum"])

    def _scalars(self, rate: Tensor) -> Sequence[Tensor]:
        t = fn.astype(self.count, rate.dtype) + 1
        beta1, beta2 = self.betas
        root = op.sqrt(_sum_of_weights(beta2, t))
        minus_rate = -rate * root / _sum_of_weights(beta1, t)
        return minus_rate, self.eps * root, *[scalar(beta, rate.dtype) for beta in self.betas]

    def _step(
        self, param: Tensor, g: Tensor, state: Sequence[Tensor], scalars: Sequence[Tensor]
    ) -> None:
        gradient_sum, square_sum = state
        minus_rate, eps, beta1, beta2 = scalars
        _multiply_add_into(gradient_sum, gradient_sum, beta1, g)
        square_sum *= beta2
        _multiply_add_into(square_sum, g, g, square_sum)
        step = op.sqrt(square_sum)
        step += eps
        op.divide(gradient_sum, step, out=step)
        _multiply_add_into(param, step, minus_rate, param)


def _multiply_add_into(out: Tensor, x: Tensor, y: Tensor, z: Tensor) -> None:
    """out = x y + z; `out` may be x, y or z."""
    apply_into(out, _MULTIPLY_ADD, x, y, z)


def _sum_of_weights(beta: float, t: Tensor) -> Tensor:
    """1 + beta + ... + beta^(t-1) = (1 - beta^t) / (1 - beta). It is accurate for beta near 1,
    too, where the digits of 1 - beta^t would cancel."""
    log = math.log(beta) if beta else -math.inf
    return op.expm1(log * t) / (beta - 1)


class AdamW(Adam):
    """Adam with decoupled weight decay: before each update p -= rate * weight_decay * p
    (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(
        self,
        params: Tree,
        learning_rate: float | Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.weight_decay = _require(self._name, "weight_decay", weight_decay, 0)
        super().__init__(params, learning_rate, betas=betas, eps=eps)

    def _scalars(self, rate: Tensor) -> Sequence[Tensor]:
        return (*super()._scalars(rate), 1 - self.weight_decay * rate)

    def _step(
        self, param: Tensor, g: Tensor, state: Sequence[Tensor], scalars: Sequence[Tensor]
    ) -> None:
        *scalars, kept = scalars
        param *= kept
        super()._step(param, g, state, scalars)


def _zeros_beside(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    path, x = named
    with x.arena.allocating():
        return path, creation.zeros(x.shape, dtype=x.dtype)


def _in_dtype(value: float | Tensor, dtype: DType) -> Tensor:
    return fn.astype(value, dtype) if isinstance(value, Tensor) else scalar(value, dtype)


def _require(where: str, name: str, value: float, low: float, below: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number < below:
        raise AttributeRefused(f"{where}: {name} must be in [{low}, {below}), given {value!r}")
    return number


# --- clipping ------------------------------------------------------------------------


def global_norm(tree: Tree) -> Tensor:
    """The square root of the sum of all squares in a tree of float tensors: f[].

    A tensor that occurs twice counts once, such as the gradient of a shared parameter.
    """
    total: Tensor | None = None
    for x in named_tensors(tree).values():
        part = op.sum(op.square(x))
        total = part if total is None else total + part
    return creation.zeros((), dtype=f32) if total is None else op.sqrt(total)


def clip_by_global_norm(grads: Tree, max_norm: float) -> Tree:
    """The same tree, times max_norm / global_norm(grads) if that is below 1
    (Pascanu et al., arXiv 1211.5063). Raises `AttributeRefused` unless max_norm > 0."""
    if not _require("clip_by_global_norm", "max_norm", max_norm, 0):
        raise AttributeRefused("clip_by_global_norm: max_norm must be positive, given 0")
    norm = global_norm(grads)
    factor = max_norm / op.maximum(norm, max_norm)
    return substitute(lambda g: g * fn.astype(factor, g.dtype), grads)


# --- learning-rate schedules ---------------------------------------------------------


def constant(rate: float) -> Schedule:
    """The same rate for every update."""
    rate = _require("constant", "rate", rate, 0)
    return lambda count: creation.full((), rate, dtype=f32)


def cosine(peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> Schedule:
    """From 0 to `peak` in a line over `warmup_steps`, then to `final` in half a cosine wave that
    ends at `total_steps` (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    Raises `AttributeRefused` for a negative rate, or unless 0 <= warmup_steps < total_steps.
    """
    peak = _require("cosine", "peak", peak, 0)
    final = _require("cosine", "final", final, 0)
    _require("cosine", "total_steps", total_steps, 1)
    _require("cosine", "warmup_steps", warmup_steps, 0, total_steps)

    def schedule(count: Tensor) -> Tensor:
        rate = _anneal(peak, final, (count - warmup_steps) / (total_steps - warmup_steps))
        if not warmup_steps:
            return rate
        return op.where(count < warmup_steps, count * (peak / warmup_steps), rate)

    return schedule


def one_cycle(
    peak: float,
    total_steps: int,
    *,
    warmup_fraction: float = 0.3,
    initial_divisor: float = 25.0,
    final_divisor: float = 1e4,
) -> Schedule:
    """From initial = peak / initial_divisor up to `peak`, and down to initial / final_divisor,
    in half a cosine wave each (Smith and Topin, arXiv 1708.07120). `warmup_fraction` of
    `total_steps` go up. The end is reached after `total_steps` updates, as in optax's
    `cosine_onecycle_schedule`; in PyTorch's `OneCycleLR` the last update reaches it. The defaults
    are those of both.

    Raises `AttributeRefused` for a negative peak, total_steps < 1, a divisor below 1, or unless
    0 <= warmup_fraction < 1.
    """
    peak = _require("one_cycle", "peak", peak, 0)
    _require("one_cycle", "total_steps", total_steps, 1)
    initial = peak / _require("one_cycle", "initial_divisor", initial_divisor, 1)
    final = initial / _require("one_cycle", "final_divisor", final_divisor, 1)
    turn = _require("one_cycle", "warmup_fraction", warmup_fraction, 0, 1) * total_steps

    def schedule(count: Tensor) -> Tensor:
        down = _anneal(peak, final, (count - turn) / (total_steps - turn))
        if not turn:
            return down
        return op.where(count < turn, _anneal(initial, peak, count / turn), down)

    return schedule


def _anneal(start: float, end: float, progress: Tensor) -> Tensor:
    """From `start` at progress 0 to `end` at 1 in half a cosine wave; `end` beyond 1."""
    wave = op.cos(math.pi * op.minimum(progress, 1.0))
    return (start - end) / 2 * (1 + wave) + end
